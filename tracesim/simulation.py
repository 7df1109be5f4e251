"""Simulate a scenario: lower it, cost it, run it, and keep what reports and exporters need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.timeline import Timeline

from .contention import execute
from .cost import CostModel
from .cost.contention import sharing_policy
from .engine import Execution
from .errors import ScenarioError
from .exposed import ExposedCommunication, affordable_reruns, describe_classes, exposed_in_simulation
from .host import host_times, with_launches
from .lowering import lower_scenario
from .memory.caching_allocator import AllocatorSettings
from .memory.curves import MemoryCurve, memory_curve
from .memory.job import ReservedMemory, reserved_by_rank
from .profiled_schedule import with_profiled_schedule
from .rank_jitter import with_rank_jitter
from .rank_spread import rank_spread
from .report import build_report
from .scenario import Scenario
from .simulated_timeline import build_timeline
from .steady_state import steady_execution

_MAXIMUM_MEMORY = 2**47
"""Bytes of a rank: a quarter of the addresses the caching allocator hands out."""
_COUNTABLE = 2.0**62


@dataclass(frozen=True)
class Simulation:
    """A simulated training step."""

    scenario: Scenario
    """As given, but for times of passes in an automatic schedule."""
    graph: OpGraph
    execution: Execution

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Allocated memory over time, one curve a represented rank."""
        return tuple(memory_curve(self.graph, self.execution, rank) for rank in range(len(self.graph.ranks)))

    @cached_property
    def reserved(self) -> tuple[dict[int, ReservedMemory], ...]:
        """What the caching allocator reserves, for each stage by global rank: the represented rank first."""
        settings = AllocatorSettings(expandable_segments=self.scenario.libraries.expandable_segments)
        return reserved_by_rank(self.graph, settings)

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report as plain data, as documented in ``docs/report.md``."""
        spread = rank_spread(self.scenario, self.graph, self.execution, self.memory)
        provenances = CostModel(self.scenario.hardware).provenances(self.graph)
        report = build_report(
            self.scenario, self.graph, self.execution, self.memory, self.reserved, provenances, spread
        )
        exposed = self.exposed_communication(
            reruns=affordable_reruns(self.graph, self.scenario.overlap.contention)
        )
        return {**report, "exposed_communication": describe_classes(exposed)}

    def exposed_communication(
        self, ranks: Sequence[int] | None = None, reruns: int | None = None
    ) -> ExposedCommunication:
        """Exposed communication by class, with what hiding each would save.

        Args:
            ranks: as in :meth:`timeline`.
            reruns: classes whose saving is found by running the step again; all of them by default.
        """
        return exposed_in_simulation(
            self.timeline(ranks),
            self.graph,
            self.execution,
            lambda changed: run_graph(self.scenario, self.graph, changed),
            step_durations(self.scenario, self.graph),
            reruns,
        )

    def timeline(self, ranks: Sequence[int] | None = None) -> Timeline:
        """The timeline of one rank a stage, or of the given global ranks.

        A rank that is not represented runs as the rank that stands for its stage.

        Raises:
            ScenarioError: if a rank is outside the world, or the ranks together make more slices than a trace can hold.
        """
        return build_timeline(self.scenario, self.graph, self.execution, self.memory, self.reserved, ranks)


def simulate(scenario: Scenario) -> Simulation:
    """Simulate one training step of a scenario.

    Raises:
        ScheduleError: if the pipeline schedule cannot be executed.
        SimulationError: if operations wait for each other.
        ScenarioError: if sizes or times are beyond what can be counted.
    """
    try:
        scenario = with_profiled_schedule(scenario, run_graph)
        graph = lower_scenario(scenario)
        execution = run_graph(scenario, graph)
    except OverflowError as error:
        raise ScenarioError(
            f"{scenario.name}: a size or time is beyond 64 bits (8 EiB, 292 years); check training.seq_len and "
            "micro_batch_size, the sizes of the model and the rates of the hardware"
        ) from error
    _check_memory(graph, execution)
    return Simulation(scenario, graph, execution)


def iteration_ms(scenario: Scenario) -> float:
    """Iteration time alone, without memory and report.

    Raises:
        ScheduleError, SimulationError: as :func:`simulate`.
    """
    scenario = with_profiled_schedule(scenario, run_graph)
    return run_graph(scenario, lower_scenario(scenario)).iteration_ns / 1e6


def step_durations(scenario: Scenario, graph: OpGraph) -> Int64:
    """Nanoseconds of every operation, on the slowest of the ranks that wait for each other in its layer."""
    return with_rank_jitter(scenario, graph, _costs(scenario).durations_ns(graph))


def run_graph(scenario: Scenario, graph: OpGraph, durations: Int64 | None = None) -> Execution:
    """Run a graph as a scenario says: launched by its host, and with contention where it asks for that.

    Args:
        scenario: whose machine, host and overlap.
        graph: lowered from it, or from a part of its step.
        durations: nanoseconds of each operation by itself; :func:`step_durations` by default.
    """
    costs, host = _costs(scenario), host_times(scenario)
    lasts = step_durations(scenario, graph) if durations is None else durations
    sharing = sharing_policy(costs, graph, lasts) if scenario.overlap.contention else None
    launched, lags = with_launches(graph, lasts, host)

    def run(rank_starts: Sequence[int] | None) -> Execution:
        return execute(
            launched, lasts, gap_ns=costs.gap_ns, lags=lags, sharing=sharing, rank_starts=rank_starts
        )

    return steady_execution(graph, run) if scenario.training.post_validation else run(None)


def _costs(scenario: Scenario) -> CostModel:
    return CostModel(scenario.hardware, reserved_sms=scenario.overlap.reserved_sms)


def _check_memory(graph: OpGraph, execution: Execution) -> None:
    for rank in range(len(graph.ranks)):
        own = graph.buffers.rank == rank
        # The sum of all buffers in floats first: it cannot wrap, and where it is small the peak is too.
        total = float(graph.buffers.size[own].astype(np.float64).sum())
        if total <= _MAXIMUM_MEMORY:
            continue
        if total > _COUNTABLE or memory_curve(graph, execution, rank).peak > _MAXIMUM_MEMORY:
            raise ScenarioError(
                f"rank {graph.ranks[rank]} would hold more than {_MAXIMUM_MEMORY // 2**40} TiB at once, which cannot "
                "be simulated; check training.seq_len and micro_batch_size, and the sizes of the model"
            )
