"""Layers that run again only as far as their backward reads (``training.recompute.stops_early``)."""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping

EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn_size": 128, "shared_ffn_size": 128}


def again(*, early: bool, **changes: Any) -> list[str]:
    """Names of what runs again on the device, in order."""
    graph = lowered(early=early, **changes)
    phases, streams = graph.operations.phase, graph.operations.stream
    rows = [
        row for row in range(len(phases)) if phases[row] == Phase.RECOMPUTE and streams[row] != Stream.HOST
    ]
    return [graph.strings[graph.operations.name[row]] for row in rows]


def lowered(*, early: bool, layers: int = 1, **changes: Any) -> OpGraph:
    recompute = {"layers": layers, "stops_early": early}
    changes = {"training__num_microbatches": 1, "model__layers": layers, **changes}
    return lower_scenario(load_scenario(dense_mapping(training__recompute=recompute, **changes)))


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        # A function of Transformer Engine saves its input behind its product, PyTorch's product in front of it.
        ({}, ["mlp_residual"]),
        ({"libraries": {"transformer_engine": False}}, ["fc2", "mlp_residual"]),
        ({"parallel": {"tp": 2}}, ["fc2_all_reduce", "mlp_residual"]),
        ({"parallel": {"tp": 2, "sp": True}}, ["fc2_reduce_scatter", "mlp_residual"]),
    ],
)
def test_what_backward_does_not_read_is_left_out(changes, left_out):
    whole, early = again(early=False, **changes), again(early=True, **changes)
    assert whole == early + left_out


def test_outputs_of_experts_are_not_brought_back():
    changes = {"model__moe": EXPERTS, "parallel": {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}}
    whole, early = again(early=False, **changes), again(early=True, **changes)
    missing = [name for name in whole if name not in early]
    assert [name.partition("_")[0] for name in missing[:-2]] == ["combine"] * (len(missing) - 2)
    assert missing[-2:] == ["shared_expert_add", "mlp_residual"]
    assert {"expert_fc2", "shared_fc2"} <= set(early)


def test_of_a_group_only_the_last_layer_stops():
    whole, early = again(early=False, layers=3), again(early=True, layers=3)
    assert (whole.count("mlp_residual"), early.count("mlp_residual")) == (3, 2)


def test_adapters_run_as_far_as_they_keep():
    changes = {
        "training__lora": {"rank": 8},
        "parallel": {"tp": 2},
        "libraries": {"transformer_engine": False},
    }
    early = again(early=True, **changes)
    assert early[-1] == "fc2_lora_scale"
    assert "fc2" not in early
    assert "fc2_lora_in" in early


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"libraries": {"transformer_engine": False}},
        {"model__hidden_dropout": 0.1},
        {"parallel": {"tp": 2, "sp": True}, "training__lora": {"rank": 8, "dropout": 0.1}},
        {"training__lora": {"rank": 8, "dropout": 0.1, "dropout_position": "post"}},
        {"model__moe": EXPERTS, "parallel": {"ep": 4, "dp": 4}},
    ],
)
def test_nothing_is_left_behind(changes):
    assert_nothing_leaks(lowered(early=True, layers=2, **changes))


def test_it_is_read_and_written():
    loaded = load_scenario(dense_mapping(training__recompute={"layers": 1, "stops_early": True}))
    assert loaded.training.recompute.stops_early
    assert load_scenario(scenario_to_mapping(loaded)) == loaded


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"layers": 1, "stops_early": 2}, "must be true or false"),
        ({"modules": ["core_attn"], "stops_early": True}, "belong to full recompute"),
    ],
)
def test_where_it_cannot_be(recompute, message):
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(training__recompute=recompute))
    assert message in str(error.value)
