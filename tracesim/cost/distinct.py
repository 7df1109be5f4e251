"""Rows of a table that are equal in some columns, so that a cost is computed once and broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


def distinct_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[Int64, Int64]:
    """Distinct rows of columns of integers or floats.

    Args:
        columns: one-dimensional arrays of one length.

    Returns:
        Row numbers of one representative of each distinct row, and for every row the position of its
        representative among them.
    """
    bits = [
        np.ascontiguousarray(column, dtype=np.float64 if column.dtype.kind == "f" else np.int64).view(
            np.uint64
        )
        for column in columns
    ]
    # Sorting one hash is several times faster than sorting tuples; the check below makes it exact.
    mixed = np.zeros(len(bits[0]), dtype=np.uint64)
    for column in bits:
        mixed = (mixed ^ column) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    if not all(np.array_equal(column[first][inverse], column) for column in bits):
        _, first, inverse = np.unique(np.stack(bits), axis=1, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.reshape(-1).astype(np.int64)
