"""Reserved memory: the allocations of a job on one rank, from its start into its second step, through the allocator.

A step alone is not enough. The first one finds what the construction of model and optimizer left in the cache; the
optimizer states come at its end, into blocks that its activations left; so the second step, whose activations are those
of the first, finds no room for some of them and reserves more. From then on a step repeats the one before, so two are
replayed. The host calls the allocator in program order, ahead of the device: nothing depends on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import Buffers, OpGraph, Startup

from .caching_allocator import AllocatorSettings
from .replay_allocations import AllocationEvents, AllocatorUsage, order_events, replay_events

_STEPS = 2
_MOST_EVENTS = 200_000
"""Allocations and releases replayed for ranks beside the represented ones: about a fifth of a second."""


@dataclass(frozen=True)
class ReservedMemory:
    """What the allocator of one rank reserved."""

    usage: AllocatorUsage
    """Over the whole replay. Its events are those of the job, not of a step."""
    row: Int64
    """Rows of the last step during which reserved memory changes, in program order; -1 first, for its beginning."""
    reserved: Int64
    """Bytes from each of :attr:`row` on."""


def reserved_memory(
    graph: OpGraph,
    rank: int,
    startup: Startup | None = None,
    settings: AllocatorSettings | None = None,
) -> ReservedMemory:
    """Replay the job of a represented rank (a row of ``graph.ranks``).

    ``startup`` is how the job began there, or on another rank of the stage that runs the same step; by default that of
    the represented rank. Of a graph that does not say it, one step is replayed, behind what is there before it.
    """
    buffers = graph.buffers.take(np.flatnonzero(graph.buffers.rank == rank))
    if startup is None and graph.startups:
        startup = graph.startups[rank][0].allocations
    if startup is None:
        events = order_events(buffers.allocate, buffers.release)
        return _of_last_step(
            replay_events(buffers.size, events, stream=buffers.pool, settings=settings), events, 0
        )
    step = buffers.take(np.flatnonzero(buffers.allocate >= 0))
    parts = [_before(startup)]
    for number in range(_STEPS):
        once = startup if number == 0 else startup.take(np.empty(0, dtype=np.int64))
        parts.append(_step(step, once, len(startup) + number * len(step), last=number == _STEPS - 1))
    events = AllocationEvents.concatenate(parts)
    sizes = np.concatenate([startup.size, *[step.size] * _STEPS])
    pools = np.concatenate([startup.pool, *[step.pool] * _STEPS])
    usage = replay_events(sizes, events, stream=pools, settings=settings)
    return _of_last_step(usage, events, len(events) - len(parts[-1]))


def _before(startup: Startup) -> AllocationEvents:
    """What happens before the first step."""
    numbers = np.arange(len(startup))
    made, gone = numbers[startup.row < 0], numbers[startup.until >= 0]
    buffer = np.concatenate([made, gone])
    release = np.arange(len(buffer)) >= len(made)
    # What is released before the allocation of an entry comes in front of it.
    order = np.lexsort((~release, np.concatenate([made, startup.until[gone]])))
    return AllocationEvents(buffer[order], release[order], np.full(len(buffer), -1))


def _step(step: Buffers, startup: Startup, offset: int, *, last: bool) -> AllocationEvents:
    """One step: its buffers, numbered from ``offset`` on, and what is allocated in it for the rest of the job.

    What it leaves behind is gone before the next step begins.
    """
    events = order_events(step.allocate, step.release)
    left = np.flatnonzero(step.release < 0) if not last else np.empty(0, dtype=np.int64)
    kept = np.flatnonzero(startup.row >= 0)
    end = int(max(step.release.max(initial=-1), step.allocate.max(initial=-1))) + 1
    position = np.concatenate([startup.row[kept], events.position, np.full(len(left), end)])
    buffer = np.concatenate([kept, events.buffer + offset, left + offset])
    release = np.concatenate(
        [np.zeros(len(kept), dtype=bool), events.release, np.ones(len(left), dtype=bool)]
    )
    order = np.argsort(position, kind="stable")
    return AllocationEvents(buffer[order], release[order], position[order])


def _of_last_step(usage: AllocatorUsage, events: AllocationEvents, first: int) -> ReservedMemory:
    """What is reserved during the events from ``first`` on."""
    before = int(np.searchsorted(usage.reserved_event, first))
    level = int(usage.reserved[before - 1]) if before else 0
    return ReservedMemory(
        usage,
        np.concatenate([[-1], events.position[usage.reserved_event[before:]]]),
        np.concatenate([[level], usage.reserved[before:]]),
    )


def reserved_by_rank(
    graph: OpGraph, settings: AllocatorSettings | None = None
) -> tuple[dict[int, ReservedMemory], ...]:
    """For each stage the replays of its represented rank, and of others that hold other shards of the states.

    Of others so many as a limit of events in all allows, each stage as many.
    """
    known = graph.startups or ((),) * len(graph.ranks)
    events = _STEPS * 2 * max(1, len(graph.buffers))
    share = max(1, _MOST_EVENTS // events)
    return tuple(
        {int(graph.ranks[rank]): reserved_memory(graph, rank, settings=settings)}
        | {one.rank: reserved_memory(graph, rank, one.allocations, settings) for one in others[1:share]}
        for rank, others in enumerate(known)
    )
