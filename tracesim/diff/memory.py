"""Peak memory of two runs: by how much it differs on each rank, and in which categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import MemoryCategory
from tracesim.diff.pairing import pair_rows

CATEGORIES = "categories"
"""Name of what is compared where both runs know categories."""
OTHER = "other"
"""Name of what a run has allocated beyond its categories."""
_ALLOCATED = "allocated"


@dataclass(frozen=True)
class Peak:
    """The highest memory of a rank and what made it up. Bytes."""

    total: int
    parts: Mapping[str, int]
    """By category in lower case; they add up to ``total``."""


def compare_peaks(a: Timeline, b: Timeline) -> list[dict[str, Any]]:
    """The peaks of the ranks for which both sides have memory by category, or a curve of the same name.

    Ranks pair as those of steps do (:func:`~tracesim.diff.pairing.pair_rows`); steps are not needed. With categories on
    both sides the peak is that of the curve of all that is allocated, else of the sum of categories; what is allocated
    beyond them is ``other``.

    Returns:
        One dict a rank pair: ``rank``, ``rank_b``, ``of`` (what is compared), ``a_bytes``, ``b_bytes``,
        ``difference_bytes`` and ``parts_bytes``, which add up to the difference: what the categories held at each
        side's peak.
    """
    found = []
    rows_a, rows_b = (np.unique(t.counter_tracks.rank[t.counter_tracks.is_bytes]).tolist() for t in (a, b))
    for row_a, row_b in pair_rows(a, b, rows_a, rows_b):
        sides = [_peaks(timeline, row) for timeline, row in ((a, row_a), (b, row_b))]
        common = next((name for name in sides[0] if name in sides[1]), None)
        if common is None:
            continue
        x, y = sides[0][common], sides[1][common]
        names = dict.fromkeys((*x.parts, *y.parts))
        found.append(
            {
                "rank": int(a.ranks.rank[row_a]),
                "rank_b": int(b.ranks.rank[row_b]),
                "of": common,
                "a_bytes": x.total,
                "b_bytes": y.total,
                "difference_bytes": y.total - x.total,
                "parts_bytes": {name: y.parts.get(name, 0) - x.parts.get(name, 0) for name in names},
            }
        )
    return found


def _peaks(timeline: Timeline, rank: int) -> dict[str, Peak]:
    """Peaks of a rank by curve: that of all categories together first, then single curves in bytes."""
    counters = timeline.counter_tracks
    rows = np.flatnonzero((counters.rank == rank) & counters.is_bytes)
    by_category = rows[counters.category[rows] >= 0]
    curves = {
        timeline.string(int(counters.name[row])): row for row in rows[counters.category[rows] < 0].tolist()
    }
    found: dict[str, Peak] = {}
    if len(by_category) and (peak := _by_category(timeline, by_category, curves.get(_ALLOCATED))) is not None:
        found[CATEGORIES] = peak
    for name, row in curves.items():
        values = _values(timeline, [row])[0]
        if len(values):
            total = int(values.max())
            found[name] = Peak(total, {name: total})
    return found


def _by_category(timeline: Timeline, tracks: Int64, allocated: int | None) -> Peak | None:
    """What categories hold at the first instant at which all that is allocated is highest."""
    rows = tracks.tolist() if allocated is None else [*tracks.tolist(), allocated]
    values = _values(timeline, rows)
    if not values.size:
        return None
    categories = values[: len(tracks)]
    whole = categories.sum(axis=0) if allocated is None else values[-1]
    best = int(whole.argmax())
    parts: dict[str, int] = {}
    for row, track in enumerate(tracks.tolist()):
        name = MemoryCategory(int(timeline.counter_tracks.category[track])).name.lower()
        parts[name] = parts.get(name, 0) + int(categories[row, best])
    total = int(whole[best])
    if beyond := total - sum(parts.values()):
        parts[OTHER] = beyond
    return Peak(total, parts)


def _values(timeline: Timeline, tracks: list[int]) -> Int64:
    """Curves at every time at which one of them changes, 0 before their first sample; shape [tracks, times]."""
    samples = timeline.counter_samples
    bounds = [np.searchsorted(samples.track, (track, track + 1)) for track in tracks]
    curves = [(samples.time[low:high], samples.value[low:high]) for low, high in bounds]
    time = np.unique(np.concatenate([curve[0] for curve in curves]))
    values = np.zeros((len(tracks), len(time)), dtype=np.int64)
    for row, (at, value) in enumerate(curves):
        place = np.searchsorted(at, time, side="right") - 1
        if len(at):
            values[row] = np.where(place >= 0, value[np.maximum(place, 0)], 0).astype(np.int64)
    return values
