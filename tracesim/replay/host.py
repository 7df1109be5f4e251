"""Host threads as calls and the work between them, and what the host waited for.

Of the host only the calls that touch the device matter (launches, copies, synchronisation) and the time between them.
A blocking call ends when the slice it waits for has ended; a copy from pageable memory happens at the end of its call.
A pause may have ended because another thread handed over (forward to autograd and back), or because the host polled
memory that a communication kernel writes, for which no call is visible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.analysis.intervals import Intervals, covered, union
from tracesim.replay.measured import Measured, on_threads

LAUNCH, BLOCKING, MARK = range(3)
"""What a point of a thread is."""

_SYNCHRONISE = re.compile(r"^(cuda|hip|cu|musa)(Stream|Device|Event|Ctx)Synchronize")
_EVENT_SYNCHRONISE = re.compile(r"EventSynchronize")
_COPY = re.compile(r"^(cuda|hip)Memcpy(Async|WithStream)?$|^cuMemcpy")
_CLOCK_STEP_NS = 1_000
_BLOCKED_NS = 10_000
_RETURN_NS = 60_000
_SHORT_CALL_NS = 10_000
_PAUSE_NS = 500_000
_POLL_NS = 150_000
_LEAST_POLLS = 2
_HANDOVER_PAUSE_NS = 100_000
_MOST_COVERED = 0.15
_HANDED_OVER_NS = 50_000
_HANDOVER_LAG_NS = 1_000_000
_HANDOVER_LAG_SHARE = 0.3
_NEVER = np.iinfo(np.int64).min // 4


@dataclass(frozen=True)
class HostPoints:
    """Calls and marks of all threads, by track, then time; they do not overlap on a track."""

    slice_row: Int64
    """The host slice; -1 for a mark."""
    track: Int64
    start: Int64
    end: Int64
    what: Int8
    """LAUNCH, BLOCKING or MARK."""
    source: Int64
    """For a blocking call the device slice it waits for, -1 for none."""
    tight: Bool
    """Whether the call returned because that slice ended."""
    staged: Int64
    """Host work inside a blocking call before its copy can start; else the duration of the call."""
    gap_slice: Int64
    """The device slice whose end let the pause before this point end, -1 for none."""
    gap_point: Int64
    """The point of another thread whose end did, -1 for none."""

    @property
    def before(self) -> Int64:
        """The point before on the thread, -1 for the first."""
        index = np.arange(len(self.track)) - 1
        if len(index):
            index[1:][self.track[1:] != self.track[:-1]] = -1
        return index.astype(np.int64)


def step_mark_tracks(measured: Measured) -> Int64:
    """For each step the host track that ran it: the one its annotation is of, else the busiest of its rank."""
    timeline, slices = measured.timeline, measured.timeline.slices
    tracks, steps = timeline.tracks, timeline.steps
    role = timeline.slice_roles()
    named = np.array([name.startswith("ProfilerStep") for name in timeline.strings], dtype=np.bool_)
    marks = np.flatnonzero(named[slices.name] & ((role == TrackRole.ANNOTATION) | (role == TrackRole.HOST)))
    host_tracks = np.flatnonzero(tracks.role == TrackRole.HOST)
    launching = np.bincount(slices.track[measured.launch[measured.launch >= 0]], minlength=len(tracks))
    found = np.full(len(steps), -1, dtype=np.int64)
    for row in range(len(steps)):
        mine = host_tracks[tracks.rank[host_tracks] == steps.rank[row]]
        if not len(mine):
            continue
        at = marks[(slices.start[marks] == steps.start[row]) & (measured.rank[marks] == steps.rank[row])]
        threads = mine[np.isin(tracks.stream[mine], tracks.stream[slices.track[at]])]
        found[row] = threads[0] if len(threads) else mine[np.argmax(launching[mine])]
    return found


def host_points(measured: Measured) -> HostPoints:
    """The calls and step marks of all threads of a trace, and what they waited for."""
    timeline, slices = measured.timeline, measured.timeline.slices
    synchronise = _calls(measured, _SYNCHRONISE)
    launching = np.flatnonzero(measured.host)
    copying = np.intersect1d(_calls(measured, _COPY), launching)
    source, tight, staged = _blocking(measured, synchronise, copying)
    steps, mark_track = timeline.steps, step_mark_tracks(measured)
    if on_threads(timeline):
        # The threads are device tracks, and the host work between their slices is on them.
        mark_track = np.full(len(steps), -1, dtype=np.int64)
    marked = mark_track >= 0
    mark_time = np.concatenate((steps.start[marked], steps.end[marked]))
    calls = np.union1d(launching, synchronise)
    row = np.concatenate((calls, np.full(len(mark_time), -1)))
    track = np.concatenate((slices.track[calls], np.tile(mark_track[marked], 2))).astype(np.int64)
    start = np.concatenate((measured.start[calls], mark_time))
    end = np.concatenate((measured.end[calls], mark_time))
    what = np.concatenate(
        (np.where(source[calls] >= 0, BLOCKING, LAUNCH), np.full(len(mark_time), MARK))
    ).astype(np.int8)
    order = np.lexsort((-end, start, track))
    row, track, what = row[order], track[order], what[order]
    start, end = _without_overlap(track, start[order], end[order])
    of_row = np.where(row >= 0, row, 0)
    points = HostPoints(
        slice_row=row,
        track=track,
        start=start,
        end=end,
        what=what,
        source=np.where(what == BLOCKING, source[of_row], -1) if len(source) else row,
        tight=(what == BLOCKING) & tight[of_row] if len(tight) else row >= 0,
        staged=np.minimum(np.where(what == BLOCKING, staged[of_row], end - start), end - start)
        if len(staged)
        else row,
        gap_slice=np.full(len(row), -1, dtype=np.int64),
        gap_point=np.full(len(row), -1, dtype=np.int64),
    )
    _find_polls(measured, points)
    _find_handovers(measured, points)
    return points


def _calls(measured: Measured, pattern: re.Pattern[str]) -> Int64:
    timeline = measured.timeline
    names = [i for i, name in enumerate(timeline.strings) if pattern.search(name)]
    host = timeline.slice_roles() == TrackRole.HOST
    return np.flatnonzero(host & np.isin(timeline.slices.name, names))


def _without_overlap(track: Int64, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Let each interval begin after those before it on its track have ended."""
    if not len(track):
        return start, end
    origin, stride = int(start.min()), int(end.max()) - int(start.min()) + 1
    reach = np.maximum.accumulate(track * stride + end - origin) - track * stride + origin
    begin = start.copy()
    same = track[1:] == track[:-1]
    begin[1:] = np.where(same, np.maximum(start[1:], reach[:-1]), start[1:])
    return begin, np.maximum(end, begin)


