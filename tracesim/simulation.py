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
from .host import execute_with_host, host_times, with_launches
from .lowering import lower_scenario
from .memory.curves import MemoryCurve, memory_curve
from .memory.job import ReservedMemory, reserved_by_rank
from .rank_jitter import with_rank_jitter
from .rank_spread import rank_spread
from .report import build_report
from .scenario import Scenario
from .simulated_timeline import build_timeline

_MAXIMUM_MEMORY = 2**47
"""Bytes of a rank: a quarter of the addresses the caching allocator hands out."""
_COUNTABLE = 2.0**62


@dataclass(frozen=True)
class Simulation:
    """A simulated training step."""

    scenario: Scenario
    graph: OpGraph
    execution: Execution

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Allocated memory over time, one curve a represented rank."""
        return tuple(memory_curve(self.graph, self.execution, rank) for rank in range(len(self.graph.ranks)))

    @cached_property
    def reserved(self) -> tuple[dict[int, ReservedMemory], ...]:
        """What the caching allocator reserves, for each stage by global rank: the represented rank first."""
        return reserved_by_rank(self.graph)

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
        costs = CostModel(self.scenario.hardware, reserved_sms=self.scenario.overlap.reserved_sms)
        return exposed_in_simulation(
            self.timeline(ranks),
            self.graph,
            self.execution,
            lambda changed: _execute(self.scenario, self.graph, costs, changed),
            _durations(self.scenario, self.graph, costs),
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
        graph = lower_scenario(scenario)
        costs = CostModel(scenario.hardware, reserved_sms=scenario.overlap.reserved_sms)
        execution = _execute(scenario, graph, costs, _durations(scenario, graph, costs))
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
    graph = lower_scenario(scenario)
    costs = CostModel(scenario.hardware)
    return float(_execute(scenario, graph, costs, _durations(scenario, graph, costs)).end.max()) / 1e6


def _durations(scenario: Scenario, graph: OpGraph, costs: CostModel) -> Int64:
    """Nanoseconds of every operation, on the slowest of the ranks that wait for each other in its layer."""
    return with_rank_jitter(scenario, graph, costs.durations_ns(graph))


def _execute(scenario: Scenario, graph: OpGraph, costs: CostModel, durations: Int64) -> Execution:
    """Run a graph; with contention where the scenario asks for it."""
    host = host_times(scenario)
    if scenario.overlap.contention:
        sharing = sharing_policy(costs, graph, durations)
        launched, lags = with_launches(graph, durations, host)
        return execute(launched, durations, gap_ns=costs.gap_ns, lags=lags, sharing=sharing)
    return execute_with_host(graph, durations, gap_ns=costs.gap_ns, host=host)


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
