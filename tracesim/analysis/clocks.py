"""Clocks of the ranks: how far apart, told by collectives that end on all members at once.

The members of an all-reduce, all-gather, reduce-scatter, all-to-all or barrier leave it within tens of microseconds of
each other, because none can finish before the last has arrived. So the median difference of their ends is the offset
of two clocks. Offsets are taken relative to the lowest rank, along chains of shared groups where two ranks share none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication
from tracesim.analysis.matching import Matches

LEAST_CORRECTION_NS = 20_000
"""Offsets below this are left alone: the ends of a collective differ by that much on equal clocks."""
LEAST_CERTAINTY = 5
"""Offsets below this many spreads are left alone."""

_SYNCHRONISING = (
    Communication.ALL_REDUCE,
    Communication.ALL_GATHER,
    Communication.REDUCE_SCATTER,
    Communication.ALL_TO_ALL,
    Communication.BARRIER,
)
_LEAST_OPERATIONS = 3


@dataclass(frozen=True)
class ClockOffsets:
    """Offset of the clock of each rank; columns of shape [ranks]."""

    offset: Int64
    """Nanoseconds its clock is ahead of the reference; 0 where nothing tells."""
    spread: Int64
    """Median absolute deviation of the single differences."""
    operations: Int64
    """Collectives the offset is taken from; 0 for references and ranks without any."""
    corrected: Bool
    """Whether the offset is large and certain enough to be taken out."""


def estimate_offsets(timeline: Timeline, matches: Matches) -> ClockOffsets:
    """Offsets of all ranks from their common collectives."""
    ranks = len(timeline.ranks)
    offset, spread = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    operations = np.zeros(ranks, dtype=np.int64)
    slices = timeline.slices
    used = np.isin(slices.communication[matches.row], _SYNCHRONISING)
    row, operation = matches.row[used], matches.operation[used]
    rank = timeline.slice_ranks()[row]
    ends = np.full((ranks, len(matches.method)), np.iinfo(np.int64).min, dtype=np.int64)
    ends[rank, operation] = slices.start[row] + slices.duration[row]
    shown: Bool = ends > np.iinfo(np.int64).min
    open_ranks = list(range(ranks))
    while open_ranks and not timeline.simulated:
        known = [open_ranks.pop(0)]
        while known:
            origin = known.pop(0)
            for other in list(open_ranks):
                common = shown[origin] & shown[other]
                if common.sum() >= _LEAST_OPERATIONS:
                    difference = ends[other, common] - ends[origin, common]
                    median = int(np.median(difference))
                    offset[other] = offset[origin] + median
                    spread[other] = int(np.median(np.abs(difference - median)))
                    operations[other] = int(common.sum())
                    open_ranks.remove(other)
                    known.append(other)
    certain: Bool = (np.abs(offset) >= LEAST_CORRECTION_NS) & (np.abs(offset) > LEAST_CERTAINTY * spread)
    return ClockOffsets(offset, spread, operations, certain)


def align_clocks(timeline: Timeline, offsets: ClockOffsets) -> Timeline:
    """The timeline with the offsets that are certain taken out of all times."""
    if not offsets.corrected.any():
        return timeline
    shift = np.where(offsets.corrected, -offsets.offset, 0)
    samples, steps, slices = timeline.counter_samples, timeline.steps, timeline.slices
    return replace(
        timeline,
        slices=slices.with_columns(start=slices.start + shift[timeline.slice_ranks()]),
        counter_samples=samples.with_columns(
            time=samples.time + shift[timeline.counter_tracks.rank[samples.track]]
        ),
        steps=steps.with_columns(start=steps.start + shift[steps.rank], end=steps.end + shift[steps.rank]),
    )
