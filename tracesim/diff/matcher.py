"""Matches the slices of two layouts pass after pass: in order, across streams, out of order, and pieces of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from op_graphs.columns import Bool, Float64, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
from tracesim.diff.layouts import COMMUNICATION, Layout
from tracesim.diff.likeness import most_alike
from tracesim.diff.operations import DISTINCT, Operations, Similarity, keys, structure_keys
from tracesim.diff.sequences import Gaps, Score, align

PRIMARY, MOVED, PIECE = 0, 1, 2
"""How two slices match: in order, out of order, or as a further piece of an operation that is matched."""

_FEW_MATCHES = 8
_MOST_OFF = float(np.log(32))
"""By what factor a duration may be off (as a logarithm) where names and operators do not say what an operation is."""
_MOST_OFF_UNORDERED = float(np.log(4))
"""The same where not even the order speaks for a match."""
_LARGEST_CALL = 16
"""Kernels of a call above which it is no single operation (a compiled graph, a whole backward pass)."""


class Matcher:
    """Matches entries of both sides by position, pass after pass."""

    def __init__(
        self,
        timelines: tuple[Timeline, Timeline],
        sides: tuple[Operations, Operations],
        layouts: tuple[Layout, Layout],
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

    def _prepared(self, a: Int64, b: Int64, most_off: float = _MOST_OFF) -> Callable[[Int64, Int64], Score]:
        """Similarity of some entries, by their place among them; 0 if durations are off by more than ``most_off``."""
        slower = self._slower()

        def prepare(left_a: Int64, left_b: Int64) -> Score:
            rows = (self.layouts[0].row[a[left_a]], self.layouts[1].row[b[left_b]])
            similarity = Similarity(*self.sides, rows, self.strings, self.known, slower)
            place_a, place_b = np.zeros(len(a), dtype=np.int64), np.zeros(len(b), dtype=np.int64)
            place_a[left_a], place_b[left_b] = np.arange(len(left_a)), np.arange(len(left_b))

            return lambda i, j: similarity.score(place_a[i], place_b[j], most_off)

        return prepare

    def _slower(self) -> Float64:
        """By kind the logarithm of duration in b by that in a, the median by time of what is matched; 0 of few."""
        found = np.zeros(len(OpKind), dtype=np.float64)
        at = np.flatnonzero(self.partner >= 0)
        rows_a, rows_b = self.layouts[0].row[at], self.layouts[1].row[self.partner[at]]
        a, b = self.sides[0].duration[rows_a], self.sides[1].duration[rows_b]
        told = (a > 0) & (b > 0) & (self.sides[0].kind[rows_a] == self.sides[1].kind[rows_b])
        kind, ratio, time = self.sides[0].kind[rows_a][told], np.log(b[told] / a[told]), (a + b)[told]
        for number in np.unique(kind).tolist():
            mine = np.flatnonzero(kind == number)
            if len(mine) >= _FEW_MATCHES:
                mine = mine[np.argsort(ratio[mine], kind="stable")]
                reached = np.cumsum(time[mine])
                found[number] = ratio[mine[np.searchsorted(reached, reached[-1] / 2)]]
        return found

    def across_streams(self) -> None:
        """What is left of a segment but communication, over all streams in order of start, phase by phase."""
        a, b, gaps = self._left(lambda layout: layout.group < COMMUNICATION)
        if not len(a) or not len(b):
            return
        taken = [(key_a[a], key_b[b]) for key_a, key_b in self.keys]
        x, y = align(len(a), gaps, taken, self._prepared(a, b))
        self._add(a[x], b[y], PRIMARY)

    def alike(self) -> None:
        """What is left of a segment and is alike, in whatever order: a graph compiled on one side has its own."""
        a, b, gaps = self._left(lambda layout: np.ones(len(layout.row), dtype=np.bool_))
        if not len(a) or not len(b):
            return
        score = self._prepared(a, b, _MOST_OFF_UNORDERED)(np.arange(len(a)), np.arange(len(b)))
        x, y = most_alike(gaps, score)
        self._add(a[x], b[y], MOVED)

    def _left(self, chosen: Callable[[Layout], Bool]) -> tuple[Int64, Int64, Gaps]:
        """What of the chosen entries has no partner, by segment, phase and start, and the stretches that may match."""
        left, codes = [], []
        for timeline, layout, free in zip(
            self.timelines, self.layouts, (self.partner < 0, ~self.taken), strict=True
        ):
            at = np.flatnonzero(free & chosen(layout))
            code = layout.phase_code[at]
            order = np.lexsort((at, timeline.slices.start[layout.row[at]], code))
            left.append(at[order])
            codes.append(code[order])
        return left[0], left[1], _shared(*codes)

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
        row, computes = layout.row, layout.group < COMMUNICATION
        joined_by: tuple[str, ...] = ("module", "layer", "phase", "microbatch", "chunk")
        if (operations.instance[row] >= 0).any():
            joined_by = ("instance",)
        first = np.where(
            operations.call_size[row] <= _LARGEST_CALL, getattr(operations, joined_by[0])[row], -1
        )
        kind = operations.kind[row]
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
        # A product is no piece of an addition: what counts is the kind of what is matched.
        other = self.sides[1 - side].kind[self.layouts[1 - side].row[found[alone]]]
        alone = alone[~np.isin(kind[alone], DISTINCT) | np.isin(other, DISTINCT)]
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
