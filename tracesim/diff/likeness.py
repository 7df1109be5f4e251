"""Pairs of elements that are each other's most alike, in whatever order they come."""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Int64
from tracesim.diff.sequences import Float32, Gaps, Score

_MOST_CELLS = 1 << 22
_FAR_PENALTY = np.float32(0.02)


def most_alike(gaps: Gaps, score: Score) -> tuple[Int64, Int64]:
    """Match the elements of each gap greedily, the most alike pair first; matches may cross.

    Of elements as alike as each other those are taken that lie at nearly the same place of their gaps. A gap with more
    than four million pairs is left alone.

    Args:
        gaps: what may match what, disjoint on both sides.
        score: similarity of elements by position, 0 where they cannot be the same.

    Returns:
        Positions in both sequences of the matched pairs.
    """
    none = np.zeros(0, dtype=np.int64)
    found_a, found_b = [none], [none]
    filled = gaps.filled()
    for first_a, end_a, first_b, end_b in zip(filled.a, filled.a_end, filled.b, filled.b_end, strict=True):
        a, b = np.arange(first_a, end_a), np.arange(first_b, end_b)
        if len(a) * len(b) > _MOST_CELLS:
            continue
        similar = score(a[:, None], b[None, :])
        apart = np.abs((a - first_a)[:, None] / len(a) - (b - first_b)[None, :] / len(b)).astype(np.float32)
        x, y = _greedy(np.where(similar > 0, np.maximum(similar - _FAR_PENALTY * apart, 1e-3), 0))
        found_a.append(a[x])
        found_b.append(b[y])
    return np.concatenate(found_a), np.concatenate(found_b)


def _greedy(similar: Float32) -> tuple[Int64, Int64]:
    """Rows and columns of the pairs that are taken, the largest first.

    A pair that is the largest of its row and of its column would be taken before anything that excludes it, so all of
    these are taken at once.
    """
    rows, columns = np.arange(similar.shape[0]), np.arange(similar.shape[1])
    found_a, found_b = [rows[:0]], [columns[:0]]
    while similar.size and similar.max() > 0:
        best_column, best_row = similar.argmax(axis=1), similar.argmax(axis=0)
        at = np.flatnonzero(
            (best_row[best_column] == np.arange(len(rows))) & (similar[np.arange(len(rows)), best_column] > 0)
        )
        found_a.append(rows[at])
        found_b.append(columns[best_column[at]])
        kept_rows, kept_columns = np.ones(len(rows), dtype=np.bool_), np.ones(len(columns), dtype=np.bool_)
        kept_rows[at] = False
        kept_columns[best_column[at]] = False
        # What has no possible partner left needs no further look.
        similar = similar[kept_rows][:, kept_columns]
        rows, columns = rows[kept_rows], columns[kept_columns]
        useful_rows, useful_columns = (similar > 0).any(axis=1), (similar > 0).any(axis=0)
        similar = similar[useful_rows][:, useful_columns]
        rows, columns = rows[useful_rows], columns[useful_columns]
    return np.concatenate(found_a), np.concatenate(found_b)
