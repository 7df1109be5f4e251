"""Gated DeltaNet layers and attention with a gate behind it: work, parameters, communication and memory in closed form.

Products are those of the chunked gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.3), by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.huggingface import model_from_huggingface
from op_graphs.model import ModelError
from op_graphs.model_flops import model_flops_per_token
from op_graphs.parameters import (
    count_active_parameters,
    count_parameters,
    elements_of,
    parameters_on_stage,
)
from op_graphs.presets import load_model, model_from_mapping
from op_graphs.vocabulary import Communication, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.megatron_lists import problems_of, scenario_of
from tests.test_lowering import assert_nothing_leaks, saved_bytes, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

HIDDEN, FFN, VOCAB, SEQUENCE, CHUNK = 256, 512, 1024, 128, 64
KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 4, 8, 16, 32, 4
KEYS, VALUES = KEY_HEADS * KEY, HEADS * VALUE
CHANNELS = 2 * KEYS + VALUES
PROJECTION = CHANNELS + VALUES + 2 * HEADS
NET = {"key_heads": KEY_HEADS, "value_heads": HEADS, "key_head_size": KEY, "value_head_size": VALUE}
QUERIES, KEY_VALUES = 8 * 32, 4 * 32


def delta(pattern: str, **changes: Any) -> dict[str, Any]:
    """The small dense model with layers of one part."""
    net = {"model__delta_net": NET} if "G" in pattern else {}
    return dense_mapping(**{"model__layer_pattern": pattern, "model__layers": len(pattern), **net, **changes})


def lowered(pattern: str, **changes: Any) -> tuple[Scenario, OpGraph]:
    scenario = load_scenario(delta(pattern, **changes))
    return scenario, lower_scenario(scenario)


# -- parameters --------------------------------------------------------------------------------------------------


def test_a_delta_rule_layer_has_the_parameters_of_megatron():
    """Both projections, filters without bias, two numbers a value head, a norm over the size of a head, the norm."""
    more = count_parameters(load_scenario(delta("GG")).model)
    one = count_parameters(load_scenario(delta("G")).model)
    assert more - one == HIDDEN * (PROJECTION + VALUES) + CHANNELS * WIDTH + 2 * HEADS + VALUE + HIDDEN


@pytest.mark.parametrize("pattern", ["G", "*", "G*-"])
@pytest.mark.parametrize("tp", [2, 4])
def test_parameters_of_all_ranks_are_those_of_the_model(pattern: str, tp: int):
    model = load_scenario(delta(pattern, model__attention_output_gate=True)).model
    rank = parameters_on_stage(model, range(model.layers), tp, True, has_embedding=True, has_head=True)
    cut = [tensor for tensor in rank if tensor.tp_axis is not None]
    rest = [tensor for tensor in rank if tensor.tp_axis is None]
    assert tp * elements_of(cut) + elements_of(rest) == count_parameters(model)


def test_qwen3_next_has_the_published_active_parameters():
    """A3B: 3 billion of 80 are active; 3.6 billion without the embedding, by its layers."""
    model = load_model("qwen3-next-80b-a3b")
    attention = 2048 * (3 * 4096 + 2 * 512) + 2 * 256
    rule = 2048 * (12288 + 64) + 4096 * 2048 + 8192 * 4 + 2 * 32 + 128
    experts = 11 * 3 * 2048 * 512 + 512 * 2048 + 2048
    layers = 12 * attention + 36 * rule + 48 * (experts + 2 * 2048)
    assert count_active_parameters(model, with_embedding=False) == layers + 2048 + 151936 * 2048


# -- work --------------------------------------------------------------------------------------------------------

PLANS: list[dict[str, Any]] = [
    {},
    {"parallel__tp": 4},
    {"parallel__tp": 4, "parallel__sp": True},
    {"parallel__pp": 2, "parallel__dp": 2, "parallel__tp": 2, "parallel__sp": True},
    {"parallel__dp": 2, "parallel__zero": 3},
    {"training__dtype": "fp8-tensorwise"},
    {"training__recompute": {"modules": ["layernorm"]}},
    {"training__micro_batch_size": 1},
    {"training__cuda_graphs": ["attn"]},
    {"parallel__pp": 2, "schedule": "zb-h1"},
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_delta_rule_layer_does_its_linears_and_the_products_of_its_chunks(plan: dict[str, Any]):
    scenario, graph = lowered("GGGG", **plan)
    assert_nothing_leaks(graph)
    tokens = scenario.tokens
    key, value = 2.0 * tokens * CHUNK * HEADS * KEY, 2.0 * tokens * CHUNK * HEADS * VALUE
    state, triangle = 2.0 * tokens * HEADS * KEY * VALUE, tokens * HEADS * CHUNK**2 / 3
    convolution = 2.0 * WIDTH * CHANNELS * tokens
    # K K^T, new keys and values, Q K^T and its product with the values; states, what they lack and what queries see.
    forward = 3 * key + 2 * value + 3 * state + 2 * triangle + convolution
    # New keys, values and states again; gradients through the output, the states, and both sides of the triangle.
    backward = 8 * key + 5 * value + 8 * state + 12 * triangle + 2 * convolution
    linears = 6.0 * HIDDEN * (PROJECTION + VALUES) * tokens
    head = 6.0 * HIDDEN * VOCAB * tokens
    assert step_flops(graph, scenario) == pytest.approx(4 * (linears + forward + backward) + head, rel=1e-9)


def test_model_flops_count_the_forward_products_three_times():
    model = load_scenario(delta("G")).model
    rule = HEADS * (2.0 * CHUNK * (3 * KEY + 2 * VALUE) + 6 * KEY * VALUE + 2 * CHUNK**2 / 3)
    forward = 2.0 * HIDDEN * (PROJECTION + VALUES + VOCAB) + rule
    assert model_flops_per_token(model, SEQUENCE) == pytest.approx(3 * forward)


def test_the_work_of_the_rule_does_not_grow_with_the_sequence():
    short, _ = lowered("G", training__seq_len=256)
    long, _ = lowered("G", training__seq_len=4096)
    assert model_flops_per_token(short.model, 256) == model_flops_per_token(long.model, 4096)


@pytest.mark.parametrize("plan", [{}, {"parallel__tp": 2, "parallel__sp": True}, {"parallel__cp": 2},
                                  {"training__dtype": "fp8-tensorwise"}, {"training__recompute": "full"},
                                  {"training__recompute": {"modules": ["core_attn"]}},
                                  {"parallel__pp": 2, "schedule": "zb-h1"}])  # fmt: skip
def test_a_gate_behind_attention_is_a_third_of_the_queries_linear(plan: dict[str, Any]):
    changes = {"model__layers": 2, **plan}
    plain = load_scenario(dense_mapping(**changes))
    gated = load_scenario(dense_mapping(**changes, model__attention_output_gate=True))
    graphs = [lower_scenario(scenario) for scenario in (gated, plain)]
    assert_nothing_leaks(graphs[0])
    passes = 4 if plan.get("training__recompute") == "full" else 3
    more = 2 * 2.0 * passes * HIDDEN * QUERIES * gated.tokens
    flops = [step_flops(graph, gated) for graph in graphs]
    assert flops[0] - flops[1] == pytest.approx(more, rel=1e-9)
    assert count_parameters(gated.model) - count_parameters(plain.model) == 2 * HIDDEN * QUERIES
    names = [Counter(graph.strings[name] for name in graph.operations.name) for graph in graphs]
    assert names[1]["attention_output_gate"] == 0
    assert names[0]["attention_output_gate"] == names[0]["attention_output_gate_backward"] * (
        2 if plan.get("training__recompute") == "full" else 1
    )


# -- communication and memory ------------------------------------------------------------------------------------


def test_tensor_parallel_collectives_are_those_of_its_two_linears():
    _, graph = lowered("G", parallel__tp=4, parallel__sp=True)
    operations = graph.operations
    chosen = np.flatnonzero(
        (operations.stream == Stream.TP) & (operations.phase == Phase.FORWARD) & (operations.layer == 0)
        & (operations.microbatch == 0)
    )  # fmt: skip
    sent = [
        (Communication(int(operations.communication[row])).name, int(operations.communication_bytes[row]))
        for row in chosen
    ]
    hidden = 2 * 2 * SEQUENCE * HIDDEN
    assert sent == [("ALL_GATHER", hidden), ("REDUCE_SCATTER", hidden)]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_activations_of_a_delta_rule_layer(tp: int, sp: bool):
    """Two norms' sides; the convolution's input; queries and keys twice; values and gate, three outputs; the rule."""
    _, graph = lowered("GG", parallel__tp=tp, parallel__sp=sp, training__num_microbatches=1)
    tokens = 2 * SEQUENCE
    hidden = 2 * 2 * tokens * HIDDEN // (tp if sp else 1)
    rule = 2 * CHANNELS + 2 * 2 * KEYS + 2 * 2 * HEADS * KEY + 5 * 2 * VALUES
    small = HEADS * (2 * CHUNK + 4 + 2)
    assert saved_bytes(graph, 0) == hidden + tokens * (rule + small) // tp


def test_memory_falls_with_tensor_parallelism_and_recompute():
    def peak(**changes: Any) -> float:
        return float(simulate(load_scenario(delta("G-G*", **changes))).report["peak_allocated_gib"])

    sharded = [peak(parallel__tp=tp, parallel__sp=tp > 1) for tp in (1, 2, 4)]
    assert sharded == sorted(sharded, reverse=True)
    assert peak(training__recompute="full") < peak()


def test_full_recompute_runs_the_rule_again():
    scenario, graph = lowered("GG", training__recompute="full")
    assert_nothing_leaks(graph)
    operations = graph.operations
    again = (operations.kind == OpKind.SCAN) & (operations.phase == Phase.RECOMPUTE)
    once = (operations.kind == OpKind.SCAN) & (operations.phase == Phase.FORWARD)
    assert again.sum() == once.sum() == 6 * 2 * scenario.training.num_microbatches


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__cp": 2}, "cannot share the sequences of gated delta-rule layers"),
        ({"parallel__tp": 8}, "4 delta-rule key heads do not divide by it"),
        (
            {"training__dtype": "fp8-rowwise"},
            "is known for dense layers, small has delta-rule layers; nearest:",
        ),
        ({"training__recompute": {"keep": "products"}}, "knows layers of attention and an MLP"),
    ],
)
def test_plans_without_a_rule_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ScenarioError) as refused:
        load_scenario(delta("G-G*", **changes))
    assert message in str(refused.value)


def test_fp8_storage_of_gated_attention_is_refused():
    changes = {"training__dtype": "fp8-blockwise", "training__fp8_storage": True}
    load_scenario(dense_mapping(**changes))
    with pytest.raises(ScenarioError, match="knows attention without a gate behind it, small has one"):
        load_scenario(dense_mapping(**changes, model__attention_output_gate=True))


MODEL = {**delta("G*")["model"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta_net": {**NET, "key_heads": 3}}, "key_heads: 3 does not divide the 8 value heads; nearest: 2"),
        ({"delta_net": {"key_heads": 4}}, "delta_net.value_heads"),
        ({"delta_net": None}, "delta_net"),
        ({"layer_pattern": "**"}, "delta_net"),
        ({"delta_net": {**NET, "conv_width": 0}}, "conv_width"),
        ({"latent_attention": {"kv_lora_rank": 64, "qk_nope_head_size": 16, "qk_rope_head_size": 16,
                               "v_head_size": 32}, "attention_output_gate": True, "kv_heads": 8},
         "attention_output_gate"),
    ],
)  # fmt: skip
def test_bad_models_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError) as refused:
        model_from_mapping({**MODEL, **changes}, "model.yaml")
    assert message in str(refused.value)


# -- other formats -----------------------------------------------------------------------------------------------

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def test_a_configuration_gives_the_preset_and_so_do_the_defaults():
    preset = load_model("qwen3-next-80b-a3b")
    assert model_from_huggingface(QWEN3_NEXT, "config.json", preset.name) == preset
    short = {"model_type": "qwen3_next", "intermediate_size": 5120}
    assert model_from_huggingface(short, "config.json", preset.name) == preset


def test_layers_may_be_listed_as_words():
    words = ["linear_attention", "full_attention", "full_attention"]
    config = {**QWEN3_NEXT, "num_hidden_layers": 3, "layer_types": words}
    assert model_from_huggingface(config, "config.json").mixer_pattern == "G**"
    with pytest.raises(ModelError, match="layer_types: must be a list of linear_attention or full_attention"):
        model_from_huggingface({**config, "layer_types": ["rnn"] * 3}, "config.json")


VARIANT = {
    "experimental-attention-variant": "gated_delta_net",
    "linear-attention-freq": 4,
    "linear-num-key-heads": 4,
    "linear-num-value-heads": 8,
    "linear-key-head-dim": 16,
    "linear-value-head-dim": 32,
    "attention-output-gate": True,
}


@pytest.mark.parametrize(
    ("frequency", "pattern"), [(4, "GGG*"), (1, "*"), ("[1,0]*4", "G*" * 4), ("([1]*6+[0]*2)", "GGGGGG**")]
)
def test_arguments_of_megatron_say_which_layers_have_the_rule(frequency: object, pattern: str):
    model = scenario_of({**VARIANT, "linear-attention-freq": frequency, "num-layers": 8}).model
    assert (model.mixer_pattern, model.attention_output_gate) == (pattern, True)
    if "G" in pattern:
        assert model.delta_net == load_scenario(delta("G")).model.delta_net


@pytest.mark.parametrize("frequency", [0, "[1,2]", "[1]*3", "G", None])
def test_wrong_patterns_of_megatron_are_refused(frequency: object):
    message = problems_of({**VARIANT, "linear-attention-freq": frequency, "num-layers": 8})
    assert "linear-attention-freq" in message
    assert "a number above 0, or a list of 0 or 1 for each of 8 layers" in message


def test_a_hybrid_pattern_of_megatron_may_have_the_rule():
    sizes = {
        name: value for name, value in VARIANT.items() if name.startswith("linear-") and "freq" not in name
    }
    model = scenario_of({"hybrid-layer-pattern": "G-*-", "num-layers": None, **sizes}).model
    assert model.layer_pattern == "G-*-"
    assert model.delta_net == load_scenario(delta("G")).model.delta_net
