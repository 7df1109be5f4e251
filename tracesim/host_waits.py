"""Where the host waits for its device in a pass: to fetch the batch of a forward, and to look at its loss.

Megatron-LM until late 2023 fetched batches so on every pipeline stage: ``get_batch`` broadcasts the sizes of the batch
and copies them back to the host (``core/tensor_parallel/data.py``), which waits for all that is queued. The forward
then begins
``host.resume_us`` after what ran before it, and after what it received (``libraries.batch_fetch_waits``). Where the
host has just waited for a batch of transfers nothing is queued any more, and the wait costs nothing.

Megatron-LM since late 2024 checks the loss of every microbatch for NaN and infinity on the host
(``--check-for-nan-in-loss-and-grad``, on by default; ``core/rerun_state_machine.py``, ``validate_result``, takes the
truth of a tensor on the device). What comes behind the forward that has the loss, its backward, then begins
``host.resume_us`` after it (``libraries.nan_checks``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import OpKind, Phase, Stream


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
    lags = np.where(received, np.maximum(lags, resume_ns), lags)
    return _with_edges(graph, lags, begins[follows], before[follows], resume_ns)


def with_loss_checks(graph: OpGraph, lags: Int64, resume_ns: int) -> tuple[OpGraph, Int64]:
    """The graph with an edge from every forward that computes a loss to the compute behind it, and all lags.

    Args:
        graph: what runs; the rows of a rank stand behind each other.
        lags: nanoseconds of each dependency of the graph.
        resume_ns: from the end of the forward to the start of what follows.
    """
    operations, segments = graph.operations, graph.segments
    losses = np.flatnonzero((operations.kind == OpKind.LOSS) & (operations.phase == Phase.FORWARD))
    holds = np.searchsorted(losses, segments.begin) < np.searchsorted(losses, segments.end)
    begins_forward = holds.copy()
    begins_forward[holds] = operations.phase[segments.begin[holds]] == Phase.FORWARD
    compute = np.flatnonzero(operations.stream == Stream.COMPUTE)
    behind = np.searchsorted(compute, segments.end[begins_forward])
    behind = behind[(behind > 0) & (behind < len(compute))]
    last, following = compute[behind - 1], compute[behind]
    same = operations.rank[last] == operations.rank[following]
    return _with_edges(graph, lags, following[same], last[same], resume_ns)


def _with_edges(
    graph: OpGraph, lags: Int64, waiting: Int64, sources: Int64, lag_ns: int
) -> tuple[OpGraph, Int64]:
    """The graph with edges from ``sources`` to ``waiting``, each with the same lag, and the lags of all edges."""
    count = len(graph.operations)
    targets = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    rows = np.concatenate([targets, waiting])
    dependencies = np.concatenate([graph.dependencies, sources])
    changed = np.concatenate([lags, np.full(len(waiting), lag_ns)])
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return (
        replace(graph, dependency_offsets=offsets, dependencies=dependencies[order]),
        changed[order].astype(np.int64),
    )
