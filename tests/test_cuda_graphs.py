"""CUDA graphs and waits for token counts: what the host launches at once, and what it must wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from op_graphs.cuda_graphs import LAYER_PARTS
from op_graphs.graph import GemmShape, MemoryShape
from op_graphs.vocabulary import OpKind, Phase, Stream
from tests.graphs import graph_of
from tracesim.errors import ScenarioError
from tracesim.host import HostTimes, execute_with_host, host_times
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

EXPERTS = {"model": "qwen3-30b-a3b", "parallel": {"dp": 8, "ep": 8}}
DENSE = {"model": "llama3-8b", "parallel": {}}


def scenario_of(base: dict[str, Any], **training: object) -> Scenario:
    """One microbatch of 4,096 tokens on H100."""
    plan = {"seq_len": 4096, "micro_batch_size": 1, "num_microbatches": 1, **training}
    return load_scenario({**base, "hardware": "h100-sxm", "training": plan})


def slow_host(scenario: Scenario, operation_us: float) -> Scenario:
    """The scenario with a host that takes so long for an operation."""
    host = replace(scenario.hardware.host, operation_us=operation_us)
    return replace(scenario, hardware=replace(scenario.hardware, host=host))


def iteration_ms(scenario: Scenario) -> float:
    return float(simulate(scenario).report["iteration_time_ms"])


# -- launches ------------------------------------------------------------------------------------------------------


def test_neighbours_of_one_graph_are_launched_together():
    rows = [{"stream": Stream.COMPUTE, "cuda_graph": graph} for graph in (-1, 0, 0, 0, 1, -1)]
    run = execute_with_host(graph_of(rows, [(0, 6, 0)]), np.full(6, 10), host=HostTimes(100))
    # Eager, a graph of three, the next graph, eager: four launches, and the kernels of a graph back to back.
    assert run.start.tolist() == [0, 100, 110, 120, 200, 300]


def test_further_kernels_of_experts_take_a_launch_each():
    shapes = (MemoryShape("stream", 5), GemmShape(8, 8, 8, count=4), None)
    kinds = (OpKind.NORM, OpKind.CAST, OpKind.GROUPED_GEMM, OpKind.NORM)
    rows = [
        {"stream": Stream.COMPUTE, "shape": shape, "kind": kind}
        for shape, kind in zip((-1, 0, 1, -1), kinds, strict=True)
    ]
    graph = replace(graph_of(rows, [(0, 4, 0)]), shapes=shapes)
    durations = np.full(4, 1)
    grouped = execute_with_host(graph, durations, host=HostTimes(100, launch_ns=10))
    # Casts inside a module take a quarter, and 40 more for five; a grouped product is one kernel, or one an expert.
    assert grouped.start.tolist() == [0, 65, 165, 265]
    single = execute_with_host(graph, durations, host=HostTimes(100, launch_ns=10, launches_experts=True))
    assert single.start.tolist() == [0, 65, 195, 295]


def test_pieces_of_a_product_and_rings_inside_it_take_a_launch_alone():
    product = {"stream": Stream.COMPUTE, "kind": OpKind.GEMM, "layer": 0, "name": 0}
    collective = {"stream": Stream.TP, "kind": OpKind.P2P, "layer": 0, "name": 1}
    other = {**product, "name": 2}
    rows = [product, collective, product, collective, product, other]
    run = execute_with_host(graph_of(rows, [(0, 6, 0)]), np.full(6, 1), host=HostTimes(100, launch_ns=10))
    # Pieces of one product with the transfers between them, then another product.
    assert run.start.tolist() == [0, 10, 20, 30, 40, 140]


def test_with_the_whole_iteration_captured_the_host_takes_no_time_and_waits_for_nothing():
    eager = slow_host(scenario_of(EXPERTS), 500.0)
    whole = slow_host(scenario_of(EXPERTS, cuda_graphs="full_iteration"), 500.0)
    assert host_times(whole) == HostTimes()
    assert OpKind.HOST not in lower_scenario(whole).operations.kind
    assert iteration_ms(whole) == pytest.approx(iteration_ms(slow_host(whole, 0.0)))
    assert iteration_ms(eager) > 2 * iteration_ms(whole)


# -- what is captured ----------------------------------------------------------------------------------------------


def captured_modules(scenario: Scenario, phase: Phase) -> set[str]:
    """Modules of captured compute of a phase, in the first layer."""
    graph = lower_scenario(scenario)
    own = graph.operations
    rows = np.flatnonzero((own.cuda_graph >= 0) & (own.layer == 0) & (own.phase == phase))
    return {graph.strings[module] for module in own.module[rows]}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD_INPUT])
@pytest.mark.parametrize(
    ("base", "parts", "modules"),
    [
        (DENSE, ["attn"], {"self_attention"}),
        (DENSE, ["mlp"], {"mlp"}),
        (DENSE, ["attn", "mlp"], {"self_attention", "mlp"}),
        (EXPERTS, ["attn"], {"self_attention"}),
        (EXPERTS, ["moe_router", "moe_preprocess"], {"mlp"}),
    ],
)
def test_the_parts_that_are_named_are_captured_in_both_directions(base, parts, modules, phase):
    assert captured_modules(scenario_of(base, cuda_graphs=parts), phase) == modules


def test_experts_and_their_exchanges_stay_eager_where_routing_decides_their_shapes():
    graph = lower_scenario(scenario_of(EXPERTS, cuda_graphs=["attn", "moe_router", "moe_preprocess"]))
    own = graph.operations
    kinds = {OpKind(kind) for kind in own.kind[own.cuda_graph >= 0]}
    assert {OpKind.ATTENTION, OpKind.ROUTER, OpKind.NORM} <= kinds
    assert kinds.isdisjoint({OpKind.GROUPED_GEMM, OpKind.PERMUTE, OpKind.COLLECTIVE, OpKind.HOST})


def test_a_layer_is_one_launch_from_its_first_captured_part_to_its_last():
    graph = lower_scenario(scenario_of(EXPERTS, cuda_graphs=["attn", "moe_router"]))
    own = graph.operations
    forward = (own.phase == Phase.FORWARD) & (own.cuda_graph >= 0)
    assert len(set(own.cuda_graph[forward])) == 48


def test_captured_parts_hide_a_slow_host():
    times = [
        iteration_ms(slow_host(scenario_of(DENSE, cuda_graphs=parts), 1000.0))
        for parts in (None, ["attn"], ["attn", "mlp"], "full_iteration")
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]


# -- token counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep", "allgather"])
def test_the_host_waits_once_a_layer_for_the_token_counts_of_dropless_routing(dispatcher):
    parallel = {**EXPERTS["parallel"], "ep_dispatcher": dispatcher}
    graph = lower_scenario(scenario_of({**EXPERTS, "parallel": parallel}))
    waits = graph.operations.kind == OpKind.HOST
    assert int(waits.sum()) == 48
    # In forward only; the backward pass knows what was sent.
    assert set(graph.operations.phase[waits]) == {Phase.FORWARD}


def test_recomputed_experts_are_waited_for_again():
    graph = lower_scenario(scenario_of(EXPERTS, recompute={"modules": ["moe"]}))
    # Work of the host for the checkpoints has no shape, and nobody waits for it.
    waits = (graph.operations.kind == OpKind.HOST) & (graph.operations.shape >= 0)
    assert int(waits.sum()) == 96


def test_a_capacity_or_counts_that_stay_on_the_device_need_no_wait():
    capacity = {"base": "qwen3-30b-a3b", "moe": {"capacity_factor": 1.0}}
    for base in (
        {**EXPERTS, "model": capacity},
        {**EXPERTS, "parallel": {**EXPERTS["parallel"], "ep_host_sync": False}},
        DENSE,
    ):
        assert OpKind.HOST not in lower_scenario(scenario_of(base)).operations.kind


def test_what_follows_the_wait_is_launched_when_the_counts_are_there():
    scenario = slow_host(scenario_of(EXPERTS), 300.0)
    simulation = simulate(scenario)
    own, run = simulation.graph.operations, simulation.execution
    wait = int(np.flatnonzero(own.kind == OpKind.HOST)[0])
    exchange = wait + int(np.argmax(own.stream[wait:] == Stream.EP))
    assert run.start[exchange] >= run.end[wait] + 300_000


# -- scenarios -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [None, "none", "full_iteration", ["attn"], ["attn", "mlp"]])
def test_the_field_survives_a_round_trip(graphs):
    scenario = scenario_of(DENSE, cuda_graphs=graphs)
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


@pytest.mark.parametrize(
    ("base", "training", "message"),
    [
        (DENSE, {"cuda_graphs": "everything"}, "everything (from scenario) cannot be captured"),
        (DENSE, {"cuda_graphs": ["atn"]}, "did you mean attn?"),
        (DENSE, {"cuda_graphs": []}, "must be none, full_iteration, or a list of attn, mamba, mlp"),
        (DENSE, {"cuda_graphs": ["attn", "attn"]}, "names a part twice"),
        (DENSE, {"cuda_graphs": ["attn", "full_iteration"]}, "captures everything; give it alone"),
        (DENSE, {"cuda_graphs": ["mamba"]}, "llama3-8b has no state-space layers"),
        (DENSE, {"cuda_graphs": ["moe_router"]}, "llama3-8b has no experts"),
        (DENSE, {"cuda_graphs": ["attn"], "recompute": "full"}, "set full_iteration, or recompute modules"),
        (DENSE, {"cuda_graphs": ["attn"], "offload": {"layers": 2}}, "leave out training.offload"),
        (EXPERTS, {"cuda_graphs": ["moe"]}, "set model.moe.capacity_factor"),
        (EXPERTS, {"cuda_graphs": ["moe_preprocess"]}, "add moe_router"),
        (
            EXPERTS,
            {"cuda_graphs": ["moe_router"], "recompute": {"modules": ["moe"]}},
            "leave one of the two out",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(base, training, message):
    with pytest.raises(ScenarioError) as error:
        scenario_of(base, **training)
    assert message in str(error.value)


def test_every_part_is_described():
    assert all(LAYER_PARTS.values())
