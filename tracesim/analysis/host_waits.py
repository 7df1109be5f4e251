"""Where the host waited for the device: in a call that blocks, or polling memory that a kernel writes.

A synchronising call, or a copy that is not asynchronous, returns once the slice it waits for has ended: it counts if a
slice ended inside the call, shortly before its return. Polling leaves no call behind. It shows as a pause of a
launching thread of more than half a millisecond after the launch of a communication kernel, which ends when that kernel
does, and more than once on its rank (expert-parallel libraries wait so for the sizes of their messages).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.analysis.causes import Causes

_BLOCKING = re.compile(
    r"^(cuda|hip|cu|musa)(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(Async|WithStream)?$|^cuMemcpy"
)
_BLOCKED_NS = 10_000
_RETURN_NS = 60_000
_PAUSE_NS = 500_000
_POLL_NS = 150_000
_LEAST_POLLS = 2


@dataclass(frozen=True)
class HostWaits:
    """Moments at which the host of one rank had waited for a device slice; rising in time."""

    end: Int64
    """Nanoseconds at which the host went on."""
    row: Int64
    """The device slice waited for."""


def find_host_waits(timeline: Timeline, causes: Causes) -> dict[int, HostWaits]:
    """The waits of each rank (row of :attr:`Timeline.ranks`) that has any."""
    end, row = (
        np.concatenate(c) for c in zip(_calls(timeline, causes), _polls(timeline, causes), strict=True)
    )
    order = np.lexsort((row, end))
    end, row = end[order], row[order]
    rank = timeline.slice_ranks()[row]
    return {
        number: HostWaits(end[rank == number], row[rank == number]) for number in np.unique(rank).tolist()
    }


def _calls(timeline: Timeline, causes: Causes) -> tuple[Int64, Int64]:
    """Ends of blocking calls, and the slices they waited for."""
    slices, rank_of = timeline.slices, timeline.slice_ranks()
    ends = slices.start + slices.duration
    names = [i for i, name in enumerate(timeline.strings) if _BLOCKING.search(name)]
    host = timeline.slice_roles() == TrackRole.HOST
    calls = np.flatnonzero(host & np.isin(slices.name, names) & (slices.duration > _BLOCKED_NS))
    device = np.flatnonzero(causes.on_device)
    device = device[np.argsort(causes.end_position[device], kind="stable")]
    found_end, found_row = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for rank in np.unique(rank_of[calls]).tolist():
        mine, on_rank = calls[rank_of[calls] == rank], device[rank_of[device] == rank]
        if not len(on_rank):
            continue
        at = np.searchsorted(ends[on_rank], ends[mine], side="right") - 1
        target = on_rank[np.maximum(at, 0)]
        waited = (at >= 0) & (ends[target] > slices.start[mine]) & (ends[mine] - ends[target] <= _RETURN_NS)
        found_end.append(ends[mine[waited]])
        found_row.append(target[waited])
    return np.concatenate(found_end), np.concatenate(found_row)


def _polls(timeline: Timeline, causes: Causes) -> tuple[Int64, Int64]:
    """Starts of launches after a pause, and the communication kernels polled for."""
    slices, rank_of = timeline.slices, timeline.slice_ranks()
    kernels = np.flatnonzero(causes.on_device & (causes.launch >= 0))
    launch = causes.launch[kernels]
    order = np.lexsort((slices.start[launch], slices.track[launch]))
    kernels, launch = kernels[order], launch[order]
    before, after, polled = launch[:-1], launch[1:], kernels[:-1]
    resumed = slices.start[after]
    pause = resumed - slices.start[before] - slices.duration[before]
    kind = slices.kind[polled]
    ended = slices.start[polled] + slices.duration[polled]
    found = (slices.track[before] == slices.track[after]) & (pause > _PAUSE_NS)
    found &= (kind == OpKind.COLLECTIVE) | (kind == OpKind.P2P)
    found &= (np.abs(ended - resumed) <= _POLL_NS) & (slices.start[polled] < resumed)
    hits = np.bincount(rank_of[polled[found]], minlength=len(timeline.ranks))
    found &= hits[rank_of[polled]] >= _LEAST_POLLS
    return resumed[found], polled[found].astype(np.int64)
