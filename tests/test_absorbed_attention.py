"""Latent attention on the latents: FLOPs, transfers and kept memory against those of the expanded form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

HEADS, RANK, NOPE, ROPE, VALUES, QUERY_RANK, HIDDEN = 8, 64, 32, 16, 24, 48, 256
LATENT = {
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_size": NOPE,
    "qk_rope_head_size": ROPE,
    "v_head_size": VALUES,
}
TOKENS, LENGTH = 256, 128


def scenario(mla: str = "absorbed", latent: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """One layer, one microbatch of two sequences of 128 tokens."""
    model = {
        "model__latent_attention": {**LATENT, **(latent or {})},
        "model__kv_heads": HEADS,
        "model__head_size": NOPE + ROPE,
        "model__layers": 1,
    }
    training = {"training__num_microbatches": 1, "training__mla": mla}
    return load_scenario(dense_mapping(**{**model, **training, **changes}))


def lowered(mla: str = "absorbed", **changes: Any) -> OpGraph:
    return lower_scenario(scenario(mla, **changes))


def flops(graph: OpGraph, kind: OpKind) -> float:
    return float(graph.operations.flops[graph.operations.kind == kind].sum())


def flops_by_name(graph: OpGraph) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in zip(graph.operations.name.tolist(), graph.operations.flops.tolist(), strict=True):
        found[graph.strings[name]] += count
    return found


def test_linears_do_the_same_work_and_attention_that_of_wider_heads():
    absorbed, expanded = lowered(), lowered("expanded")
    assert flops(absorbed, OpKind.GEMM) == flops(expanded, OpKind.GEMM)
    pairs = 2 * LENGTH**2 / 2 * HEADS
    found = flops_by_name(absorbed)
    assert found["flash_attention"] == 2 * pairs * ((RANK + ROPE) + RANK)
    assert found["flash_attention_backward"] == 2 * pairs * (3 * (RANK + ROPE) + 2 * RANK)
    plain = flops_by_name(expanded)
    assert plain["flash_attention"] == 2 * pairs * ((NOPE + ROPE) + VALUES)


def test_a_product_a_head_in_the_place_of_one_linear():
    found = flops_by_name(lowered())
    one = 2.0 * TOKENS * HEADS * RANK
    for name, width in (("k_absorb", NOPE), ("v_up", VALUES)):
        for part in ("", "_dgrad", "_wgrad"):
            assert found[f"{name}{part}"] == one * width
    assert found["k_absorb"] + found["v_up"] == flops_by_name(lowered("expanded"))["kv_up"]


def test_parameters_and_model_work_stay_those_of_the_model():
    reports = [simulate(scenario(mla)).report for mla in ("absorbed", "expanded")]
    assert reports[0]["model"] == reports[1]["model"]
    times = [report["iteration_time_ms"] for report in reports]
    assert reports[0]["mfu"] * times[0] == pytest.approx(reports[1]["mfu"] * times[1])
    assert reports[0]["hfu"] * times[0] > reports[1]["hfu"] * times[1]


def kept(graph: OpGraph) -> Counter[str]:
    """Bytes of the activations that are left to the backward pass, by name."""
    sizes: Counter[str] = Counter()
    operations, buffers = graph.operations, graph.buffers
    for index in np.flatnonzero(buffers.category == MemoryCategory.ACTIVATIONS):
        released = operations.phase[buffers.release[index]]
        if operations.phase[buffers.allocate[index]] == Phase.FORWARD and released != Phase.FORWARD:
            sizes[graph.strings[buffers.name[index]]] += int(buffers.size[index])
    return sizes


def test_what_is_kept():
    absorbed, expanded = kept(lowered()), kept(lowered("expanded"))
    token = 2 * TOKENS
    assert absorbed - expanded == {
        "q_up_output": token * HEADS * (NOPE + ROPE),
        "attention_output": token * HEADS * (RANK - VALUES),
        "attention_values": token * HEADS * VALUES,
    }
    # Queries are as wide as the latent and its rotary part, which are there once for all heads.
    queries_and_latent = (HEADS + 1) * (RANK + ROPE)
    expanded_heads = HEADS * (2 * (NOPE + ROPE) + VALUES)
    assert expanded - absorbed == {
        "qkv": token * (expanded_heads - queries_and_latent),
        # Attention reads a copy of it.
        "kv_latent_normalized": token * RANK,
    }


def test_recomputed_projections_keep_the_latents_instead():
    absorbed = kept(lowered(training__recompute={"modules": ["mla_up_proj"]}))
    assert "qkv" not in absorbed
    assert "q_up_output" not in absorbed
    assert absorbed["kv_latent_normalized"] == 2 * TOKENS * RANK
    found = flops_by_name(lowered(training__recompute={"modules": ["mla_up_proj"]}))
    plain = flops_by_name(lowered())
    assert {name for name in found if found[name] != plain[name]} == {"q_up", "k_absorb"}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_latent_is_gathered_and_its_gradient_scattered(tp):
    graph = lowered(parallel={"tp": tp, "sp": True})
    operations = graph.operations
    message = 2.0 * TOKENS * (RANK + ROPE)
    sizes = {
        graph.strings[operations.name[row]]: (
            Communication(operations.communication[row]),
            float(operations.communication_bytes[row]),
        )
        for row in np.flatnonzero(operations.stream == Stream.TP)
    }
    assert sizes["kv_latent_all_gather"] == (Communication.ALL_GATHER, message)
    assert sizes["kv_latent_gradient_reduce_scatter"] == (Communication.REDUCE_SCATTER, message)
    assert not [name for name in sizes if name.startswith("kv_up")]
    # Heads are shared out.
    assert flops(graph, OpKind.ATTENTION) == flops(lowered(), OpKind.ATTENTION) / tp


@pytest.mark.parametrize("algorithm", ["p2p", "allgather"])
def test_a_ring_moves_the_latent_not_keys_and_values(algorithm):
    plan = {"cp": 2, "cp_comm": algorithm}
    moved = []
    for mla in ("absorbed", "expanded"):
        operations = lowered(mla, parallel=plan).operations
        rows = operations.stream == Stream.CP
        moved.append(float(operations.communication_bytes[rows].sum()))
    assert moved[0] / moved[1] == pytest.approx((RANK + ROPE) / (HEADS * (NOPE + ROPE + VALUES)))


@pytest.mark.parametrize("latent", [{}, {"q_lora_rank": 0}])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"tp": 2, "sp": True, "dp": 2, "zero": 3}},
        {"parallel": {"cp": 4}},
        {"training__recompute": "full"},
        {"training__recompute": {"modules": ["core_attn", "layernorm", "mla_up_proj"]}},
        {"training__attention": "unfused"},
        {"parallel": {"pp": 2}, "schedule": "zb-h1", "model__layers": 2, "training__num_microbatches": 4},
        {"training__offload": {"modules": ["qkv_linear", "core_attn"], "minimum_bytes": 0}},
    ],
)
def test_nothing_leaks_and_every_weight_gets_its_gradient(latent, changes):
    graph = lowered(latent=latent, **changes)
    assert_nothing_leaks(graph)
    found, plain = flops_by_name(graph), flops_by_name(lowered("expanded", latent=latent, **changes))
    assert found["k_absorb_wgrad"] + found["v_up_wgrad"] == plain["kv_up_wgrad"]
    assert "k_absorb_wgrad_accumulate" in found or changes.get("parallel", {}).get("zero") == 3


def test_a_split_backward_is_the_whole_one_in_two_parts():
    changes = {
        "parallel": {"pp": 2},
        "model__layers": 2,
        "training__num_microbatches": 4,
    }
    whole, split = (lowered(**changes, schedule=schedule) for schedule in ("1f1b", "zb-h1"))
    assert flops_by_name(split) == flops_by_name(whole)
    rows = split.operations.phase == Phase.BACKWARD_WEIGHT
    assert {"k_absorb_wgrad", "v_up_wgrad"} <= {split.strings[i] for i in split.operations.name[rows]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"tp": 2}}, "gathers latents along the sequence with tp = 2; set parallel.sp: true"),
        ({"training__dtype": "fp8-tensorwise"}, "is not there for products in 8 or 4 bits; set dtype: bf16, or mla"),
        ({"training__mla": "absorb"}, "did you mean absorbed?"),
        ({"parallel": {"cp": 2, "cp_comm": "a2a"}}, "does not divide the 1 key-value heads of a rank"),
        (
            {"training__attention": "flash-2", "latent": {"kv_lora_rank": 512}},
            "takes heads of at most 256 elements, with mla: absorbed they have 528; set attention: flash, or mla",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(changes, said):
    with pytest.raises(ScenarioError) as error:
        scenario(**{"mla": "absorbed", **changes})
    assert said in str(error.value)


def test_a_model_without_latents_has_nothing_to_absorb():
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(training__mla="absorbed"))
    assert (
        "training.mla: absorbed (from scenario) belongs to latent attention, small has none; leave it out"
        in str(error.value)
    )


def test_a_scenario_writes_it_back():
    loaded = scenario()
    assert load_scenario(scenario_to_mapping(loaded)) == loaded
