"""Buffers of a rebuilt run, from the curve of allocated memory that its trace holds.

``[memory]`` events say when how much was allocated or freed, as steps of a curve. Each step up is a buffer; a step down
releases the youngest live buffer of that size, and one of a size that none has releases memory from before the trace.
Which of several equal buffers is meant does not change the curve. A buffer lives from the start of the row of the host
in which it was allocated to the end of the one in which it was freed, of several threads the shortest row. So a
replayed curve moves with the host, and is above the measured one by what is freed within one row.
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
    queue = _queue(rebuilt, rank)
    if curve is None or queue < 0:
        return Buffers.empty()
    value = np.rint(curve.value).astype(np.int64)
    change: Int64 = np.concatenate((value[:1], value[1:] - value[:-1]))
    allocate, release, size = _paired(change, _rows_at(rebuilt, rank, curve.time))
    count = len(size)
    return Buffers(
        rank=np.full(count, queue, dtype=np.int32),
        allocate=allocate,
        release=release,
        size=size,
        category=np.full(count, MemoryCategory.TEMPORARY, dtype=np.int8),
        name=np.full(count, -1, dtype=np.int32),
        pool=np.zeros(count, dtype=np.int8),
    )


def _queue(rebuilt: Rebuilt, rank: int) -> int:
    """Queue of the thread of a rank that has most rows; -1 if no thread was recorded."""
    host = _host_rows(rebuilt, rank)
    return int(np.bincount(rebuilt.graph.operations.rank[host]).argmax()) if len(host) else -1


def _host_rows(rebuilt: Rebuilt, rank: int) -> Int64:
    rows = rebuilt.rows
    roles = (RowRole.GAP, RowRole.CALL, RowRole.RETURN)
    threads = np.unique(rebuilt.graph.operations.rank[(rows.rank == rank) & np.isin(rows.role, roles)])
    return np.flatnonzero(np.isin(rebuilt.graph.operations.rank, threads) & (rows.role != RowRole.ANCHOR))


def _rows_at(rebuilt: Rebuilt, rank: int, time: Int64) -> Int64:
    """The row of a thread of the rank that each moment lies in, the shortest where there are several; -1 for none."""
    rows, host = rebuilt.rows, _host_rows(rebuilt, rank)
    lane = rebuilt.graph.operations.rank[host]
    best = np.full(len(time), -1, dtype=np.int64)
    shortest = np.full(len(time), np.iinfo(np.int64).max)
    for number in np.unique(lane).tolist():
        mine = host[lane == number]
        at = np.searchsorted(rows.start[mine], time, side="right") - 1
        row = mine[np.maximum(at, 0)]
        length = rows.end[row] - rows.start[row]
        better = (at >= 0) & (time <= rows.end[row]) & (length < shortest)
        best[better], shortest[better] = row[better], length[better]
        # What comes after all rows belongs to the last.
        best = np.where((best < 0) & (at >= 0), row, best)
    return best


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
        queue = _queue(replayed.rebuilt, rank)
        buffers = graph.buffers.take(np.flatnonzero(graph.buffers.rank == queue))
        if curve is not None and len(buffers):
            begin = np.where(buffers.allocate >= 0, replayed.start[buffers.allocate], replayed.rebuilt.origin)
            freed = np.flatnonzero(buffers.release >= 0)
            time = np.concatenate((begin, replayed.end[buffers.release[freed]]))
            step = np.concatenate((buffers.size, -buffers.size[freed]))
            order = np.lexsort((step >= 0, time))
            found[rank] = int(curve.peak), int(np.cumsum(step[order]).max())
    return found
