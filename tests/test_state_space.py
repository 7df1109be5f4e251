"""Mamba-2 layers and patterns of layers: work, parameters, communication and memory in closed form.

Formulas are those of Dao and Gu 2024 (arXiv:2405.21060, section 6) and of Megatron-Core's MambaMixer; they share
nothing with the package.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.model import ModelError
from op_graphs.model_flops import model_flops_per_token, mtp_flops_per_token
from op_graphs.parameters import (
    count_active_parameters,
    count_parameters,
    elements_of,
    parameters_on_stage,
    tensor_parallel_problem,
)
from op_graphs.presets import load_model, model_from_mapping
from op_graphs.vocabulary import Communication, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.graphs import bytes_by_name
from tests.test_lowering import assert_nothing_leaks, saved_bytes, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

HIDDEN, FFN, VOCAB, SEQUENCE = 256, 512, 1024, 128
HEADS, HEAD, STATE, GROUPS, WIDTH, CHUNK = 16, 32, 64, 4, 4, 32
INNER, CHANNELS = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE
PROJECTION = INNER + CHANNELS + HEADS
SPACE = {"heads": HEADS, "head_size": HEAD, "state_size": STATE, "groups": GROUPS, "chunk_size": CHUNK}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn_size": 64, "shared_ffn_size": 64, "aux_loss": True}


def hybrid(pattern: str, **changes: Any) -> dict[str, Any]:
    """The small dense model with its layers given by a pattern."""
    letters = pattern + changes.get("model__mtp_pattern", "")
    fixed: dict[str, Any] = {"model__layer_pattern": pattern, "model__layers": len(pattern)}
    if "M" in letters:
        fixed["model__state_space"] = SPACE
    if "E" in letters:
        fixed["model__moe"] = EXPERTS
    return dense_mapping(**{**fixed, **changes})


def lowered(pattern: str, **changes: Any) -> tuple[Scenario, OpGraph]:
    scenario = load_scenario(hybrid(pattern, **changes))
    return scenario, lower_scenario(scenario)


def scan_products(tokens: float) -> tuple[float, float, float]:
    """FLOPs of C B^T, of one product with the states, and of one with the masked square."""
    return (
        2.0 * tokens * CHUNK * GROUPS * STATE,
        2.0 * tokens * INNER * STATE,
        1.0 * tokens * INNER * CHUNK,
    )


# -- parameters --------------------------------------------------------------------------------------------------


def mamba_parameters() -> int:
    """in_proj, out_proj, filters and biases of the convolution; A, D and dt of each head; the two norms."""
    matrices = HIDDEN * PROJECTION + INNER * HIDDEN
    return matrices + CHANNELS * (WIDTH + 1) + 3 * HEADS + INNER + HIDDEN


def test_a_mamba_layer_has_the_parameters_of_megatron():
    model = load_scenario(hybrid("MM")).model
    one = load_scenario(hybrid("M")).model
    assert count_parameters(model) - count_parameters(one) == mamba_parameters()


@pytest.mark.parametrize("pattern", ["M", "*", "-", "E", "M*-E"])
@pytest.mark.parametrize("tp", [2, 4])
def test_parameters_of_all_ranks_are_those_of_the_model(pattern: str, tp: int):
    model = load_scenario(hybrid(pattern)).model
    rank = parameters_on_stage(model, range(model.layers), tp, True, has_embedding=True, has_head=True, etp=1)
    whole = parameters_on_stage(model, range(model.layers), 1, False, has_embedding=True, has_head=True)
    cut = [tensor for tensor in rank if tensor.tp_axis is not None and not tensor.is_expert]
    rest = [tensor for tensor in rank if tensor.tp_axis is None or tensor.is_expert]
    assert tp * elements_of(cut) + elements_of(rest) == elements_of(whole) == count_parameters(model)


def test_a_layer_of_one_part_has_nothing_of_the_others():
    names = {
        letter: {tensor.name.split(".")[3] for tensor in load_tensors(letter)}
        for letter in ("M", "*", "-", "E")
    }
    assert names == {
        "M": {"norm", "mixer"},
        "*": {"input_layernorm", "self_attention"},
        "-": {"pre_mlp_layernorm", "mlp"},
        "E": {"pre_mlp_layernorm", "mlp"},
    }


def load_tensors(pattern: str) -> list[Any]:
    model = load_scenario(hybrid(pattern)).model
    return parameters_on_stage(model, range(model.layers), 1, False, has_embedding=False, has_head=False)


@pytest.mark.parametrize(
    ("name", "active", "without_embedding"),
    # arXiv:2512.20848, section 2: 3.2 billion active of 31.6, 3.6 with the embedding. arXiv:2604.12374: 12 of 120.
    [("nemotron3-nano-30b-a3b", 3.6, 3.2), ("nemotron3-super-120b-a12b", 12.8, 12.2)],
)
def test_active_parameters_equal_the_published_ones(name: str, active: float, without_embedding: float):
    model = load_model(name)
    assert round(count_active_parameters(model) / 1e9, 1) == active
    assert round(count_active_parameters(model, with_embedding=False) / 1e9, 1) == without_embedding


# -- work --------------------------------------------------------------------------------------------------------

PLANS: list[dict[str, Any]] = [
    {},
    {"parallel__tp": 4},
    {"parallel__tp": 4, "parallel__sp": True},
    {"parallel__cp": 2},
    {"parallel__cp": 4},
    {"parallel__pp": 2, "parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True},
    {"parallel__dp": 2, "parallel__zero": 3},
    {"training__dtype": "fp8-tensorwise"},
    {"training__recompute": {"modules": ["layernorm"]}},
    {"training__micro_batch_size": 1},
    {"parallel__pp": 2, "schedule": "zb-h1"},
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_mamba_layer_does_its_linears_and_the_products_of_the_chunked_scan(plan: dict[str, Any]):
    scenario, graph = lowered("MMMM", **plan)
    assert_nothing_leaks(graph)
    square, state, masked = scan_products(scenario.tokens)
    convolution = 2.0 * WIDTH * CHANNELS * scenario.tokens
    forward = square + 2 * state + masked + convolution
    # Convolution, C B^T and the states of chunks run again in backward; the rest is two products for each, and the
    # gradient of the decay one more with the masked square.
    backward = 3 * square + 5 * state + 3 * masked + 3 * convolution
    linears = 6.0 * HIDDEN * (PROJECTION + INNER) * scenario.tokens
    head = 6.0 * HIDDEN * VOCAB * scenario.tokens
    assert step_flops(graph, scenario) == pytest.approx(4 * (linears + forward + backward) + head, rel=1e-9)


def test_model_flops_count_the_forward_products_three_times():
    model = load_scenario(hybrid("M")).model
    square, state, masked = scan_products(1)
    forward = 2.0 * HIDDEN * (PROJECTION + INNER + VOCAB) + square + 2 * state + masked
    assert model_flops_per_token(model, SEQUENCE) == pytest.approx(3 * forward)


@pytest.mark.parametrize(
    ("name", "printed"),
    # Megatron Bridge's performance summary: whole TFLOP/s at so many tokens a second and GPU. Of Super the prediction
    # head counts twice.
    [
        ("nemotron3-nano-30b-a3b", [(885, 39_749), (747, 33_522), (786, 35_282), (323, 14_507)]),
        ("nemotron3-super-120b-a12b", [(839, 9_900), (689, 8_131), (815, 9_623), (783, 9_243)]),
    ],
)
def test_megatron_counts_the_flops_that_its_tables_print(name: str, printed: list[tuple[int, int]]):
    model = load_model(name)
    flops = model_flops_per_token(model, 8192, convention="megatron")
    flops += mtp_flops_per_token(model, 8192, convention="megatron")
    for tflops, tokens in printed:
        assert tflops * 1e12 / tokens == pytest.approx(flops, rel=0.5 / tflops + 1e-4)


@pytest.mark.parametrize("pattern", ["M*-E", "E-*M", "**--", "MEME"])
def test_the_work_of_a_pattern_is_that_of_its_letters(pattern: str):
    scenario, graph = lowered(pattern)
    alone = [lowered(letter) for letter in pattern]
    _, empty = lowered("--")
    _, one = lowered("-")
    ends = 2 * step_flops(one, scenario) - step_flops(empty, scenario)
    letters = sum(step_flops(each, small) - ends for small, each in alone)
    assert step_flops(graph, scenario) == pytest.approx(ends + letters, rel=1e-9)
    assert_nothing_leaks(graph)


def test_a_pattern_of_pairs_is_the_layer_with_both_parts():
    """Attention and MLP as layers of their own run the kernels of layers that have both."""
    _, apart = lowered("*-*-")
    scenario = load_scenario(dense_mapping(model__layers=2))
    together = lower_scenario(scenario)

    def kernels(graph: OpGraph) -> list[tuple[str, int]]:
        operations = graph.operations
        return [
            (graph.strings[name], int(phase))
            for name, phase in zip(operations.name, operations.phase, strict=True)
        ]

    assert kernels(apart) == kernels(together)
    assert simulate(load_scenario(hybrid("*-*-"))).report["peak_allocated_gib"] == pytest.approx(
        simulate(scenario).report["peak_allocated_gib"]
    )


def test_layers_may_have_a_state_space_in_the_place_of_attention():
    scenario = load_scenario(
        dense_mapping(model__layers=4, model__mixer_pattern="MMM*", model__state_space=SPACE)
    )
    assert [scenario.model.mixer(layer) for layer in range(4)] == ["state_space"] * 3 + ["attention"]
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    names = Counter(graph.strings[name] for name in graph.operations.name)
    microbatches = scenario.training.num_microbatches
    assert names["ssm_chunk_scan"] == 3 * microbatches
    assert names["flash_attention"] == microbatches
    assert names["fc1"] == 4 * microbatches


@pytest.mark.parametrize("plan", [{}, {"parallel__tp": 4, "parallel__sp": True}, {"parallel__ep": 2, "parallel__dp": 2},
                                  {"training__dtype": "fp8-tensorwise"},
                                  {"training__recompute": {"modules": ["moe"]}}])  # fmt: skip
def test_experts_of_a_latent_space_do_less_and_two_projections_more(plan: dict[str, Any]):
    latent = 64
    scenario, plain = lowered("EE", **plan)
    inside = {**EXPERTS, "latent_size": latent}
    narrow, graph = lowered("EE", **plan, model__moe=inside)
    assert_nothing_leaks(graph)
    forward = 2 * HIDDEN * latent - 3 * EXPERTS["top_k"] * EXPERTS["expert_ffn_size"] * (HIDDEN - latent)
    passes = 4 if plan.get("training__recompute") else 3
    more = 2 * 2.0 * passes * forward * scenario.tokens
    assert step_flops(graph, scenario) - step_flops(plain, scenario) == pytest.approx(more, rel=1e-9)
    held = count_parameters(narrow.model) - count_parameters(scenario.model)
    each = 2 * HIDDEN * latent - 3 * EXPERTS["experts"] * EXPERTS["expert_ffn_size"] * (HIDDEN - latent)
    assert held == 2 * each
    counted = [model_flops_per_token(model, SEQUENCE) for model in (narrow.model, scenario.model)]
    assert counted[0] - counted[1] == pytest.approx(2 * 6.0 * forward)


def test_tokens_travel_to_experts_at_the_latent_width():
    plan = {"parallel__ep": 2, "parallel__dp": 2}
    sent = {}
    for latent in (0, 64):
        _, graph = lowered("E", **plan, model__moe={**EXPERTS, "latent_size": latent})
        sent[latent] = bytes_by_name(graph)["dispatch_all_to_all"]
    assert sent[64] == sent[0] * 64 // HIDDEN


# -- communication -----------------------------------------------------------------------------------------------


def collectives(graph: OpGraph, stream: Stream, phase: Phase) -> Counter[tuple[str, int]]:
    operations = graph.operations
    chosen = np.flatnonzero(
        (operations.stream == stream) & (operations.phase == phase) & (operations.layer == 0)
        & (operations.microbatch == 0)
    )  # fmt: skip
    return Counter(
        (Communication(int(operations.communication[row])).name, int(operations.communication_bytes[row]))
        for row in chosen
    )


def test_tensor_parallel_collectives_of_a_mamba_layer_are_those_of_its_two_linears():
    scenario, graph = lowered("M", parallel__tp=4, parallel__sp=True)
    hidden = 2 * 2 * SEQUENCE * HIDDEN
    forward = collectives(graph, Stream.TP, Phase.FORWARD)
    assert forward == {("ALL_GATHER", hidden): 1, ("REDUCE_SCATTER", hidden): 1}
    backward = collectives(graph, Stream.TP, Phase.BACKWARD_INPUT)
    assert backward == {("ALL_GATHER", hidden): 2, ("REDUCE_SCATTER", hidden): 1}
    assert scenario.training.micro_batch_size == 2


@pytest.mark.parametrize(
    ("cp", "repeat"),
    # Four groups over eight ranks: each is held by two of them.
    [(2, 1), (4, 1), (8, 2)],
)
def test_context_parallel_ranks_exchange_each_part_of_the_projection(cp: int, repeat: int):
    _, graph = lowered("M", parallel__cp=cp)
    local = 2 * 2 * SEQUENCE // cp
    parts = [INNER, INNER, GROUPS * STATE * repeat, GROUPS * STATE * repeat, HEADS]
    into = Counter(("ALL_TO_ALL", local * width) for width in parts)
    back = Counter({("ALL_TO_ALL", local * INNER): 1})
    assert collectives(graph, Stream.CP, Phase.FORWARD) == into + back
    assert collectives(graph, Stream.CP, Phase.BACKWARD_INPUT) == into + back


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_activations_of_a_mamba_layer(tp: int, sp: bool):
    """Norm input and output; the projection, the output before the gate, behind it, and behind the norm."""
    _, graph = lowered("MM", parallel__tp=tp, parallel__sp=sp, training__num_microbatches=1)
    tokens = 2 * SEQUENCE
    hidden = 2 * 2 * tokens * HIDDEN // (tp if sp else 1)
    assert saved_bytes(graph, 0) == hidden + 2 * tokens * (PROJECTION + 3 * INNER) // tp


def test_layer_norm_recompute_leaves_the_norm_that_is_part_of_a_projection():
    _, plain = lowered("M*")
    _, again = lowered("M*", training__recompute={"modules": ["layernorm"]})
    assert saved_bytes(again, 0) == saved_bytes(plain, 0)
    assert saved_bytes(again, 1) < saved_bytes(plain, 1)


@pytest.mark.parametrize("pattern", ["MM", "M*-E", "MEME"])
def test_memory_falls_with_tensor_and_context_parallelism_and_recompute(pattern: str):
    def peak(**changes: Any) -> float:
        return float(simulate(load_scenario(hybrid(pattern, **changes))).report["peak_allocated_gib"])

    sharded = [peak(parallel__tp=tp, parallel__sp=tp > 1) for tp in (1, 2, 4)]
    assert sharded == sorted(sharded, reverse=True)
    shorter = [peak(parallel__cp=cp, training__seq_len=512) for cp in (1, 2, 4)]
    assert shorter == sorted(shorter, reverse=True)
    assert peak(training__recompute="full") < peak()


def test_full_recompute_runs_the_scan_again():
    scenario, graph = lowered("MM", training__recompute="full")
    assert_nothing_leaks(graph)
    operations = graph.operations
    again = (operations.kind == OpKind.SCAN) & (operations.phase == Phase.RECOMPUTE)
    once = (operations.kind == OpKind.SCAN) & (operations.phase == Phase.FORWARD)
    assert again.sum() == once.sum() == 5 * 2 * scenario.training.num_microbatches


def test_one_sequence_needs_no_copy_into_the_order_of_the_scan():
    for batch, copies in ((1, 0), (2, 4)):
        _, graph = lowered("M", training__micro_batch_size=batch, training__num_microbatches=1)
        names = [graph.strings[name] for name in graph.operations.name]
        assert sum(name.endswith("_turned") for name in names) == copies


# -- prediction heads --------------------------------------------------------------------------------------------


def test_a_prediction_head_runs_the_layers_of_its_pattern():
    heads = {"model__mtp_layers": 2, "model__mtp_pattern": "*E"}
    scenario, graph = lowered("ME", **heads)
    assert_nothing_leaks(graph)
    names = Counter(graph.strings[name] for name in graph.operations.name)
    microbatches = scenario.training.num_microbatches
    assert names["flash_attention"] == 2 * microbatches
    assert names["router"] == 3 * microbatches
    once, repeated = (
        load_scenario(hybrid("ME", **heads, model__mtp_repeated=shared)).model for shared in (False, True)
    )
    plain = parameters_on_stage(once, (), 1, False, has_embedding=True, has_head=True)
    shared = parameters_on_stage(repeated, (), 1, False, has_embedding=True, has_head=True)
    first = [tensor for tensor in plain if tensor.name.startswith("mtp.layers.0")]
    second = [tensor for tensor in plain if tensor.name.startswith("mtp.layers.1")]
    assert elements_of(first) == elements_of(second)
    assert elements_of(plain) - elements_of(shared) == elements_of(second)


@pytest.mark.parametrize("plan", [{}, {"parallel__dp": 2, "parallel__zero": 3}, {"parallel__dp": 2}])
def test_repeated_heads_do_the_work_of_distinct_ones(plan: dict[str, Any]):
    heads = {"model__mtp_layers": 2, "model__mtp_pattern": "*E", **plan}
    scenario, distinct = lowered("ME", **heads)
    _, repeated = lowered("ME", **heads, model__mtp_repeated=True)
    assert_nothing_leaks(repeated)
    assert step_flops(repeated, scenario) == step_flops(distinct, scenario)
    sent = [sum(bytes_by_name(graph).values()) for graph in (repeated, distinct)]
    assert sent[0] <= sent[1]


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": "M*x"}, "layer_pattern: character 3: 'x' means nothing; "),
        ({"layer_pattern": "M*"}, "layer_pattern: names 2 layers, the model has 4"),
        (
            {"layer_pattern": "M*M*", "state_space": None},
            "state_space: is missing; a pattern has layers of it",
        ),
        ({"layer_pattern": "E*E*", "state_space": None}, "moe: is missing"),
        ({"layer_pattern": "*-*-"}, "state_space: no layer is of it"),
        ({"layer_pattern": "M*M*", "mixer_pattern": "M"}, "mixer_pattern: M, but layer_pattern says"),
        ({"layer_pattern": "M*M*", "mtp_layers": 1}, "mtp_layers: 1 heads of layers that are not given"),
        (
            {"layer_pattern": "M*M*", "mtp_pattern": "*"},
            "mtp_pattern: *, but the model has no prediction heads",
        ),
        ({"mixer_pattern": ""}, "mixer_pattern: must be letters, one a layer"),
        (
            {"mixer_pattern": "M", "mtp_repeated": True},
            "mtp_repeated: true, but there are 0 prediction heads",
        ),
        (
            {"mixer_pattern": "M", "state_space": {**SPACE, "groups": 3}},
            "state_space.groups: 3 does not divide the 16 heads; nearest: 2",
        ),
        ({"mixer_pattern": "M", "state_space": {"head_size": 64}}, "state_space.heads: is missing"),
    ],
)
def test_a_model_that_does_not_fit_together_is_refused(changes: dict[str, Any], message: str):
    mapping = {**dense_mapping()["model"], "state_space": SPACE, **changes}
    with pytest.raises(ModelError) as refused:
        model_from_mapping(mapping)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__tp": 8}, "4 state-space groups do not divide by it. The nearest tp that fits is 4"),
        (
            {"parallel__cp": 3, "training__seq_len": 192},
            "parallel.cp: 3 (from scenario) does not divide the 16 state",
        ),
        (
            {"training__recompute": {"keep": "products"}},
            "training.recompute.keep: knows layers of attention and an MLP",
        ),
        ({"training__recompute": {"modules": ["core_attn"]}}, "has no such module; it has layernorm"),
    ],
)
def test_a_plan_that_does_not_fit_a_state_space_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ScenarioError) as refused:
        load_scenario(hybrid("MMMM", **changes))
    assert message in " ".join(str(refused.value).split())


def test_only_what_a_model_has_limits_its_tensor_parallel_degree():
    model = load_scenario(hybrid("MM", model__kv_heads=8)).model
    assert tensor_parallel_problem(model, 4) == ""
    assert "state-space groups" in tensor_parallel_problem(model, 16)
    assert "key-value heads" not in tensor_parallel_problem(model, 16)
