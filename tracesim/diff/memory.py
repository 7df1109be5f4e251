"""Peak memory of two runs: by how much it differs on each rank, and in which categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import MemoryCategory
from tracesim.diff.pairing import RankPair


@dataclass(frozen=True)
class Peak:
    """The highest memory of a rank and what made it up. Bytes."""

    total: int
    parts: Mapping[str, int]
    """By category in lower case; they add up to ``total``."""


def compare_peaks(a: Timeline, b: Timeline, ranks: list[RankPair]) -> list[dict[str, Any]]:
    """The peaks of the ranks for which both sides have memory by category, or a curve of the same name.

    Returns:
        One dict a rank pair: ``rank``, ``rank_b``, ``a_bytes``, ``b_bytes``, ``difference_bytes`` and ``parts_bytes``,
        which add up to the difference: what the categories held at each side's peak.
    """
    found = []
    for rank in ranks:
        sides = [_peaks(timeline, row) for timeline, row in ((a, rank.a), (b, rank.b))]
        common = next((name for name in sides[0] if name in sides[1]), None)
        if common is None:
            continue
        x, y = sides[0][common], sides[1][common]
        names = dict.fromkeys((*x.parts, *y.parts))
        found.append(
            {
                "rank": int(a.ranks.rank[rank.a]),
                "rank_b": int(b.ranks.rank[rank.b]),
                "of": common,
                "a_bytes": x.total,
                "b_bytes": y.total,
                "difference_bytes": y.total - x.total,
                "parts_bytes": {name: y.parts.get(name, 0) - x.parts.get(name, 0) for name in names},
            }
        )
    return found


_CATEGORIES = "categories"


def _peaks(timeline: Timeline, rank: int) -> dict[str, Peak]:
    """Peaks of a rank by curve: that of all categories together first, then single curves in bytes."""
    counters = timeline.counter_tracks
    rows = np.flatnonzero((counters.rank == rank) & counters.is_bytes)
    found: dict[str, Peak] = {}
    by_category = rows[counters.category[rows] >= 0]
    if len(by_category) and (peak := _peak(timeline, by_category.tolist())) is not None:
        found[_CATEGORIES] = peak
    for row in rows[counters.category[rows] < 0].tolist():
        name = timeline.string(int(counters.name[row]))
        if (peak := _peak(timeline, [row])) is not None:
            found.setdefault(name, Peak(peak.total, {name: peak.total}))
    return found


def _peak(timeline: Timeline, tracks: list[int]) -> Peak | None:
    """The first instant at which the curves together are highest."""
    samples = timeline.counter_samples
    bounds = [np.searchsorted(samples.track, (track, track + 1)) for track in tracks]
    curves = [(samples.time[low:high], samples.value[low:high]) for low, high in bounds]
    time = np.unique(np.concatenate([curve[0] for curve in curves]))
    if not len(time):
        return None
    values = np.zeros((len(tracks), len(time)), dtype=np.int64)
    for row, (at, value) in enumerate(curves):
        place = np.searchsorted(at, time, side="right") - 1
        if len(at):
            values[row] = np.where(place >= 0, value[np.maximum(place, 0)], 0).astype(np.int64)
    best = int(values.sum(axis=0).argmax())
    parts: dict[str, int] = {}
    for row, track in enumerate(tracks):
        category = int(timeline.counter_tracks.category[track])
        name = MemoryCategory(category).name.lower() if category >= 0 else ""
        parts[name] = parts.get(name, 0) + int(values[row, best])
    return Peak(int(values[:, best].sum()), parts)
