"""Time of a step whose optimizer is its update alone, for rows that hold no more of it.

Around the update a step zeroes gradients, copies them to fp32, looks for overflow, takes their norm over all ranks,
clips, and copies the masters to the weights. Times that were put together from parts may leave all of that out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Phase
from tracesim.scenario import Scenario
from tracesim.simulation import run_graph, step_durations


def update_only_ms(scenario: Scenario, graph: OpGraph) -> float:
    """Iteration time with nothing but the update in the optimizer step, which the host launches ahead.

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
    # What is left out is not launched either: only the segments of actions have a host.
    actions = replace(graph, segments=graph.segments.take(np.flatnonzero(graph.segments.stage >= 0)))
    return run_graph(scenario, actions, durations).iteration_ns / 1e6
