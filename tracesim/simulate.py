"""Simulate a scenario: lower it, cost it, run it, and keep what reports and exporters need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from op_graphs.graph import OpGraph
from op_graphs.timeline import Timeline

from .cost import CostModel
from .engine import Execution, execute
from .lowering import lower_scenario
from .memory import AllocatorUsage
from .memory.curves import MemoryCurve, memory_curve, reserved_memory
from .report import build_report
from .scenario import Scenario
from .simulated_timeline import build_timeline


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
    def reserved(self) -> tuple[AllocatorUsage, ...]:
        """What the caching allocator reserves, for each represented rank."""
        return tuple(reserved_memory(self.graph, rank) for rank in range(len(self.graph.ranks)))

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report as plain data, as documented in ``docs/report.md``."""
        return build_report(self.scenario, self.graph, self.execution, self.memory, self.reserved)

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
    """
    graph = lower_scenario(scenario)
    costs = CostModel(scenario.hardware)
    execution = execute(graph, costs.durations_ns(graph), gap_ns=costs.gap_ns)
    return Simulation(scenario, graph, execution)
