"""Why each device slice started when it did: its stream, its launch, another stream, or a peer.

A simulated timeline says it (``waited_for``). In a measured one a kernel can start once the slice before it on its
stream has ended and the host has launched it. One that starts later than that waited for something a profiler does not
name; it is looked for among the other streams of the rank:

- the slice that ended last there before the start, if an event wait (``StreamWaitEvent``) was queued between the launch
  before on this stream and its own, and the start follows the end within 60 us or 30 % of the lateness; without such a
  call within 12 us only (40 us for kernels without a launch; as with an event wait on a rank without any launch);
- else a slice that is about to end (the last tenth of at least 20 us): a ready kernel is not admitted to the device
  before the running one has issued its last wave of blocks.

Traces without launches (of whole operations instead of kernels) may show communication only while data moves. A member
of an operation that starts late for no reason of its own then waited for the last member that has one.

What is left is lateness without a cause; from 100 us on it is called a device stall.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from op_graphs.columns import Bool, Int8, Int32, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, TrackRole
from tracesim.analysis.transfers import Transfers

STALL_NS = 100_000
"""Lateness without a cause from which on it is a device stall."""
EVENT_DELAY_NS = 60_000
"""Time up to which the end of a slice on another stream or rank is on its way; what is longer has another reason."""

_LEAST_TOLERANCE_NS = 3_000
_FEW, _TOLERANCE_OF_FEW_NS = 8, 10_000
_MOST_TOLERANCE_NS = 100_000
_VISIBLE_WAIT_LAG_SHARE = 0.3
_HIDDEN_WAIT_LAG_NS = 12_000
_UNLAUNCHED_LAG_NS = 40_000
_CLOCK_STEP_NS = 1_000
_PEER_CLOCK_NS = 100_000
_ADMISSION_LENGTH_NS = 20_000
_ADMISSION_SHARE = 0.9
_NEVER = np.iinfo(np.int64).min // 4
_WAIT_CALL = re.compile(r"^(cuda|hip|cu|musa)StreamWaitEvent")


class Cause(IntEnum):
    """What the start of a slice waited for last."""

    NONE = 0
    """Nothing known: the first of its stream, without a launch."""
    STREAM = 1
    """The slice before it on its stream."""
    LAUNCH = 2
    """Its launch by the host."""
    OTHER_STREAM = 3
    """A slice on another stream of its rank."""
    PEER = 4
    """A slice of another rank (simulated timelines, and traces of operations without launches)."""


@dataclass(frozen=True)
class Causes:
    """Columns of shape [slices]; meaningful where ``on_device``."""

    on_device: Bool
    cause: Int8
    """:class:`Cause`."""
    row: Int64
    """The slice waited for (a host slice for LAUNCH), -1 for NONE."""
    time: Int64
    """Nanoseconds at which that let it start; never after its start."""
    late: Int64
    """Nanoseconds from that time to the start."""
    tolerance: Int64
    """Lateness up to which it is the ordinary delay of a launch, a queue or an event."""
    host_ready: Int64
    """End of the launching call, at most the start of the slice; a very small number where no launch is known."""
    launch: Int64
    """Launching host slice, -1 where not known."""
    end_position: Int64
    """Position in the order of ends over all slices; a cause has a lower one than what it lets start."""

    @property
    def stalled(self) -> Bool:
        """Launched slices that start at least :data:`STALL_NS` after everything known let them."""
        launched = (self.launch >= 0) & (self.host_ready <= self.time)
        own = (self.cause == Cause.STREAM) | (self.cause == Cause.LAUNCH)
        stalled: Bool = (
            self.on_device & launched & own & (self.late >= STALL_NS) & (self.late > self.tolerance)
        )
        return stalled


def find_causes(timeline: Timeline, transfers: Transfers) -> Causes:
    """The cause of every device slice of a timeline, given its matched communication."""
    slices = timeline.slices
    count = len(slices)
    start, end = slices.start, slices.start + slices.duration
    order = np.lexsort((np.arange(count), end))
    position = np.empty(count, dtype=np.int64)
    position[order] = np.arange(count)
    device = np.flatnonzero(timeline.on_device())
    before = stream_predecessors(slices.track, start, end, device)
    free = np.where(before >= 0, end[before], _NEVER)
    launch, host_ready = _launches(timeline, device)
    rank = timeline.slice_ranks()
    tolerance = _tolerances(rank, device, start, free, host_ready)
    ready = np.maximum(free, host_ready)
    by_launch = (host_ready > free) & (launch >= 0)
    cause = np.where(by_launch, Cause.LAUNCH, np.where(before >= 0, Cause.STREAM, Cause.NONE)).astype(np.int8)
    row = np.where(by_launch, launch, before)
    time = np.where(cause == Cause.NONE, start, np.minimum(ready, start))
    late_rows = device[(start - ready > tolerance)[device] & (slices.waited_for[device] < 0)]
    search = _Search(timeline, device, rank, start, end, position)
    found, moment = search.other_stream(late_rows, ready[late_rows], launch)
    _set(cause, row, time, late_rows, found, moment, Cause.OTHER_STREAM)
    _peers(timeline, transfers, launch, (cause, row, time), tolerance)
    known = device[slices.waited_for[device] >= 0]
    source = slices.waited_for[known]
    kind = np.where(
        rank[source] != rank[known],
        Cause.PEER,
        np.where(slices.track[source] == slices.track[known], Cause.STREAM, Cause.OTHER_STREAM),
    )
    cause[known], row[known] = kind, source
    time[known] = np.minimum(end[source], start[known])
    on_device = np.zeros(count, dtype=np.bool_)
    on_device[device] = True
    # Of a run on CPU the call is a slice of a device track.
    cause[(cause == Cause.LAUNCH) & on_device[np.maximum(row, 0)]] = Cause.OTHER_STREAM
    return Causes(on_device, cause, row, time, start - time, tolerance, host_ready, launch, position)


def _set(cause: Int8, row: Int64, time: Int64, rows: Int64, found: Int64, moment: Int64, kind: Cause) -> None:
    chosen = found >= 0
    cause[rows[chosen]], row[rows[chosen]], time[rows[chosen]] = kind, found[chosen], moment[chosen]


def _peers(
    timeline: Timeline,
    transfers: Transfers,
    launch: Int64,
    columns: tuple[Int8, Int64, Int64],
    tolerance: Int64,
) -> None:
    """Let members without a launch, whose start nothing explains, wait for one whose start something does."""
    cause, row, time = columns
    slices, matches = timeline.slices, transfers.matches
    if not len(matches.row):
        return
    member, operation, start = matches.row, matches.operation, slices.start[matches.row]
    late = start - time[member]
    usual = np.where(cause[member] == Cause.OTHER_STREAM, EVENT_DELAY_NS, tolerance[member])
    explained = (cause[member] != Cause.NONE) & (late <= usual)
    # Of the explained ones the last to arrive comes last in this order; operations without any are left alone.
    order = np.lexsort((transfers.arrival, explained, operation))
    stop = np.searchsorted(operation[order], np.arange(len(matches.method)), side="right")
    source = order[stop - 1][operation]
    arrival = transfers.arrival[source]
    began = np.where(cause[member] == Cause.NONE, _NEVER, time[member])
    fits = ~explained & explained[source] & (arrival > began) & (arrival <= start + _PEER_CLOCK_NS)
    fits &= (launch[member] < 0) & (slices.waited_for[member] < 0)
    _set(cause, row, time, member[fits], member[source[fits]], np.minimum(arrival, start)[fits], Cause.PEER)


def stream_predecessors(track: Int32, start: Int64, end: Int64, rows: Int64) -> Int64:
    """For each slice the one on its track that ended last before it started, -1 if none; shape [slices].

    Only ``rows`` are looked at. Among slices without duration at one instant, the lower row comes first.
    """
    before = np.full(len(track), -1, dtype=np.int64)
    if not len(rows):
        return before
    key, origin, stride = _keys(track[rows].astype(np.int64), end[rows])
    order = np.lexsort((rows, key))
    ordered = rows[order]
    position = np.empty(len(rows), dtype=np.int64)
    position[order] = np.arange(len(rows))
    started = track[rows].astype(np.int64) * stride + np.clip(start[rows] - origin, -1, stride - 1)
    at = np.minimum(np.searchsorted(key[order], started, side="right"), position) - 1
    same = (at >= 0) & (track[ordered[at]] == track[rows])
    before[rows] = np.where(same, ordered[at], -1)
    return before


def _keys(number: Int64, time: Int64) -> tuple[Int64, int, int]:
    """(number, time) as one sortable integer, with the origin and stride that make it."""
    origin = int(time.min())
    stride = int(time.max()) - origin + 2
    return number * stride + (time - origin), origin, stride


def _launches(timeline: Timeline, device: Int64) -> tuple[Int64, Int64]:
    """The launching host slice of each slice and the moment from which it was launched."""
    slices, flows = timeline.slices, timeline.flows
    launch = np.full(len(slices), -1, dtype=np.int64)
    chosen = flows.kind == FlowKind.LAUNCH
    launch[flows.target[chosen]] = flows.source[chosen]
    ready = np.full(len(slices), _NEVER, dtype=np.int64)
    launched = device[launch[device] >= 0]
    if not len(launched):
        return launch, ready
    source = launch[launched]
    order = np.lexsort((slices.start[launched], source))
    first = np.ones(len(launched), dtype=np.bool_)
    first[order] = np.concatenate(([True], source[order][1:] != source[order][:-1]))
    # Of a graph only the first kernel waits for the call to return; the others are there when it began.
    moment = slices.start[source] + np.where(first, slices.duration[source], 0)
    ready[launched] = np.minimum(moment, slices.start[launched])
    return launch, ready


def _tolerances(rank: Int32, device: Int64, start: Int64, free: Int64, host_ready: Int64) -> Int64:
    """What delay is ordinary: four times the lower quartile on its rank, after a launch and after a slice apart.

    Less than eight slices say nothing of that; 10 us then.
    """
    tolerance = np.full(len(start), _LEAST_TOLERANCE_NS, dtype=np.int64)
    delay = start - np.maximum(free, host_ready)
    known = np.maximum(free, host_ready) > _NEVER
    for number in np.unique(rank[device]).tolist():
        mine = device[(rank[device] == number) & known[device]]
        by_launch = host_ready[mine] > free[mine]
        for rows in (mine[by_launch], mine[~by_launch]):
            if len(rows) < _FEW:
                tolerance[rows] = _TOLERANCE_OF_FEW_NS
            else:
                quartile = int(np.quantile(delay[rows], 0.25))
                tolerance[rows] = min(max(_LEAST_TOLERANCE_NS, 4 * quartile), _MOST_TOLERANCE_NS)
    return tolerance


class _Search:
    """Looks for what late slices waited for on the other streams of their ranks."""

    def __init__(
        self, timeline: Timeline, device: Int64, rank: Int32, start: Int64, end: Int64, position: Int64
    ) -> None:
        self.timeline, self.rank, self.start, self.end, self.position = timeline, rank, start, end, position
        self.track = timeline.slices.track
        if len(device):
            key, self.origin, self.stride = _keys(rank[device].astype(np.int64), end[device])
            order = np.lexsort((device, key))
            self.key, self.rows = key[order], device[order]

    def other_stream(self, rows: Int64, ready: Int64, launch: Int64) -> tuple[Int64, Int64]:
        """The slice each of ``rows`` waited for (-1 if none is found) and the moment it let them start."""
        if not len(rows):
            return np.full(0, -1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        late = self.start[rows] - ready
        visible = self._waits_visibly(rows, launch)
        hosted = np.zeros(len(self.timeline.ranks), dtype=np.bool_)
        hosted[self.rank[launch >= 0]] = True
        lag = np.where(
            visible | ~hosted[self.rank[rows]],
            np.maximum(EVENT_DELAY_NS, (late * _VISIBLE_WAIT_LAG_SHARE).astype(np.int64)),
            np.where(launch[rows] >= 0, _HIDDEN_WAIT_LAG_NS, _UNLAUNCHED_LAG_NS),
        )
        earliest = np.maximum(ready + 1, self.start[rows] - lag)
        found = self._latest_ended(rows, earliest)
        moment = np.where(found >= 0, np.minimum(self.end[found], self.start[rows]), 0)
        running = self._about_to_end(rows)
        admitted = (found < 0) & (running >= 0)
        return np.where(admitted, running, found), np.where(admitted, self.start[rows], moment)

    def _at(self, rows: Int64, time: Int64) -> Int64:
        """How many slices of lower ranks, or of the own rank with an end up to ``time``, there are."""
        base = self.rank[rows].astype(np.int64) * self.stride
        return np.searchsorted(
            self.key, base + np.clip(time - self.origin, -1, self.stride - 1), side="right"
        ).astype(np.int64)

    def _latest_ended(self, rows: Int64, earliest: Int64) -> Int64:
        """The slice on another track of the rank that ended last before each start, but not before ``earliest``."""
        at = self._at(rows, self.start[rows] + _CLOCK_STEP_NS) - 1
        found = np.full(len(rows), -1, dtype=np.int64)
        open_rows = np.flatnonzero(at >= 0)
        while len(open_rows):
            candidate = self.rows[at[open_rows]]
            own = rows[open_rows]
            inside = (self.rank[candidate] == self.rank[own]) & (self.end[candidate] >= earliest[open_rows])
            open_rows, candidate, own = open_rows[inside], candidate[inside], own[inside]
            fits = (self.track[candidate] != self.track[own]) & (
                self.position[candidate] < self.position[own]
            )
            found[open_rows[fits]] = candidate[fits]
            open_rows = open_rows[~fits]
            at[open_rows] -= 1
            open_rows = open_rows[at[open_rows] >= 0]
        return found

    def _about_to_end(self, rows: Int64) -> Int64:
        """The slice on another track that ends next after each start, if it is in its last tenth by then."""
        at = np.minimum(self._at(rows, self.start[rows]), len(self.rows) - 1)
        running = self.rows[at]
        length = self.end[running] - self.start[running]
        passed = self.start[rows] - self.start[running]
        fits = (
            (self.rank[running] == self.rank[rows])
            & (self.track[running] != self.track[rows])
            & (self.end[running] > self.start[rows])
            & (length >= _ADMISSION_LENGTH_NS)
            & (passed >= _ADMISSION_SHARE * length)
        )
        return np.where(fits, running, -1)

    def _waits_visibly(self, rows: Int64, launch: Int64) -> Bool:
        """Whether an event wait was queued between the launch before on the stream, by the thread, and its own."""
        timeline, slices = self.timeline, self.timeline.slices
        names = [i for i, name in enumerate(timeline.strings) if _WAIT_CALL.match(name)]
        host = timeline.slice_roles() == TrackRole.HOST
        calls = np.flatnonzero(host & np.isin(slices.name, names)) if names else np.zeros(0, dtype=np.int64)
        visible = np.zeros(len(rows), dtype=np.bool_)
        if not len(calls):
            return visible
        launched = np.flatnonzero(launch >= 0)
        thread, stream = (
            slices.track[launch[launched]].astype(np.int64),
            self.track[launched].astype(np.int64),
        )
        moment = slices.start[launch[launched]]
        order = np.lexsort((moment, stream, thread))
        same = (thread[order][1:] == thread[order][:-1]) & (stream[order][1:] == stream[order][:-1])
        previous = np.full(len(slices), _NEVER, dtype=np.int64)
        previous[launched[order][1:]] = np.where(same, moment[order][:-1], _NEVER)
        key, origin, stride = _keys(slices.track[calls].astype(np.int64), slices.start[calls])
        key_order = np.argsort(key, kind="stable")
        own = rows[launch[rows] >= 0]
        base = slices.track[launch[own]].astype(np.int64)
        at = (
            np.searchsorted(
                key[key_order],
                base * stride + np.clip(slices.start[launch[own]] - origin, -1, stride - 1),
                side="right",
            )
            - 1
        )
        call = calls[key_order[np.maximum(at, 0)]]
        near = (at >= 0) & (slices.track[call] == base) & (slices.start[call] > previous[own])
        visible[launch[rows] >= 0] = near
        return visible
