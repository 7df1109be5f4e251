"""The slowest of many ranks: expected largest of normal values, which ranks meet, and what a step takes longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from op_graphs.plan import ParallelPlan
from op_graphs.vocabulary import Phase
from tests.dense_scenarios import dense_mapping
from tracesim.cost import CostModel
from tracesim.lowering import lower_scenario
from tracesim.rank_jitter import (
    CALIBRATED_RANKS,
    expected_largest,
    ranks_that_meet,
    slowest_rank_factor,
    with_rank_jitter,
)
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import iteration_ms


def scenario_of(jitter: float, **parallel: object) -> Scenario:
    scenario = load_scenario(dense_mapping(parallel=parallel))
    return replace(scenario, hardware=replace(scenario.hardware, rank_jitter=jitter))


@pytest.mark.parametrize(
    ("count", "mean"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (8, 1.4236), (64, 2.344), (1000, 3.2414)]
)
def test_the_expected_largest_of_normal_values(count, mean):
    """Means of the largest order statistic: exact for 2 and 3 (1/sqrt(pi), 3/(2 sqrt(pi))), Tippett's table beyond."""
    assert expected_largest(count) == pytest.approx(mean, abs=0.03)


def test_it_is_what_a_sample_shows():
    largest = np.random.default_rng(0).standard_normal((20_000, 32)).max(axis=1).mean()
    assert expected_largest(32) == pytest.approx(largest, abs=0.02)


@pytest.mark.parametrize(
    ("plan", "meet"),
    [
        ({"dp": 64, "zero": 0}, 1),
        ({"dp": 64, "zero": 1}, 1),
        ({"dp": 64, "zero": 3}, 64),
        ({"dp": 64, "zero": 2}, 64),
        ({"tp": 8, "dp": 8, "zero": 3}, 64),
        ({"tp": 8, "cp": 4, "dp": 2}, 32),
        ({"tp": 4, "pp": 4, "dp": 16, "zero": 3}, 4),
        ({"dp": 64, "ep": 32, "tp": 2}, 32),
        ({"dp": 64, "zero": 3, "hsdp_shard": 8}, 8),
        ({"tp": 2, "cp": 4, "dp": 8, "zero": 3, "hsdp_shard": 16}, 32),
    ],
)
def test_ranks_that_wait_for_each_other_in_every_layer(plan, meet):
    assert ranks_that_meet(ParallelPlan(**plan)) == meet


def test_compute_of_passes_takes_as_long_as_on_the_slowest():
    scenario = scenario_of(0.05, dp=64, zero=3)
    factor = slowest_rank_factor(scenario)
    assert factor == pytest.approx(1 + 0.05 * (expected_largest(64) - expected_largest(CALIBRATED_RANKS)))
    graph = lower_scenario(scenario)
    durations = CostModel(scenario.hardware).durations_ns(graph)
    slowed = with_rank_jitter(scenario, graph, durations)
    phases, communicates = graph.operations.phase, graph.is_communication()
    passes = ~communicates & np.isin(phases, [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT])
    assert passes.any()
    np.testing.assert_allclose(slowed[passes], durations[passes] * factor, atol=0.5)
    beside = communicates | np.isin(phases, [Phase.OPTIMIZER, Phase.GRADIENT_SYNC, Phase.PARAM_SYNC])
    np.testing.assert_array_equal(slowed[beside], durations[beside])


@pytest.mark.parametrize("plan", [{"dp": 8, "zero": 3}, {"tp": 8, "sp": True}, {"dp": 64, "zero": 1}])
def test_nothing_changes_up_to_eight_ranks_that_meet(plan):
    assert iteration_ms(scenario_of(0.05, **plan)) == iteration_ms(scenario_of(0.0, **plan))


def test_a_step_grows_with_the_jitter_and_a_scenario_sets_it():
    times = [iteration_ms(scenario_of(jitter, dp=64, zero=3)) for jitter in (0.0, 0.03, 0.06)]
    assert times == sorted(times)
    assert times[0] < times[2]
    scenario = load_scenario(dense_mapping(), ["hardware.rank_jitter=0.02"])
    assert scenario.hardware.rank_jitter == 0.02
