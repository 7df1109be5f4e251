"""Device slices of both runs laid out for alignment: by step, group of streams and phase, in order of start.

A slice belongs to the step that launched it, where that is known: on a stream of its own the copy of the next batch
runs while the device is still busy with the step before. Without a launch it belongs to the step in which it starts.
Slices outside of steps are laid out too, between the steps beside which they lie, so that nothing of a trace is lost,
unless a step stands beside several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Dimension, FlowKind, OpKind, Phase
from tracesim.analysis import Window, slice_dimensions
from tracesim.analysis.windows import busiest_track
from tracesim.diff.pairing import RankPair

COMMUNICATION = 2
"""Group of communication of which nothing is known; those of the parallel dimensions follow, then group sizes."""

_MAIN, _OTHER = 0, 1
_GROUPS = 64
_MOST_SIZES = 48
_PARTS = 8
_WEIGHTS = 4
_PART_OF_PHASE = {
    Phase.UNKNOWN: 0,
    Phase.FORWARD: 1,
    Phase.BACKWARD_INPUT: 2,
    Phase.BACKWARD_WEIGHT: _WEIGHTS,
    Phase.RECOMPUTE: 2,
    Phase.OPTIMIZER: 3,
    Phase.GRADIENT_SYNC: 2,
    Phase.PARAM_SYNC: 3,
}
"""Phases that are aligned by themselves: schedules and streams interleave them differently."""
_LEAST_KNOWN_PHASES = 0.9


@dataclass(frozen=True)
class Layout:
    """Slices of one run, columns of one length, by segment, stream group, part and start.

    A slice is here more than once where its step is laid beside several.
    """

    row: Int64
    segment: Int64
    """Index of the step pair over all ranks; from their number on for what lies outside of steps."""
    group: Int64
    """0 the busiest compute stream, 1 other streams of compute, from :data:`COMMUNICATION` on communication."""
    part: Int64
    """Phases that are aligned by themselves; 0 where they are not known."""

    @property
    def code(self) -> Int64:
        """A number for segment, group and part together, rising."""
        return (self.segment * _GROUPS + self.group) * _PARTS + self.part

    @property
    def phase_code(self) -> Int64:
        """A number for segment and part together, whatever the stream."""
        return self.segment * _PARTS + self.part


def lay_out(a: Timeline, b: Timeline, ranks: Sequence[RankPair]) -> tuple[Layout, Layout]:
    """The device slices of the paired ranks of both runs."""
    by_dimension = [slice_dimensions(timeline).astype(np.int64) for timeline in (a, b)]
    if not all(
        dimensions[timeline.on_device()].any()
        for timeline, dimensions in zip((a, b), by_dimension, strict=True)
    ):
        by_dimension = [np.zeros_like(dimensions) for dimensions in by_dimension]
    by_dimension = _by_members((a, b), by_dimension)
    sides = [
        _side(timeline, dimensions, ranks, side)
        for side, (timeline, dimensions) in enumerate(zip((a, b), by_dimension, strict=True))
    ]
    parts = [
        _phase_parts()[timeline.slices.phase[side[0]]] for timeline, side in zip((a, b), sides, strict=True)
    ]
    known = all(
        _share(timeline.slices.duration[row], part > 0) >= _LEAST_KNOWN_PHASES
        for timeline, (row, _, _), part in zip((a, b), sides, parts, strict=True)
    )
    apart = all((part == _WEIGHTS).any() for part in parts)
    layouts = []
    for timeline, (row, segment, group), part in zip((a, b), sides, parts, strict=True):
        if not apart:
            # Most traces say of a backward kernel no more than that it is one.
            part = np.where(part == _WEIGHTS, _PART_OF_PHASE[Phase.BACKWARD_INPUT], part)
        part = part if known else np.zeros_like(part)
        order = np.lexsort((row, timeline.slices.start[row], part, group, segment))
        layouts.append(Layout(row[order], segment[order], group[order], part[order]))
    return layouts[0], layouts[1]


def _by_members(timelines: tuple[Timeline, Timeline], by_dimension: list[Int64]) -> list[Int64]:
    """Numbers above those of dimensions for transfers of no known one, by group sizes that both sides have."""
    members = []
    for timeline, dimensions in zip(timelines, by_dimension, strict=True):
        sizes = np.array([*(g.size or len(g.ranks) for g in timeline.groups), 0], dtype=np.int64)
        of_slice = np.where(timeline.on_device() & (dimensions == 0), sizes[timeline.slices.group], 0)
        members.append(of_slice)
    common = np.intersect1d(members[0], members[1])
    common = common[common > 0][:_MOST_SIZES]
    found = []
    for dimensions, of_slice in zip(by_dimension, members, strict=True):
        known = np.isin(of_slice, common)
        found.append(np.where(known, len(Dimension) + np.searchsorted(common, of_slice), dimensions))
    return found


def _side(
    timeline: Timeline, dimensions: Int64, ranks: Sequence[RankPair], side: int
) -> tuple[Int64, Int64, Int64]:
    """Row, segment and group of the slices of all paired ranks of one side."""
    none = np.zeros(0, dtype=np.int64)
    rows, segments, groups = [none], [none], [none]
    layout = _RankLayout(timeline, dimensions)
    outside = sum(len(rank.steps) for rank in ranks)
    first = 0
    for rank in ranks:
        windows = [step.b if side else step.a for step in rank.steps]
        mine, group, of_window = layout.rank(rank.b if side else rank.a, windows)
        by_window = np.argsort(of_window, kind="stable")
        for number, window in enumerate(windows):
            at = windows.index(window)
            low, high = np.searchsorted(of_window[by_window], (at, at + 1))
            chosen = by_window[low:high]
            rows.append(mine[chosen])
            groups.append(group[chosen])
            segments.append(np.full(len(chosen), first + number, dtype=np.int64))
        first += len(windows)
        if not (rank.repeats_a or rank.repeats_b):
            free = of_window < 0
            rows.append(mine[free])
            groups.append(group[free])
            begins = np.sort(np.array([window.start for window in windows], dtype=np.int64))
            start = timeline.slices.start[mine[free]]
            segments.append(outside + np.searchsorted(begins, start, side="right"))
        outside += len(windows) + 1
    return np.concatenate(rows), np.concatenate(segments), np.concatenate(groups)


def _phase_parts() -> Int64:
    return np.array([_PART_OF_PHASE[phase] for phase in Phase], dtype=np.int64)


def _share(duration: Int64, chosen: Bool) -> float:
    total = int(duration.sum())
    return int(duration[chosen].sum()) / total if total else 0.0


class _RankLayout:
    """Device slices of one rank at a time, in order of start, with their stream groups and windows."""

    def __init__(self, timeline: Timeline, dimensions: Int64) -> None:
        self.timeline, self.dimensions = timeline, dimensions
        self.device = np.flatnonzero(timeline.on_device())
        self.of_rank = timeline.slice_ranks()[self.device]
        launches = timeline.flows.kind == FlowKind.LAUNCH
        self.launched = np.full(len(timeline.slices), np.iinfo(np.int64).min)
        self.launched[timeline.flows.target[launches]] = timeline.slices.start[
            timeline.flows.source[launches]
        ]

    def rank(self, row: int, windows: Sequence[Window]) -> tuple[Int64, Int64, Int64]:
        """Rows, stream groups, and for each row the first of the windows to which it belongs, -1 if to none."""
        slices = self.timeline.slices
        mine = self.device[self.of_rank == row]
        mine = mine[np.argsort(slices.start[mine], kind="stable")]
        communicates = np.isin(slices.kind[mine], (OpKind.COLLECTIVE, OpKind.P2P))
        main = slices.track[mine] == busiest_track(self.timeline, mine)
        group = np.where(communicates, COMMUNICATION + self.dimensions[mine], np.where(main, _MAIN, _OTHER))
        return mine, group, self._windows(row, mine, windows)

    def _windows(self, row: int, mine: Int64, windows: Sequence[Window]) -> Int64:
        spans = [(window.start, window.end) for window in windows]
        by_time = _inside(spans, self.timeline.slices.start[mine])
        steps = self.timeline.steps.take(np.flatnonzero(self.timeline.steps.rank == row))
        if len(np.unique(steps.number)) < len(steps):
            return by_time
        spans = list(zip(steps.start.tolist(), steps.end.tolist(), strict=True))
        launched = _inside(spans, self.launched[mine])
        numbers = [window.step for window in windows]
        window_of_step = [numbers.index(n) if n in numbers else -1 for n in steps.number.tolist()]
        return np.where(launched >= 0, np.array([*window_of_step, -1], dtype=np.int64)[launched], by_time)


def _inside(spans: Sequence[tuple[int, int]], time: Int64) -> Int64:
    """For each time the first of the spans ``[start, end)`` that it is in, -1 if it is in none; spans are disjoint."""
    if not spans:
        return np.full(len(time), -1, dtype=np.int64)
    start, end = np.array(spans, dtype=np.int64).T
    order = np.argsort(start, kind="stable")
    # The first of equal spans.
    order = order[np.append(True, start[order][1:] != start[order][:-1])]
    at = np.searchsorted(start[order], time, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (time < end[found]), found, -1)
