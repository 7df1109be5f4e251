"""Clamped activation and bias of experts (gpt-oss): kernels, traffic, what is kept, and what captured experts fuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.model import ModelDescription
from op_graphs.presets import load_model
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 8, 2, 256, 128, 256
ROWS = TOKENS * TOP_K
MOE = {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn_size": WIDTH}
FIRST, SECOND = 2 * ROWS * 2 * WIDTH, 2 * ROWS * WIDTH
"""Bytes of the first linear's output and of the second one's input."""


def mixture(moe: dict[str, Any] | None = None, **changes: Any) -> OpGraph:
    """One layer with experts, one microbatch of 256 tokens."""
    changes = {"model__moe": {**MOE, **(moe or {})}, "model__layers": 1, **changes}
    graph = lower_scenario(load_scenario(dense_mapping(**changes, training__num_microbatches=1)))
    assert_nothing_leaks(graph)
    return graph


def moved(graph: OpGraph, word: str, phase: Phase | None = None) -> list[tuple[str, float, float, int]]:
    """Name, bytes read and written, and number of kernels of the operations whose name has a word, in order."""
    operations, found = graph.operations, []
    for row in range(len(operations)):
        name = graph.strings[operations.name[row]]
        if word in name and phase in (None, Phase(int(operations.phase[row]))):
            shape = graph.shapes[operations.shape[row]]
            read, written = float(operations.bytes_read[row]), float(operations.bytes_written[row])
            found.append((name, read, written, shape.passes))
    return found


def kept(graph: OpGraph, name: str) -> int:
    """Bytes of a name that live from the forward pass into the backward pass."""
    buffers, phase = graph.buffers, graph.operations.phase
    mine = np.array([graph.strings[buffer] == name for buffer in buffers.name])
    mine &= (buffers.allocate >= 0) & (buffers.category == MemoryCategory.ACTIVATIONS)
    first, last = phase[buffers.allocate[mine]], phase[buffers.release[mine]]
    return int(buffers.size[mine][(first == Phase.FORWARD) & (last != Phase.FORWARD)].sum())


def test_clamps_of_both_halves_are_kernels_of_their_own():
    graph = mixture(model__activation="clamped_swiglu")
    elements = ROWS * WIDTH
    assert moved(graph, "clamp") == [
        ("expert_clamp", FIRST, FIRST, 2),
        ("expert_clamp_join", FIRST, FIRST, 1),
        ("expert_clamped_swiglu", FIRST + 4 * ROWS, SECOND, 1),
        ("expert_clamped_swiglu_backward", FIRST + SECOND, FIRST + 4 * ROWS, 1),
        # One half: compare, select. The other: two comparisons, both, select.
        ("expert_clamp_backward", (3 + 2 + 2) * elements + (2 + 2 + 3) * elements, 3 * elements + 5 * elements, 6),
        ("expert_clamp_gradient_join", FIRST, FIRST, 1),
    ]  # fmt: skip
    assert kept(graph, "expert_clamped") == FIRST
    assert kept(graph, "expert_fc1_output") == FIRST


def test_the_unclamped_activation_is_one_kernel():
    graph = mixture(model__activation="swiglu")
    assert moved(graph, "clamp") == []
    assert kept(graph, "expert_clamped") == 0
    assert [name for name, *_ in moved(graph, "expert_swiglu")] == ["expert_swiglu", "expert_swiglu_backward"]


def test_recompute_of_the_activation_runs_the_clamps_again_and_keeps_nothing_of_them():
    graph = mixture(model__activation="clamped_swiglu", training__recompute={"modules": ["moe_act"]})
    again = [name for name, *_ in moved(graph, "clamp", Phase.RECOMPUTE)]
    assert again == ["expert_clamp", "expert_clamp_join", "expert_clamped_swiglu"]
    assert kept(graph, "expert_clamped") == 0


def test_the_bias_of_the_second_linear_is_added_expert_by_expert_in_fp32():
    graph = mixture({"expert_bias": True})
    elements = ROWS * HIDDEN
    assert moved(graph, "expert_bias") == [
        ("expert_bias", (4 + 2) * elements, 8 * elements, 2 * EXPERTS),
        ("expert_bias_join", 8 * elements, 6 * elements, 2),
        ("expert_bias_gradient_cast", 2 * elements, 4 * elements, 1),
        ("expert_bias_products", 8 * elements, 8 * elements, 2 * EXPERTS),
        ("expert_bias_sums", 8 * elements, 4 * ROWS, 2 * EXPERTS),
        ("expert_bias_gradient_join", 6 * elements, 4 * elements, EXPERTS + 1),
    ]
    assert moved(mixture(), "expert_bias") == []


def test_a_bias_stands_between_the_product_and_what_cuts_the_padding():
    graph = mixture({"expert_bias": True, "experts": 6}, training__dtype="fp8-tensorwise")
    order = [graph.strings[name] for name in graph.operations.name]
    steps = ["expert_fc2", "expert_bias_join", "expert_unpad"]
    back = ["expert_unpad_backward", "expert_bias_gradient_join", "expert_fc2_dgrad"]
    assert [name for name in order if name in steps] == steps
    assert [name for name in order if name in back] == back


@pytest.mark.parametrize("graphs", ["full_iteration", ["attn", "moe"]])
def test_captured_experts_have_fused_kernels(graphs):
    moe = {"expert_bias": True, "capacity_factor": 1.0, "pad_to_capacity": True}
    graph = mixture(moe, model__activation="clamped_swiglu", training__cuda_graphs=graphs)
    assert moved(graph, "expert_bias") == []
    assert [name for name, *_ in moved(graph, "clamp")] == [
        "expert_clamped_swiglu",
        "expert_clamped_swiglu_backward",
    ]


def test_the_host_waits_for_the_copy_of_the_offset():
    def waits(activation: str) -> int:
        graph = mixture(model__activation=activation)
        kinds = graph.operations.kind
        names = [graph.strings[name] for name in graph.operations.name[kinds == OpKind.HOST]]
        return names.count("activation_offset_to_device")

    assert (waits("clamped_swiglu"), waits("swiglu")) == (1, 0)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss_clamps_and_has_biases(name):
    model = load_model(name)
    assert isinstance(model, ModelDescription)
    assert model.moe is not None
    assert (model.activation, model.gated, model.moe.expert_bias) == ("clamped_swiglu", True, True)


def test_squared_relu_and_scores_are_one_kernel_each_way_where_they_are_fused():
    apart, fused = (
        mixture(model__activation="squared_relu", libraries={"weighted_squared_relu_fusion": one})
        for one in (False, True)
    )
    scores, width = 4 * ROWS, 2 * ROWS * WIDTH
    assert moved(apart, "expert_s") == [
        ("expert_squared_relu", width, width, 1),
        ("expert_score_product", width + scores, width, 1),
        ("expert_score_product_backward", 2 * width + scores, width + scores, 1),
        ("expert_squared_relu_backward", 2 * width, width + scores, 1),
    ]
    assert moved(fused, "expert_s") == [
        ("expert_squared_relu", width + scores, width, 1),
        ("expert_squared_relu_backward", 2 * width, width + scores, 1),
    ]
    assert (kept(apart, "expert_activation_output"), kept(fused, "expert_activation_output")) == (width, 0)
    assert kept(apart, "expert_fc2_input") == kept(fused, "expert_fc2_input")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "changes nothing: small has no experts; leave it out"),
        (
            {"model__moe": MOE},
            "is a kernel of squared_relu; the activation of small is swiglu",
        ),
    ],
)
def test_the_fused_squared_relu_needs_experts_with_a_squared_relu(changes, message):
    with pytest.raises(ScenarioError, match=re.escape(message)):
        load_scenario(dense_mapping(**changes, libraries={"weighted_squared_relu_fusion": True}))
