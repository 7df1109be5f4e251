"""Replay of one rank's allocations and releases, in program order, through the caching allocator.

The host calls the allocator in program order, ahead of the device, so what is reserved depends on the order
of the operations of a rank and on nothing that happens on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int64, Table

from .caching_allocator import AllocatorSettings, CachingAllocator, OutOfMemoryError
from .expandable_segments import ExpandableAllocator

Allocator = CachingAllocator | ExpandableAllocator


@dataclass(frozen=True)
class AllocationEvents(Table):
    """Allocations and releases of buffers in the order in which the allocator sees them."""

    buffer: Int64
    """Row of the buffer."""
    release: Bool
    """Whether the buffer is released (else allocated)."""
    position: Int64
    """Order of the operation that does it: -1 before the first."""


@dataclass(frozen=True)
class MemoryState:
    """The allocator at one moment. All sizes in bytes."""

    allocated: int
    reserved: int
    largest_free_block: int

    @property
    def fragmentation(self) -> float:
        """Part of the cached free memory outside its largest block: 0 in one piece, towards 1 in crumbs."""
        free = self.reserved - self.allocated
        return 1.0 - self.largest_free_block / free if free else 0.0


@dataclass(frozen=True)
class OutOfMemoryReport:
    """The allocation at which the device was full."""

    event: int
    """Row of the event; the replay ends before it."""
    buffer: int
    requested: int
    """Bytes of the buffer."""
    state: MemoryState
    """After all cached segments were released."""
    message: str


@dataclass(frozen=True)
class AllocatorUsage:
    """What a replay used. All sizes in bytes."""

    peak_requested: int
    """Most bytes of live buffers, as asked for."""
    peak_allocated: int
    """Most bytes of live blocks: ``torch.cuda.max_memory_allocated``."""
    peak_reserved: int
    """Most bytes of segments: ``torch.cuda.max_memory_reserved``."""
    reserved_event: Int64
    """Events after which the reserved bytes differ from before, ascending."""
    reserved: Int64
    """Reserved bytes after each of :attr:`reserved_event`."""
    peak_event: int
    """First event after which :attr:`peak_reserved` is reserved; -1 without events."""
    at_peak: MemoryState
    """After :attr:`peak_event`."""
    at_end: MemoryState
    segments_allocated: int
    """Calls of ``cudaMalloc``."""
    segments_released: int
    """Calls of ``cudaFree``: each stalls the device in a real run."""
    out_of_memory: OutOfMemoryReport | None = None


def order_events(allocate_order: npt.ArrayLike, release_order: npt.ArrayLike) -> AllocationEvents:
    """Events of buffers that are allocated when one operation starts and released when another ends.

    Args:
        allocate_order: ``[buffers]``, program order of the operation that allocates; -1: before the first.
        release_order: ``[buffers]``, program order of the operation that releases; -1: never.

    Returns:
        The events by operation; one operation's allocations come before its releases, both by buffer.

    Raises:
        ValueError: if a buffer is released before it is allocated; the message names the first.

    """
    allocate = np.asarray(allocate_order, dtype=np.int64)
    release = np.asarray(release_order, dtype=np.int64)
    if allocate.shape != release.shape:
        raise ValueError(f"{len(allocate)} buffers are allocated, but {len(release)} have a release")
    backwards = np.flatnonzero((release >= 0) & (release < allocate))
    if len(backwards):
        row = int(backwards[0])
        raise ValueError(
            f"buffer {row} is released by operation {release[row]}, before {allocate[row]} allocates it"
        )
    released = np.flatnonzero(release >= 0)
    buffer = np.concatenate([np.arange(len(allocate)), released])
    position = np.concatenate([allocate, release[released]])
    kind = np.arange(len(buffer)) >= len(allocate)
    order = np.lexsort((buffer, kind, position))
    return AllocationEvents(buffer=buffer[order], release=kind[order], position=position[order])


def replay_allocations(
    size: npt.ArrayLike,
    allocate_order: npt.ArrayLike,
    release_order: npt.ArrayLike,
    *,
    stream: npt.ArrayLike | None = None,
    device_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
) -> AllocatorUsage:
    """Replay the buffers of one rank: :func:`order_events`, then :func:`replay_events`."""
    events = order_events(allocate_order, release_order)
    return replay_events(size, events, stream=stream, device_bytes=device_bytes, settings=settings)


def replay_events(
    size: npt.ArrayLike,
    events: AllocationEvents,
    *,
    stream: npt.ArrayLike | None = None,
    device_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
) -> AllocatorUsage:
    """Feed events to a fresh allocator, as ``settings`` say which, and follow what it reserves.

    Args:
        size: ``[buffers]`` bytes; buffers of 0 bytes take no block.
        events: what happens to which buffer, in program order.
        stream: ``[buffers]`` stream on which each is allocated, and to whose pool it returns; default 0.
        device_bytes: limit of the reserved bytes; the replay ends where it cannot be met. None: no limit.
        settings: allocator settings.

    Raises:
        ValueError: if a buffer is released while not allocated, or allocated twice, or a size is negative.

    """
    sizes = np.asarray(size, dtype=np.int64)
    streams = np.zeros(len(sizes), dtype=np.int64) if stream is None else np.asarray(stream, dtype=np.int64)
    _check(sizes, streams, events)
    expands = settings is not None and settings.expandable_segments
    allocator: Allocator = (ExpandableAllocator if expands else CachingAllocator)(device_bytes, settings)
    changes, failure = _feed(allocator, sizes, streams, events)
    end = _state(allocator)
    if failure is not None:
        event = failure[0]
        buffer = int(events.buffer[event])
        report = OutOfMemoryReport(event, buffer, int(sizes[buffer]), end, failure[1])
    else:
        report = None
    last = len(events) if failure is None else failure[0]
    peak = max(changes, key=lambda change: change[1].reserved, default=(last - 1, end))
    return AllocatorUsage(
        peak_requested=_peak_requested(sizes, events, last),
        peak_allocated=allocator.peak_allocated_bytes,
        peak_reserved=allocator.peak_reserved_bytes,
        reserved_event=np.array([event for event, _ in changes], dtype=np.int64),
        reserved=np.array([state.reserved for _, state in changes], dtype=np.int64),
        peak_event=peak[0],
        at_peak=peak[1],
        at_end=end,
        segments_allocated=allocator.segments_allocated,
        segments_released=allocator.segments_released,
        out_of_memory=report,
    )


def _feed(
    allocator: Allocator, sizes: Int64, streams: Int64, events: AllocationEvents
) -> tuple[list[tuple[int, MemoryState]], tuple[int, str] | None]:
    """State after each event that changed what is reserved, and the event that failed with its message."""
    changes: list[tuple[int, MemoryState]] = []
    size_of, stream_of = sizes.tolist(), streams.tolist()
    address = [-1] * len(size_of)
    allocate, free = allocator.allocate, allocator.free
    reserved = 0
    event = -1
    try:
        for event, (buffer, release) in enumerate(
            zip(events.buffer.tolist(), events.release.tolist(), strict=True)
        ):
            if release:
                if address[buffer] >= 0:
                    free(address[buffer])
            elif size_of[buffer]:
                address[buffer] = allocate(size_of[buffer], stream_of[buffer])
                if allocator.reserved_bytes != reserved:
                    reserved = allocator.reserved_bytes
                    changes.append((event, _state(allocator)))
    except OutOfMemoryError as error:
        if allocator.reserved_bytes != reserved:
            changes.append((event, _state(allocator)))
        return changes, (event, str(error))
    return changes, None


def _state(allocator: Allocator) -> MemoryState:
    return MemoryState(allocator.allocated_bytes, allocator.reserved_bytes, allocator.largest_free_bytes)


def _check(sizes: Int64, streams: Int64, events: AllocationEvents) -> None:
    if len(sizes) != len(streams):
        raise ValueError(f"{len(sizes)} buffers have {len(streams)} streams")
    if len(sizes) and sizes.min() < 0:
        row = int(sizes.argmin())
        raise ValueError(f"buffer {row} has {sizes[row]} bytes; sizes are 0 or more")
    if not len(events):
        return
    if events.buffer.min() < 0 or events.buffer.max() >= len(sizes):
        raise ValueError(
            f"events name buffers {events.buffer.min()} .. {events.buffer.max()}; there are {len(sizes)}"
        )
    order = np.argsort(events.buffer, kind="stable")
    buffer, release = events.buffer[order], events.release[order]
    first = np.concatenate([[True], buffer[1:] != buffer[:-1]])
    before = np.concatenate([[True], release[:-1]])
    wrong = np.flatnonzero(release == np.where(first, True, before))
    if len(wrong):
        row = int(order[wrong].min())
        done = "released while not allocated" if events.release[row] else "allocated while still allocated"
        raise ValueError(f"event {row}: buffer {events.buffer[row]} is {done}")


def _peak_requested(sizes: Int64, events: AllocationEvents, last: int) -> int:
    change: npt.NDArray[Any] = sizes[events.buffer[:last]] * np.where(events.release[:last], -1, 1)
    return max(0, int(change.cumsum().max())) if last else 0
