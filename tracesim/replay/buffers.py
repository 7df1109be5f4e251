"""Buffers of a rebuilt run, from the curve of allocated memory that its trace holds.

``[memory]`` events say when how much was allocated or freed, as steps of a curve. Each step up is a buffer; a step down
releases the youngest live buffer of that size, and one of a size that none has releases memory from before the trace.
Which of several equal buffers is meant does not change the curve. A buffer belongs to the rows of the thread that does
most work on its rank: from the start of the row in which it was allocated to the end of the one in which it was freed,
so a replayed curve is moved by as much as the host is, and is above the measured one by what one row frees.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import Buffers
from op_graphs.vocabulary import MemoryCategory
from tracesim.replay.graph import Rebuilt, RowRole
from tracesim.replay.run import Replayed
from tracesim.replay.what_if.memory import allocated_memory


def with_buffers(rebuilt: Rebuilt) -> Rebuilt:
    """The run with the buffers of its trace in ``graph.buffers``; as it is if the trace holds no curve of them.

    Their ``rank`` is the queue of the thread (row of ``graph.ranks``).
    """
    found = [_of_rank(rebuilt, rank) for rank in range(len(rebuilt.timeline.ranks))]
    return replace(rebuilt, graph=replace(rebuilt.graph, buffers=Buffers.concatenate(found)))


def _of_rank(rebuilt: Rebuilt, rank: int) -> Buffers:
    curve = allocated_memory(rebuilt.timeline, rank)
    lane, rows = _thread(rebuilt, rank)
    if curve is None or not len(rows):
        return Buffers.empty()
    change = np.diff(np.rint(curve.value).astype(np.int64), prepend=0)
    at = np.searchsorted(rebuilt.rows.start[rows], curve.time, side="right") - 1
    row = np.where(at >= 0, rows[np.maximum(at, 0)], -1)
    allocate, release, size = _paired(change, row)
    count = len(size)
    return Buffers(
        rank=np.full(count, lane, dtype=np.int32),
        allocate=allocate,
        release=release,
        size=size,
        category=np.full(count, MemoryCategory.TEMPORARY, dtype=np.int8),
        name=np.full(count, -1, dtype=np.int32),
    )


def _thread(rebuilt: Rebuilt, rank: int) -> tuple[int, Int64]:
    """Queue and rows of the thread of a rank that has most rows; rows in order of time, which do not overlap."""
    rows = rebuilt.rows
    lane = rebuilt.graph.operations.rank.astype(np.int64)
    host = (rows.rank == rank) & np.isin(rows.role, (RowRole.GAP, RowRole.CALL, RowRole.RETURN))
    if not host.any():
        return -1, np.zeros(0, dtype=np.int64)
    busiest = int(np.bincount(lane[host]).argmax())
    return busiest, np.flatnonzero((lane == busiest) & (rows.role != RowRole.ANCHOR))


def _paired(change: Int64, row: Int64) -> tuple[Int64, Int64, Int64]:
    """Rows that allocate and release, and bytes, of the buffers that explain the steps of a curve."""
    allocate: list[int] = []
    release: list[int] = []
    size: list[int] = []
    live: dict[int, list[int]] = {}
    for step, where in zip(change.tolist(), row.tolist(), strict=True):
        if step > 0:
            live.setdefault(step, []).append(len(size))
            allocate.append(where)
            release.append(-1)
            size.append(step)
        elif step < 0:
            same = live.get(-step)
            if same:
                release[same.pop()] = where
            else:
                allocate.append(-1)
                release.append(where)
                size.append(-step)
    # The first value of the curve is what was there before; nothing in the trace allocated it.
    if allocate and len(change) and change[0] > 0:
        allocate[0] = -1
    return (
        np.array(allocate, dtype=np.int64),
        np.array(release, dtype=np.int64),
        np.array(size, dtype=np.int64),
    )


def peaks(replayed: Replayed) -> dict[int, tuple[int, int]]:
    """Peak of allocated bytes, measured and replayed, of each rank (row of the timeline's ranks) that has a curve."""
    graph = replayed.rebuilt.graph
    found = {}
    for rank in range(len(replayed.rebuilt.timeline.ranks)):
        curve = allocated_memory(replayed.rebuilt.timeline, rank)
        lane = _thread(replayed.rebuilt, rank)[0]
        buffers = graph.buffers.take(np.flatnonzero(graph.buffers.rank == lane))
        if curve is not None and len(buffers):
            begin = np.where(buffers.allocate >= 0, replayed.start[buffers.allocate], replayed.rebuilt.origin)
            freed = np.flatnonzero(buffers.release >= 0)
            time = np.concatenate((begin, replayed.end[buffers.release[freed]]))
            step = np.concatenate((buffers.size, -buffers.size[freed]))
            order = np.lexsort((step >= 0, time))
            found[rank] = int(curve.peak), int(np.cumsum(step[order]).max())
    return found
