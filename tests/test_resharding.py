"""When sharded weights are gathered and dropped: counts, memory and what waits, by policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.vocabulary import MemoryCategory, OpKind, Stream
from tests.dense_scenarios import dense_mapping
from tests.scenario_mappings import problems_of
from tests.test_lowering import assert_nothing_leaks
from tracesim.scenario import load_scenario, scenario_to_mapping
from tracesim.simulation import Simulation, simulate

LAYERS, MICROBATCHES = 4, 2
UNITS = LAYERS + 2
"""Layers, and both ends of the model."""


def run(hardware: Any = "toy", **parallel: Any) -> Simulation:
    mapping = dense_mapping(
        hardware=hardware,
        parallel={"dp": 2, "zero": 3, **parallel},
        training__num_microbatches=MICROBATCHES,
    )
    simulation = simulate(load_scenario(mapping))
    assert_nothing_leaks(simulation.graph)
    return simulation


def rows_named(simulation: Simulation, name: str) -> np.ndarray:
    graph = simulation.graph
    return np.flatnonzero(np.array(graph.strings)[graph.operations.name] == name)


@pytest.mark.parametrize(
    ("parallel", "gathers", "reductions"),
    [
        # Forward and backward of each microbatch gather every unit.
        ({}, 2 * MICROBATCHES * UNITS, MICROBATCHES * UNITS),
        ({"reshard": "always"}, 2 * MICROBATCHES * UNITS, MICROBATCHES * UNITS),
        # Gathered weights wait for the backward.
        ({"reshard": "never"}, MICROBATCHES * UNITS, MICROBATCHES * UNITS),
        # A pipeline gathers once and reduces once a step, unless it drops weights behind every unit.
        ({"pp": 2}, UNITS, UNITS),
        ({"pp": 2, "reshard": "never"}, UNITS, UNITS),
        ({"pp": 2, "reshard": "always"}, 2 * MICROBATCHES * UNITS, UNITS),
    ],
)
def test_how_often_units_are_gathered_and_reduced(
    parallel: dict[str, Any], gathers: int, reductions: int
) -> None:
    simulation = run(**parallel)
    assert len(rows_named(simulation, "parameter_all_gather")) == gathers
    assert len(rows_named(simulation, "gradient_reduce_scatter")) == reductions


def test_kept_weights_take_the_memory_of_the_model() -> None:
    """At the turn from forward to backward all weights are there in 16 bits, beside the fp32 shard."""
    dropped, kept = run(reshard="always"), run(reshard="never")
    weights = [simulation.memory[0].by_category[MemoryCategory.WEIGHTS] for simulation in (dropped, kept)]
    shard = int(weights[0][0])
    # Two ranks hold 4 bytes of each parameter together; gathered it has 2.
    whole = shard
    assert weights[1].max() == shard + whole
    assert weights[0].max() < shard + whole
    assert kept.execution.end.max() <= dropped.execution.end.max()


@pytest.mark.parametrize("parallel", [{}, {"reshard": "never"}, {"pp": 2, "reshard": "always"}])
def test_no_unit_computes_before_its_weights_are_there(parallel: dict[str, Any]) -> None:
    simulation = run(**parallel)
    graph, execution = simulation.graph, simulation.execution
    arrived = execution.end[rows_named(simulation, "parameter_all_gather")].min()
    products = (graph.operations.kind == OpKind.GEMM) & (graph.operations.stream == Stream.COMPUTE)
    assert execution.start[np.flatnonzero(products)].min() >= arrived


def test_prefetch_hides_gathers_and_holds_more_units() -> None:
    slow = {"base": "toy", "network": {"domain": {"bandwidth_gb_per_s": 1.0}}}
    runs = [run(slow, prefetch=ahead) for ahead in (0, 1, 2)]
    times = [int(simulation.execution.end.max()) for simulation in runs]
    assert times[0] > times[1] >= times[2]
    # Units gathered ahead wait in the buffer they were gathered into.
    held = (MemoryCategory.WEIGHTS, MemoryCategory.COMMUNICATION)
    curves = [simulation.memory[0].by_category for simulation in runs]
    peaks = [int(sum(curve[category] for category in held).max()) for curve in curves]
    assert peaks[0] < peaks[1] <= peaks[2]


def test_without_prefetch_a_gather_waits_for_the_layer_before() -> None:
    simulation = run(prefetch=0)
    graph, execution = simulation.graph, simulation.execution
    computes = np.flatnonzero(graph.operations.stream == Stream.COMPUTE)
    for row in rows_named(simulation, "parameter_all_gather").tolist():
        beside = (execution.start[computes] < execution.end[row]) & (
            execution.end[computes] > execution.start[row]
        )
        assert not beside.any()


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"reshard": "sometimes"}, "must be one of default, always, never"),
        ({"zero": 1, "reshard": "never"}, "which only zero: 3 has (zero is 1); leave it out"),
        ({"zero": 1, "prefetch": 2}, "gathers weights of layers ahead, which only zero: 3"),
        ({"zero": 3, "prefetch": -1}, "must be a whole number from 0 to 64"),
    ],
)
def test_policies_that_mean_nothing_are_refused(parallel: dict[str, Any], said: str) -> None:
    assert said in problems_of(dense_mapping(parallel={"dp": 2, **parallel}))


def test_the_policy_survives_a_round_trip() -> None:
    scenario = run(reshard="never", prefetch=3).scenario
    assert load_scenario(scenario_to_mapping(scenario)) == scenario
