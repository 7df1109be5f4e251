"""Device queues of a run whose rows have been put in another order."""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Int64
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt


def queue_again(rebuilt: Rebuilt, old: Int64, part: Rebuilt) -> Edges:
    """The order of the device slices of each queue as dependencies.

    Behind the slice it was behind before a slice keeps its distance, else it has the usual one of the trace, or its own
    where that is shorter.

    Args:
        rebuilt: the run before.
        old: row of it for each row of the changed run.
        part: the changed run.
    """
    edges = rebuilt.edges
    queued = np.flatnonzero(edges.kind == EdgeKind.QUEUE)
    before = np.full(len(rebuilt.rows), -1, dtype=np.int64)
    lag = np.full(len(rebuilt.rows), rebuilt.delays.queue, dtype=np.int64)
    before[edges.target[queued]], lag[edges.target[queued]] = edges.source[queued], edges.lag[queued]
    device = np.flatnonzero(part.on_device())
    lane = part.graph.operations.rank[device]
    same = lane[1:] == lane[:-1]
    source, target = device[:-1][same], device[1:][same]
    as_it_was = before[old[target]] == old[source]
    usual = np.minimum(lag[old[target]], rebuilt.delays.queue)
    lags = np.where(as_it_was, lag[old[target]], usual)
    return Edges(source, target, lags, np.full(len(source), EdgeKind.QUEUE))
