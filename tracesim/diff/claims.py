"""Every instant of a step, given to exactly one cause and, where something runs, to exactly one slice.

The parts of a step are those of :mod:`tracesim.analysis.breakdown`: compute, optimizer, exposed communication, copies,
idle, each instant counted for the first that runs then. Inside a part, the busiest compute stream comes first, then the
slice that started first. Idle time is split as in :mod:`tracesim.analysis.idle`. So all claims of a step add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Dimension, OpKind
from tracesim.analysis import Window, slice_dimensions
from tracesim.analysis.breakdown import step_parts
from tracesim.analysis.causes import find_causes
from tracesim.analysis.idle import HOST, OTHER_STREAM, PEER, QUEUE, UNKNOWN, IdlePieces, explain_gaps
from tracesim.analysis.intervals import Intervals, clip, subtract, union
from tracesim.analysis.matching import Matches
from tracesim.analysis.transfers import split_transfers

KERNELS, OPTIMIZER, COPIES, COMMUNICATION, PEERS, BUBBLE, LAUNCH, STREAMS, UNEXPLAINED = range(9)
"""What an instant can be given to; the first six of them to a slice as well."""


@dataclass(frozen=True)
class Claims:
    """The instants of one step, in nanoseconds.

    The columns, of one length, are what slices have: more than one row each where the time of a slice has two causes.
    """

    row: Int64
    cause: Int64
    time: Int64
    idle: Int64
    """Time in which nothing runs, by cause; shape [9]."""
    gaps: Intervals
    """When the host keeps the device waiting."""

    @property
    def total(self) -> int:
        """All of the step."""
        return int(self.time.sum()) + int(self.idle.sum())


class Claimer:
    """Divides the steps of one timeline."""

    def __init__(self, timeline: Timeline, matches: Matches) -> None:
        self.timeline = timeline
        transfers = split_transfers(timeline, matches)
        self.causes = find_causes(timeline, transfers)
        self.wait_inside = transfers.by_slice(transfers.wait_inside, len(timeline.slices))
        self.dimensions = slice_dimensions(timeline)
        self.device = np.flatnonzero(timeline.on_device())
        self.of_rank = timeline.slice_ranks()[self.device]
        self._rank = -1
        self._known: dict[Window, Claims] = {}

    def step(self, window: Window) -> Claims:
        """The claims of one step."""
        if window not in self._known:
            self._known[window] = self._claims(window)
        return self._known[window]

    def _load(self, rank: int) -> None:
        """Rows of a rank in order of start, and its busiest stream of compute."""
        if rank == self._rank:
            return
        slices = self.timeline.slices
        rows = self.device[self.of_rank == rank]
        self.rows = rows[np.lexsort((rows, slices.start[rows]))]
        self.starts = slices.start[self.rows]
        # So that the slices of a step are a range: the latest end of all that start up to a slice.
        self.reach = np.maximum.accumulate(self.starts + slices.duration[self.rows])
        communicates = np.isin(slices.kind[self.rows], (OpKind.COLLECTIVE, OpKind.P2P))
        weights = np.where(communicates, 0, slices.duration[self.rows])
        track = slices.track[self.rows]
        self.main = int(np.bincount(track, weights, len(self.timeline.tracks)).argmax())
        pipelined = communicates & (self.dimensions[self.rows] == Dimension.PP)
        self.pipelined = bool(pipelined.any())
        self._rank = rank

    def _claims(self, window: Window) -> Claims:
        self._load(window.rank)
        timeline, slices = self.timeline, self.timeline.slices
        first = int(np.searchsorted(self.reach, window.start, side="right"))
        last = int(np.searchsorted(self.starts, window.end))
        rows = self.rows[first:last]
        parts = step_parts(timeline, rows, self.dimensions, window)
        start, end = clip(
            slices.start[rows], slices.start[rows] + slices.duration[rows], window.start, window.end
        )
        kept = end > start
        rows, start, end = rows[kept], start[kept], end[kept]
        communicates = np.isin(slices.kind[rows], (OpKind.COLLECTIVE, OpKind.P2P))
        main = (slices.track[rows] == self.main) & ~communicates
        found: list[tuple[Int64, Int64, Int64]] = []

        def claim(chosen: Bool, allowed: Intervals, cause: int) -> None:
            if not len(allowed):
                return
            begin = _fresh(start[chosen], end[chosen])
            measure = _Measure(allowed)
            time = measure.between(begin, end[chosen])
            if cause != COMMUNICATION:
                found.append((rows[chosen], np.full(len(time), cause), time))
                return
            mine = rows[chosen]
            waited = np.clip(
                slices.start[mine] + self.wait_inside[mine], begin, np.maximum(end[chosen], begin)
            )
            wait = measure.between(begin, waited)
            pipeline = self.dimensions[mine] == Dimension.PP
            found.append((mine, np.where(pipeline, BUBBLE, PEERS), wait))
            found.append((mine, np.full(len(time), COMMUNICATION), time - wait))

        for allowed, cause in (
            (parts.compute, KERNELS),
            (parts.optimizer, OPTIMIZER),
            (parts.memory, COPIES),
        ):
            claim(main, allowed, cause)
            others = subtract(allowed, union(start[main], end[main]))
            claim(~main & ~communicates, others, cause)
        for key, allowed in parts.exposed.items():
            claim(communicates & self._of_dimension(rows, key), allowed, COMMUNICATION)
        idle, gaps = self._idle(window, parts.idle)
        return _collected(found, idle, gaps)

    def _of_dimension(self, rows: Int64, key: str) -> Bool:
        dimensions = self.dimensions[rows]
        named = (Dimension.TP, Dimension.CP, Dimension.EP, Dimension.PP, Dimension.DP)
        if key == "other":
            return ~np.isin(dimensions, named)
        return np.asarray(dimensions == Dimension[key.upper()])

    def _idle(self, window: Window, gaps: Intervals) -> tuple[Int64, Intervals]:
        idle = np.zeros(9, dtype=np.int64)
        if not len(gaps):
            return idle, gaps
        pieces = explain_gaps(self.timeline, self.causes, self.rows, gaps)
        length = pieces.end - pieces.start
        cause = np.array([LAUNCH, LAUNCH, STREAMS, PEERS, UNEXPLAINED])[pieces.cause]
        assert (HOST, QUEUE, OTHER_STREAM, PEER, UNKNOWN) == (0, 1, 2, 3, 4)
        if self.pipelined:
            cause = np.where(self._is_bubble(window, pieces), BUBBLE, cause)
        np.add.at(idle, cause, length)
        late = cause == LAUNCH
        return idle, union(pieces.start[late], pieces.end[late])

    def _is_bubble(self, window: Window, pieces: IdlePieces) -> Bool:
        """Whether the pieces end with an operation that waited for another stage, or nothing more comes."""
        kind = self.timeline.slices.kind
        at = np.searchsorted(self.starts, pieces.end)
        more = at < len(self.rows)
        row = self.rows[np.minimum(at, len(self.rows) - 1)]
        more &= self.timeline.slices.start[row] < window.end
        source = self.causes.row[row]

        def between_stages(rows: Int64) -> Bool:
            moves = np.isin(kind[rows], (OpKind.COLLECTIVE, OpKind.P2P))
            return np.asarray(moves & (self.dimensions[rows] == Dimension.PP))

        waited = between_stages(row) | ((source >= 0) & between_stages(source))
        by_another = (pieces.cause == PEER) | (pieces.cause == OTHER_STREAM)
        return np.asarray(by_another & np.where(more, waited, pieces.cause == PEER), dtype=np.bool_)


def _collected(found: list[tuple[Int64, Int64, Int64]], idle: Int64, gaps: Intervals) -> Claims:
    none = np.zeros(0, dtype=np.int64)
    row, cause, time = (np.concatenate([none, *(part[i] for part in found)]) for i in range(3))
    kept = time > 0
    return Claims(row[kept], cause[kept], time[kept], idle, gaps)


def _fresh(start: Int64, end: Int64) -> Int64:
    """From when on each slice, in order of start, covers what none before it did; at most its end."""
    if not len(start):
        return start
    reach = np.maximum.accumulate(end)
    begin = np.maximum(start, np.concatenate((start[:1], reach[:-1])))
    return np.asarray(np.minimum(begin, end), dtype=np.int64)


class _Measure:
    """How much of a set of instants lies between two of them."""

    def __init__(self, instants: Intervals) -> None:
        length = instants.end - instants.start
        self.edges = np.stack([instants.start, instants.end], axis=1).ravel()
        self.before = np.stack([np.cumsum(length) - length, np.cumsum(length)], axis=1).ravel()

    def between(self, start: Int64, end: Int64) -> Int64:
        """Nanoseconds of the set in each ``[start, end)``."""
        return np.asarray(self._until(end) - self._until(start), dtype=np.int64)

    def _until(self, time: Int64) -> Int64:
        at = np.searchsorted(self.edges, time, side="right") - 1
        inside = (at >= 0) & (at % 2 == 0)
        place = np.maximum(at, 0)
        total = np.where(at >= 0, self.before[place], 0)
        return np.asarray(total + np.where(inside, time - self.edges[place], 0), dtype=np.int64)