def _blocking(measured: Measured, synchronise: Int64, copying: Int64) -> tuple[Int64, Bool, Int64]:
    """For each host slice what it waits for (-1), whether it returned for that, and its own work before waiting."""
    count = len(measured.start)
    source = np.full(count, -1, dtype=np.int64)
    tight = np.zeros(count, dtype=np.bool_)
    staged = measured.end - measured.start
    _blocking_copies(measured, copying, source, tight, staged)
    calls = synchronise
    names = measured.timeline.strings
    of_event = np.array([bool(_EVENT_SYNCHRONISE.search(name)) for name in names], dtype=np.bool_)
    launched = np.where(measured.launch >= 0, measured.start[measured.launch], measured.start)
    for rank in np.unique(measured.rank[calls]).tolist():
        mine = calls[measured.rank[calls] == rank]
        device = measured.device[measured.rank[measured.device] == rank]
        if not len(device):
            continue
        by_end = device[np.lexsort((device, measured.end[device]))]
        limit = measured.end[mine] + _CLOCK_STEP_NS
        at = np.searchsorted(measured.end[by_end], limit, side="right") - 1
        last = np.where(at >= 0, by_end[np.maximum(at, 0)], -1)
        blocked = (last >= 0) & (measured.end[mine] - measured.start[mine] > _BLOCKED_NS)
        blocked &= (measured.end[last] > measured.start[mine]) & (launched[last] < measured.end[mine])
        blocked &= measured.end[mine] - measured.end[last] <= _RETURN_NS
        # Nothing launched before the call still ran when it returned: it may well have waited for all of it.
        by_launch = device[np.argsort(launched[device], kind="stable")]
        reach = np.maximum.accumulate(measured.end[by_launch])
        number = np.searchsorted(launched[by_launch], measured.start[mine])
        done = (number > 0) & (reach[np.maximum(number - 1, 0)] <= measured.end[mine])
        latest = _last_to_end(measured.end[by_launch])[np.maximum(number - 1, 0)]
        quiet = done & ~of_event[measured.timeline.slices.name[mine]]
        source[mine] = np.where(blocked, last, np.where(quiet, by_launch[latest], -1))
        tight[mine] = blocked
        staged[mine[blocked]] = np.minimum(staged[mine[blocked]], _SHORT_CALL_NS)
    return source, tight, staged


def _last_to_end(end: Int64) -> Int64:
    """For each position the one up to it with the greatest end."""
    reach = np.maximum.accumulate(end)
    return np.maximum.accumulate(np.where(end == reach, np.arange(len(end)), 0)).astype(np.int64)


def _blocking_copies(measured: Measured, copying: Int64, source: Int64, tight: Bool, staged: Int64) -> None:
    """Copies whose call returned after they had ended: the host waits for them."""
    copies = measured.device[np.isin(measured.launch[measured.device], copying)]
    copies = copies[measured.timeline.slices.kind[copies] == OpKind.MEMCPY]
    call = measured.launch[copies]
    inside = measured.end[copies] <= measured.end[call] + _CLOCK_STEP_NS
    copies, call = copies[inside], call[inside]
    source[call], tight[call] = copies, True
    before = measured.before[copies]
    free = np.where(before >= 0, measured.end[before], _NEVER)
    # The stream had been empty: the copy was late because the host first moved the data itself.
    host_bound = measured.start[copies] - free > _RETURN_NS
    length = measured.end[call] - measured.start[call]
    moved = np.clip(measured.start[copies] - measured.start[call], 0, length)
    staged[call] = np.where(host_bound, moved, np.minimum(length, _SHORT_CALL_NS))


