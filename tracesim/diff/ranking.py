"""Which operations contribute most to a difference, and what only one side has."""

from __future__ import annotations

from typing import Any

import numpy as np

from op_graphs.columns import Float64, Int64
from op_graphs.vocabulary import OpKind
from tracesim.diff.alignment import Alignment
from tracesim.diff.attribution import Attribution
from tracesim.diff.matcher import PIECE

MOST_ROWS = 30


def ranked_operations(
    alignment: Alignment, attribution: Attribution, largest: int = MOST_ROWS
) -> list[dict[str, Any]]:
    """Operations by the size of their contribution, a mean over steps and ranks.

    Returns:
        One dict a kind, name and operator of a, joined with what they match in b: ``name`` and ``name_b`` (the most
        frequent where there are several; None where there is none), ``operator``, ``kind``, ``count_a`` and ``count_b``
        (slices a step), ``a_ns`` and ``b_ns`` (their own time of a step), ``difference_ns`` and ``ratio`` (of summed
        durations; None where a side has none).
    """
    weights = [_weights(alignment, side) for side in (0, 1)]
    labels = _labels(alignment)
    count = 1 + max((int(label.max()) for label in labels if len(label)), default=-1)
    columns: list[Float64] = []
    for side in (0, 1):
        duration = (alignment.a, alignment.b)[side].slices.duration[alignment.entries[side].row]
        inside = weights[side]
        columns += [
            np.bincount(labels[side], values, count).astype(np.float64)
            for values in (attribution.claimed[side], inside, duration * inside)
        ]
    own_a, count_a, sum_a, own_b, count_b, sum_b = columns
    order = np.lexsort((np.arange(count), -np.abs(own_b - own_a)))
    order = order[(own_a + own_b + count_a + count_b)[order] > 0][:largest]
    firsts = [
        _firsts(labels[side], count, at[_pieces(alignment, side)])
        for side, at in enumerate((alignment.at_a, alignment.at_b))
    ]
    found = []
    for label in order.tolist():
        names = [_description(alignment, side, int(firsts[side][label])) for side in (0, 1)]
        name, operator, kind = names[0] if names[0][0] is not None else names[1]
        found.append(
            {
                "name": name,
                "name_b": names[1][0],
                "operator": operator,
                "kind": kind,
                "count_a": round(float(count_a[label]), 6),
                "count_b": round(float(count_b[label]), 6),
                "a_ns": round(own_a[label]),
                "b_ns": round(own_b[label]),
                "difference_ns": round(own_b[label] - own_a[label]),
                "ratio": float(sum_b[label] / sum_a[label]) if sum_a[label] and sum_b[label] else None,
            }
        )
    return found


def _weights(alignment: Alignment, side: int) -> Float64:
    """What each entry counts, so that sums are means over the steps of a rank, then over ranks; 0 outside of steps."""
    each = [
        1 / len(rank.steps) / len(alignment.ranks) for rank in alignment.ranks for _ in range(len(rank.steps))
    ]
    segment = alignment.entries[side].segment
    padded = np.append(np.array(each, dtype=np.float64), 0.0)
    return padded[np.minimum(segment, len(each))]


def _labels(alignment: Alignment) -> tuple[Int64, Int64]:
    """A number for the operation of every entry; matched entries of b have that of their partner in a."""
    rows = [entries.row for entries in alignment.entries]
    number = np.zeros(len(rows[0]) + len(rows[1]), dtype=np.int64)
    side_of = np.repeat([0, 1], [len(rows[0]), len(rows[1])])
    for name in ("kind", "name", "operator"):
        values = np.concatenate(
            [getattr(side, name)[mine] for side, mine in zip(alignment.operations, rows, strict=True)]
        )
        _, dense = np.unique(values, return_inverse=True)
        number = number * (int(dense.max(initial=0)) + 1) + dense.ravel()
    # Unmatched operations are listed by themselves, on either side.
    matched = np.concatenate([entries.matched for entries in alignment.entries])
    _, number = np.unique(np.stack([number, np.where(matched, 2, side_of)]), axis=1, return_inverse=True)
    number = number.ravel().astype(np.int64)
    label_a, label_b = number[: len(rows[0])].copy(), number[len(rows[0]) :].copy()
    whole = alignment.how != PIECE
    label_b[alignment.at_b[whole]] = label_a[alignment.at_a[whole]]
    # A piece goes by the name of the operation that it is a piece of.
    piece_a, piece_b = _pieces(alignment, 0), _pieces(alignment, 1)
    label_a[alignment.at_a[piece_a]] = label_b[alignment.at_b[piece_a]]
    label_b[alignment.at_b[piece_b]] = label_a[alignment.at_a[piece_b]]
    return label_a, label_b


def _pieces(alignment: Alignment, side: int) -> Int64:
    """Pairs in which the slice of a side is the piece, and the other the match."""
    at = (alignment.at_a, alignment.at_b)[side]
    whole = np.zeros(len(alignment.entries[side].row), dtype=np.bool_)
    whole[at[alignment.how != PIECE]] = True
    return np.flatnonzero((alignment.how == PIECE) & ~whole[at])


def _firsts(label: Int64, count: int, pieces: Int64) -> Int64:
    """An entry of each label that is no piece, -1 where none."""
    first = np.full(count, -1, dtype=np.int64)
    entries = np.setdiff1d(np.arange(len(label)), pieces)[::-1]
    first[label[entries]] = entries
    return first


def _description(alignment: Alignment, side: int, entry: int) -> tuple[str | None, str, str]:
    if entry < 0:
        return None, "", ""
    timeline = (alignment.a, alignment.b)[side]
    row = int(alignment.entries[side].row[entry])
    operator = int(alignment.operations[side].operator[row])
    inner = alignment.strings[operator].partition(" < ")[0] if operator >= 0 else ""
    kind = OpKind(int(timeline.slices.kind[row])).name.lower()
    return timeline.string(int(timeline.slices.name[row])), inner, kind


def unmatched_operations(alignment: Alignment, side: int, largest: int = MOST_ROWS) -> list[dict[str, Any]]:
    """What a side has and the other does not, by name and kind: ``name``, ``kind``, ``count``, ``total_ns`` (sums)."""
    entries, timeline = alignment.entries[side], (alignment.a, alignment.b)[side]
    rows = entries.row[~entries.matched]
    code = timeline.slices.name[rows].astype(np.int64) * len(OpKind) + timeline.slices.kind[rows]
    distinct, number, count = np.unique(code, return_inverse=True, return_counts=True)
    total = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(total, number.ravel(), timeline.slices.duration[rows])
    order = np.lexsort((distinct, -total))[:largest]
    return [
        {
            "name": timeline.string(int(distinct[i]) // len(OpKind)),
            "kind": OpKind(int(distinct[i]) % len(OpKind)).name.lower(),
            "count": int(count[i]),
            "total_ns": int(total[i]),
        }
        for i in order.tolist()
    ]
