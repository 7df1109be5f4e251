"""Experts whose activation and quantisation are part of their grouped products (``libraries.grouped_mlp_fusion``)."""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.graph import GemmShape, MemoryShape, OpGraph
from op_graphs.vocabulary import OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

MOE = {"experts": 8, "top_k": 2, "expert_ffn_size": 128}


def mapping(*, fused: bool, **changes: Any) -> dict[str, Any]:
    return dense_mapping(
        **{
            "model__moe": MOE,
            "model__layers": 2,
            "hardware": "b200-sxm",
            "training__dtype": "mxfp8",
            "training__num_microbatches": 2,
            "libraries": {"grouped_mlp_fusion": fused},
            **changes,
        }
    )


def lowered(*, fused: bool, **changes: Any) -> OpGraph:
    return lower_scenario(load_scenario(mapping(fused=fused, **changes)))


def of_experts(graph: OpGraph, kind: OpKind) -> dict[str, float]:
    """Bytes of the operations of experts of a kind, by name, over the step."""
    operations, found = graph.operations, dict[str, float]()
    for row in range(len(operations)):
        name = graph.strings[operations.name[row]]
        if operations.kind[row] == kind and name.startswith("expert_"):
            moved = float(operations.bytes_read[row] + operations.bytes_written[row])
            found[name] = found.get(name, 0.0) + moved
    return found


def test_only_what_arrives_is_quantised_by_a_kernel_of_its_own():
    plain, fused = lowered(fused=False), lowered(fused=True)
    assert set(of_experts(fused, OpKind.ELEMENTWISE)) == {"expert_gradient_sum"}
    assert {"expert_swiglu", "expert_swiglu_backward"} <= set(of_experts(plain, OpKind.ELEMENTWISE))
    casts = {name: moved for name, moved in of_experts(fused, OpKind.CAST).items() if "weight" not in name}
    assert set(casts) == {"expert_fc1_input_cast_transpose", "expert_fc2_gradient_cast_transpose"}
    assert casts.items() <= of_experts(plain, OpKind.CAST).items()


def test_the_products_are_the_same():
    def products(graph: OpGraph) -> list[tuple[str, GemmShape]]:
        operations = graph.operations
        return sorted(
            (
                (graph.strings[operations.name[row]], shape)
                for row in range(len(operations))
                if operations.shape[row] >= 0
                and isinstance(shape := graph.shapes[operations.shape[row]], GemmShape)
            ),
            key=str,
        )

    assert products(lowered(fused=True)) == products(lowered(fused=False))


def test_one_kernel_quantises_for_all_experts():
    graph = lowered(fused=True)
    launches = [
        shape.passes
        for row in range(len(graph.operations))
        if graph.strings[graph.operations.name[row]].startswith(("expert_fc1_input", "expert_fc2_gradient"))
        and isinstance(shape := graph.shapes[graph.operations.shape[row]], MemoryShape)
    ]
    assert set(launches) == {1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__recompute": "full"},
        {"training__recompute": {"modules": ["moe"]}},
        {"parallel": {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}},
    ],
)
def test_nothing_is_left_behind(changes):
    assert_nothing_leaks(lowered(fused=True, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__dtype": "bf16"}, "needs training.dtype: mxfp8"),
        ({"parallel": {"ep": 2, "etp": 2, "tp": 2, "dp": 2}}, "needs parallel.etp: 1"),
        ({"training__recompute": {"modules": ["moe_act"]}}, "needs no moe_act in training.recompute"),
        ({"model__moe": None}, "changes nothing: small has no experts"),
    ],
)
def test_where_it_cannot_be(changes, message):
    with pytest.raises(ScenarioError) as error:
        load_scenario(mapping(fused=True, **changes))
    assert message in str(error.value)