def _find_polls(measured: Measured, points: HostPoints) -> None:
    """Pauses after the launch of a communication kernel that end when that kernel does, more than once on a rank."""
    before = points.before
    last_launched = np.full(len(measured.start), -1, dtype=np.int64)
    rows = measured.device[measured.launch[measured.device] >= 0]
    last_launched[measured.launch[rows]] = rows
    of_point = np.where(points.slice_row >= 0, last_launched[points.slice_row], -1)
    polled = np.where(before >= 0, of_point[before], -1)
    pause = points.start - np.where(before >= 0, points.end[before], points.start)
    found = (polled >= 0) & (pause > _PAUSE_NS) & measured.communication[polled]
    found &= (np.abs(measured.end[polled] - points.start) <= _POLL_NS) & (
        measured.start[polled] < points.start
    )
    hits = np.bincount(measured.rank[polled[found]], minlength=len(measured.timeline.ranks))
    found &= hits[measured.rank[polled]] >= _LEAST_POLLS
    points.gap_slice[found] = polled[found]


def _find_handovers(measured: Measured, points: HostPoints) -> None:
    """Idle pauses of a thread that end shortly after another thread of its rank has stopped working."""
    timeline, slices = measured.timeline, measured.timeline.slices
    before = points.before
    began = np.where(before >= 0, points.end[before], measured.start.min() if len(measured.start) else 0)
    rank_of_track = timeline.tracks.rank.astype(np.int64)
    host = np.flatnonzero(timeline.slice_roles() == TrackRole.HOST)
    threads = np.unique(points.track)
    best_end = np.full(len(points.track), _NEVER, dtype=np.int64)
    for track in threads.tolist():
        mine = np.flatnonzero((points.track == track) & (points.gap_slice < 0))
        mine = mine[points.start[mine] - began[mine] > _HANDOVER_PAUSE_NS]
        busy = _innermost(measured, host[slices.track[host] == track])
        pause = points.start[mine] - began[mine]
        # What runs when the pause ends belongs to the call after it.
        inside = covered(busy, began[mine], points.start[mine])
        mine = mine[inside <= _MOST_COVERED * pause]
        for other in threads[(rank_of_track[threads] == rank_of_track[track]) & (threads != track)].tolist():
            _take_handovers(
                measured,
                points,
                (mine, began),
                (_innermost(measured, host[slices.track[host] == other]), other),
                best_end,
            )


def _take_handovers(
    measured: Measured,
    points: HostPoints,
    pauses: tuple[Int64, Int64],
    other: tuple[Intervals, int],
    best_end: Int64,
) -> None:
    """Let pauses end with another thread where that stopped later than the best thread known."""
    mine, began = pauses
    busy, other_track = other
    their = np.flatnonzero(points.track == other_track)
    if not len(busy) or not len(their) or not len(mine):
        return
    at = np.searchsorted(busy.start, points.start[mine] + _CLOCK_STEP_NS, side="right") - 1
    # A thread that still works when the pause ends has not handed over.
    idle = (at >= 0) & (busy.end[np.maximum(at, 0)] <= points.start[mine] + _CLOCK_STEP_NS)
    resumes = np.append(busy.start, np.iinfo(np.int64).max)[at + 1]
    idle &= resumes - points.start[mine] > _HANDED_OVER_NS
    stop = busy.end[np.maximum(at, 0)]
    point = their[np.maximum(np.searchsorted(points.end[their], points.start[mine], side="right") - 1, 0)]
    pause = points.start[mine] - began[mine]
    allowed = np.maximum(_HANDOVER_LAG_NS, (pause * _HANDOVER_LAG_SHARE).astype(np.int64))
    fits = idle & (stop > began[mine]) & (points.start[mine] - stop <= allowed)
    fits &= (points.end[point] > began[mine]) & (points.end[point] <= points.start[mine])
    fits &= stop > best_end[mine]
    points.gap_point[mine[fits]] = point[fits]
    best_end[mine[fits]] = stop[fits]


def _innermost(measured: Measured, rows: Int64) -> Intervals:
    """When the slices of a thread that contain no others ran: those around them may only wait."""
    start, end = measured.start[rows], measured.end[rows]
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    contains = np.append(start[1:] < end[:-1], False) if len(start) else np.zeros(0, dtype=np.bool_)
    return union(start[~contains], end[~contains])


def returns_after(measured: Measured, points: HostPoints) -> Int64:
    """How long after the slice waited for each blocking call that waited returned."""
    chosen = points.tight
    return (points.end[chosen] - measured.end[points.source[chosen]]).astype(np.int64)
