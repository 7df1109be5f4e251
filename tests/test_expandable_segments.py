"""The caching allocator with segments that grow: requests in, reserved memory out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense_scenarios import dense_mapping
from tests.test_caching_allocator import Run
from tracesim.memory import (
    AllocatorSettings,
    ExpandableAllocator,
    OutOfMemoryError,
    replay_allocations,
)
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("what", "script", "reserved"),
    [
        ("the large pool grows by 20 MiB", "a=1.5M", 20),
        ("and goes on where it ended", "a=18M b=18M", 40),
        ("the small pool grows by 2 MiB", "a=1M b=1M c=1K", 4),
        ("neighbours merge whatever they came from", "a=30M b=30M -a -b c=60M", 60),
        ("a block at the end takes only what it lacks", "a=30M b=40M -b c=60M", 100),
        ("a hole is preferred to the end, even to a smaller piece there", "a=30M b=10M c=10M -c -a d=5M e=25M", 60),
        ("a hole that is too small stays", "a=30M b=10M -a c=40M", 80),
        ("streams do not share", "a=20M -a b=20M@1", 40),
        # Logits of 2 bytes, their copy of 4, its softmax; then two gradients: only one fits where logits and copy were.
        ("half a tensor is lost between the gradients of a loss",
         "logits=20M fp32=40M softmax=40M -fp32 -logits picked=40M gradient=40M", 140),
    ],
)  # fmt: skip
def test_what_is_reserved(what: str, script: str, reserved: int) -> None:
    allocator = ExpandableAllocator()
    Run(allocator)(script)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == reserved * MIB, what


def test_free_granules_go_back_and_are_mapped_again_lowest_first() -> None:
    allocator = ExpandableAllocator()
    addresses = Run(allocator)("a=10M b=40M c=10M d=20M -b")
    assert allocator.reserved_bytes == 80 * MIB
    # Of the hole from 10 to 50 MiB one granule, from 20 to 40 MiB, is wholly free.
    assert allocator.empty_cache() == 20 * MIB
    assert (allocator.reserved_bytes, allocator.largest_free_bytes) == (60 * MIB, 10 * MIB)
    assert allocator.allocate(30 * MIB) == addresses["a"] + 10 * MIB
    assert (allocator.reserved_bytes, allocator.largest_free_bytes) == (80 * MIB, 10 * MIB)


def test_a_full_device_releases_what_is_cached_before_it_gives_up() -> None:
    allocator = ExpandableAllocator(device_bytes=100 * MIB)
    Run(allocator)("a=60M@1 -a b=80M")
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(
        OutOfMemoryError, match=r"cannot map 41943040 bytes for a block of 41943040: 83886080 of"
    ):
        allocator.allocate(40 * MIB)
    assert allocator.allocate(20 * MIB)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ExpandableAllocator().allocate(0), "cannot allocate 0 bytes"),
        (lambda: ExpandableAllocator().free(512), "cannot free address 512: no allocated block starts there"),
        (
            lambda: AllocatorSettings(max_split_bytes=64 * MIB, expandable_segments=True),
            "max_split_bytes is 67108864 with expandable_segments",
        ),
    ],
)
def test_what_means_nothing_is_refused(call, said) -> None:
    with pytest.raises(ValueError, match=said):
        call()


class PlainRange:
    """One pool as a list of blocks from address 0 on, searched from end to end: ``[start, size, free]``."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.mapped = 0

    def allocate(self, size: int) -> int:
        fitting = [block for block in self.blocks if block[2] and block[1] >= size]
        inner = [block for block in fitting if block[0] + block[1] < self.mapped]
        if not fitting:
            last = self.blocks[-1] if self.blocks and self.blocks[-1][2] else None
            if last is None:
                last = [self.mapped, 0, 1]
                self.blocks.append(last)
            grown = -(-(size - last[1]) // (20 * MIB)) * 20 * MIB
            last[1] += grown
            self.mapped += grown
            fitting = [last]
        best = min(inner or fitting, key=lambda block: (block[1], block[0]))
        if best[1] > size:
            self.blocks.insert(self.blocks.index(best) + 1, [best[0] + size, best[1] - size, 1])
        best[1], best[2] = size, 0
        return best[0]

    def free(self, start: int) -> None:
        next(block for block in self.blocks if block[0] == start)[2] = 1
        merged: list[list[int]] = []
        for block in self.blocks:
            if merged and merged[-1][2] and block[2]:
                merged[-1][1] += block[1]
            else:
                merged.append(block)
        self.blocks = merged


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(3, 200)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_list_of_blocks(steps: list[tuple[int, int]]) -> None:
    """Allocate so many half MiB, or release the live block of a number."""
    allocator, plain = ExpandableAllocator(), PlainRange()
    live: list[tuple[int, int]] = []
    for choice, halves in steps:
        if choice < len(live):
            address, _ = live.pop(choice)
            allocator.free(address)
            plain.free(address)
            continue
        size = halves * MIB // 2
        address = allocator.allocate(size)
        assert address == plain.allocate(size)
        live.append((address, size))
        assert allocator.reserved_bytes == plain.mapped
        assert allocator.allocated_bytes == sum(size for _, size in live)
        ordered = sorted(live)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(ordered))


def test_a_replay_and_a_scenario_choose_it() -> None:
    grows = AllocatorSettings(expandable_segments=True)
    sizes = [30 * MIB, 30 * MIB, 60 * MIB]
    plain, grown = (
        replay_allocations(sizes, [0, 1, 3], [2, 2, 3], settings=chosen) for chosen in (None, grows)
    )
    assert (plain.peak_reserved, grown.peak_reserved) == (120 * MIB, 60 * MIB)
    runs = [
        simulate(load_scenario(dense_mapping(parallel={"dp": 2, "zero": 3}, libraries=chosen)))
        for chosen in ({}, {"expandable_segments": True})
    ]
    peaks = [run.report["peak_reserved_gib"] for run in runs]
    allocated = runs[1].report["peak_allocated_gib"]
    assert peaks[0] != peaks[1] >= allocated
