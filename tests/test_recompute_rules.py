"""The registry of recompute rules: what each runs again and drops, that none is more than its parts, and adding one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.plan import Recompute
from op_graphs.recompute import (
    INSIDE,
    KEEP_RULES,
    LAYER_RULES,
    MODULE_RULES,
    Part,
    RecomputeRule,
    recomputed_layers,
    recomputed_parts,
)
from op_graphs.vocabulary import MemoryCategory, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_size": 16,
    "qk_rope_head_size": 8,
    "v_head_size": 16,
}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn_size": 64, "shared_ffn_size": 64, "first_dense_layers": 1}
EVERYTHING: dict[str, Any] = {
    "model__layers": 2,
    "model__latent_attention": LATENT,
    "model__kv_heads": 8,
    "model__head_size": 24,
    "model__moe": EXPERTS,
    "training__num_microbatches": 1,
}
"""A dense layer and one with experts, both with latent attention: every module there is."""


def lowered(recompute: Any, **changes: Any) -> OpGraph:
    return lower_scenario(load_scenario(dense_mapping(**{**changes, "training__recompute": recompute})))


def again(graph: OpGraph) -> Counter[str]:
    rows = np.flatnonzero(graph.operations.phase == Phase.RECOMPUTE)
    return Counter(graph.strings[name] for name in graph.operations.name[rows].tolist())


def kept_bytes(graph: OpGraph) -> int:
    """Activations that the forward leaves to the backward pass."""
    operations, buffers = graph.operations, graph.buffers
    backward = operations.phase[buffers.release] != Phase.FORWARD
    forward = operations.phase[buffers.allocate] == Phase.FORWARD
    rows = forward & backward & (buffers.category == MemoryCategory.ACTIVATIONS)
    return int(buffers.size[rows].sum())


@pytest.mark.parametrize("name", list(MODULE_RULES))
def test_every_module_drops_something_and_runs_it_again(name: str) -> None:
    plain, graph = lowered("none", **EVERYTHING), lowered({"modules": [name]}, **EVERYTHING)
    assert not again(plain)
    assert again(graph)
    # Flash attention keeps a statistic a row, which is what its recompute drops.
    assert kept_bytes(graph) < kept_bytes(plain)
    assert_nothing_leaks(graph)
    extra = graph.operations.flops[graph.operations.phase == Phase.RECOMPUTE].sum()
    assert graph.operations.flops.sum() == pytest.approx(plain.operations.flops.sum() + extra)


@pytest.mark.parametrize("name", list(KEEP_RULES))
def test_every_policy_drops_something_and_runs_it_again(name: str) -> None:
    plain, graph = lowered("none"), lowered({"keep": name})
    assert again(graph)
    assert kept_bytes(graph) < kept_bytes(plain)
    assert_nothing_leaks(graph)


def test_every_part_belongs_to_a_rule_and_every_rule_has_parts() -> None:
    rules = [*MODULE_RULES.values(), *KEEP_RULES.values()]
    assert all(rule.parts for rule in rules)
    assert {part for rule in rules for part in rule.parts} == set(Part)


def test_modules_add_up() -> None:
    """What two rules run again is what each of them does."""
    pair = ["layernorm", "moe_act"]
    both = again(lowered({"modules": pair}, **EVERYTHING))
    assert both == sum((again(lowered({"modules": [name]}, **EVERYTHING)) for name in pair), Counter())
    assert recomputed_parts(Recompute("selective", tuple(pair))) == {Part.NORMS, Part.EXPERT_ACTIVATION}


@pytest.mark.parametrize(
    ("method", "number", "expected"),
    [
        ("uniform", 3, [range(4, 7), range(7, 9)]),
        ("block", 2, [range(4, 5), range(5, 6)]),
        ("every", 2, [range(5, 6), range(7, 8)]),
    ],
)
def test_layers_of_a_chunk_that_run_again(method: str, number: int, expected: list[range]) -> None:
    assert recomputed_layers(Recompute("full", layers=number, method=method), range(4, 9)) == expected
    assert recomputed_layers(Recompute(), range(4, 9)) == []


@pytest.fixture
def mlp_act() -> Iterator[None]:
    """A rule of one's own: of the MLP only the activation runs again."""
    MODULE_RULES["mlp_act"] = RecomputeRule(
        frozenset({Part.MLP_ACTIVATION}),
        lambda model: any(model.layer_ffn_size(layer) for layer in model.layer_numbers),
        lambda model, training: "does not go with fp8_storage; leave it out" if training.fp8_storage else "",
    )
    yield
    del MODULE_RULES["mlp_act"]


