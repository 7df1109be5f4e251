"""Sets of half-open time intervals, as two sorted arrays; every operation is vectorised.

An :class:`Intervals` is always disjoint and sorted, and abutting intervals are joined, so equal sets of instants
have equal arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64


@dataclass(frozen=True)
class Intervals:
    """Instants ``[start[i], end[i])`` in nanoseconds: sorted, disjoint, none empty, none abutting."""

    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """Nanoseconds covered."""
        return int((self.end - self.start).sum())

    @classmethod
    def empty(cls) -> Intervals:
        """No instant at all."""
        return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def union(start: Int64, end: Int64) -> Intervals:
    """The instants covered by at least one of ``[start[i], end[i])``, given in any order; empty ones count nothing."""
    kept = end > start
    start, end = start[kept], end[kept]
    if not len(start):
        return Intervals.empty()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return Intervals(start[opens], reach[closes])


def join(*sets: Intervals) -> Intervals:
    """The instants that lie in at least one of the sets."""
    if not sets:
        return Intervals.empty()
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The instants that lie in both sets."""
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    counts = np.maximum(last - first, 0)
    left = np.repeat(np.arange(len(a)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    right = first[left] + offsets
    return Intervals(np.maximum(a.start[left], b.start[right]), np.minimum(a.end[left], b.end[right]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The instants of ``a`` that do not lie in ``b``."""
    if not len(a) or not len(b):
        return a
    low, high = min(a.start[0], b.start[0]) - 1, max(a.end[-1], b.end[-1]) + 1
    gaps = Intervals(np.concatenate(([low], b.end)), np.concatenate((b.start, [high])))
    return intersect(a, gaps)


def clip(start: Int64, end: Int64, low: int, high: int) -> tuple[Int64, Int64]:
    """The parts of ``[start[i], end[i])`` that lie in ``[low, high)``; intervals outside become empty."""
    start = np.clip(start, low, high)
    return start, np.maximum(np.clip(end, low, high), start)


def covered(intervals: Intervals, low: Int64, high: Int64) -> Int64:
    """Nanoseconds of each ``[low[i], high[i])`` that lie in the intervals."""
    total = np.concatenate(([0], np.cumsum(intervals.end - intervals.start)))

    def up_to(moment: Int64) -> Int64:
        at = np.searchsorted(intervals.start, moment, side="right")
        last = np.maximum(at - 1, 0)
        over = (
            np.maximum(intervals.end[last] - moment, 0)
            if len(intervals)
            else np.zeros(len(moment), dtype=np.int64)
        )
        return (total[at] - np.where(at > 0, over, 0)).astype(np.int64)

    inside: Int64 = up_to(high) - up_to(low)
    return inside
