"""When sharded weights are gathered and dropped: counts, memory and what waits, by policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.vocabulary import MemoryCategory, OpKind, Phase, Stream
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


def most_bytes(simulation: Simulation, name: str) -> int:
    """Most bytes of buffers of a name that are there at once, in program order."""
    buffers, strings = simulation.graph.buffers, np.array(simulation.graph.strings)
    rows = np.flatnonzero(strings[buffers.name] == name)
    change = np.zeros(len(simulation.graph.operations) + 2, dtype=np.int64)
    np.add.at(change, buffers.allocate[rows], buffers.size[rows])
    np.add.at(change, buffers.release[rows] + 1, -buffers.size[rows])
    return int(change.cumsum().max())


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


@pytest.mark.parametrize(
    ("parallel", "gathers", "reductions"),
    [
        # One unit less; the model's own stays between forward and backward.
        ({}, MICROBATCHES * (2 * LAYERS + 1), MICROBATCHES * (LAYERS + 1)),
        ({"reshard": "never"}, MICROBATCHES * (LAYERS + 1), MICROBATCHES * (LAYERS + 1)),
        ({"dp": 4, "reshard": 2}, MICROBATCHES * (2 * LAYERS + 1), MICROBATCHES * (LAYERS + 1)),
        # On two stages it has a part on each.
        ({"pp": 2}, LAYERS + 2, LAYERS + 2),
    ],
)
def test_both_ends_of_a_model_are_one_unit(parallel: dict[str, Any], gathers: int, reductions: int) -> None:
    simulation = run(root_unit=True, **parallel)
    assert len(rows_named(simulation, "parameter_all_gather")) == gathers
    assert len(rows_named(simulation, "gradient_reduce_scatter")) == reductions


def test_the_models_own_unit_is_there_beside_each_layer() -> None:
    simulation = run(root_unit=True)
    weights, model = simulation.memory[0].by_category[MemoryCategory.WEIGHTS], simulation.scenario.model
    # Two ranks hold 4 bytes of each parameter together; gathered it has 2.
    shard = int(weights[0])
    root = 2 * model.vocab_size * model.hidden_size + model.hidden_size
    layer = (shard // 2 - root) // LAYERS
    assert int(weights.max()) == shard + 2 * (root + layer)


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
    peaks = [most_bytes(simulation, "gathered_weights") for simulation in runs]
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
        ({"reshard": "sometimes"}, "must be one of default, always, never, or a number of ranks from 2"),
        ({"reshard": 2.0}, "must be one of default, always, never, or a number"),
        ({"reshard": True}, "must be one of default, always, never, or a number"),
        (
            {"dp": 8, "reshard": 1},
            "is no divisor between 1 and the 8 ranks of a shard group (data-parallel); nearest: 2",
        ),
        (
            {"dp": 8, "reshard": 8},
            "is no divisor between 1 and the 8 ranks of a shard group (data-parallel); nearest: 4",
        ),
        (
            {"dp": 8, "hsdp_shard": 4, "reshard": 4},
            "the 4 ranks of a shard group (data-parallel); nearest: 2",
        ),
        ({"dp": 2, "reshard": 2}, "the 2 ranks of a shard group (data-parallel); nearest: always"),
        ({"zero": 1, "reshard": 2}, "which only zero: 3 has (zero is 1); leave it out"),
        ({"dp": 8, "pp": 2, "reshard": 4}, "with pp = 2 others come between; set reshard: always"),
        ({"zero": 1, "reshard": "never"}, "which only zero: 3 has (zero is 1); leave it out"),
        ({"zero": 1, "prefetch": 2}, "gathers weights of layers ahead, which only zero: 3"),
        ({"zero": 3, "prefetch": -1}, "must be a whole number from 0 to 64"),
    ],
)
def test_policies_that_mean_nothing_are_refused(parallel: dict[str, Any], said: str) -> None:
    assert said in problems_of(dense_mapping(parallel={"dp": 2, "zero": 3, **parallel}))


def test_the_policy_survives_a_round_trip() -> None:
    scenario = run(reshard="never", prefetch=3).scenario
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


# -- a shard over fewer ranks between forward and backward -------------------------------------------------------


def gathered_groups(simulation: Simulation) -> list[tuple[int, ...]]:
    graph = simulation.graph
    rows = rows_named(simulation, "parameter_all_gather")
    return [graph.groups[int(graph.operations.group[row])].ranks for row in rows.tolist()]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("parallel", "forward", "backward"),
    [
        ({"dp": 8, "reshard": 2}, tuple(range(8)), (0, 1)),
        ({"dp": 8, "reshard": 4}, tuple(range(8)), (0, 1, 2, 3)),
        ({"dp": 4, "cp": 2, "reshard": 4}, tuple(range(8)), (0, 1, 2, 3)),
        ({"dp": 8, "hsdp_shard": 4, "reshard": 2}, (0, 1, 2, 3), (0, 1)),
        ({"dp": 8, "reshard": 4, "flat_parameters": True}, tuple(range(8)), (0, 1, 2, 3)),
    ],
)
def test_the_backward_gathers_over_the_ranks_that_a_shard_stayed_on(
    parallel: dict[str, Any], forward: tuple[int, ...], backward: tuple[int, ...], recompute: str
) -> None:
    mapping = dense_mapping(
        hardware="toy",
        parallel={"zero": 3, **parallel},
        training__num_microbatches=MICROBATCHES,
        training__recompute=recompute,
    )
    simulation = simulate(load_scenario(mapping))
    assert_nothing_leaks(simulation.graph)
    groups = gathered_groups(simulation)
    assert groups.count(forward) == groups.count(backward) == MICROBATCHES * UNITS
    assert len(groups) == 2 * MICROBATCHES * UNITS
    sizes = simulation.graph.operations.communication_bytes[rows_named(simulation, "parameter_all_gather")]
    by_group = [
        sorted(size for size, group in zip(sizes.tolist(), groups, strict=True) if group == wanted)
        for wanted in (forward, backward)
    ]
    assert by_group[0] == by_group[1]
    # Gradients are scattered over all shards, whatever stayed in between.
    graph = simulation.graph
    reductions = rows_named(simulation, "gradient_reduce_scatter")
    assert {graph.groups[int(graph.operations.group[row])].ranks for row in reductions} == {forward}


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_stays_is_a_shard_of_all_weights_in_the_computing_type(ranks: int) -> None:
    """From the end of a unit's forward until it is whole again, once a microbatch."""
    simulation = run(dp=8, reshard=ranks)
    graph, buffers = simulation.graph, simulation.graph.buffers
    held = np.flatnonzero(np.array(graph.strings)[buffers.name] == "resharded_weights")
    # The fp32 shard of eight ranks has half of a quarter of the bytes that all weights have in 16 bits.
    whole = int(simulation.memory[0].by_category[MemoryCategory.WEIGHTS][0]) * 8 // 4 * 2
    assert int(buffers.size[held].sum()) == pytest.approx(MICROBATCHES * whole / ranks, rel=1e-6)
    assert len(held) == len(rows_named(simulation, "resharded_weights_copy")) == MICROBATCHES * UNITS
    assert (graph.operations.phase[buffers.allocate[held]] == Phase.PARAM_SYNC).all()
    gathers = set(rows_named(simulation, "parameter_all_gather").tolist())
    assert set(buffers.release[held].tolist()) <= gathers


