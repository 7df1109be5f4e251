"""Where the host waits for its device at the start of a forward, to fetch the batch.

Megatron-LM until late 2023 did so on every pipeline stage: ``get_batch`` broadcasts the sizes of the batch and copies
them back to the host (``core/tensor_parallel/data.py``), which waits for all that is queued. The forward then begins
``host.resume_us`` after what ran before it, and after what it received (``libraries.batch_fetch_waits``). Where the
host has just waited for a batch of transfers nothing is queued any more, and the wait costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Phase, Stream


def with_batch_waits(graph: OpGraph, lags: Int64, resume_ns: int) -> tuple[OpGraph, Int64]:
    """The graph with an edge to every forward from the compute before it, and the lags of all edges.

    Args:
        graph: what runs; the rows of a rank stand behind each other.
        lags: nanoseconds of each dependency of the graph.
        resume_ns: from when the host finds the device done to the start of the forward.
    """
    operations, segments = graph.operations, graph.segments
    count = len(operations)
    forward = segments.stage >= 0
    forward[forward] = operations.phase[segments.begin[forward]] == Phase.FORWARD
    begins = segments.begin[forward]
    of_forward = np.zeros(count + 1, dtype=np.int64)
    np.add.at(of_forward, begins, 1)
    np.add.at(of_forward, segments.end[forward], -1)
    inside = np.cumsum(of_forward)[:-1] > 0
    targets = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    received = inside[targets] & ~inside[graph.dependencies]
    # The last compute row in front of each forward, on the same rank.
    compute = np.where(operations.stream == Stream.COMPUTE, np.arange(count), -1)
    before = np.concatenate([[-1], np.maximum.accumulate(compute)[:-1]])[begins]
    follows = (before >= 0) & (operations.rank[np.maximum(before, 0)] == operations.rank[begins])
    rows = np.concatenate([targets, begins[follows]])
    dependencies = np.concatenate([graph.dependencies, before[follows]])
    changed = np.concatenate(
        [np.where(received, np.maximum(lags, resume_ns), lags), np.full(int(follows.sum()), resume_ns)]
    )
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return replace(graph, dependency_offsets=offsets, dependencies=dependencies[order]), changed[
        order
    ].astype(np.int64)
