"""The host's side of a step: an operation cannot start before the framework has launched it.

Launching one lowered operation takes the framework ``host.operation_us`` of the profile: Python and C++ of the module,
the autograd node, and all launches the operation stands for. The host launches the operations of an action (a forward
or backward of one microbatch) one after another in program order, beginning when the first of them starts; between
actions it keeps up. Small kernels, short sequences and many tensor-parallel ranks make a step host-bound.

Left out: the lead a host builds up over a slow backward pass and spends in the next forward pass, the bounded launch
queue, device synchronisations, and CUDA graphs. Gradient reductions and weight gathers are launched by hooks ahead of
time and do not wait.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Stream

from .engine import Execution, execute


def execute_with_host(
    graph: OpGraph, durations: Int64, *, gap_ns: int = 0, operation_ns: int = 0
) -> Execution:
    """Run a graph (:func:`tracesim.engine.execute`), no operation before its launch.

    Raises:
        SimulationError: if operations are left that wait for each other.
    """
    launched, lags = with_launches(graph, durations, operation_ns)
    return execute(launched, durations, gap_ns=gap_ns, lags=lags)


def with_launches(graph: OpGraph, durations: Int64, operation_ns: int) -> tuple[OpGraph, Int64 | None]:
    """The graph with an edge from the first operation of each segment to every other one, and the lags of all edges.

    Args:
        graph: what runs.
        durations: nanoseconds of each operation.
        operation_ns: what launching one operation takes the host; 0 leaves the graph as it is.

    Returns:
        The graph, and for :func:`tracesim.engine.execute` the lag of each of its dependencies: the time from the end of
        the segment's first operation to the launch of the other, negative where that lies before. None without edges.
    """
    if operation_ns <= 0 or not len(graph.segments):
        return graph, None
    targets, sources, launched = _launches(graph, operation_ns)
    count = len(graph.operations)
    rows = np.concatenate([np.repeat(np.arange(count), np.diff(graph.dependency_offsets)), targets])
    dependencies = np.concatenate([graph.dependencies, sources])
    lags = np.concatenate([np.zeros(len(graph.dependencies), dtype=np.int64), launched - durations[sources]])
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return replace(graph, dependency_offsets=offsets, dependencies=dependencies[order]), lags[order]


def _launches(graph: OpGraph, operation_ns: int) -> tuple[Int64, Int64, Int64]:
    """Rows that wait for their launch, the first row of their segment, and the time from its start to the launch."""
    segments = graph.segments
    lengths = segments.end - segments.begin
    first = np.repeat(segments.begin, lengths)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    rows = first + within
    waits = (within > 0) & (graph.operations.stream[rows] != Stream.DP)
    return rows[waits], first[waits], within[waits] * operation_ns
