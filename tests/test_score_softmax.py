"""Softmax of unfused attention: where Megatron-LM's kernel runs, and what runs where it cannot."""

from __future__ import annotations

import pytest

from op_graphs.graph import OpGraph
from op_graphs.lower_score_softmax import kernel_runs
from op_graphs.vocabulary import MemoryCategory
from tests.dense_scenarios import dense_mapping
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario

FUSED = ["scale_mask_softmax", "scale_mask_softmax_backward"]
APART = [
    "scores_to_fp32",
    "scale_scores",
    "mask_scores",
    "softmax",
    "softmax_cast",
    "softmax_cast_backward",
    "softmax_backward",
    "mask_scores_backward",
    "scale_scores_backward",
    "scores_to_fp32_backward",
]


def lowered(*, heads: int, dropout: float) -> tuple[Scenario, OpGraph]:
    """One microbatch of one sequence over two tensor-parallel ranks."""
    scenario = load_scenario(
        dense_mapping(
            parallel={"tp": 2},
            model__hidden_size=512,
            model__heads=heads,
            model__kv_heads=heads,
            model__attention_dropout=dropout,
            training__attention="unfused",
            training__seq_len=256,
            training__micro_batch_size=1,
            training__num_microbatches=1,
        )
    )
    return scenario, lower_scenario(scenario)


def names_of_layer(graph: OpGraph, layer: int) -> list[str]:
    rows = (graph.operations.layer == layer) & (graph.operations.rank == 0)
    return [graph.strings[name] for name in graph.operations.name[rows]]


@pytest.mark.parametrize(
    ("heads_and_sequences", "queries", "keys", "causal", "runs"),
    [
        (4, 1024, 1024, True, True),
        (2, 1024, 1024, True, False),  # 16 heads over 8 ranks, one sequence
        (14, 2048, 2048, True, False),  # 112 heads over 8 ranks, one sequence
        (28, 2048, 2048, True, True),  # two of them
        (4, 128, 128, True, False),  # a block takes eight short rows
        (8, 128, 128, True, True),
        (4, 1026, 1026, True, False),
        (4, 16, 16, True, False),
        (4, 132, 128, False, False),  # without a causal mask rows are those of one head
        (4, 136, 128, False, True),
    ],
)
def test_the_kernel_needs_rows_that_fill_its_blocks(heads_and_sequences, queries, keys, causal, runs):
    assert kernel_runs(heads_and_sequences, queries, keys, causal=causal) is runs


@pytest.mark.parametrize(("heads", "expected"), [(8, FUSED), (4, APART)])
def test_kernels_of_a_layer(heads, expected):
    _, graph = lowered(heads=heads, dropout=0.1)
    names = names_of_layer(graph, 1)
    assert [name for name in names if name in FUSED + APART] == expected
    at = names.index("attention_scores")
    assert names[at + 1 : at + 1 + len(expected) // 2] == expected[: len(expected) // 2]


@pytest.mark.parametrize(
    ("heads", "dropout", "bytes_a_score"),
    [
        (8, 0.0, 2),
        (8, 0.1, 2 + 1 + 2),
        # The fp32 probabilities; those in 16 bits are an operand of the product behind, or go with the dropout.
        (4, 0.0, 4 + 2),
        (4, 0.1, 4 + 1 + 2),
    ],
)
def test_what_the_backward_keeps_of_the_scores(heads, dropout, bytes_a_score):
    scenario, graph = lowered(heads=heads, dropout=dropout)
    kept = {"softmax", "softmax_fp32", "attention_dropout_mask", "dropped_softmax"}
    buffers, operations = graph.buffers, graph.operations
    backward = min(
        row for row in range(len(operations)) if graph.strings[operations.name[row]] == "head_dgrad"
    )
    alive = (
        (buffers.category == MemoryCategory.ACTIVATIONS) & (buffers.rank == 0) & (buffers.release > backward)
    )
    own = [row for row in range(len(buffers)) if alive[row] and graph.strings[buffers.name[row]] in kept]
    scores = scenario.training.seq_len**2 * heads // 2
    assert sum(int(buffers.size[row]) for row in own) == scenario.model.layers * scores * bytes_a_score
