"""Distinct values of columns of small numbers, counted instead of sorted."""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Int8, Int32, Int64

_LARGEST_TABLE = 1 << 22


def distinct(numbers: Int8 | Int32 | Int64) -> tuple[Int64, Int64]:
    """The distinct numbers, rising, and the place of each row among them; as ``np.unique`` with its inverse.

    Quick where the range of the numbers is small, which that of ids is.
    """
    if not len(numbers):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    low, high = int(numbers.min()), int(numbers.max())
    if high - low > max(4 * len(numbers), 1024) or high - low > _LARGEST_TABLE:
        found, place = np.unique(numbers, return_inverse=True)
        return found.astype(np.int64), place
    shifted = numbers.astype(np.int64) - low
    present = np.zeros(high - low + 1, dtype=np.bool_)
    present[shifted] = True
    return np.flatnonzero(present) + low, (np.cumsum(present) - 1)[shifted]