def test_memory_falls_and_the_backward_gathers_farther_the_more_ranks_hold_it() -> None:
    """Eight GPUs on two nodes of four: inside a node a gather takes the fast links, across the slow."""
    hardware = {"base": "toy", "network": {"gpus_per_domain": 4}}
    policies: list[Any] = ["never", 2, 4, "always"]
    runs = [run(hardware, dp=8, reshard=policy) for policy in policies]
    peaks = [int(one.memory[0].by_category[MemoryCategory.WEIGHTS].max()) for one in runs]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    slow = {"base": "toy", "network": {"gpus_per_domain": 4, "fabric": {"bandwidth_gb_per_s": 0.5}}}
    times = [int(run(slow, dp=8, reshard=policy).execution.end.max()) for policy in policies]
    assert times[0] <= times[1] <= times[2] < times[3]


def test_experts_keep_shards_of_their_own_group() -> None:
    moe = {"experts": 4, "top_k": 2, "expert_ffn_size": 64}
    mapping = dense_mapping(
        hardware="toy",
        model__moe=moe,
        parallel={"dp": 8, "ep": 2, "zero": 3, "reshard": 2},
        training__num_microbatches=1,
    )
    simulation = simulate(load_scenario(mapping))
    assert_nothing_leaks(simulation.graph)
    groups = set(gathered_groups(simulation))
    assert groups == {tuple(range(8)), (0, 1), (0, 2, 4, 6), (0, 2)}
    mapping["parallel"]["reshard"] = 4
    assert "the 4 ranks of a shard group (expert data-parallel); nearest: 2" in problems_of(mapping)
