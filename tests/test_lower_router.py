"""The router of a mixture: element types of its products, and its kernels fused by Transformer Engine or PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.graph import GemmShape, MemoryShape, OpGraph
from op_graphs.vocabulary import DType, OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

EXPERTS, TOKENS, HIDDEN = 8, 256, 256
PAIRS = TOKENS * EXPERTS


def mixture(libraries: dict[str, Any] | None = None, **moe: Any) -> OpGraph:
    """One layer with experts, one microbatch of 256 tokens."""
    mapping = dense_mapping(
        model__moe={"experts": EXPERTS, "top_k": 2, "expert_ffn_size": 128, **moe},
        model__layers=1,
        training__num_microbatches=1,
        libraries=libraries or {},
    )
    return lower_scenario(load_scenario(mapping))


def products(graph: OpGraph) -> dict[str, tuple[DType, DType]]:
    """Element types of operands and result of the router's products."""
    operations, found = graph.operations, {}
    for row in range(len(operations)):
        shape = graph.shapes[operations.shape[row]] if operations.shape[row] >= 0 else None
        name = graph.strings[operations.name[row]]
        if name.startswith("router") and isinstance(shape, GemmShape):
            found[name] = (shape.dtype, shape.output)
    return found


def kernels(graph: OpGraph) -> dict[str, tuple[int, float, float]]:
    """Launches, bytes read and bytes written of its other kernels."""
    operations, found = graph.operations, {}
    for row in range(len(operations)):
        if operations.kind[row] == OpKind.ROUTER:
            shape = graph.shapes[operations.shape[row]]
            assert isinstance(shape, MemoryShape)
            name = graph.strings[operations.name[row]]
            found[name] = (
                shape.passes,
                float(operations.bytes_read[row]),
                float(operations.bytes_written[row]),
            )
    return found


@pytest.mark.parametrize(
    ("fp32", "transformer_engine", "forward", "backward"),
    [
        (False, True, (DType.BF16, DType.BF16), (DType.BF16, DType.BF16)),
        # Operands stay in bf16, scores are fp32; backward reads fp32 gradients, and TF32 multiplies those.
        (True, True, (DType.BF16, DType.FP32), (DType.TF32, DType.FP32)),
        # torch.mm of fp32 copies, which PyTorch does not run in TF32 by default.
        (True, False, (DType.FP32, DType.FP32), (DType.FP32, DType.FP32)),
    ],
)
def test_element_types_of_its_products(fp32, transformer_engine, forward, backward):
    graph = mixture({"transformer_engine": transformer_engine}, router_fp32=fp32)
    found = products(graph)
    assert (found["router"], found["router_dgrad"]) == (forward, backward)
    assert found["router_wgrad"][0] == backward[0]


@pytest.mark.parametrize("groups", [1, 4])
def test_one_kernel_each_way_where_they_are_fused(groups):
    graph = mixture({"router_fusion": True}, routing_groups=groups, top_groups=min(groups, 2), aux_loss=False)
    # Scores of four bytes are read; written are probabilities, scores for backward, and the map of a byte.
    assert kernels(graph) == {
        "router_fused_top_k": (1, 4 * PAIRS, 9 * PAIRS),
        "router_backward": (1, 9 * PAIRS, 4 * PAIRS),
    }
    assert_nothing_leaks(graph)


def test_fused_kernels_are_fewer_and_move_less():
    plain, fused = (
        kernels(mixture({"router_fusion": fusion}, routing_groups=4, top_groups=2, aux_loss=True))
        for fusion in (False, True)
    )
    for column in (0, 1):
        assert sum(row[column] for row in fused.values()) < sum(row[column] for row in plain.values())
    assert fused["router_aux_loss"][0] == 2


def test_experts_in_turn_have_no_scores_to_compute():
    graph = mixture({"experts_in_turn": True}, router_fp32=True)
    assert products(graph) == {}
    assert set(kernels(graph)) == {"router_in_turn"}
    assert_nothing_leaks(graph)


def test_experts_in_turn_lie_on_one_or_two_ranks():
    """16 experts on 8 ranks, four to a token: two ranks get it, in the mean of random choices 3.3 do."""
    sent = {}
    for in_turn in (False, True):
        mapping = dense_mapping(
            model__moe={"experts": 16, "top_k": 4, "expert_ffn_size": 128},
            model__layers=1,
            parallel={"ep": 8, "dp": 8, "ep_dispatcher": "deepep"},
            libraries={"experts_in_turn": in_turn},
        )
        graph = lower_scenario(load_scenario(mapping))
        operations = graph.operations
        for row in range(len(operations)):
            if graph.strings[operations.name[row]] == "dispatch_all_to_all":
                sent[in_turn] = float(graph.operations.communication_bytes[row])
    token = 2 * HIDDEN
    assert sent[True] == pytest.approx(TOKENS * token * 8 / 4 * (1 - 0.5**4))
    assert sent[False] == pytest.approx(TOKENS * token * 8 * (1 - (7 / 8) ** 4))


@pytest.mark.parametrize(
    ("libraries", "model", "message"),
    [
        (
            {"experts_in_turn": True},
            {},
            "libraries.experts_in_turn: true (from scenario) changes nothing: small has no experts; leave it out",
        ),
        (
            {"router_fusion": True},
            {},
            "libraries.router_fusion: true (from scenario) changes nothing: small has no experts; leave it out",
        ),
        (
            {"router_fusion": True, "transformer_engine": False},
            {"model__moe": {"experts": EXPERTS, "top_k": 2, "expert_ffn_size": 128}},
            "libraries.router_fusion: true (from scenario) is a kernel of Transformer Engine; set "
            "libraries.transformer_engine: true",
        ),
    ],
)
def test_a_fusion_that_cannot_be(libraries, model, message):
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(libraries=libraries, **model))
    assert message in str(error.value)
