"""Tokens reordered for their experts: kernels, traffic and kept memory, fused in Transformer Engine or not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 256, 256
COPIES = TOKENS * TOP_K
TOKEN_BYTES, COPY_BYTES = TOKENS * HIDDEN * 2, COPIES * HIDDEN * 2
MOE = {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn_size": 128}


def mixture(*, fused: bool, **changes: Any) -> OpGraph:
    """One layer with experts, one microbatch of 256 tokens."""
    changes = {"model__moe": MOE, "model__layers": 1, "training__num_microbatches": 1, **changes}
    return lower_scenario(load_scenario(dense_mapping(**changes, libraries={"permute_fusion": fused})))


def kernels(graph: OpGraph) -> list[tuple[str, float, float]]:
    """Name, bytes read and bytes written of what moves tokens, in order of launch."""
    operations = graph.operations
    found = []
    for row in range(len(operations)):
        name = graph.strings[operations.name[row]]
        if operations.kind[row] == OpKind.PERMUTE or name.endswith("_zeros"):
            found.append((name, float(operations.bytes_read[row]), float(operations.bytes_written[row])))
    return found


def test_one_kernel_each_way_where_they_are_fused():
    assert kernels(mixture(fused=True)) == [
        ("dispatch_permute", TOKEN_BYTES, COPY_BYTES),
        ("combine_unpermute", COPY_BYTES, TOKEN_BYTES),
        ("combine_backward_permute", TOKEN_BYTES, COPY_BYTES),
        ("dispatch_backward_unpermute", COPY_BYTES, TOKEN_BYTES),
    ]


def test_the_kernels_of_pytorch_and_what_they_move():
    numbers, entries = 8 * COPIES, TOKENS * EXPERTS
    assert kernels(mixture(fused=False)) == [
        ("dispatch_permute_map_transpose", entries, entries),
        # count, flag, indices (16 bytes), gather
        ("dispatch_permute_select", 2 * entries + 4 * numbers, 4 * numbers),
        ("dispatch_permute_scores", 6 * entries + 3 * numbers + 4 * COPIES, 4 * entries + 3 * numbers + 4 * COPIES),
        ("dispatch_permute", COPY_BYTES + numbers, COPY_BYTES),
        ("combine_unpermute_zeros", 0, TOKEN_BYTES),
        ("combine_unpermute", 2 * COPY_BYTES + numbers, COPY_BYTES),
        ("combine_backward_permute", COPY_BYTES + numbers, COPY_BYTES),
        ("dispatch_backward_unpermute_scores", 14 * entries + 4 * COPIES, 16 * entries + 4 * COPIES),
        ("dispatch_backward_unpermute_zeros", 0, TOKEN_BYTES),
        ("dispatch_backward_unpermute", 2 * COPY_BYTES + numbers, COPY_BYTES),
    ]  # fmt: skip


PLANS = [
    {"ep": 1},
    {"ep": 4, "dp": 4},
    {"ep": 4, "dp": 4, "ep_dispatcher": "allgather"},
    {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"},
    {"ep": 2, "etp": 2, "tp": 2, "sp": True, "dp": 2},
    {"ep": 2, "etp": 2, "tp": 2, "sp": True, "dp": 2, "ep_dispatcher": "deepep"},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recompute", ["none", "full", {"modules": ["moe"]}])
def test_fused_or_not_computes_and_exchanges_the_same(plan, recompute):
    fused, unfused = (
        mixture(fused=which, parallel=plan, training__recompute=recompute) for which in (True, False)
    )
    assert fused.operations.flops.sum() == unfused.operations.flops.sum()
    sent = [
        sorted(graph.operations.communication_bytes[graph.operations.communication != 0].tolist())
        for graph in (fused, unfused)
    ]
    assert sent[0] == sent[1]
    moved = [
        (graph.operations.bytes_read + graph.operations.bytes_written).sum() for graph in (fused, unfused)
    ]
    assert moved[1] > moved[0]
    for graph in (fused, unfused):
        assert_nothing_leaks(graph)


@pytest.mark.parametrize(
    ("plan", "tokens", "copies", "columns"),
    [
        ({"ep": 1}, TOKENS, COPIES, EXPERTS),
        ({"ep": 4, "dp": 4}, TOKENS, COPIES, EXPERTS),
        # Each rank sees the tokens of four, and has a quarter of the experts.
        ({"ep": 4, "dp": 4, "ep_dispatcher": "allgather"}, 4 * TOKENS, COPIES, EXPERTS // 4),
        # A token reaches a rank with a chance of 1 - (3/4)^2.
        ({"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}, 4 * TOKENS * 7 / 16, COPIES, EXPERTS // 4),
    ],
)
def test_what_autograd_keeps(plan, tokens, copies, columns):
    kept = []
    for fused in (True, False):
        graph = mixture(fused=fused, parallel=plan)
        sizes = Counter()
        for index in np.flatnonzero(graph.buffers.category == MemoryCategory.ACTIVATIONS):
            sizes[graph.strings[graph.buffers.name[index]]] += int(graph.buffers.size[index])
        kept.append(sizes)
    assert kept[1] - kept[0] == {"permutation": round(8 * copies + 5 * tokens * columns)}
    assert not kept[0] - kept[1]


def test_recomputed_experts_keep_no_permutation():
    graph = mixture(fused=False, training__recompute={"modules": ["moe"]})
    names = [graph.strings[index] for index in graph.buffers.name.tolist()]
    assert names.count("permutation") == 2
    first = names.index("permutation")
    assert graph.operations.phase[graph.buffers.release[first]] == Phase.FORWARD
    again = [kernel for kernel, *_ in kernels(graph)].count("dispatch_permute_select")
    assert again == 2


def test_a_map_is_made_of_what_deepep_brings():
    graph = mixture(fused=False, parallel={"ep": 4, "dp": 4, "ep_dispatcher": "deepep"})
    names = [name for name, *_ in kernels(graph)]
    assert names[:2] == ["dispatch_map", "dispatch_permute_map_transpose"]
    assert names.count("dispatch_map") == 1
    row = next(
        row
        for row in range(len(graph.operations))
        if graph.strings[graph.operations.name[row]] == "dispatch_map"
    )
    before = graph.operations.communication[:row] == Communication.ALL_TO_ALL
    assert before.any()


def test_a_model_without_experts_has_nothing_to_fuse():
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(libraries={"permute_fusion": False}))
    assert (
        "libraries.permute_fusion: false (from scenario) changes nothing: small has no experts; leave it out"
    ) in str(error.value)
