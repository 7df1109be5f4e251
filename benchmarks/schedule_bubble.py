"""The bubble of a schedule as the zero-bubble papers calculate it, from the passes of a simulated step.

arXiv:2401.10241, section 5.3: every stage takes the profiled times of a forward, of a backward for the input and for
the weights, and of a transfer; the *cost* is the longest time of a rank from its first action to its last, and the
bubble is what it exceeds the passes of all microbatches by, over the cost. It is a figure of the schedule: embedding,
loss and optimizer, stages that differ, and a host that waits are no part of it, as they are of
``pipeline_bubble_fraction``.
"""

from __future__ import annotations

from op_graphs.graph import OpGraph
from schedules import ActionCosts, Schedule, simulate_costs
from schedules.registry import build_schedule
from tracesim.engine import Execution
from tracesim.profiled_schedule import fetch_ns, pass_costs, posting_ns
from tracesim.scenario import Scenario


def calculated_bubble(scenario: Scenario, graph: OpGraph, execution: Execution) -> float:
    """Bubble rate of the scenario's schedule, from the passes of its middle stage; 0 without a pipeline."""
    parallel = scenario.parallel
    if parallel.pp == 1:
        return 0.0
    schedule = build_schedule(
        scenario.schedule, parallel.pp, parallel.vpp, scenario.training.num_microbatches
    )
    costs = pass_costs(graph, execution, schedule.stages // 2, fetch_ns(scenario), posting_ns(scenario))
    return bubble_rate(schedule, costs)


def bubble_rate(schedule: Schedule, costs: ActionCosts) -> float:
    """What the longest rank exceeds its own passes by, as a share of its time."""
    times = simulate_costs(schedule, costs)
    cost, rank = max((span, rank) for rank, span in enumerate(times.rank_spans))
    return (cost - times.rank_busy[rank]) / cost if cost else 0.0
