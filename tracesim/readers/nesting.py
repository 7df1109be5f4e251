"""Which host slice lies inside which: the parent of every slice, and the innermost slice around an instant.

Works on columns without a Python step per slice. Slices of one thread that cross instead of nesting (TorchRec writes
such) are given the innermost earlier slice that ends no sooner, which is a best guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int32, Int64


@dataclass(frozen=True)
class Nesting:
    """Slices of several threads ordered by thread, start and falling end, each with its parent."""

    order: Int64
    """Row of the caller's table at each position."""
    key: Int64
    """Thread and start as one sortable number, rising."""
    end: Int64
    parent: Int64
    """Position of the enclosing slice of the same thread, -1 at the top."""
    stride: int
    origin: int
    shift: int
    """Bits by which times are cut in ``key``; 0 unless the threads' spans would not fit 63 bits."""

    @classmethod
    def build(cls, thread: Int32, start: Int64, end: Int64) -> Nesting:
        """The nesting of slices ``[start, end)`` (nanoseconds) on threads numbered from 0; all arrays of shape [n]."""
        order = np.lexsort((-end, start, thread))
        number = thread[order].astype(np.int64)
        start, end = start[order], end[order]
        origin = int(start.min()) if len(start) else 0
        stride = int(end.max()) - origin + 2 if len(end) else 1
        # Times of all threads one after another must fit 63 bits: a file with one event at the epoch spans decades.
        threads = int(number[-1]) + 1 if len(number) else 1
        shift = max(0, (stride * threads).bit_length() - 62)
        stride = (stride >> shift) + 2
        key = number * stride + (start - origin >> shift)
        return cls(order, key, end, _parents(number, end), stride, origin, shift)

    def innermost(self, thread: Int32, time: Int64) -> Int64:
        """Position of the innermost slice around each instant of a thread, -1 where there is none."""
        if not len(self.key):
            return np.full(len(time), -1, dtype=np.int64)
        distance = np.where(time < self.origin, -1, np.maximum(time, self.origin) - self.origin)
        offset = np.minimum(distance >> self.shift, self.stride - 1)
        base = thread.astype(np.int64) * self.stride
        found = np.searchsorted(self.key, base + offset, side="right") - 1
        found[(found >= 0) & (self.key[found] < base)] = -1
        while True:
            left = (found >= 0) & (self.end[found] < time)
            if not left.any():
                return np.asarray(found, dtype=np.int64)
            found[left] = self.parent[found[left]]

    def nearest_marked(self, marked: Bool) -> Int64:
        """For each position, itself if marked, else its nearest marked ancestor, else -1 (``marked`` by position)."""
        # One sentinel at the end stands for "no ancestor" and points at itself, so jumping needs no test.
        last = len(self.parent)
        target = np.append(
            np.where(marked, np.arange(last), np.where(self.parent < 0, last, self.parent)), last
        )
        while True:
            jumped = target[target]
            if np.array_equal(jumped, target):
                return np.where(target[:-1] == last, -1, target[:-1])
            target = jumped


def _parents(thread: Int64, end: Int64) -> Int64:
    """Previous position on the same thread that ends no sooner, -1 if none.

    Everything between a candidate and the slice ends sooner than the slice; if the candidate does too, then so does
    everything back to the candidate's own candidate. Jumping along candidates therefore keeps that true, and all
    slices jump at once.
    """
    count = len(thread)
    first = np.ones(count, dtype=np.bool_)
    first[1:] = thread[1:] != thread[:-1]
    parent = np.arange(count, dtype=np.int64) - 1
    parent[first] = -1
    open_rows = np.nonzero(parent >= 0)[0]
    while True:
        candidates = parent[open_rows]
        short = (candidates >= 0) & (end[candidates] < end[open_rows])
        open_rows = open_rows[short]
        if not len(open_rows):
            return parent
        parent[open_rows] = parent[parent[open_rows]]
