"""The rules of PyTorch's caching allocator: requests in, reserved memory out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracesim.memory import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemoryError,
)
from tracesim.memory.caching_allocator import segment_bytes

KIB, MIB = 1 << 10, 1 << 20
UNITS = {"B": 1, "K": KIB, "M": MIB}


def parse_size(text: str) -> int:
    return int(float(text[:-1]) * UNITS[text[-1]])


@dataclass
class Run:
    """Executes ``A=3M -A B=1M@2 empty``: allocate a (on stream 0), free it, allocate b on stream 2, empty the cache."""

    allocator: CachingAllocator

    def __call__(self, script: str) -> dict[str, int]:
        address: dict[str, int] = {}
        for step in script.split():
            if step == "empty":
                self.allocator.empty_cache()
            elif step.startswith("-"):
                self.allocator.free(address[step[1:]])
            else:
                name, size = step.split("=")
                size, _, stream = size.partition("@")
                address[name] = self.allocator.allocate(parse_size(size), int(stream or 0))
        return address


@pytest.mark.parametrize(
    ("divisions", "request_bytes", "block"),
    [
        (0, 1, 512),
        (0, 512, 512),
        (0, 513, 1024),
        (0, 1_000_000, 1_000_448),
        (1, 1_000_000, 1_000_448),
        (4, 1200 * MIB, 1280 * MIB),  # steps of 256 MiB between 1 and 2 GiB
        (4, 1281 * MIB, 1536 * MIB),
        (4, 1800 * MIB, 2048 * MIB),
        (4, 1024 * MIB, 1024 * MIB),
        (4, 2048, 2048),  # up to 512 * divisions only the 512 byte rule holds
        (4, 2049, 2560),
        (8, 3000, 3072),
    ],
)
def test_rounding_of_requests(divisions: int, request_bytes: int, block: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=divisions).round_request(request_bytes) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        ("512B", "2M"),
        ("1M", "2M"),
        ("1.5M", "20M"),
        ("9.5M", "20M"),
        ("10M", "10M"),
        ("10.5M", "12M"),
        ("33M", "34M"),
    ],
)
def test_segment_of_a_block(block: str, segment: str) -> None:
    assert segment_bytes(parse_size(block)) == parse_size(segment)


SCRIPTS = [
    # what happens                                      script                            allocated reserved
    ("small blocks share a 2 MiB segment",              "A=1M B=1M",                        "2M",     "2M"),
    ("the third needs a second segment",                "A=1M B=1M C=1B",                   "2.00048828125M", "4M"),
    ("large blocks under 10 MiB share 20 MiB",          "A=9M B=9M",                        "18M",    "20M"),
    ("2 MiB are left and stay free",                    "A=9M B=9M C=3M",                   "21M",    "40M"),
    ("small requests never use the large pool",         "A=9M B=512K",                      "9.5M",   "22M"),
    ("from 10 MiB on a segment of its own",             "A=10M B=12M",                      "22M",    "22M"),
    ("a remainder of 1 MiB stays with the block",       "A=11M",                            "12M",    "12M"),
    ("a remainder above 1 MiB is split off",            "A=10.5M B=1.5M",                   "12M",    "12M"),
    ("a freed block is used again",                     "A=30M -A B=30M",                   "30M",    "30M"),
    ("... by a smaller request, which leaves the rest", "A=30M -A B=18M C=12M",             "30M",    "30M"),
    ("a larger request cannot use it",                  "A=30M -A B=31M",                   "32M",    "62M"),
    ("the smallest block that fits is taken",           "A=40M B=30M -A -B C=28M D=40M",    "68M",    "70M"),
    ("of equal ones the lowest address",                "A=30M B=30M C=30M -C -A D=12M E=16M F=30M", "88M", "90M"),
    ("free neighbours merge",                           "A=6M B=6M C=6M -A -C -B D=19M",    "20M",    "20M"),
    ("a block in use keeps them apart",                 "A=6M B=6M C=6M -A -C D=8.5M",      "14.5M",  "40M"),
    ("blocks of two segments do not merge",             "A=20M B=20M -A -B C=40M",          "40M",    "80M"),
    ("a block stays with its stream",                   "A=30M@1 -A B=30M@2",               "30M",    "60M"),
    ("... and serves that stream again",                "A=30M@1 -A B=30M@2 C=30M@1",       "60M",    "60M"),
    ("freeing returns nothing to the device",           "A=30M B=1K -A -B",                 "0M",     "32M"),
    ("emptying the cache returns whole segments",       "A=30M B=6M C=6M -A -B empty",      "6M",     "20M"),
    ("... of all streams",                              "A=30M@1 B=1K@2 -A -B empty",       "0M",     "0M"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "allocated", "reserved"), [row[1:] for row in SCRIPTS], ids=[r[0] for r in SCRIPTS]
)
def test_scripts(script: str, allocated: str, reserved: str) -> None:
    allocator = CachingAllocator()
    Run(allocator)(script)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (
        parse_size(allocated),
        parse_size(reserved),
    )


LIMITS = [
    # with max_split 30 MiB                             script                   limit reserved
    ("an oversized block is not split",                 "A=40M -A B=32M C=4M",           None, "60M"),
    ("... and not given to a smaller request",          "A=40M -A B=25M",                None, "66M"),
    ("an oversized request may waste less than 20 MiB", "A=52M -A B=34M",                None, "52M"),
    ("... but not 20 MiB",                              "A=54M -A B=34M",                None, "88M"),
    ("a full device returns one oversized block",       "A=40M B=80M C=16M -A -B -C D=32M@1 E=50M", "200M", "138M"),
    ("... else several, the largest first",             "A=32M B=40M C=34M -A -B -C D=70M", "110M", "102M"),
    ("... else everything that is cached",              "A=40M B=24M C=24M -A -B -C D=60M", "90M", "60M"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "limit", "reserved"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS]
)
def test_limits_of_splitting(script: str, limit: str | None, reserved: str) -> None:
    allocator = CachingAllocator(
        parse_size(limit) if limit else None, AllocatorSettings(max_split_bytes=30 * MIB)
    )
    Run(allocator)(script)
    assert allocator.reserved_bytes == parse_size(reserved)


def test_a_full_device_releases_cached_segments_before_it_gives_up() -> None:
    allocator = CachingAllocator(device_bytes=100 * MIB)
    Run(allocator)("A=40M B=40M -A C=60M")
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (100 * MIB, 100 * MIB)
    assert (allocator.segments_allocated, allocator.segments_released) == (3, 1)
    with pytest.raises(
        OutOfMemoryError, match=r"cannot reserve 20971520 bytes for a block of 2097152: 104857600 of"
    ):
        allocator.allocate(2 * MIB)
    assert allocator.allocated_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AllocatorSettings(roundup_power2_divisions=3), "roundup_power2_divisions is 3; .* powers of two"),
        (lambda: AllocatorSettings(max_split_bytes=20 * MIB), "max_split_bytes is 20971520; it must be above"),
        (lambda: CachingAllocator().allocate(0), "cannot allocate 0 bytes"),
        (lambda: CachingAllocator().free(512), "cannot free address 512: no allocated block starts there"),
        (
            lambda: CachingAllocator().adopt_segment(0, MIB, [(0, 1024), (512, 512)], small=True),
            "block of 512 bytes at 512 does not fit behind 1024",
        ),
    ],
)  # fmt: skip
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_out_of_memory_is_a_user_error_that_leaves_a_usable_allocator() -> None:
    allocator = CachingAllocator(device_bytes=64 * MIB)
    address = Run(allocator)("A=20M B=20M -A")
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 20 * MIB, "the cache was given back in the attempt"
    allocator.free(address["B"])
    assert allocator.allocate(60 * MIB) >= 0


class ObviousAllocator:
    """The same rules, written as slowly and plainly as possible: a list of segments, each a list of blocks."""

    def __init__(self, device_bytes: int | None, max_split: float) -> None:
        self.segments: list[dict[str, Any]] = []
        self.device_bytes = device_bytes
        self.max_split = max_split
        self.next_address = 2 * MIB

    def reserved(self) -> int:
        return sum(segment["size"] for segment in self.segments)

    def allocate(self, request: int, stream: int) -> int | None:
        size = max(1, (request + 511) // 512) * 512
        small = size <= MIB
        candidates = [
            (block["size"], block["address"], segment)
            for segment in self.segments
            for block in segment["blocks"]
            if not block["used"]
            and block["size"] >= size
            and (segment["small"], segment["stream"]) == (small, stream)
        ]
        best = min(candidates, key=lambda c: c[:2], default=None)
        if best is not None and not small:
            too_large = best[0] >= (size + 20 * MIB if size >= self.max_split else self.max_split)
            best = None if too_large else best
        if best is None:
            segment = self.grow(size, small, stream)
            if segment is None:
                return None
            address = segment["blocks"][0]["address"]
        else:
            _, address, segment = best
        position = next(i for i, block in enumerate(segment["blocks"]) if block["address"] == address)
        block = segment["blocks"][position]
        rest = block["size"] - size
        if rest >= 512 if small else (rest > MIB and size < self.max_split):
            segment["blocks"].insert(position + 1, {"address": address + size, "size": rest, "used": False})
            block["size"] = size
        block["used"] = True
        return int(address)

    def grow(self, size: int, small: bool, stream: int) -> dict[str, Any] | None:
        total = (
            2 * MIB
            if small
            else 20 * MIB
            if size < 10 * MIB
            else (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        )
        if self.device_bytes is not None:
            if self.reserved() + total > self.device_bytes and self.max_split < float("inf"):
                self.drop_oversized(max(size, int(self.max_split)), small, stream)
            if self.reserved() + total > self.device_bytes:
                self.empty()
            if self.reserved() + total > self.device_bytes:
                return None
        blocks = [{"address": self.next_address, "size": total, "used": False}]
        segment = {"size": total, "small": small, "stream": stream, "blocks": blocks}
        self.next_address += total
        self.segments.append(segment)
        return segment

    def drop_oversized(self, wanted: int, small: bool, stream: int) -> None:
        whole = sorted(
            (s["size"], s["blocks"][0]["address"], i)
            for i, s in enumerate(self.segments)
            if self.idle(s) and s["size"] >= self.max_split and (s["small"], s["stream"]) == (small, stream)
        )
        chosen = [entry for entry in whole if entry[0] >= wanted][:1]
        if not chosen:
            while whole and sum(entry[0] for entry in chosen) < wanted:
                chosen.append(whole.pop())
        gone = {entry[2] for entry in chosen}
        self.segments = [s for i, s in enumerate(self.segments) if i not in gone]

    @staticmethod
    def idle(segment: dict[str, Any]) -> bool:
        return len(segment["blocks"]) == 1 and not segment["blocks"][0]["used"]

    def empty(self) -> None:
        self.segments = [segment for segment in self.segments if not self.idle(segment)]

    def free(self, address: int) -> None:
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["address"] == address:
                    block["used"] = False
            merged: list[dict[str, Any]] = []
            for block in segment["blocks"]:
                if merged and not merged[-1]["used"] and not block["used"]:
                    merged[-1]["size"] += block["size"]
                else:
                    merged.append(block)
            segment["blocks"] = merged

    def blocks(self) -> list[tuple[int, int, bool]]:
        return sorted((b["address"], b["size"], b["used"]) for s in self.segments for b in s["blocks"])


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(1, 50).map(lambda count: count * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 11 * MIB, 29 * MIB + 1, 30 * MIB, 42 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["allocate", "empty"]), st.just(3 * MIB), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([None, 200 * MIB]), st.sampled_from([None, 30 * MIB]))
def test_every_block_is_where_the_obvious_implementation_puts_it(
    steps: list[tuple[str, int, int]], limit: int | None, max_split: int | None
) -> None:
    allocator = CachingAllocator(limit, AllocatorSettings(max_split_bytes=max_split))
    obvious = ObviousAllocator(limit, max_split or float("inf"))
    live: list[int] = []
    for action, number, stream in steps:
        if action == "allocate":
            expected = obvious.allocate(number, stream)
            try:
                address: int | None = allocator.allocate(number, stream)
            except OutOfMemoryError:
                address = None
            assert address == expected
            if address is not None:
                live.append(address)
        elif action == "free" and live:
            address = live.pop(number % len(live))
            allocator.free(address)
            obvious.free(address)
        elif action == "empty":
            allocator.empty_cache()
            obvious.empty()
        assert allocator.reserved_bytes == obvious.reserved()
    assert allocator.blocks() == obvious.blocks()


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from([None, 30 * MIB]), st.sampled_from([0, 4]))
def test_properties_that_hold_for_any_order(
    steps: list[tuple[str, int, int]], max_split: int | None, divisions: int
) -> None:
    allocator = CachingAllocator(settings=AllocatorSettings(max_split, divisions))
    live: dict[int, int] = {}
    for action, number, stream in steps:
        if action == "allocate":
            address = allocator.allocate(number, stream)
            assert address not in live
            live[address] = number
        elif action == "free" and live:
            address = sorted(live)[number % len(live)]
            del live[address]
            allocator.free(address)
        blocks = allocator.blocks()
        tiles = [(start, size) for start, size, _ in blocks]
        assert all(a + size <= b for (a, size), (b, _) in pairwise(tiles)), "no two overlap"
        assert sum(size for _, size in tiles) == allocator.reserved_bytes, "blocks fill the segments"
        used = {start: size for start, size, is_used in blocks if is_used}
        assert used.keys() == live.keys()
        assert all(used[start] >= request for start, request in live.items())
        assert (
            sum(live.values()) <= allocator.allocated_bytes == sum(used.values()) <= allocator.reserved_bytes
        )
    for address in live:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert allocator.empty_cache() == sum(size for _, size, _ in blocks) if steps else True
    assert (allocator.reserved_bytes, allocator.blocks(), allocator.largest_free_bytes) == (0, [], 0)
