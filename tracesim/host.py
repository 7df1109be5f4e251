"""The host's side of a step: an operation cannot start before the framework has launched it.

Launching an operation takes the framework a share of ``host.operation_us`` of the profile, the time of a module, by
what it runs (:mod:`tracesim.host_work`). What there is once for each expert of a rank takes ``host.launch_us`` more for
each further kernel: the products of a grouped GEMM that is launched expert by expert, and casts. Pieces of one product
take that alone. The host launches the operations of an action (a forward or backward of one microbatch) one after
another in program order, beginning when the first of them starts; between actions it keeps up. Small kernels, short
sequences and many tensor-parallel ranks make a step host-bound.

Where the host waits for the device, it loses its lead:

- Transfers between stages that are not overlapped: Megatron-LM synchronises the device after each batch of them, so the
  next action begins ``host.resume_us`` later, with the return from the wait, the step function, and the first launches.
- A forward that fetches its batch first, and one whose loss is checked (:mod:`tracesim.host_waits`).
- Operations of kind ``HOST`` with a shape inside an action (the token counts of experts): what follows is launched from
  their end. Those without a shape are work of the host that launches nothing and only takes its time (checkpoints,
  ``op_graphs.lower_checkpoint``).

Operations that are captured into a CUDA graph are launched together: the graph takes ``host.operation_us``, once for
all of them. With the whole iteration captured nothing is left to launch, and the host waits for nothing.

Left out: the lead a host builds up over a slow backward pass and spends in the next forward pass, and the bounded
launch queue. Gradient reductions and weight gathers are launched by hooks ahead of time and do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.cuda_graphs import FULL_ITERATION
from op_graphs.graph import OpGraph
from op_graphs.overlap.registry import TRANSFERS
from op_graphs.vocabulary import OpKind, Stream

from .engine import Execution, execute
from .host_waits import with_batch_waits, with_loss_checks
from .host_work import launch_work
from .scenario import Scenario

_TRANSFERS = (
    Stream.PP_RECEIVE_PREVIOUS,
    Stream.PP_SEND_NEXT,
    Stream.PP_RECEIVE_NEXT,
    Stream.PP_SEND_PREVIOUS,
)


@dataclass(frozen=True)
class HostTimes:
    """What the host takes, in nanoseconds; 0 leaves that part of it out."""

    operation_ns: int = 0
    """Launching a module, with its first kernel."""
    resume_ns: int = 0
    """From the end of a transfer between stages that the host waits for to the start of the action behind it."""
    batch_ns: int = 0
    """The same from the end of what ran before a forward whose batch the host waits for."""
    loss_ns: int = 0
    """The same from the end of a forward whose loss the host looks at."""
    launch_ns: int = 0
    """Launching each further kernel of an operation."""
    launches_experts: bool = False
    """Whether a grouped product is launched expert by expert."""


def host_times(scenario: Scenario) -> HostTimes:
    """What the host of a scenario takes; it waits for transfers between stages where they are not overlapped."""
    if scenario.training.cuda_graphs == (FULL_ITERATION,):
        return HostTimes()
    host = scenario.hardware.host
    waits = TRANSFERS.chosen(scenario.overlap.p2p).host_waits
    resume_ns = round(host.resume_us * 1e3)
    return HostTimes(
        round(host.operation_us * 1e3),
        resume_ns if waits else 0,
        resume_ns if scenario.libraries.batch_fetch_waits else 0,
        resume_ns if scenario.libraries.nan_checks else 0,
        launch_ns=round(host.launch_us * 1e3),
        launches_experts=scenario.hardware.gemm.grouped_per_expert_us > 0,
    )


def execute_with_host(graph: OpGraph, durations: Int64, *, gap_ns: int = 0, host: HostTimes) -> Execution:
    """Run a graph (:func:`tracesim.engine.execute`), no operation before its launch.

    Raises:
        SimulationError: if operations are left that wait for each other.
    """
    launched, lags = with_launches(graph, durations, host)
    return execute(launched, durations, gap_ns=gap_ns, lags=lags)


def with_launches(graph: OpGraph, durations: Int64, host: HostTimes) -> tuple[OpGraph, Int64 | None]:
    """The graph with an edge to every operation from what its launch counts from, and the lags of all edges.

    Args:
        graph: what runs.
        durations: nanoseconds of each operation.
        host: what the host takes.

    Returns:
        The graph, and for :func:`tracesim.engine.execute` the lag of each of its dependencies: the time from the end of
        the operation that a launch counts from to the launch, negative where that lies before. None without lags.
    """
    if host == HostTimes() or not len(graph.segments):
        return graph, None
    count = len(graph.operations)
    targets = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    stream = graph.operations.stream
    resumes = np.isin(stream[graph.dependencies], _TRANSFERS) & ~np.isin(stream[targets], _TRANSFERS)
    lags = np.where(resumes, host.resume_ns, 0)
    if host.batch_ns:
        graph, lags = with_batch_waits(graph, lags, host.batch_ns)
        targets = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    if host.loss_ns:
        graph, lags = with_loss_checks(graph, lags, host.loss_ns)
        targets = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    if not host.operation_ns:
        return graph, lags.astype(np.int64)
    launched, sources, launches = _launches(graph, durations, host)
    rows = np.concatenate([targets, launched])
    dependencies = np.concatenate([graph.dependencies, sources])
    lags = np.concatenate([lags, launches])
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    changed = replace(graph, dependency_offsets=offsets, dependencies=dependencies[order])
    return changed, lags[order].astype(np.int64)


def _launches(graph: OpGraph, durations: Int64, host: HostTimes) -> tuple[Int64, Int64, Int64]:
    """Rows that wait for their launch, the row it counts from, and the time from that row's end to the launch.

    Launches count from the start of the first operation of a segment, and from the end of one that the host waits for.
    """
    segments = graph.segments
    lengths = segments.end - segments.begin
    first = np.repeat(segments.begin, lengths)
    ends = np.cumsum(lengths)
    rows = first + np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    operations = graph.operations
    # What stands on the host's stream and has no shape is work of the host alone, which waits for nothing.
    alone = (operations.stream[rows] == Stream.HOST) & (operations.shape[rows] < 0)
    blocking = (operations.kind[rows] == OpKind.HOST) & ~alone
    # The last blocking row before each row; where there is none in its segment, the first row of the segment.
    last = np.maximum.accumulate(np.where(blocking, rows, -1))
    before = np.concatenate([[-1], last[:-1]])
    restarted = before >= first
    source = np.where(restarted, before, first)
    ahead = np.where(restarted, 0, durations[source])
    launched = np.zeros(len(graph.operations), dtype=np.int64)
    launched[rows] = np.cumsum(_launch_ns(graph, rows, host))
    waits = (rows > first) & (graph.operations.stream[rows] != Stream.DP)
    return rows[waits], source[waits], (launched[rows] - launched[source] - ahead)[waits]


def _launch_ns(graph: OpGraph, rows: Int64, host: HostTimes) -> Int64:
    """Time the host takes to launch each row, of a CUDA graph all with its first one."""
    shares, further = launch_work(graph, rows, launches_experts=host.launches_experts)
    taken = np.rint(shares * host.operation_ns) + further * host.launch_ns
    taken = np.where(_goes_on(graph, rows), host.launch_ns, taken)
    graphs = graph.operations.cuda_graph[rows]
    goes_on = np.concatenate([[False], (graphs[1:] == graphs[:-1]) & (graphs[1:] >= 0)])
    taken = np.where(graphs >= 0, host.operation_ns, taken)
    return np.where(goes_on, 0, taken).astype(np.int64)


def _goes_on(graph: OpGraph, rows: Int64) -> Bool:
    """Rows that are further pieces of the product before them."""
    operations = graph.operations
    found = np.zeros(len(rows), dtype=np.bool_)
    on_compute = np.flatnonzero(operations.stream[rows] == Stream.COMPUTE)
    at = rows[on_compute]
    again = operations.kind[at[1:]] == OpKind.GEMM
    for column in (operations.name, operations.layer, operations.microbatch, operations.phase):
        again = again & (column[at[1:]] == column[at[:-1]])
    found[on_compute[1:][again]] = True
    return found
