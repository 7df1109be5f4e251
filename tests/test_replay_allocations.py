"""Buffers of a rank, in program order, through the caching allocator: peaks, curve, fragmentation, out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracesim.memory import AllocationEvents, order_events, replay_allocations, replay_events

MIB = 1 << 20


def events(script: str) -> AllocationEvents:
    """Events of ``0 1 -0``: allocate buffers 0 and 1, release buffer 0."""
    steps = script.split()
    return AllocationEvents(
        buffer=np.array([abs(int(s)) for s in steps]),
        release=np.array([s.startswith("-") for s in steps]),
        position=np.arange(len(steps)),
    )


def test_order_of_events_is_program_order_with_allocations_first() -> None:
    ordered = order_events(allocate_order=[-1, 2, 0, 2], release_order=[-1, 2, 2, 5])
    steps = [("-" if r else "") + str(b) for b, r in zip(ordered.buffer, ordered.release, strict=True)]
    assert steps == ["0", "2", "1", "3", "-1", "-2", "-3"]
    assert ordered.position.tolist() == [-1, 0, 2, 2, 2, 2, 5]


def test_replay_reports_peaks_curve_and_fragmentation() -> None:
    mib = MIB
    #       weights  a        b        c: does not fit where a was
    size = [30 * mib, 20 * mib, 40 * mib, 24 * mib]
    usage = replay_allocations(size, allocate_order=[-1, 0, 1, 2], release_order=[-1, 1, 3, 3])
    assert usage.peak_requested == 94 * mib
    assert usage.peak_allocated == 94 * mib
    assert usage.peak_reserved == 114 * mib
    assert dict(zip(usage.reserved_event.tolist(), (usage.reserved // mib).tolist(), strict=True)) == {
        0: 30,
        1: 50,
        2: 90,
        4: 114,
    }
    assert (usage.peak_event, usage.at_peak.allocated, usage.at_peak.largest_free_block) == (
        4,
        94 * mib,
        20 * mib,
    )
    assert usage.at_peak.fragmentation == 0.0
    assert (usage.at_end.allocated, usage.at_end.reserved) == (30 * mib, 114 * mib)
    assert usage.at_end.fragmentation == pytest.approx(1 - 40 / 84)
    assert (usage.segments_allocated, usage.segments_released, usage.out_of_memory) == (4, 0, None)


def test_replay_ends_where_the_device_is_full() -> None:
    usage = replay_allocations(
        [30 * MIB, 30 * MIB, 50 * MIB], [0, 1, 2], [2, 0 + 1, 3], device_bytes=70 * MIB
    )
    report = usage.out_of_memory
    assert report is not None
    assert (report.event, report.buffer, report.requested) == (3, 2, 50 * MIB)
    assert (report.state.allocated, report.state.reserved) == (30 * MIB, 30 * MIB)
    assert "of the device's 73400320 bytes are reserved" in report.message
    assert usage.peak_requested == 60 * MIB
    assert usage.reserved.tolist() == [30 * MIB, 60 * MIB, 30 * MIB]


def test_empty_buffers_take_no_block_and_no_buffers_no_memory() -> None:
    assert replay_allocations([0, 5], [0, 1], [1, 2]).peak_allocated == 512
    usage = replay_allocations([], [], [])
    assert (usage.peak_requested, usage.peak_allocated, usage.peak_reserved, usage.peak_event) == (
        0,
        0,
        0,
        -1,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: order_events([3], [2]), "buffer 0 is released by operation 2, before 3 allocates it"),
        (lambda: replay_allocations([-1], [0], [1]), "buffer 0 has -1 bytes"),
        (lambda: replay_allocations([1], [0], [1], stream=[0, 0]), "1 buffers have 2 streams"),
        (lambda: replay_events([1], events("0 0")), "event 1: buffer 0 is allocated while still allocated"),
        (lambda: replay_events([1, 1], events("0 -1")), "event 1: buffer 1 is released while not allocated"),
        (lambda: replay_events([1], events("0 3")), r"events name buffers 0 .. 3; there are 1"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50 * MIB), st.integers(-1, 20), st.integers(0, 20)), max_size=40))
def test_replay_bounds_and_determinism(buffers: list[tuple[int, int, int]]) -> None:
    size = np.array([b[0] for b in buffers], dtype=np.int64)
    allocate = np.array([b[1] for b in buffers], dtype=np.int64)
    release = allocate + np.array([b[2] for b in buffers], dtype=np.int64)
    usage = replay_allocations(size, allocate, release)
    again = replay_allocations(size, allocate, release)
    assert usage.peak_requested <= usage.peak_allocated <= usage.peak_reserved
    assert usage.peak_reserved == max(usage.reserved.tolist(), default=0)
    assert (usage.reserved.tolist(), usage.at_end) == (again.reserved.tolist(), again.at_end)
    # A release of -1 means never, also for what was there before the first operation.
    last = np.where(release < 0, 41, release)
    alive = [size[(allocate <= t) & (t <= last)].sum() for t in range(-1, 41)]
    assert usage.peak_requested == max(alive)
