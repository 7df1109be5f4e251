"""Alignment of two sequences: rare runs as anchors, and dynamic programming for what lies between them.

A sequence is cut into *gaps* that are aligned one by one; at first they are what the caller gives (a rank, a step and a
group of streams), then every matched pair cuts its gap in two. In all gaps at once,

1. elements equal from the beginning and from the end of a gap are matched;
2. runs of 32, 8, 2 and 1 keys that occur once on each side of a gap anchor it (the longest rising subsequence of them,
   as in patience diff), first by the exact key of an element, then by coarser ones; by structure, runs of 32 only;
3. the rest goes through Needleman-Wunsch without gap costs over the similarity of elements, in a band around the
   diagonal, many gaps at once.

References: patience diff (B. Cohen, 2003); S. Needleman and C. Wunsch, J. Mol. Biol. 48, 443 (1970).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int8, Int64

Float32 = npt.NDArray[np.float32]
UInt64 = npt.NDArray[np.uint64]

Score = Callable[[Int64, Int64], Float32]
"""Similarity of elements of both sides, by position; 0 where they cannot be the same, else in (0, 1]."""

RUNS = (32, 8, 2, 1)
"""Lengths of the runs of keys that anchor."""
LONG_RUN = 32
"""Length of the runs that anchor by structure alone."""
BAND = 96
"""Positions on each side of the diagonal that large gaps are searched in, beyond their difference in length."""

_CELLS = 1 << 22
_MOST_CELLS = 1 << 25
_SMALL = 128
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FAR_PENALTY = 0.02
_FEW_GAPS = 8


@dataclass(frozen=True)
class Gaps:
    """Stretches of both sequences that may match each other; columns of shape [gaps]."""

    a: Int64
    """First position in the first sequence."""
    b: Int64
    a_end: Int64
    b_end: Int64

    def filled(self) -> Gaps:
        """The gaps that have elements on both sides."""
        kept = (self.a_end > self.a) & (self.b_end > self.b)
        return Gaps(self.a[kept], self.b[kept], self.a_end[kept], self.b_end[kept])


def align(
    length: int,
    gaps: Gaps,
    keys: Sequence[tuple[Int64, Int64]],
    prepare: Callable[[Int64, Int64], Score] | None = None,
    structure: Sequence[tuple[Int64, Int64]] = (),
) -> tuple[Int64, Int64]:
    """Match elements of two sequences; inside a gap, matches cross nowhere.

    Args:
        length: elements of the first sequence.
        gaps: what may match what, rising and disjoint on both sides.
        keys: keys of all elements of both sides, from exact to coarse. Elements of equal key are taken to be the same.
        prepare: gives the similarity, told the positions that are left after the anchors; without it they are all.
        structure: keys of which only long runs mean the same: elements of equal key may differ.

    Returns:
        Positions in both sequences of the matched pairs, rising in the first.
    """
    matches = _Matches(np.full(length, -1, dtype=np.int64), gaps)
    for key_a, key_b in keys:
        matches.equal_ends(key_a, key_b)
        for run in RUNS:
            if matches.anchor(key_a, key_b, run):
                matches.equal_ends(key_a, key_b)
    for key_a, key_b in structure:
        matches.anchor(key_a, key_b, LONG_RUN)
    left = matches.gaps
    if prepare is not None and len(left.a):
        score = prepare(_positions(left.a, left.a_end), _positions(left.b, left.b_end))
        for part in _parts(left):
            matches.add(*_align_part(part, score))
    found = np.flatnonzero(matches.partner >= 0)
    return found, matches.partner[found]


class _Matches:
    """Pairs found so far."""

    def __init__(self, partner: Int64, gaps: Gaps) -> None:
        self.partner = partner
        self.gaps = gaps.filled()

    def add(self, a: Int64, b: Int64) -> None:
        self.partner[a] = b

    def equal_ends(self, key_a: Int64, key_b: Int64) -> None:
        """Match the elements at the beginning and at the end of each gap for as long as keys are equal."""
        gaps = self.gaps
        shortest = np.minimum(gaps.a_end - gaps.a, gaps.b_end - gaps.b)
        head = _equal_run(key_a, key_b, gaps.a, gaps.b, shortest, 1)
        self._run(gaps.a, gaps.b, head, 1)
        tail = _equal_run(key_a, key_b, gaps.a_end - 1, gaps.b_end - 1, shortest - head, -1)
        self._run(gaps.a_end - 1, gaps.b_end - 1, tail, -1)
        self.gaps = Gaps(gaps.a + head, gaps.b + head, gaps.a_end - tail, gaps.b_end - tail).filled()

    def _run(self, a: Int64, b: Int64, length: Int64, step: int) -> None:
        offset = _offsets(length)
        self.add(np.repeat(a, length) + step * offset, np.repeat(b, length) + step * offset)

    def anchor(self, key_a: Int64, key_b: Int64, run: int) -> bool:
        """Match runs of keys that occur once on both sides of their gap; whether any was found."""
        gaps = self.gaps
        hash_a, at_a, gap_a = _runs(key_a, gaps.a, gaps.a_end, run)
        hash_b, at_b, gap_b = _runs(key_b, gaps.b, gaps.b_end, run)
        once_a, once_b = _once(hash_a), _once(hash_b)
        _, in_a, in_b = np.intersect1d(
            hash_a[once_a], hash_b[once_b], assume_unique=True, return_indices=True
        )
        order = np.argsort(at_a[once_a][in_a], kind="stable")
        a, b = at_a[once_a][in_a][order], at_b[once_b][in_b][order]
        gap = gap_a[once_a][in_a][order]
        # Hashes of different gaps may collide.
        same = gap == gap_b[once_b][in_b][order]
        a, b, gap = a[same], b[same], gap[same]
        if not len(a):
            return False
        rising = _longest_rising(b)
        a, b, gap = a[rising], b[rising], gap[rising]
        self.add(a, b)
        self.gaps = _split(gaps, a, b, gap)
        return True


def _split(gaps: Gaps, a: Int64, b: Int64, gap: Int64) -> Gaps:
    """The gaps that are left when pairs of elements are taken out of theirs."""
    starts_a = np.concatenate((gaps.a, a + 1))
    starts_b = np.concatenate((gaps.b, b + 1))
    order = np.argsort(starts_a, kind="stable")
    of_gap = np.concatenate((np.arange(len(gaps.a)), gap))[order]
    starts_a, starts_b = starts_a[order], starts_b[order]
    last = np.append(of_gap[1:] != of_gap[:-1], True)
    ends_a = np.where(last, gaps.a_end[of_gap], np.append(starts_a[1:] - 1, 0))
    ends_b = np.where(last, gaps.b_end[of_gap], np.append(starts_b[1:] - 1, 0))
    return Gaps(starts_a, starts_b, ends_a, ends_b).filled()


def _positions(start: Int64, end: Int64) -> Int64:
    return np.asarray(np.repeat(start, end - start) + _offsets(end - start), dtype=np.int64)


def _offsets(length: Int64) -> Int64:
    """0, 1, ... within each of several runs."""
    total = int(length.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(length) - length, length)


def _equal_run(key_a: Int64, key_b: Int64, a: Int64, b: Int64, length: Int64, step: int) -> Int64:
    """For how many elements the keys are equal, from positions ``a`` and ``b`` on, at most ``length``."""
    found = np.zeros(len(a), dtype=np.int64)
    open_gaps = np.flatnonzero(length > 0)
    stride = 16
    while len(open_gaps):
        # Looked at in growing pieces: most gaps differ soon, few are long and equal.
        piece = np.minimum(length[open_gaps] - found[open_gaps], stride)
        offset = _offsets(piece) + np.repeat(found[open_gaps], piece)
        equal = (
            key_a[np.repeat(a[open_gaps], piece) + step * offset]
            == key_b[np.repeat(b[open_gaps], piece) + step * offset]
        )
        bounds = np.cumsum(piece) - piece
        unequal = np.flatnonzero(~equal)
        first = np.searchsorted(unequal, bounds)
        stop = np.append(unequal, len(equal))[first]
        run = np.minimum(stop - bounds, piece)
        found[open_gaps] += run
        open_gaps = open_gaps[(run == piece) & (found[open_gaps] < length[open_gaps])]
        stride *= 4
    return found


def _runs(key: Int64, start: Int64, end: Int64, run: int) -> tuple[UInt64, Int64, Int64]:
    """A number for each run of keys within a gap, its position, and its gap."""
    count = end - start
    gap = np.repeat(np.arange(len(start), dtype=np.int64), count)
    at = np.repeat(start, count) + _offsets(count)
    number = _mixed(key[at].astype(np.uint64) + np.uint64(1))
    left = np.repeat(end, count) - at
    length = 1
    while length < run:
        shifted = np.concatenate((number[length:], number[:length]))
        number = _mixed(number * np.uint64(3) + shifted)
        length *= 2
    number = _mixed(number + gap.astype(np.uint64) * _MIX)
    inside = left >= run
    return number[inside], at[inside], gap[inside]


def _mixed(number: UInt64) -> UInt64:
    number = (number ^ (number >> np.uint64(31))) * _MIX
    return np.asarray(number ^ (number >> np.uint64(29)), dtype=np.uint64)


def _once(number: UInt64) -> Int64:
    """Index of the values that occur once."""
    if not len(number):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(number, kind="stable")
    ordered = number[order]
    fresh = np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))
    return np.asarray(order[fresh[1:] & fresh[:-1]], dtype=np.int64)


def _longest_rising(values: Int64) -> Int64:
    """Index of a longest strictly rising subsequence."""
    if (values[1:] > values[:-1]).all():
        return np.arange(len(values), dtype=np.int64)
    tails: list[int] = []
    tail_index: list[int] = []
    previous: list[int] = []
    for index, value in enumerate(values.tolist()):
        at = bisect_left(tails, value)
        previous.append(tail_index[at - 1] if at else -1)
        if at == len(tails):
            tails.append(value)
            tail_index.append(index)
        else:
            tails[at], tail_index[at] = value, index
    found = []
    index = tail_index[-1] if tail_index else -1
    while index >= 0:
        found.append(index)
        index = previous[index]
    return np.array(found[::-1], dtype=np.int64)


@dataclass(frozen=True)
class _Part:
    """Gaps that go through the dynamic programming together."""

    gaps: Gaps
    rows: int
    width: int


def _parts(gaps: Gaps) -> list[_Part]:
    """Gaps of similar size together, each part of a bounded number of cells."""
    n, m = gaps.a_end - gaps.a, gaps.b_end - gaps.b
    width = np.where(m <= _SMALL, m, np.minimum(m, 2 * (BAND + np.abs(n - m)) + 1))
    width = np.minimum(width, np.maximum(_MOST_CELLS // np.maximum(n, 1), 2 * BAND))
    size_n, size_w = (np.ceil(np.log2(np.maximum(x, 1))).astype(np.int64) for x in (n, width))
    parts = []
    for code in np.unique(size_n * 64 + size_w).tolist():
        mine = np.flatnonzero(size_n * 64 + size_w == code)
        rows, columns = int(n[mine].max()), int(width[mine].max())
        at_once = max(1, _CELLS // (rows * columns))
        for first in range(0, len(mine), at_once):
            chosen = mine[first : first + at_once]
            taken = Gaps(gaps.a[chosen], gaps.b[chosen], gaps.a_end[chosen], gaps.b_end[chosen])
            parts.append(_Part(taken, rows, columns))
    return parts


def _align_part(part: _Part, score: Score) -> tuple[Int64, Int64]:
    gaps = part.gaps
    n, m = gaps.a_end - gaps.a, gaps.b_end - gaps.b
    low = _band(n, m, part)
    count = len(n)
    column = np.arange(part.width, dtype=np.int64)
    best = np.zeros((count, part.width + 1), dtype=np.float32)
    moves = np.zeros((part.rows, count, part.width), dtype=np.int8)
    last_b = (gaps.b_end - 1)[:, None]
    place = ((column + 0.5) / m[:, None]).astype(np.float32)
    for row in range(part.rows):
        at_b = gaps.b[:, None] + low[row][:, None] + column
        similar = score(np.minimum(gaps.a + row, gaps.a_end - 1)[:, None], np.minimum(at_b, last_b))
        centre = ((row + 0.5) / n - low[row] / m).astype(np.float32)
        fits = (similar > 0) & (at_b <= last_b) & (row < n)[:, None]
        similar = np.where(
            fits, np.maximum(similar - _FAR_PENALTY * np.abs(centre[:, None] - place), 1e-3), -1
        )
        above = best if row == 0 else _shifted(best, low[row] - low[row - 1])
        diagonal = above[:, :-1] + similar
        best = np.empty_like(above)
        best[:, 0] = above[:, 0]
        np.maximum(diagonal, above[:, 1:], out=best[:, 1:])
        np.maximum.accumulate(best, axis=1, out=best)
        # 1: the two match; 2: the element of a stays alone; 0: that of b does.
        alone = (above[:, 1:] >= best[:, 1:]).astype(np.int8) * np.int8(2)
        moves[row] = np.where((diagonal >= best[:, 1:]) & fits, np.int8(1), alone)
    return _walk_back(part, moves, low, m)


def _band(n: Int64, m: Int64, part: _Part) -> Int64:
    """First column of the band in each row and gap; shape [rows, gaps], rising along rows."""
    row = np.arange(part.rows, dtype=np.int64)[:, None]
    centre = row * m // np.maximum(n, 1)
    return np.asarray(np.clip(centre - part.width // 2, 0, np.maximum(m - part.width, 0)), dtype=np.int64)


def _shifted(best: Float32, shift: Int64) -> Float32:
    """Columns of the row above as the band of this row sees them; beyond its end its last value holds on."""
    if not shift.any():
        return best
    at = np.minimum(np.arange(best.shape[1]) + shift[:, None], best.shape[1] - 1)
    return np.take_along_axis(best, at, axis=1)


def _walk_back(part: _Part, moves: Int8, low: Int64, m: Int64) -> tuple[Int64, Int64]:
    """Positions of the matched pairs, from the moves of all cells."""
    if len(m) <= _FEW_GAPS:
        ways = [_way(moves[:, gap], low[:, gap], int(m[gap])) for gap in range(len(m))]
        rows, columns = (
            [np.array(way[i], dtype=np.int64) + first[gap] for gap, way in enumerate(ways)]
            for i, first in enumerate((part.gaps.a, part.gaps.b))
        )
        return np.concatenate(rows), np.concatenate(columns)
    gaps = part.gaps
    found_a, found_b = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    live = np.arange(len(m))
    row = np.full(len(m), part.rows - 1, dtype=np.int64)
    at = np.minimum(m, low[-1] + part.width) - 1
    while len(live):
        first = low[row[live], live]
        # The band of a row may lie wholly to the right of the path, or end to the left of where the row is entered.
        at[live] = np.minimum(at[live], first + part.width - 1)
        column = at[live] - first
        move = np.where(column < 0, 2, moves[row[live], live, np.maximum(column, 0)])
        matched = live[move == 1]
        found_a.append(gaps.a[matched] + row[matched])
        found_b.append(gaps.b[matched] + at[matched])
        row[live[move >= 1]] -= 1
        at[live[move != 2]] -= 1
        live = live[(row[live] >= 0) & (at[live] >= 0)]
    return np.concatenate(found_a), np.concatenate(found_b)


def _way(moves: Int8, low: Int64, m: int) -> tuple[list[int], list[int]]:
    """The same for one gap, cell by cell: moves of shape [rows, width], first column of each row."""
    width = moves.shape[1]
    flat, first = moves.tobytes(), low.tolist()
    row = len(first) - 1
    at = min(m, first[row] + width) - 1
    rows, columns = [], []
    while row >= 0 and at >= 0:
        at = min(at, first[row] + width - 1)
        column = at - first[row]
        move = flat[row * width + column] if column >= 0 else 2
        if move == 1:
            rows.append(row)
            columns.append(at)
        if move >= 1:
            row -= 1
        if move != 2:
            at -= 1
    return rows, columns
