"""The automatic schedule of a scenario from the times of its own passes, as zero-bubble runtimes build it.

They run some steps with a schedule for equal times, take the times of each pass, and search a schedule for those
(arXiv:2401.10241, section 3; ``core/pipeline_parallel/zb_schedules.py`` of its code). Their timer waits for the device
before and after each pass and starts before a forward fetches its batch, so it sees passes that nothing runs beside,
and a forward with the time the host takes to come back from that wait. What they take as the time of a transfer is
that of a chain of them down the pipeline and back over its links, each received, waited for and sent on by the host
before the next can begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import OpKind, Stream
from schedules.costs import ActionCosts
from schedules.registry import takes_profiled_times, with_times, without_flushes

from .engine import Execution
from .lowering import lower_scenario
from .scenario import Scenario

_DIGITS_MS = 3


def with_profiled_schedule(scenario: Scenario, run: Callable[[Scenario, OpGraph], Execution]) -> Scenario:
    """The scenario with times in its schedule, in ms and to the microsecond, where that says ``times=profiled``.

    Args:
        scenario: any; without such a schedule it comes back as it is.
        run: executes a graph.
    """
    parallel = scenario.parallel
    if not takes_profiled_times(scenario.schedule):
        return scenario
    profile = replace(
        scenario,
        schedule=with_times(without_flushes(scenario.schedule), ActionCosts()),
        training=replace(
            scenario.training, num_microbatches=min(scenario.training.num_microbatches, parallel.pp)
        ),
        overlap=replace(scenario.overlap, contention=False),
    )
    graph = lower_scenario(profile)
    costs = pass_costs(
        graph, run(profile, graph), parallel.stages // 2, fetch_ns(scenario), posting_ns(scenario)
    )
    rounded = {
        name: round(getattr(costs, name) / 1e6, _DIGITS_MS)
        for name in ("forward", "backward_input", "backward_weight", "transfer")
    }
    return replace(scenario, schedule=with_times(scenario.schedule, ActionCosts(**rounded)))


def fetch_ns(scenario: Scenario) -> float:
    """What a timer of forwards sees of the host where they fetch their batch first, nanoseconds."""
    return 1e3 * scenario.hardware.host.resume_us if scenario.libraries.batch_fetch_waits else 0.0


def posting_ns(scenario: Scenario) -> float:
    """What the host adds to a transfer that is received and sent on before the next: launching both, nanoseconds."""
    return 2e3 * scenario.hardware.host.operation_us


def pass_costs(
    graph: OpGraph, execution: Execution, stage: int, fetch: float = 0.0, posting: float = 0.0
) -> ActionCosts:
    """Median times of the passes of a stage, and the mean of the transfers, in nanoseconds.

    Args:
        graph: of a step.
        execution: of it.
        stage: whose passes.
        fetch: added to a forward.
        posting: added to a transfer.
    """
    segments = graph.segments
    lengths: dict[str, list[int]] = {letter: [] for letter in "FBIW"}
    for row in np.flatnonzero(segments.stage == stage):
        rows = np.arange(segments.begin[row], segments.end[row])
        rows = rows[graph.operations.stream[rows] == Stream.COMPUTE]
        name = graph.strings[segments.name[row]]
        if len(rows) and name[0] in lengths and "+" not in name:
            lengths[name[0]].append(int(execution.end[rows].max() - execution.start[rows].min()))
    times = {letter: float(median(found)) for letter, found in lengths.items() if found}
    transfers = np.flatnonzero(graph.operations.kind == OpKind.P2P)
    lasts = (execution.end - execution.start)[transfers]
    for_input = times.get("I", times.get("B", 0.0))
    return ActionCosts(
        forward=times.get("F", 0.0) + fetch,
        backward_input=for_input,
        backward_weight=times.get("W", 0.0),
        transfer=float(np.mean(lasts)) + posting if len(lasts) else 0.0,
    )
