"""Which operation of one run is which operation of the other.

Device slices are laid out rank by rank and step by step (:mod:`.layouts`): those of the busiest compute stream, those
of its other streams, and communication by parallel dimension, each by phase where both sides know it, in order of
start. :mod:`.sequences` aligns them. What is left then is looked at without regard to streams, then without regard to
order: by key (an operation that moved), then by likeness (:mod:`.likeness`; a compiled graph has an order of its own).
An operation that launched one kernel here and several there (split or fused) keeps its pieces together. Last, what is
left of a rank is looked for in its other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from tracesim.diff.layouts import lay_out
from tracesim.diff.matcher import PRIMARY, Matcher
from tracesim.diff.operations import Operations, known_features, operations_of
from tracesim.diff.pairing import RankPair, StepPair

_CLOCK_ANCHORS = 64


@dataclass(frozen=True)
class Entries:
    """Slices of one run as they were aligned: columns of one length, by segment, stream group and start.

    A slice is here more than once where its step is laid beside several.
    """

    row: Int64
    segment: Int64
    """Index of the step pair over all ranks; from :attr:`Alignment.step_pairs` on for what lies outside of steps."""
    group: Int64
    matched: Bool


@dataclass(frozen=True)
class Clock:
    """How the clock of a rank of b stands to that of a, told by matched operations. Nanoseconds."""

    offset: int
    """Median of start in b less start in a, over the first operations of the first step."""
    spread: int
    """Median absolute deviation of those differences."""
    anchors: int


@dataclass(frozen=True)
class Alignment:
    """The match of two runs; the columns are of shape [pairs]."""

    a: Timeline
    b: Timeline
    ranks: tuple[RankPair, ...]
    entries: tuple[Entries, Entries]
    at_a: Int64
    """Index into the entries of a, rising."""
    at_b: Int64
    how: Int8
    """:data:`PRIMARY`, :data:`MOVED` or :data:`PIECE`."""
    operations: tuple[Operations, Operations]
    strings: tuple[str, ...]
    """What the string numbers of ``operations`` stand for."""
    clocks: tuple[Clock, ...]
    """One a rank pair."""

    @property
    def row_a(self) -> Int64:
        """Slice of a of each pair."""
        return self.entries[0].row[self.at_a]

    @property
    def row_b(self) -> Int64:
        """Slice of b of each pair."""
        return self.entries[1].row[self.at_b]

    @property
    def steps(self) -> list[tuple[RankPair, StepPair]]:
        """The step pairs of all ranks, in the order of their segments."""
        return [(rank, step) for rank in self.ranks for step in rank.steps]

    def compared(self, side: int) -> Bool:
        """The entries of a side that belong to a compared step; all where no steps are compared."""
        segment, steps = self.entries[side].segment, len(self.steps)
        return segment < steps if steps else np.ones(len(segment), dtype=np.bool_)

    def outside(self, side: int) -> int:
        """Nanoseconds of device time of a side, summed over slices, that are in no compared step."""
        timeline = (self.a, self.b)[side]
        compared = np.unique(self.entries[side].row[self.compared(side)])
        duration = timeline.slices.duration
        return int(duration[timeline.on_device()].sum()) - int(duration[compared].sum())

    def matched_fraction(self, side: int | None = None) -> float:
        """Share of the device time of compared steps, summed over slices, that is matched; 1 without any.

        Of side 0 or 1, or of both together.
        """
        matched = total = 0
        for number, (timeline, entries) in enumerate(zip((self.a, self.b), self.entries, strict=True)):
            if side in (None, number):
                duration = timeline.slices.duration[entries.row] * self.compared(number)
                matched += int(duration[entries.matched].sum())
                total += int(duration.sum())
        return matched / total if total else 1.0


def align_timelines(a: Timeline, b: Timeline, ranks: Sequence[RankPair]) -> Alignment:
    """Match the operations of the ranks and steps of two runs that were paired."""
    first, second, strings = operations_of(a, b)
    layouts = lay_out(a, b, ranks)
    rows = (layouts[0].row, layouts[1].row)
    known = known_features(first, second, *rows)
    matcher = Matcher((a, b), (first, second), layouts, strings, known)
    matcher.anchors()
    matcher.alone_of_their_kind()
    matcher.in_order()
    matcher.across_streams()
    matcher.out_of_order(layouts[0].segment, layouts[1].segment)
    matcher.alike()
    matcher.pieces()
    matcher.out_of_order(*(_rank_of_segment(ranks)[layout.segment] for layout in layouts))
    at_a, at_b, how = matcher.result()
    entries = tuple(
        Entries(layout.row, layout.segment, layout.group, _marked(len(layout.row), at))
        for layout, at in zip(layouts, (at_a, at_b), strict=True)
    )
    segment = np.where(how == PRIMARY, layouts[0].segment[at_a], -1)
    clocks = _clocks(a, b, ranks, rows[0][at_a], rows[1][at_b], segment)
    return Alignment(
        a, b, tuple(ranks), (entries[0], entries[1]), at_a, at_b, how, (first, second), strings, tuple(clocks)
    )


def _rank_of_segment(ranks: Sequence[RankPair]) -> Int64:
    """For each segment the index of its rank pair; the segments of steps that repeat have each their own."""
    steps: list[int] = []
    outside: list[int] = []
    for number, rank in enumerate(ranks):
        repeats = rank.repeats_a or rank.repeats_b
        steps += [len(ranks) + len(steps) + k if repeats else number for k in range(len(rank.steps))]
        outside += [number] * (len(rank.steps) + 1)
    return np.array(steps + outside, dtype=np.int64)


def _marked(length: int, at: Int64) -> Bool:
    found = np.zeros(length, dtype=np.bool_)
    found[at] = True
    return found


def _clocks(
    a: Timeline, b: Timeline, ranks: Sequence[RankPair], row_a: Int64, row_b: Int64, segment: Int64
) -> list[Clock]:
    found = []
    first = 0
    for rank in ranks:
        mine = np.flatnonzero(segment == first)
        mine = mine[np.argsort(a.slices.start[row_a[mine]], kind="stable")][:_CLOCK_ANCHORS]
        first += len(rank.steps)
        if not len(mine):
            step = rank.steps[0]
            found.append(Clock(step.b.start - step.a.start, 0, 0))
            continue
        difference = b.slices.start[row_b[mine]] - a.slices.start[row_a[mine]]
        median = int(np.median(difference))
        found.append(Clock(median, int(np.median(np.abs(difference - median))), len(mine)))
    return found
