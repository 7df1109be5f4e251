"""Which operation of one run is which operation of the other.

Device slices are laid out rank by rank and step by step: those of the busiest compute stream, those of its other
streams, and communication by parallel dimension, each by phase where both sides know it, in order of start.
:mod:`.sequences` aligns them. What is left then is looked at without regard to streams, then without regard to order
(an operation that moved); an operation that launched one kernel here and several there (split or fused) keeps its
pieces together; last, what is left of a rank is looked for in its other steps (it was launched in one step and ran in
the next).

Slices outside of steps are aligned too, so that nothing of a trace is lost, unless a step stands beside several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, Phase
from tracesim.analysis import slice_dimensions
from tracesim.diff.operations import (
    Operations,
    Similarity,
    keys,
    known_features,
    operations_of,
    structure_keys,
)
from tracesim.diff.pairing import RankPair, StepPair
from tracesim.diff.sequences import Gaps, Score, align

PRIMARY, MOVED, PIECE = 0, 1, 2
"""How two slices match: in order, out of order, or as a further piece of an operation that is matched."""

_MAIN, _OTHER, _COMMUNICATION = 0, 1, 2
_GROUPS = 32
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

    def matched_fraction(self, side: int | None = None) -> float:
        """Share of device time, summed over slices, that is matched: of side 0 or 1, or of both; 1 without any."""
        matched = total = 0
        for number, (timeline, entries) in enumerate(zip((self.a, self.b), self.entries, strict=True)):
            if side in (None, number):
                duration = timeline.slices.duration[entries.row]
                matched += int(duration[entries.matched].sum())
                total += int(duration.sum())
        return matched / total if total else 1.0


def align_timelines(a: Timeline, b: Timeline, ranks: Sequence[RankPair]) -> Alignment:
    """Match the operations of the ranks and steps of two runs that were paired."""
    first, second, strings = operations_of(a, b)
    layouts = _layouts(a, b, ranks)
    rows = (layouts[0].row, layouts[1].row)
    known = known_features(first, second, *rows)
    matcher = _Matcher((a, b), (first, second), layouts, strings, known)
    matcher.anchors()
    matcher.alone_of_their_kind()
    matcher.in_order()
    matcher.across_streams()
    matcher.out_of_order(layouts[0].segment, layouts[1].segment)
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


@dataclass(frozen=True)
class _Layout:
    row: Int64
    segment: Int64
    group: Int64
    part: Int64

    @property
    def code(self) -> Int64:
        return (self.segment * _GROUPS + self.group) * _PARTS + self.part


def _layouts(a: Timeline, b: Timeline, ranks: Sequence[RankPair]) -> tuple[_Layout, _Layout]:
    by_dimension = [slice_dimensions(timeline).astype(np.int64) for timeline in (a, b)]
    for timeline, dimensions in zip((a, b), by_dimension, strict=True):
        if not dimensions[timeline.on_device()].any():
            by_dimension = [np.zeros_like(d) for d in by_dimension]
            break
    found = []
    for side, (timeline, dimensions) in enumerate(zip((a, b), by_dimension, strict=True)):
        none = np.zeros(0, dtype=np.int64)
        rows, segments, groups = [none], [none], [none]
        layout = _RankLayout(timeline, dimensions)
        outside = sum(len(rank.steps) for rank in ranks)
        number = 0
        for rank in ranks:
            mine, group, start = layout.rank(rank.b if side else rank.a)
            free = np.ones(len(mine), dtype=np.bool_)
            windows = [step.b if side else step.a for step in rank.steps]
            for window in windows:
                low, high = np.searchsorted(start, (window.start, window.end))
                rows.append(mine[low:high])
                groups.append(group[low:high])
                segments.append(np.full(high - low, number, dtype=np.int64))
                free[low:high] = False
                number += 1
            if not (rank.repeats_a or rank.repeats_b):
                rows.append(mine[free])
                groups.append(group[free])
                begins = np.sort(np.array([window.start for window in windows], dtype=np.int64))
                segments.append(outside + np.searchsorted(begins, start[free], side="right"))
            outside += len(rank.steps) + 1
        row, segment, group = np.concatenate(rows), np.concatenate(segments), np.concatenate(groups)
        part = _phase_parts()[timeline.slices.phase[row]]
        found.append((timeline, row, segment, group, part))
    known = all(
        _share(t.slices.duration[row], part > 0) >= _LEAST_KNOWN_PHASES for t, row, _, _, part in found
    )
    apart = all((part == _WEIGHTS).any() for *_, part in found)
    layouts = []
    for timeline, row, segment, group, part in found:
        if not apart:
            # Most traces say of a backward kernel no more than that it is one.
            part = np.where(part == _WEIGHTS, _PART_OF_PHASE[Phase.BACKWARD_INPUT], part)
        part = part if known else np.zeros_like(part)
        order = np.lexsort((row, timeline.slices.start[row], part, group, segment))
        layouts.append(_Layout(row[order], segment[order], group[order], part[order]))
    return layouts[0], layouts[1]


def _phase_parts() -> Int64:
    return np.array([_PART_OF_PHASE[phase] for phase in Phase], dtype=np.int64)


def _share(duration: Int64, chosen: Bool) -> float:
    total = int(duration.sum())
    return int(duration[chosen].sum()) / total if total else 0.0


class _RankLayout:
    """Device slices of one rank at a time, in order of start, with their stream groups."""

    def __init__(self, timeline: Timeline, dimensions: Int64) -> None:
        self.timeline, self.dimensions = timeline, dimensions
        self.device = np.flatnonzero(timeline.on_device())
        self.of_rank = timeline.slice_ranks()[self.device]

    def rank(self, row: int) -> tuple[Int64, Int64, Int64]:
        slices = self.timeline.slices
        mine = self.device[self.of_rank == row]
        mine = mine[np.argsort(slices.start[mine], kind="stable")]
        communicates = np.isin(slices.kind[mine], (OpKind.COLLECTIVE, OpKind.P2P))
        busy = np.bincount(
            slices.track[mine], np.where(communicates, 0, slices.duration[mine]), len(self.timeline.tracks)
        )
        main = slices.track[mine] == (int(busy.argmax()) if len(mine) else -1)
        group = np.where(communicates, _COMMUNICATION + self.dimensions[mine], np.where(main, _MAIN, _OTHER))
        return mine, group, slices.start[mine]


class _Matcher:
    """Matches entries of both sides by position, pass after pass."""

    def __init__(
        self,
        timelines: tuple[Timeline, Timeline],
        sides: tuple[Operations, Operations],
        layouts: tuple[_Layout, _Layout],
        strings: Sequence[str],
        known: frozenset[str],
    ) -> None:
        self.timelines, self.sides, self.layouts, self.known = timelines, sides, layouts, known
        self.strings = strings
        self.keys = keys(*sides, layouts[0].row, layouts[1].row, known)
        self.structure = structure_keys(*sides, layouts[0].row, layouts[1].row, known)
        self.partner = np.full(len(layouts[0].row), -1, dtype=np.int64)
        self.taken = np.zeros(len(layouts[1].row), dtype=np.bool_)
        self.how = np.zeros(len(self.partner), dtype=np.int8)
        none = np.zeros(0, dtype=np.int64)
        self.more: list[tuple[Int64, Int64]] = [(none, none)]

    def _add(self, a: Int64, b: Int64, how: int) -> None:
        self.partner[a], self.how[a] = b, how
        self.taken[b] = True

    def anchors(self) -> None:
        """What is rare in each segment and stream group by itself."""
        gaps = _shared(self.layouts[0].code, self.layouts[1].code)
        self._add(*align(len(self.partner), gaps, self.keys[:2]), PRIMARY)

    def alone_of_their_kind(self) -> None:
        """What is left of a segment with an exact key that no other has, before it is taken for another."""
        key_a, key_b = self.keys[0]
        a, b = np.flatnonzero(self.partner < 0), np.flatnonzero(~self.taken)
        keys_of = 1 + max(int(key_a.max(initial=0)), int(key_b.max(initial=0)))
        codes = [
            layout.segment[at] * keys_of + key[at]
            for layout, at, key in zip(self.layouts, (a, b), (key_a, key_b), strict=True)
        ]
        once = [np.unique(code, return_index=True, return_counts=True) for code in codes]
        first, second = ((code[counts == 1], index[counts == 1]) for code, index, counts in once)
        _, x, y = np.intersect1d(first[0], second[0], assume_unique=True, return_indices=True)
        self._add(a[first[1][x]], b[second[1][y]], MOVED)

    def in_order(self) -> None:
        """What is left between anchors, by similarity."""
        anchor_a = (self.partner >= 0) & (self.how == PRIMARY)
        anchor_b = np.zeros(len(self.taken), dtype=np.bool_)
        anchor_b[self.partner[anchor_a]] = True
        left, codes = [], []
        for layout, anchor, free in zip(
            self.layouts, (anchor_a, anchor_b), (self.partner < 0, ~self.taken), strict=True
        ):
            at = np.flatnonzero(free)
            # Anchors come in the same order on both sides, so their number tells the gaps between them.
            codes.append(layout.code[at] * (len(self.partner) + 1) + np.cumsum(anchor)[at])
            left.append(at)
        a, b = left
        coarse = [(key_a[a], key_b[b]) for key_a, key_b in self.keys[2:]]
        structure = [(key_a[a], key_b[b]) for key_a, key_b in self.structure]
        x, y = align(len(a), _shared(*codes), coarse, self._prepared(a, b), structure)
        self._add(a[x], b[y], PRIMARY)

    def _prepared(self, a: Int64, b: Int64) -> Callable[[Int64, Int64], Score]:
        """Similarity of some entries, by their place among them."""

        def prepare(left_a: Int64, left_b: Int64) -> Score:
            score = self._score(a[left_a], b[left_b])
            return lambda i, j: score(a[i], b[j])

        return prepare

    def _score(self, a: Int64, b: Int64) -> Score:
        """Similarity of entries, of those at the given positions."""
        rows = (self.layouts[0].row[a], self.layouts[1].row[b])
        similarity = Similarity(*self.sides, rows, self.strings, self.known)
        place_a, place_b = (
            np.zeros(len(self.partner), dtype=np.int64),
            np.zeros(len(self.taken), dtype=np.int64),
        )
        place_a[a], place_b[b] = np.arange(len(a)), np.arange(len(b))
        return lambda i, j: similarity.score(place_a[i], place_b[j])

    def across_streams(self) -> None:
        """What is left of a segment but communication, over all streams in order of start."""
        left = []
        for timeline, layout, free in zip(
            self.timelines, self.layouts, (self.partner < 0, ~self.taken), strict=True
        ):
            at = np.flatnonzero(free & (layout.group < _COMMUNICATION))
            start = timeline.slices.start[layout.row[at]]
            left.append(at[np.lexsort((at, start, layout.segment[at]))])
        a, b = left
        if not len(a) or not len(b):
            return
        gaps = _shared(self.layouts[0].segment[a], self.layouts[1].segment[b])
        taken = [(key_a[a], key_b[b]) for key_a, key_b in self.keys]
        x, y = align(len(a), gaps, taken, self._prepared(a, b))
        self._add(a[x], b[y], PRIMARY)

    def out_of_order(self, of_a: Int64, of_b: Int64) -> None:
        """What is left with equal keys in the same part of the run, first with first, second with second.

        The parts are numbered for every entry: steps, then ranks, for what moved over the border of a step.
        """
        for key_a, key_b in self.keys[:2]:
            a, b = np.flatnonzero(self.partner < 0), np.flatnonzero(~self.taken)
            if not len(a) or not len(b):
                return
            code_a = _numbered(key_a[a], of_a[a])
            code_b = _numbered(key_b[b], of_b[b])
            both = np.concatenate((code_a, code_b), axis=0)
            _, number = np.unique(both, axis=0, return_inverse=True)
            number = number.ravel()
            _, in_a, in_b = np.intersect1d(
                number[: len(a)], number[len(a) :], assume_unique=True, return_indices=True
            )
            self._add(a[in_a], b[in_b], MOVED)

    def pieces(self) -> None:
        """Give lone neighbours of a match that belong to the same call, or module, to that match."""
        partner_b = np.full(len(self.taken), -1, dtype=np.int64)
        matched = np.flatnonzero(self.partner >= 0)
        partner_b[self.partner[matched]] = matched
        exact_a, exact_b = self.keys[0]
        same_a = np.zeros(len(self.partner), dtype=np.bool_)
        same_a[matched] = exact_a[matched] == exact_b[self.partner[matched]]
        same_b = np.zeros(len(self.taken), dtype=np.bool_)
        same_b[self.partner[matched]] = same_a[matched]
        for side, partner, same in ((0, self.partner, same_a), (1, partner_b, same_b)):
            alone, other = self._neighbours(side, partner, same)
            self.more.append((alone, other) if side == 0 else (other, alone))

    def _neighbours(self, side: int, partner: Int64, same: Bool) -> tuple[Int64, Int64]:
        """Positions that stand alone beside a match that is not equal in all, and the partner of that match.

        Beside is the slice before or after on the same streams, or on any stream but those of communication.
        """
        operations, layout = self.sides[side], self.layouts[side]
        row, computes = layout.row, layout.group < _COMMUNICATION
        joined_by: tuple[str, ...] = ("module", "layer", "phase", "microbatch", "chunk")
        if (operations.instance[row] >= 0).any():
            joined_by = ("instance",)
        first = getattr(operations, joined_by[0])[row]
        start = self.timelines[side].slices.start[row]
        by_time = np.lexsort((np.arange(len(row)), start, computes, layout.segment))
        found: Int64 = np.where(same, -1, partner)
        for _ in range(3):
            for order, within in (
                (np.arange(len(row)), layout.code),
                (by_time, np.where(computes, layout.segment, -1 - np.arange(len(row)))),
            ):
                for near, at in ((order[:-1], order[1:]), (order[1:], order[:-1])):
                    open_pairs = (found[at] < 0) & (partner[at] < 0) & (found[near] >= 0) & (first[at] >= 0)
                    at, near = at[open_pairs], near[open_pairs]
                    joined = within[at] == within[near]
                    for name in joined_by:
                        column = getattr(operations, name)[row]
                        joined &= column[at] == column[near]
                    found[at[joined]] = found[near[joined]]
        alone = np.flatnonzero((found >= 0) & (partner < 0))
        return alone, found[alone]

    def result(self) -> tuple[Int64, Int64, Int8]:
        """Positions on both sides of all pairs, rising in the first, and how each was found."""
        a = np.flatnonzero(self.partner >= 0)
        more_a = np.concatenate([pair[0] for pair in self.more])
        more_b = np.concatenate([pair[1] for pair in self.more])
        at_a, at_b = np.concatenate((a, more_a)), np.concatenate((self.partner[a], more_b))
        how = np.concatenate((self.how[a], np.full(len(more_a), PIECE, dtype=np.int8)))
        order = np.lexsort((at_b, at_a))
        return at_a[order], at_b[order], how[order]


def _shared(code_a: Int64, code_b: Int64) -> Gaps:
    """The stretches of equal code of both sides, whose codes rise."""
    code = np.intersect1d(code_a, code_b)
    return Gaps(
        *(np.searchsorted(c, code).astype(np.int64) for c in (code_a, code_b)),
        *(np.searchsorted(c, code, side="right").astype(np.int64) for c in (code_a, code_b)),
    )


def _numbered(key: Int64, segment: Int64) -> Int64:
    """Key, segment, and the how many-th of them each element is; shape [elements, 3]."""
    order = np.lexsort((np.arange(len(key)), segment, key))
    fresh = np.ones(len(key), dtype=np.bool_)
    fresh[1:] = (key[order][1:] != key[order][:-1]) | (segment[order][1:] != segment[order][:-1])
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(key)), 0))
    ordinal = np.empty(len(key), dtype=np.int64)
    ordinal[order] = np.arange(len(key)) - first
    return np.stack([key, segment, ordinal], axis=1)


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
