"""Why communication is not overlapped: for each exposed stretch what it waited for, what waited for it, what could run.

An exposed stretch is a part of one communication slice beside which the rank computes nothing. Stretches of a rank do
not overlap: where several transfers of a dimension run at once, an instant belongs to the one that began first, and
among dimensions to the first of tp, cp, ep, pp, dp, so the stretches of a step add up to its exposed communication.

What could have run there is compute of the same rank and step that ran later and does not hang on the transfer. The
order on a compute stream hides which kernels need each other, so independence is inferred, by these rules:

- weight gradients of the same microbatch: those of layers above the transfer's, and those of its own layer that come
  right behind a transfer that is no gather;
- other microbatches, other model chunks: work whose own inputs were there when the stretch began (from the dependencies
  of the graph where there is one; without it arrival is not known, and the figure is an upper bound);
- beside a reduction of gradients: any forward or backward;
- where no microbatch is known: compute on another stream than that of what waited for the transfer.

Only the next :data:`LOOK_AHEAD` compute slices are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int32, Int64, Table
from op_graphs.graph import Operations
from op_graphs.timeline import Slices, Timeline
from op_graphs.vocabulary import Communication, Dimension, OpKind, Phase
from tracesim.analysis.breakdown import DIMENSIONS, StepParts
from tracesim.analysis.intervals import Intervals
from tracesim.analysis.windows import Window

LOOK_AHEAD = 64
"""Compute slices behind a stretch among which independent work is looked for."""

_CHUNK = 4096
_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)
_REDUCTIONS = (Communication.ALL_REDUCE, Communication.REDUCE_SCATTER)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class ExposedStretches(Table):
    """Stretches of exposed communication, by step of a rank, dimension and time. Times in nanoseconds."""

    rank: Int64
    """Row of :attr:`Timeline.ranks`."""
    step: Int64
    dimension: Int64
    """Index into :data:`~tracesim.analysis.breakdown.DIMENSIONS`."""
    row: Int64
    """The communication slice."""
    start: Int64
    end: Int64
    waiting: Int64
    """Part in which the slice waits for its last member; 0 where that is not known."""
    cause: Int64
    """Slice whose end let the communication start, -1 if none is known."""
    waiter: Int64
    """Slice that the communication let start; else the next compute slice of the rank; -1 if there is none."""
    waiter_known: Bool
    """Whether the waiter is recorded or found as the cause of its start, and not just the next."""
    could_run: Int64
    """Independent compute that ran later, at most the length of the stretch."""
    could_run_row: Int64
    """The longest slice of it, -1 if there is none."""

    @property
    def length(self) -> Int64:
        """Nanoseconds of each stretch."""
        return self.end - self.start


@dataclass(frozen=True)
class ExposedClass:
    """Stretches of one transfer: same name, dimension, phase and layer class. Times in nanoseconds, over all ranks."""

    name: str
    dimension: str
    phase: str
    layer_class: str
    """Module path without layer numbers, ``layer`` where only a layer is known, else empty."""
    stretches: int
    total: int
    waiting: int
    bound: int
    """What hiding it can save of a step at most: the most that any rank has of it, as a mean over the steps."""
    could_run: int
    waited_for: str
    """Name that the transfers waited for in most of the time; empty if none is known."""
    waited_by: str
    runnable: str
    """Name of the independent work that fills most of the time; empty if there is none."""


@dataclass(frozen=True)
class SliceCauses:
    """What is known of why slices started and what they waited for inside; columns of shape [slices]."""

    row: Int64
    """Slice whose end let each start, -1 if none is known."""
    wait_inside: Int64
    """Nanoseconds from the start in which a communication slice waits for its last member."""
    ready: Int64 | None = None
    """When the inputs of a compute slice from outside its action were there, from the graph; None without one."""


def exposed_stretches(
    timeline: Timeline, causes: SliceCauses, parts: Iterable[tuple[Window, StepParts]], dimensions: Int8
) -> ExposedStretches:
    """Every stretch of exposed communication of a timeline.

    Args:
        timeline: simulated or measured.
        causes: of its slices.
        parts: the parts of each step of each rank (:func:`~tracesim.analysis.breakdown.step_parts`).
        dimensions: of all slices, as :func:`~tracesim.analysis.breakdown.slice_dimensions` gives them.
    """
    finder = _Finder(timeline, causes, dimensions)
    tables = [finder.within(window, found) for window, found in parts]
    return ExposedStretches.concatenate(tables) if tables else ExposedStretches.empty()


class _Finder:
    def __init__(self, timeline: Timeline, causes: SliceCauses, dimensions: Int8) -> None:
        slices = timeline.slices
        self.timeline, self.causes = timeline, causes
        self.start, self.end = slices.start, slices.start + slices.duration
        self.rank = timeline.slice_ranks()
        device = timeline.on_device()
        communicates = (slices.kind == OpKind.COLLECTIVE) | (slices.kind == OpKind.P2P)
        moves = (slices.kind == OpKind.MEMCPY) | (slices.kind == OpKind.MEMSET)
        rank_count = len(timeline.ranks)
        self.transfers = _by_rank(np.flatnonzero(device & communicates), self.rank, self.start, rank_count)
        computes = device & ~communicates & ~moves & (slices.duration > 0)
        self.compute = _by_rank(np.flatnonzero(computes), self.rank, self.start, rank_count)
        known = np.isin(dimensions, (Dimension.TP, Dimension.CP, Dimension.EP, Dimension.PP, Dimension.DP))
        self.dimension = np.where(known, dimensions.astype(np.int64) - 1, len(DIMENSIONS) - 1)
        self.follower = _followers(causes.row, computes, self.rank, self.start)

    def within(self, window: Window, parts: StepParts) -> ExposedStretches:
        tables = []
        mine = self.transfers[window.rank]
        mine = mine[(self.start[mine] < window.end) & (self.end[mine] > window.start)]
        for number, key in enumerate(DIMENSIONS):
            rows, start, end = self._claimed(mine[self.dimension[mine] == number], parts.exposed[key])
            if len(rows):
                tables.append(self._described(window, number, rows, start, end))
        return ExposedStretches.concatenate(tables) if tables else ExposedStretches.empty()

    def _claimed(self, rows: Int64, exposed: Intervals) -> tuple[Int64, Int64, Int64]:
        """The exposed parts of slices sorted by start; what several share goes to the first."""
        if not len(rows) or not len(exposed):
            return rows[:0], rows[:0], rows[:0]
        reach = np.maximum.accumulate(self.end[rows])
        begin = np.maximum(self.start[rows], np.concatenate(([self.start[rows[0]]], reach[:-1])))
        kept = self.end[rows] > begin
        rows, begin, end = rows[kept], begin[kept], self.end[rows][kept]
        first = np.searchsorted(exposed.end, begin, side="right")
        counts = np.maximum(np.searchsorted(exposed.start, end, side="left") - first, 0)
        left = np.repeat(np.arange(len(rows)), counts)
        right = first[left] + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return (
            rows[left],
            np.maximum(begin[left], exposed.start[right]),
            np.minimum(end[left], exposed.end[right]),
        )

    def _described(
        self, window: Window, dimension: int, rows: Int64, start: Int64, end: Int64
    ) -> ExposedStretches:
        compute = self.compute[window.rank]
        following = np.searchsorted(self.start[compute], end, side="left")
        follower = self.follower[rows]
        padded = np.append(compute, np.int64(-1))
        waiter = np.where(follower >= 0, follower, padded[np.minimum(following, len(compute))])
        waits_until = self.start[rows] + self.causes.wait_inside[rows]
        could, could_row = self._runnable(window, compute, following, (rows, start, end, waiter))
        count = len(rows)
        return ExposedStretches(
            rank=np.full(count, window.rank),
            step=np.full(count, window.step),
            dimension=np.full(count, dimension),
            row=rows,
            start=start,
            end=end,
            waiting=np.clip(waits_until, start, end) - start,
            cause=self.causes.row[rows],
            waiter=waiter,
            waiter_known=follower >= 0,
            could_run=could,
            could_run_row=could_row,
        )

    def _runnable(
        self,
        window: Window,
        compute: Int64,
        following: Int64,
        stretches: tuple[Int64, Int64, Int64, Int64],
    ) -> tuple[Int64, Int64]:
        """Independent compute behind each stretch (row, start, end, waiter): nanoseconds, and its longest slice."""
        count = len(following)
        could, longest = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
        if not len(compute):
            return could, longest
        durations = self.timeline.slices.duration
        for low in range(0, count, _CHUNK):
            part = slice(low, low + _CHUNK)
            rows, start, end, waiter = (column[part] for column in stretches)
            at = following[part, None] + np.arange(LOOK_AHEAD)
            candidates = compute[np.minimum(at, len(compute) - 1)]
            free = (at < len(compute)) & (self.start[candidates] < window.end)
            free &= self._independent(rows[:, None], candidates, start[:, None], waiter[:, None])
            work = np.where(free, durations[candidates], 0)
            could[part] = np.minimum(work.sum(axis=1), end - start)
            best = work.argmax(axis=1)
            found = candidates[np.arange(len(rows)), best]
            longest[part] = np.where(work.max(axis=1) > 0, found, -1)
        return could, longest

    def _independent(self, row: Int64, candidate: Int64, moment: Int64, waiter: Int64) -> Bool:
        """Whether compute could have run at a moment in spite of a transfer, by the rules of the module."""
        s = self.timeline.slices
        batch, of = s.microbatch[row], s.microbatch[candidate]
        same = (batch == of) & (s.chunk[row] == s.chunk[candidate])
        known = (batch >= 0) & (of >= 0)
        weight = s.phase[candidate] == Phase.BACKWARD_WEIGHT
        backward = np.isin(s.phase[candidate], _BACKWARD)
        # Gradients flow from the last layer to the first. What is gathered may be an operand.
        above = (s.layer[row] >= 0) & (s.layer[candidate] > s.layer[row])
        behind = np.logical_and.accumulate(weight, axis=1)
        above |= (
            behind & (s.layer[candidate] == s.layer[row]) & (s.communication[row] != Communication.ALL_GATHER)
        )
        reduces = s.phase[row] == Phase.GRADIENT_SYNC
        reduces |= (self.dimension[row] == Dimension.DP - 1) & np.isin(s.communication[row], _REDUCTIONS)
        works = backward | (s.phase[candidate] == Phase.FORWARD)
        free: Bool = np.where(known, ~same | (weight & above), weight & above) & (
            s.phase[row] != Phase.PARAM_SYNC
        )
        free |= reduces & works
        unknown = (batch < 0) & (of < 0) & (waiter >= 0)
        free |= (
            unknown & ~reduces & (s.track[candidate] != s.track[waiter]) & (self.causes.row[candidate] != row)
        )
        free &= s.phase[candidate] != Phase.OPTIMIZER
        free &= s.kind[candidate] != OpKind.OPTIMIZER
        if self.causes.ready is not None:
            free &= self.causes.ready[candidate] <= moment
        return free


def _by_rank(rows: Int64, rank: Int32, start: Int64, count: int) -> list[Int64]:
    rows = rows[np.lexsort((rows, start[rows], rank[rows]))]
    bounds = np.searchsorted(rank[rows], np.arange(count + 1))
    return [rows[low:high] for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _followers(cause: Int64, computes: Bool, rank: Int32, start: Int64) -> Int64:
    """For each slice the one that it let start: the first compute of its own rank, else the first of any kind."""
    followers = np.full(len(cause), -1, dtype=np.int64)
    rows = np.flatnonzero(cause >= 0)
    preferred = computes[rows] & (rank[rows] == rank[cause[rows]])
    order = rows[np.lexsort((rows, start[rows], ~preferred, cause[rows]))]
    first = np.flatnonzero(np.concatenate(([True], np.diff(cause[order]) != 0))) if len(order) else order
    followers[cause[order[first]]] = order[first]
    return followers


# -- classes -----------------------------------------------------------------------------------------------------


def class_keys(
    slices: Slices | Operations, strings: tuple[str, ...], rows: Int64, simulated: bool
) -> list[tuple[str, str, str]]:
    """(name, phase, layer class) of communication slices or operations, one a row.

    A simulated operation goes by its own name. Measured kernels are named after algorithm and element type, so they go
    by the transfer they perform, where it is known.
    """
    columns = (slices.name, slices.communication, slices.phase, np.minimum(slices.layer, 0), slices.module)
    distinct, label = np.unique(
        np.stack([column[rows].astype(np.int64) for column in columns]), axis=1, return_inverse=True
    )
    name, communication, phase, layer, module = distinct.tolist()
    keys = []
    for text, what, of_phase, of_layer, of_module in zip(
        name, communication, phase, layer, module, strict=True
    ):
        known = what not in (Communication.NONE, Communication.UNKNOWN)
        called = Communication(what).name.lower() if known and not simulated else strings[text]
        layer_class = (
            _DIGITS.sub("*", strings[of_module]) if of_module >= 0 else "layer" if of_layer >= 0 else ""
        )
        keys.append((called, Phase(of_phase).name.lower(), layer_class))
    return [keys[number] for number in label.ravel().tolist()]


def exposed_classes(timeline: Timeline, stretches: ExposedStretches, steps: int) -> list[ExposedClass]:
    """Stretches by (name, dimension, phase, layer class), the largest total first.

    Args:
        timeline: where the stretches are.
        stretches: of all its ranks and steps.
        steps: how many steps the timeline shows; at least 1.
    """
    distinct, inverse = np.unique(stretches.row, return_inverse=True)
    keys = class_keys(timeline.slices, timeline.strings, distinct, timeline.simulated)
    of_stretch = [keys[i] for i in inverse.tolist()]
    members: dict[tuple[str, int, str, str], list[int]] = {}
    for number, ((name, phase, layer), dimension) in enumerate(
        zip(of_stretch, stretches.dimension.tolist(), strict=True)
    ):
        members.setdefault((name, dimension, phase, layer), []).append(number)
    found = [
        _class_of(
            timeline, (name, DIMENSIONS[dimension], phase, layer), stretches.take(np.array(rows)), steps
        )
        for (name, dimension, phase, layer), rows in members.items()
    ]
    return sorted(found, key=lambda c: (-c.total, c.name, c.dimension, c.phase, c.layer_class))


def _class_of(
    timeline: Timeline, key: tuple[str, str, str, str], rows: ExposedStretches, steps: int
) -> ExposedClass:
    length = rows.length
    of_step, label = np.unique(np.stack([rows.step, rows.rank]), axis=1, return_inverse=True)
    totals = np.bincount(label.ravel(), weights=length)
    most = [totals[of_step[0] == step].max() for step in np.unique(of_step[0])]
    return ExposedClass(
        *key,
        stretches=len(rows),
        total=int(length.sum()),
        waiting=int(rows.waiting.sum()),
        bound=round(sum(most) / steps),
        could_run=int(rows.could_run.sum()),
        waited_for=_most(timeline, rows.cause, length),
        waited_by=_most(timeline, rows.waiter, length),
        runnable=_most(timeline, rows.could_run_row, rows.could_run),
    )


def _most(timeline: Timeline, rows: Int64, weight: Int64) -> str:
    """The name of slices that has most weight; empty where no slice is given."""
    given = rows >= 0
    if not given.any():
        return ""
    names = timeline.slices.name[rows[given]]
    totals = np.bincount(names, weights=weight[given])
    present = np.unique(names)
    return timeline.strings[int(present[totals[present].argmax()])]