@pytest.mark.usefixtures("mlp_act")
def test_a_rule_of_known_parts_is_a_line() -> None:
    """Tokens times the width of the MLP, of two bytes, in every layer; only the activation's kernel runs again."""
    scenario = load_scenario(dense_mapping(training__recompute={"modules": ["mlp_act"]}))
    graph = lower_scenario(scenario)
    plain = lowered("none")
    layers, microbatches, tokens, width = 4, 2, 256, 512
    assert again(graph) == {"swiglu": layers * microbatches}
    assert kept_bytes(plain) - kept_bytes(graph) == layers * microbatches * tokens * width * 2
    assert graph.operations.flops.sum() == plain.operations.flops.sum()
    assert_nothing_leaks(graph)
    assert load_scenario(scenario_to_mapping(scenario)) == scenario
    assert simulate(scenario).report["iteration_time_ms"] > 0


@pytest.mark.usefixtures("mlp_act")
@pytest.mark.parametrize(
    "changes",
    [
        {"training__dtype": "fp8-tensorwise"},
        {"training__dtype": "mxfp8", "hardware": "b200-sxm"},
        {"model__moe": EXPERTS},
        {"parallel": {"tp": 2, "sp": True}},
        {"libraries": {"eager": True}, "parallel": {"zero": 3, "dp": 2}},
        {"parallel": {"pp": 2}, "schedule": "zb-h1"},
    ],
)
def test_it_goes_with_everything_else(changes: dict[str, Any]) -> None:
    graph = lowered({"modules": ["mlp_act"]}, **changes)
    assert_nothing_leaks(graph)
    names = set(again(graph))
    # Shared experts are an MLP as well; in fp8 what is activated again is quantised again.
    assert any(name.endswith("swiglu") or "gate" in name for name in names)
    assert not any(name.startswith(("fc1", "qkv", "proj")) for name in names)
    assert kept_bytes(graph) < kept_bytes(lowered("none", **changes))


@pytest.mark.usefixtures("mlp_act")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__recompute": {"modules": ["mlp_acts"]}}, "is not a module; did you mean mlp_act?"),
        (
            {"training__recompute": {"modules": ["mlp", "mlp_act"]}},
            "training.recompute.modules: mlp (from scenario) recomputes the MLP whole; leave out mlp_act",
        ),
        (
            {
                "training__recompute": {"modules": ["mlp_act"]},
                "training__dtype": "fp8-blockwise",
                "training__fp8_storage": True,
            },
            "training.recompute.modules: mlp_act (from scenario) does not go with fp8_storage; leave it out",
        ),
        (
            {
                "training__recompute": {"modules": ["mlp_act"]},
                "model__moe": {**EXPERTS, "first_dense_layers": 0},
            },
            "small has no such module; it has core_attn, layernorm, moe, moe_act, shared_experts",
        ),
    ],
)
def test_it_is_checked_like_the_others(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(**changes))
    assert said in str(error.value)


def test_a_whole_and_its_parts_are_not_named_together() -> None:
    assert INSIDE[Part.EXPERTS] == {Part.EXPERT_ACTIVATION, Part.SHARED_EXPERTS}
    with pytest.raises(ScenarioError) as error:
        lowered({"modules": ["moe", "moe_act", "shared_experts"]}, **EVERYTHING)
    assert "moe (from scenario) recomputes the experts whole; leave out moe_act and shared_experts" in str(
        error.value
    )


def test_the_registry_lists_what_scenarios_take() -> None:
    assert list(LAYER_RULES) == ["uniform", "block", "every"]
    with pytest.raises(ScenarioError) as error:
        lowered({"keep": "all"})
    assert "must be products or every-second-product" in str(error.value)
