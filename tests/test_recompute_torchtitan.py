"""torchtitan's selective recompute: every n-th layer, and all but matrix products and attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.vocabulary import OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import (
    assert_nothing_leaks,
    attention_flops,
    linear_flops,
    lowered,
    saved_bytes,
    step_flops,
)
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping


@pytest.mark.parametrize(("every", "layers"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), (5, [])])
@pytest.mark.parametrize("pp", [1, 2])
def test_every_nth_layer_runs_again(every, layers, pp):
    changes: dict[str, Any] = {"parallel__pp": pp, "libraries__transformer_engine": False}
    scenario, plain = lowered(**changes)
    _, again = lowered(**changes, training__recompute={"every": every})
    assert_nothing_leaks(again)
    rows = again.operations.phase == Phase.RECOMPUTE
    assert sorted(set(again.operations.layer[rows].tolist())) == layers
    model = scenario.model
    layer = (linear_flops(scenario) + attention_flops(scenario)) / model.layers
    # Nothing in backward reads what the last product of a layer makes.
    layer -= 2 * model.ffn_size * model.hidden_size
    added = step_flops(again, scenario) - step_flops(plain, scenario)
    assert added == pytest.approx(scenario.tokens * len(layers) * layer, rel=1e-9)


@pytest.mark.parametrize("dtype", ["bf16", "fp8-tensorwise", "fp8-rowwise"])
@pytest.mark.parametrize("policy", ["in-place", "gathered-once", "async-tp"])
def test_a_layer_runs_again_as_far_as_its_backward_needs_it(dtype, policy):
    """Up to the input of its last product (``torch.utils.checkpoint`` stops there), Megatron-LM's to its end."""
    changes: dict[str, Any] = {
        "parallel": {"tp": 2, "sp": True},
        "overlap__tp": policy,
        "training__dtype": dtype,
        "hardware": "h100-sxm",
        "libraries__transformer_engine": False,
    }
    whole, needed = (lowered(**changes, training__recompute=rule)[1] for rule in ("full", {"every": 1}))
    assert_nothing_leaks(needed)

    def again(graph):
        rows = graph.operations.phase == Phase.RECOMPUTE
        return Counter(graph.strings[name] for name in graph.operations.name[rows])

    left_out = set(again(whole) - again(needed))
    assert {"fc2", "mlp_residual"} <= left_out
    assert all(name.startswith(("fc2", "mlp_residual")) for name in left_out)
    assert not again(needed) - again(whole)
    backward = [graph.operations.phase != Phase.RECOMPUTE for graph in (whole, needed)]
    kept = [
        Counter(graph.strings[name] for name in graph.operations.name[rows])
        for graph, rows in zip((whole, needed), backward, strict=True)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("plan", [{}, {"tp": 4}, {"tp": 4, "sp": True}, {"pp": 2, "dp": 2, "zero": 3}])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_products_are_kept_and_the_rest_runs_again(plan, qk_norm):
    """Kept: input of the layer, q k v, the output of attention with its log-sum-exp, the output of the hidden width
    behind attention, and fc1's output. Not kept: outputs of norms and of the activation, and what nothing reads, the
    output of the MLP."""
    changes: dict[str, Any] = {"parallel": plan, "model__qk_norm": qk_norm}
    scenario, plain = lowered(**changes)
    _, graph = lowered(**changes, training__recompute={"keep": "products"})
    assert_nothing_leaks(graph)
    assert step_flops(graph, scenario) == step_flops(plain, scenario)
    operations = graph.operations
    again = operations.phase == Phase.RECOMPUTE
    assert not np.isin(operations.kind[again], [OpKind.GEMM, OpKind.ATTENTION]).any()
    names = Counter(graph.strings[name] for name in operations.name[again])
    times = scenario.model.layers * scenario.training.num_microbatches
    expected = ["input_layernorm", "pre_mlp_layernorm", "rotary", "attention_residual", "swiglu"]
    assert names == dict.fromkeys([*expected, *(["qk_norm"] if qk_norm else [])], times)
    model, tp = scenario.model, scenario.parallel.tp
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    query, key_value = model.heads * model.head_size, model.kv_heads * model.head_size
    whole = 2 * tokens * 2 * model.hidden_size // (tp if scenario.parallel.sp else 1)
    cut = 2 * tokens * (query + 2 * key_value + query + 2 * model.ffn_size) + 4 * tokens * model.heads
    kept = (whole + cut // tp) * scenario.training.num_microbatches
    if scenario.parallel.pp == 1:
        assert [saved_bytes(graph, layer) for layer in range(model.layers)] == [kept] * model.layers


@pytest.mark.parametrize(("eager", "kept"), [(False, 0), (True, 1), (["norms"], 0), (["mlp"], 1)])
def test_an_eager_checkpoint_keeps_what_nothing_reads(eager, kept):
    """torchao measured 47.65 GiB of Llama 3 8B on eight H100 with compiled layers, torchtitan's pull request 996 49.58
    without: 1.93 GiB more, where 32 outputs of 8,192 tokens have 2."""
    scenario, graph = lowered(training__recompute={"keep": "products"}, libraries={"eager": eager})
    named = [graph.strings[name] for name in graph.buffers.name]
    assert named.count("mlp_output") == kept * scenario.model.layers * scenario.training.num_microbatches


@pytest.mark.parametrize("plan", [{}, {"tp": 4}, {"tp": 4, "sp": True}, {"pp": 2, "dp": 2, "zero": 3}])
def test_every_second_product_runs_again_too(plan):
    """In torchtitan's order (wq, wk, wv, wo, w1, w3, w2) the second, fourth and sixth: keys, the output projection
    unless its reduced output is kept under tensor parallelism, and the up projection."""
    recompute = {"keep": "every-second-product"}
    scenario, products = lowered(parallel=plan, training__recompute={"keep": "products"})
    _, graph = lowered(parallel=plan, training__recompute=recompute)
    assert_nothing_leaks(graph)
    operations, model, parallel = graph.operations, scenario.model, scenario.parallel
    again = (operations.phase == Phase.RECOMPUTE) & (operations.kind == OpKind.GEMM)
    times = model.layers * scenario.training.num_microbatches
    expected = ["keys", "fc1_up", *(["proj"] if parallel.tp == 1 else [])]
    assert Counter(graph.strings[name] for name in operations.name[again]) == dict.fromkeys(expected, times)
    keys = model.kv_heads * model.head_size
    elements = model.hidden_size * (keys + model.ffn_size)
    if parallel.tp == 1:
        elements += model.attention_output_size * model.hidden_size
    added = step_flops(graph, scenario) - step_flops(products, scenario)
    assert added == pytest.approx(2 * scenario.tokens * model.layers * elements, rel=1e-9)
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    dropped = 2 * tokens * (keys + model.ffn_size) // parallel.tp
    if parallel.tp == 1:
        dropped += 2 * tokens * model.hidden_size
    if parallel.pp == 1:
        kept = [saved_bytes(products, layer) - saved_bytes(graph, layer) for layer in range(model.layers)]
        assert kept == [dropped * scenario.training.num_microbatches] * model.layers


def test_experts_and_images_go_with_it():
    moe = {"experts": 4, "top_k": 2, "expert_ffn_size": 64, "shared_ffn_size": 64}
    scenario = load_scenario(dense_mapping(model__moe=moe, training__recompute={"keep": "products"}))
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    again = graph.operations.phase == Phase.RECOMPUTE
    names = {graph.strings[name] for name in graph.operations.name[again]}
    assert {"expert_swiglu", "shared_swiglu"} <= names
    assert not np.isin(graph.operations.kind[again], [OpKind.GEMM, OpKind.GROUPED_GEMM]).any()


LATENT = {"kv_lora_rank": 32, "qk_nope_head_size": 16, "qk_rope_head_size": 16, "v_head_size": 32}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__recompute": {"every": 0}},
            "training.recompute.every: 0 (from scenario) must be a whole number",
        ),
        ({"training__recompute": {"every": 2, "layers": 1}}, "takes every or keep alone, not every, layers"),
        (
            {"training__recompute": {"keep": "norms"}},
            "training.recompute.keep: norms (from scenario) must be products",
        ),
        ({"training__recompute": {"evry": 2}}, "did you mean every?"),
        (
            {
                "training__recompute": {"keep": "products"},
                "model__latent_attention": LATENT,
                "model__kv_heads": 8,
            },
            "training.recompute.keep: does not know the latent attention of small",
        ),
        (
            {
                "training__recompute": {"keep": "every-second-product"},
                "model__moe": {"experts": 4, "top_k": 2, "expert_ffn_size": 64},
            },
            "every-second-product counts the products of dense layers, small has experts; use products",
        ),
        (
            {
                "training__recompute": {"keep": "products"},
                "training__dtype": "fp8-blockwise",
                "training__fp8_storage": True,
            },
            "training.recompute.keep: does not go with fp8_storage",
        ),
    ],
)
def test_what_is_refused(changes, said):
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(**changes))
    assert said in str(error.value)


@pytest.mark.parametrize("recompute", [{"every": 3}, {"keep": "products"}, {"keep": "every-second-product"}])
def test_a_scenario_writes_it_back(recompute):
    scenario = load_scenario(dense_mapping(training__recompute=recompute))
    mapping = scenario_to_mapping(scenario)
    assert mapping["training"]["recompute"] == recompute
    assert load_scenario(mapping) == scenario
    assert load_scenario(dense_mapping(), ["training.recompute.every=3"]).training.recompute.layers == 3
