"""Time of a step that was put together from parts, for rows that hold sums of such parts and no steps that were timed.

Parts are timed by themselves, so nothing of one hides behind another, and what belongs to none is not counted:

- Of the optimizer step there is the update alone, which the host launches ahead. Zeroing gradients, copying them to
  fp32, looking for overflow, the norm over all ranks, clipping and copying masters to weights are in no part.
- All-reduces of tensor parallelism are those of layers. Each adds its time to the pass it is in: where launches bound
  a pass, it does not hide behind them, as it would in a step.
- An all-reduce of gradients beyond the largest timed one is its bytes over that one's bus bandwidth. That is the time
  of two ranks; the factor for more is missing (``compute_comm_time`` in ``src/predictor.py`` of vTrain), so an
  all-reduce of more than 1 GiB takes less time than one below.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, Phase, Stream
from tracesim.scenario import Scenario
from tracesim.simulation import run_graph, step_durations

LARGEST_TIMED_BYTES = 2**30
"""Largest all-reduce in the table of times that rows were put together with."""


def composed_ms(scenario: Scenario, graph: OpGraph) -> float:
    """Iteration time as the sum of parts.

    Args:
        scenario: whose machine and overlap.
        graph: lowered from it.

    Raises:
        ScheduleError, SimulationError: as ``tracesim.simulation.simulate``.
    """
    operations, update = graph.operations, scenario.training.optimizer
    updates = np.array([name.startswith(update) for name in graph.strings], dtype=bool)
    around = (operations.phase == Phase.OPTIMIZER) & ~updates[operations.name]
    durations = np.where(around, 0, step_durations(scenario, graph))
    durations = _gradients_reduced(scenario, graph, durations)
    durations = _behind_their_passes(graph, durations)
    # What is left out is not launched either: only the segments of actions have a host.
    actions = replace(graph, segments=graph.segments.take(np.flatnonzero(graph.segments.stage >= 0)))
    return run_graph(scenario, actions, durations).iteration_ns / 1e6


def _gradients_reduced(scenario: Scenario, graph: OpGraph, durations: Int64) -> Int64:
    """Durations with gradients of more than the largest timed all-reduce at its bus bandwidth."""
    operations, ranks = graph.operations, scenario.parallel.data_parallel_size
    reduces = (operations.stream == Stream.DP) & (operations.communication == Communication.ALL_REDUCE)
    reduces &= operations.phase != Phase.OPTIMIZER
    if ranks == 1 or not reduces.any():
        return durations
    of_rank = np.bincount(operations.rank[reduces], weights=operations.communication_bytes[reduces])
    beyond = reduces.copy()
    beyond[reduces] = of_rank[operations.rank[reduces]] > LARGEST_TIMED_BYTES
    reduced: Int64 = np.where(beyond, np.rint(durations * ranks / (2 * (ranks - 1))), durations).astype(
        np.int64
    )
    return reduced


def _behind_their_passes(graph: OpGraph, durations: Int64) -> Int64:
    """Durations with the tensor-parallel all-reduces of each pass behind its last kernel, those of layers alone."""
    operations, segments = graph.operations, graph.segments
    changed: Int64 = durations.copy()
    of_tensors = operations.stream == Stream.TP
    counted = np.concatenate([[0], np.cumsum(np.where(of_tensors & (operations.layer >= 0), durations, 0))])
    changed[of_tensors] = 0
    compute = np.flatnonzero(operations.stream == Stream.COMPUTE)
    for begin, end in zip(segments.begin.tolist(), segments.end.tolist(), strict=True):
        after = int(np.searchsorted(compute, end))
        if after and compute[after - 1] >= begin:
            changed[compute[after - 1]] += counted[end] - counted[begin]
    return changed
