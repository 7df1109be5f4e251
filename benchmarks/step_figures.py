"""What the scoreboard compares of a simulated step, for many scenarios: each one once, on several processes.

A full report also says what hiding each class of communication would save, for which the step is run again several
times, and replays the allocator. The scoreboard computes what its rows have measured, and nothing else; the figures are
the report's.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import RunReport
from tracesim.scenario import Scenario

_GIB = 2**30

Figures = Mapping[str, RunReport | str]
"""By :func:`scenario_key`: the figures of a step, or in words why the simulator refuses it."""


@dataclass(frozen=True)
class Wanted:
    """A scenario, and which of the slow figures are compared."""

    scenario: Scenario
    allocator: bool = False
    optimizer: bool = False
    bubble: bool = False
    layers: bool = False
    composed: bool = False

    @property
    def operations(self) -> int:
        """About how many operations its step has, for sharing out the work."""
        scenario = self.scenario
        return scenario.model.layers * scenario.training.num_microbatches + 100 * scenario.parallel.pp


def scenario_key(scenario: Scenario) -> str:
    """What scenarios that run the same step have in common: all but the name."""
    return repr(dataclasses.replace(scenario, name=""))


def figures_of(
    wanted: Sequence[Wanted], jobs: int = 1, runner: Callable[[Scenario], RunReport] | None = None
) -> Figures:
    """Figures of all scenarios, those that run the same step simulated once.

    ``runner`` replaces the simulator, in this process.
    """
    tasks: dict[str, Wanted] = {}
    for item in wanted:
        key = scenario_key(item.scenario)
        known = tasks.get(key, item)
        tasks[key] = Wanted(
            known.scenario,
            known.allocator or item.allocator,
            known.optimizer or item.optimizer,
            known.bubble or item.bubble,
            known.layers or item.layers,
            known.composed or item.composed,
        )
    if runner is not None:
        return {key: _attempt(runner, item.scenario) for key, item in tasks.items()}
    if jobs <= 1 or len(tasks) <= 1:
        return {key: _figures_or_reason(item) for key, item in tasks.items()}
    # The longest first, so that none of them is left for the end.
    order = sorted(tasks, key=lambda key: -tasks[key].operations)
    with ProcessPoolExecutor(max_workers=jobs, initializer=_collect_rarely) as pool:
        found = pool.map(_figures_or_reason, [tasks[key] for key in order], chunksize=1)
        return dict(zip(order, found, strict=True))


def _collect_rarely() -> None:
    """A tenth of a simulation would go into looking for cycles among objects that live to its end."""
    gc.set_threshold(200_000, 20, 20)


def _figures_or_reason(item: Wanted) -> RunReport | str:
    return _attempt(
        lambda scenario: step_figures(
            scenario, item.allocator, item.optimizer, item.bubble, item.layers, item.composed
        ),
        item.scenario,
    )


def _attempt(runner: Callable[[Scenario], RunReport], scenario: Scenario) -> RunReport | str:
    try:
        return runner(scenario)
    except ValueError as error:
        return f"the simulator refuses it: {' '.join(str(error).split())}"


def step_figures(
    scenario: Scenario,
    allocator: bool = True,
    optimizer: bool = True,
    bubble: bool = True,
    layers: bool = False,
    composed: bool = False,
) -> dict[str, Any]:
    """The part of a scenario's report that rows are compared with, under the report's keys.

    Without ``allocator`` what only its replay tells is None, without ``optimizer`` the time of the optimizer, without
    ``bubble`` the one that papers calculate of a schedule (``calculated_bubble_fraction``, not in the report). With
    ``layers`` there is the memory of the layers alone, with ``composed`` the sum of the parts of a step
    (``composed_time_ms``), which are not in the report either.

    Raises:
        ValueError: as ``tracesim.simulation.simulate``.
    """
    # The simulator takes its time to import, and reading rows does not need it.
    from benchmarks.composed import composed_ms
    from benchmarks.layer_memory import layer_memory
    from benchmarks.schedule_bubble import calculated_bubble
    from op_graphs.vocabulary import MemoryCategory
    from tracesim.report import breakdown
    from tracesim.simulation import simulate

    simulation = simulate(scenario)
    scenario, graph, execution = simulation.scenario, simulation.graph, simulation.execution
    by_rank = [
        {str(number): found.usage.peak_reserved / _GIB for number, found in ranks.items()}
        for ranks in (simulation.reserved if allocator else ())
    ]
    blocks = [
        next(iter(ranks.values())).usage.peak_allocated / _GIB
        for ranks in (simulation.reserved if allocator else ())
    ]
    stages: list[dict[str, Any]] = [
        {
            "optimizer_ms": breakdown(graph, execution, rank)[1] / 1e6 if optimizer else None,
            "peak_allocated_gib": curve.peak / _GIB,
            "peak_allocated_blocks_gib": blocks[rank] if allocator else None,
            "peak_reserved_gib": max(by_rank[rank].values()) if allocator else None,
            "peak_reserved_by_rank_gib": by_rank[rank] if allocator else None,
            "memory_at_peak_gib": {
                category.name.lower(): float(curve.by_category[category, curve.peak_moment]) / _GIB
                for category in MemoryCategory
            },
            **(layer_memory(scenario, graph, execution, rank) if layers else {}),
        }
        for rank, curve in enumerate(simulation.memory)
    ]
    return {
        "iteration_time_ms": execution.iteration_ns / 1e6,
        **({"composed_time_ms": composed_ms(scenario, graph)} if composed else {}),
        "calculated_bubble_fraction": calculated_bubble(scenario, graph, execution) if bubble else None,
        **{
            key: max(stage[key] for stage in stages) if stages[0][key] is not None else None
            for key in ("peak_allocated_gib", "peak_allocated_blocks_gib", "peak_reserved_gib")
        },
        "stages": stages,
    }
