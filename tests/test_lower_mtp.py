"""Heads for multi-token prediction on the last stage: work, parameters, communication and memory in closed form.

The formulas follow DeepSeek-V3 (arXiv:2412.19437, section 2.2) and share nothing with the package.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.graphs import bytes_by_name
from tests.test_lowering import assert_nothing_leaks, attention_flops, linear_flops, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

HIDDEN, VOCAB, LAYERS = 256, 1024, 4


def lowered(heads: int, **changes: Any) -> tuple[Scenario, OpGraph]:
    scenario = load_scenario(dense_mapping(model__mtp_layers=heads, **changes))
    return scenario, lower_scenario(scenario)


PLANS: list[dict[str, Any]] = [
    {},
    {"parallel__tp": 4},
    {"parallel__tp": 4, "parallel__sp": True},
    {"parallel__pp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2},
    {"parallel__dp": 2, "parallel__zero": 3},
    {"parallel__dp": 2, "parallel__zero": 2},
    {"parallel__pp": 2, "model__tied_embeddings": True, "parallel__dp": 2},
    {"model__tied_embeddings": True},
    {"training__recompute": {"modules": ["core_attn", "layernorm", "mlp"]}},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_head_does_a_projection_a_layer_and_the_output_head_once_more(heads, plan):
    scenario, graph = lowered(heads, **plan)
    _, without = lowered(0, **plan)
    layer = linear_flops(scenario) / LAYERS
    attention = attention_flops(scenario) / LAYERS
    again = attention if scenario.training.recompute.modules else 0.0
    if scenario.training.recompute.modules:
        again += 2.0 * 3 * HIDDEN * scenario.model.ffn_size
    matrices = 2.0 * 2 * HIDDEN * HIDDEN + layer + 2.0 * HIDDEN * VOCAB
    added = scenario.tokens * heads * (3 * matrices + 3.5 * attention + again)
    assert step_flops(graph, scenario) - step_flops(without, scenario) == pytest.approx(added, rel=1e-9)
    assert_nothing_leaks(graph)


@pytest.mark.parametrize(
    ("recompute", "runs_again"),
    # Megatron-Core: uniform covers the heads, block does not
    [("full", True), ({"method": "block", "layers": 1}, False)],
)
def test_full_recompute_runs_a_head_again_up_to_its_norm(recompute, runs_again):
    scenario, graph = lowered(1, training__recompute=recompute)
    assert_nothing_leaks(graph)
    operations = graph.operations
    again = operations.phase == Phase.RECOMPUTE
    names = Counter(graph.strings[name] for name in operations.name[again])
    assert names["eh_proj"] == (scenario.training.num_microbatches if runs_again else 0)
    assert (operations.layer[again] == LAYERS).any() == runs_again
    assert names["mtp_final_norm"] == 0


def lasting(graph: OpGraph, rank: int) -> dict[str, int]:
    buffers = graph.buffers
    rows = np.flatnonzero((buffers.rank == rank) & (buffers.allocate < 0))
    return bytes_by_name(graph, rows)


@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        ({}, 0),
        # the last stage has no embedding: it holds a copy of the table
        ({"parallel__pp": 2}, 1),
        # ... unless its head is the table
        ({"parallel__pp": 2, "model__tied_embeddings": True}, 0),
    ],
)
def test_parameters_of_a_head_lie_on_the_last_stage(plan, copies):
    _, graph = lowered(1, **plan)
    _, without = lowered(0, **plan)
    last = plan.get("parallel__pp", 1) - 1
    layer = HIDDEN * (256 + 2 * 128) + 256 * HIDDEN + 3 * HIDDEN * 512 + 2 * HIDDEN
    head = 2 * HIDDEN * HIDDEN + 3 * HIDDEN + layer
    added = lasting(graph, last)["weights"] - lasting(without, last)["weights"]
    assert added == 2 * (head + copies * VOCAB * HIDDEN)
    if last:
        assert lasting(graph, 0)["weights"] == lasting(without, 0)["weights"]


def test_copies_of_the_embedding_sum_their_gradients():
    _, graph = lowered(1, parallel__pp=2)
    names = np.array([graph.strings[name] for name in graph.operations.name])
    rows = np.flatnonzero(names == "tied_embedding_all_reduce")
    assert graph.operations.rank[rows].tolist() == [0, 1]
    assert set(graph.operations.communication_bytes[rows].tolist()) == {4 * VOCAB * HIDDEN}
    assert len(set(graph.operations.rendezvous[rows].tolist())) == 1


AG, RS, AR = Communication.ALL_GATHER, Communication.REDUCE_SCATTER, Communication.ALL_REDUCE


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        # (phase is forward) -> collectives beside those of the layer: the embedding's, those around eh_proj
        (True, {True: {RS: 1, AG: 2}, False: {AG: 3, RS: 1}}),
        (False, {True: {AR: 1, AG: 1}, False: {AR: 1}}),
    ],
)
def test_tensor_parallel_collectives_of_a_head(sequence_parallel, expected):
    scenario, graph = lowered(1, parallel__tp=4, parallel__sp=sequence_parallel)
    operations = graph.operations
    modules = np.array([graph.strings[m] if m >= 0 else "" for m in operations.module])
    of_head = (operations.layer == LAYERS) & np.char.startswith(modules, "mtp")
    own = (operations.stream == Stream.TP) & of_head
    whole = 2 * scenario.training.micro_batch_size * scenario.training.seq_len * HIDDEN
    for forward, wanted in expected.items():
        rows = own & ((operations.phase == Phase.FORWARD) == forward)
        found = Counter(operations.communication[rows].tolist())
        assert found == {kind: n * scenario.training.num_microbatches for kind, n in wanted.items()}
    # The projection reads both states: twice the width is gathered in front of it and scattered behind its gradient.
    sizes = Counter(operations.communication_bytes[own].tolist())
    assert set(sizes) == {whole, 2 * whole}


def test_a_head_keeps_its_inputs_and_what_lies_between():
    """Beside a layer, its output and the loss: embedded tokens, both joined (2 h), the projection's output, and the
    output of the final norm; 2 bytes each."""
    scenario, graph = lowered(1, training__num_microbatches=1)
    operations, buffers = graph.operations, graph.buffers
    passing = np.flatnonzero(buffers.allocate >= 0)
    first, last = buffers.allocate[passing], buffers.release[passing]
    kept = (operations.phase[first] == Phase.FORWARD) & (operations.phase[last] != Phase.FORWARD)

    def of_layer(layer: int) -> int:
        return int(buffers.size[passing[kept & (operations.layer[first] == layer)]].sum())

    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    assert of_layer(LAYERS) - of_layer(0) == 2 * tokens * HIDDEN * (1 + 2 + 1 + 1)
    # Two losses keep an fp32 softmax each.
    names = [graph.strings[n] for n in buffers.name[passing[kept]]]
    assert names.count("softmax_fp32") == 2
    assert set(buffers.category[passing[kept]].tolist()) == {int(MemoryCategory.ACTIVATIONS)}


def test_the_head_of_a_mixture_has_experts():
    scenario = load_scenario(
        dense_mapping(
            model__mtp_layers=1,
            model__moe={"experts": 8, "top_k": 2, "expert_ffn_size": 64, "first_dense_layers": 1},
            parallel__ep=2,
            parallel__dp=2,
        )
    )
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    grouped = (graph.operations.kind == OpKind.GROUPED_GEMM) & (graph.operations.layer == LAYERS)
    assert int(grouped.sum()) == 6 * scenario.training.num_microbatches


def test_every_gradient_of_a_shared_matrix_is_reduced_behind_its_last_use(tmp_path):
    """The head's matrix has a weight gradient for each loss; the reduction waits for all, split or not."""
    (tmp_path / "split.csv").write_text("0F0,0I0,0W0\r\n")
    for schedule in ("1f1b", str(tmp_path / "split.csv")):
        _, graph = lowered(2, parallel__dp=2, training__num_microbatches=1, schedule=schedule)
        names = [graph.strings[n] for n in graph.operations.name]
        uses = [row for row, name in enumerate(names) if name == "head_wgrad"]
        tables = [row for row, name in enumerate(names) if name == "word_embedding_accumulate"]
        reduction = [row for row, name in enumerate(names) if name == "gradient_reduce_scatter"]
        assert (len(uses), len(tables), len(reduction)) == (3, 3, 1)
        assert reduction[0] > max(uses + tables)


def test_model_flops_count_the_heads():
    with_heads, without = (simulate(lowered(n)[0]) for n in (1, 0))
    seconds = [s.report["iteration_time_ms"] / 1e3 for s in (with_heads, without)]
    flops = [
        s.report["model_tflops_per_gpu"] * t * 1e12
        for s, t in zip((with_heads, without), seconds, strict=True)
    ]
    scenario = with_heads.scenario
    layer = (linear_flops(scenario) + attention_flops(scenario)) / LAYERS
    added = 3 * scenario.tokens * (2.0 * 2 * HIDDEN * HIDDEN + layer + 2.0 * HIDDEN * VOCAB)
    assert flops[0] - flops[1] == pytest.approx(added, rel=1e-9)


def test_learned_positions_are_refused():
    with pytest.raises(ScenarioError, match=r"multi-token prediction and learned positions.*mtp_layers: 0"):
        lowered(1, model__positions="learned", model__max_positions=128)
