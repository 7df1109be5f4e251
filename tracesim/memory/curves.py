"""Memory over time: live buffers of each rank, by category, and what was alive at the peak.

A buffer lives from the start of the operation that allocates it to the end of the one that releases it. At one
instant releases come before allocations, as the framework frees an input before it allocates the next output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import MemoryCategory

from ..engine import Execution


@dataclass(frozen=True)
class LiveTensor:
    """Buffers of one name that are alive together."""

    name: str
    category: MemoryCategory
    count: int
    size: int
    """Bytes of all of them."""


@dataclass(frozen=True)
class MemoryCurve:
    """Allocated memory of one rank over a step."""

    time: Int64
    """Distinct moments at which something changes, ascending; the first is 0."""
    by_category: npt.NDArray[np.int64]
    """``[categories, moments]`` bytes from each moment on."""
    peak_moment: int
    """Index into :attr:`time` of the first moment with the most bytes."""
    alive_at_peak: tuple[LiveTensor, ...]
    """Largest first."""

    @property
    def allocated(self) -> Int64:
        """``[moments]`` bytes of all categories."""
        total: Int64 = self.by_category.sum(axis=0)
        return total

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return int(self.allocated[self.peak_moment])


def memory_curve(graph: OpGraph, execution: Execution, rank: int) -> MemoryCurve:
    """The curve of one represented rank (a row of ``graph.ranks``)."""
    buffers = graph.buffers.take(np.flatnonzero(graph.buffers.rank == rank))
    begin = np.where(buffers.allocate >= 0, execution.start[buffers.allocate], 0)
    released = np.flatnonzero(buffers.release >= 0)
    end = execution.end[buffers.release[released]]
    time = np.concatenate([[0], begin, end])
    size = np.concatenate([[0], buffers.size, -buffers.size[released]])
    category = np.concatenate([[0], buffers.category, buffers.category[released]])
    # At one moment releases first: what is freed is there for what is allocated.
    order = np.lexsort((size >= 0, time))
    time, size, category = time[order], size[order], category[order]
    deltas = np.zeros((len(MemoryCategory), len(time)), dtype=np.int64)
    deltas[category, np.arange(len(time))] = size
    last = np.flatnonzero(np.concatenate([time[1:] != time[:-1], [True]]))
    levels = np.cumsum(deltas, axis=1)[:, last]
    moments = time[last]
    peak = int(levels.sum(axis=0).argmax())
    ends = np.full(len(buffers), np.iinfo(np.int64).max)
    ends[released] = end
    alive = np.flatnonzero((begin <= moments[peak]) & (ends > moments[peak]))
    return MemoryCurve(
        moments,
        levels,
        peak,
        _live_tensors(graph, buffers.name[alive], buffers.category[alive], buffers.size[alive]),
    )


def _live_tensors(
    graph: OpGraph, names: npt.NDArray[np.int32], categories: npt.NDArray[np.int8], sizes: Int64
) -> tuple[LiveTensor, ...]:
    keys = names.astype(np.int64) * len(MemoryCategory) + categories
    unique, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    totals = np.zeros(len(unique), dtype=np.int64)
    np.add.at(totals, inverse, sizes)
    order = np.lexsort((unique, -totals))
    return tuple(
        LiveTensor(
            graph.strings[int(unique[i]) // len(MemoryCategory)],
            MemoryCategory(int(unique[i]) % len(MemoryCategory)),
            int(counts[i]),
            int(totals[i]),
        )
        for i in order
    )
