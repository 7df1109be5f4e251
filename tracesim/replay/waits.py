"""Waits between streams that a profiler does not name: which slice of another stream let a late one start.

A slice waited for an event of another stream if it started more than 3 us after its stream and its launch allowed, and
an event wait was queued between the launch before on its stream and its own. The source is the slice that ended last
on another stream and was launched before that event wait, up to 60 us or 30 % of the lateness earlier. Without a
visible event wait only a tight end counts: 12 us, or 40 us for slices without a launch.

Communication also waits for the last compute kernel that its thread launched before, where the measured order allows.

A late slice without such a source may have waited for room: a ready kernel does not start before the running one has
issued its last wave of blocks, which is seen as a start within the last tenth of the running one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.replay.measured import LATE_NS, Measured

_VISIBLE_LAG_NS = 60_000
_VISIBLE_LAG_SHARE = 0.3
_HIDDEN_LAG_NS = 12_000
_UNLAUNCHED_LAG_NS = 40_000
_CLOCK_STEP_NS = 1_000
_ADMISSION_LENGTH_NS = 20_000
_ADMISSION_SHARE = 0.9
_NEVER = np.iinfo(np.int64).min // 4
_EVENT_WAIT = re.compile(r"^(cuda|hip|cu|musa)StreamWaitEvent")


@dataclass(frozen=True)
class Waits:
    """Slices that waited for a slice of another stream of their rank."""

    row: Int64
    source: Int64

    def joined(self, other: Waits) -> Waits:
        """The waits of both, each once."""
        pairs = np.stack([np.concatenate((self.row, other.row)), np.concatenate((self.source, other.source))])
        pairs = np.unique(pairs, axis=1)
        return Waits(pairs[0], pairs[1])


NO_WAITS = Waits(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def event_waits(measured: Measured, ready: Int64) -> Waits:
    """Waits of late slices for events of other streams.

    Args:
        measured: the trace.
        ready: when stream and launch allowed each slice to start; shape [slices].
    """
    rows = measured.device[(measured.start - ready)[measured.device] > LATE_NS]
    if not len(rows):
        return NO_WAITS
    late = measured.start[rows] - ready[rows]
    queued = _event_wait_before(measured, rows)
    visible = queued > _NEVER
    hosted = np.zeros(len(measured.timeline.ranks), dtype=np.bool_)
    hosted[measured.rank[measured.launch >= 0]] = True
    lag = np.where(
        visible | ~hosted[measured.rank[rows]],
        np.maximum(_VISIBLE_LAG_NS, (late * _VISIBLE_LAG_SHARE).astype(np.int64)),
        np.where(measured.launch[rows] >= 0, _HIDDEN_LAG_NS, _UNLAUNCHED_LAG_NS),
    )
    earliest = np.maximum(ready[rows] + 1, measured.start[rows] - lag)
    launched = np.where(measured.launch >= 0, measured.start[measured.launch], _NEVER)
    limit = np.where(visible, queued, np.iinfo(np.int64).max)

    def fits(own: Int64, at: Int64, candidate: Int64) -> Bool:
        chosen: Bool = (measured.timeline.slices.track[candidate] != measured.timeline.slices.track[own]) & (
            launched[candidate] < limit[at]
        )
        return chosen

    source = _latest_ended(measured, rows, earliest, fits)
    found = source >= 0
    return Waits(rows[found], source[found])


def communication_waits(measured: Measured) -> Waits:
    """Each communication slice with a launch, and the last compute slice launched before it by its thread."""
    slices = measured.timeline.slices
    rows = measured.device[measured.launch[measured.device] >= 0]
    if not len(rows):
        return NO_WAITS
    launch = measured.launch[rows]
    rows = rows[np.lexsort((measured.start[rows], measured.start[launch], slices.track[launch]))]
    thread = slices.track[measured.launch[rows]]
    copies = (slices.kind[rows] == OpKind.MEMCPY) | (slices.kind[rows] == OpKind.MEMSET)
    compute = ~measured.communication[rows] & ~copies
    place = np.maximum.accumulate(np.where(compute, np.arange(len(rows)), -1))
    source = np.where(place >= 0, rows[np.maximum(place, 0)], -1)
    wanted = measured.communication[rows] & (source >= 0)
    wanted &= thread == slices.track[measured.launch[source]]
    wanted &= (slices.track[source] != slices.track[rows]) & (measured.rank[source] == measured.rank[rows])
    wanted &= measured.end[source] <= measured.start[rows] + _CLOCK_STEP_NS
    return Waits(rows[wanted], source[wanted])


def admission_waits(measured: Measured, ready: Int64, explained: Int64) -> Waits:
    """Late slices that started in the last tenth of one on another stream; those in ``explained`` are left out."""
    slices = measured.timeline.slices
    late = measured.device[(measured.start - ready)[measured.device] > LATE_NS]
    rows = np.setdiff1d(late, explained)
    if not len(rows):
        return NO_WAITS
    ordered, key, origin, stride = _by_end(measured)
    base = measured.rank[rows] * stride
    at = np.searchsorted(key, base + np.clip(measured.start[rows] - origin, -1, stride - 1), side="right")
    running = ordered[np.minimum(at, len(ordered) - 1)]
    length = slices.duration[running]
    passed = measured.start[rows] - measured.start[running]
    found = (measured.rank[running] == measured.rank[rows]) & (slices.track[running] != slices.track[rows])
    found &= (measured.end[running] > measured.start[rows]) & (length >= _ADMISSION_LENGTH_NS)
    found &= (passed >= _ADMISSION_SHARE * length) & (measured.end[rows] > measured.end[running])
    return Waits(rows[found], running[found])


def all_waits(measured: Measured) -> Waits:
    """The rule to compare with: everything waits for the last slice that had ended on each other stream."""
    slices = measured.timeline.slices
    found = NO_WAITS
    for rank in np.unique(measured.rank[measured.device]).tolist():
        mine = measured.device[measured.rank[measured.device] == rank]
        for track in np.unique(slices.track[mine]).tolist():
            on_track = mine[slices.track[mine] == track]
            on_track = on_track[np.lexsort((on_track, measured.end[on_track]))]
            others = mine[slices.track[mine] != track]
            at = np.searchsorted(
                measured.end[on_track], measured.start[others] + _CLOCK_STEP_NS, side="right"
            )
            kept = at > 0
            found = found.joined(Waits(others[kept], on_track[at[kept] - 1]))
    return found


def _by_end(measured: Measured) -> tuple[Int64, Int64, int, int]:
    """Device slices by rank, then end; the sort key of each; and the origin and stride of the key."""
    rows = measured.device
    origin = int(measured.end[rows].min())
    stride = int(measured.end[rows].max()) - origin + 2
    key = measured.rank[rows] * stride + measured.end[rows] - origin
    order = np.lexsort((rows, key))
    return rows[order], key[order], origin, stride


def _latest_ended(
    measured: Measured, rows: Int64, earliest: Int64, fits: Callable[[Int64, Int64, Int64], Bool]
) -> Int64:
    """For each slice the one of its rank that ended last before its start, not before ``earliest``, and fits."""
    ordered, key, origin, stride = _by_end(measured)
    limit = measured.start[rows] + _CLOCK_STEP_NS
    base = measured.rank[rows] * stride
    at = np.searchsorted(key, base + np.clip(limit - origin, -1, stride - 1), side="right") - 1
    found = np.full(len(rows), -1, dtype=np.int64)
    open_rows = np.flatnonzero(at >= 0)
    while len(open_rows):
        candidate, own = ordered[at[open_rows]], rows[open_rows]
        inside = (measured.rank[candidate] == measured.rank[own]) & (
            measured.end[candidate] >= earliest[open_rows]
        )
        open_rows, candidate, own = open_rows[inside], candidate[inside], own[inside]
        chosen = fits(own, open_rows, candidate) & (measured.end[candidate] < measured.end[own])
        found[open_rows[chosen]] = candidate[chosen]
        open_rows = open_rows[~chosen]
        at[open_rows] -= 1
        open_rows = open_rows[at[open_rows] >= 0]
    return found


def _event_wait_before(measured: Measured, rows: Int64) -> Int64:
    """When the last event wait was queued between the launch before on the stream and that of each of ``rows``."""
    timeline, slices = measured.timeline, measured.timeline.slices
    moment = np.full(len(rows), _NEVER, dtype=np.int64)
    names = [i for i, name in enumerate(timeline.strings) if _EVENT_WAIT.match(name)]
    calls = np.flatnonzero((timeline.slice_roles() == TrackRole.HOST) & np.isin(slices.name, names))
    launched = np.flatnonzero(measured.launch >= 0)
    if not len(calls) or not len(launched):
        return moment
    launch = measured.launch[launched]
    thread, stream = slices.track[launch].astype(np.int64), slices.track[launched].astype(np.int64)
    order = np.lexsort((measured.start[launch], stream, thread))
    same = (thread[order][1:] == thread[order][:-1]) & (stream[order][1:] == stream[order][:-1])
    previous = np.full(len(slices), _NEVER, dtype=np.int64)
    previous[launched[order][1:]] = np.where(same, measured.start[launch][order][:-1], _NEVER)
    origin = int(slices.start.min())
    stride = int(slices.start.max()) - origin + 2
    key = slices.track[calls].astype(np.int64) * stride + slices.start[calls] - origin
    key_order = np.argsort(key, kind="stable")
    has_launch = measured.launch[rows] >= 0
    own = rows[has_launch]
    launch = measured.launch[own]
    base = slices.track[launch].astype(np.int64)
    at = np.searchsorted(key[key_order], base * stride + measured.start[launch] - origin, side="right") - 1
    call = calls[key_order[np.maximum(at, 0)]]
    near = (at >= 0) & (slices.track[call] == base) & (slices.start[call] > previous[own])
    moment[has_launch] = np.where(near, slices.start[call], _NEVER)
    return moment
