"""PyTorch's context parallelism: what travels, what is merged in fp32, what waits, and what it does not go with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, DType, OpKind, Stream
from tests.dense_scenarios import dense_mapping
from tests.measured_rows import expressed
from tests.scenario_mappings import problems_of
from tests.scenario_mappings import scenario as llama
from tests.test_lowering import assert_nothing_leaks
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

LAYERS, BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD = 2, 2, 4096, 8, 2, 32
CP = 4
TOKENS = BATCH * SEQUENCE // CP
QUERIES = 2.0 * TOKENS * HEADS * HEAD
"""Bytes of queries, and of outputs, in bf16 on a rank."""
WIDE_KV = 2 * QUERIES
"""Bytes of keys and values once they are repeated for every head."""


def scenario(algorithm: str = "dtensor-allgather", **changes: Any) -> Scenario:
    return load_scenario(
        dense_mapping(
            **{
                "model__layers": LAYERS,
                "model__kv_heads": KV_HEADS,
                "training__seq_len": SEQUENCE,
                "training__micro_batch_size": BATCH,
                "training__num_microbatches": 1,
                "parallel__cp": CP,
                "parallel__cp_comm": algorithm,
                **changes,
            }
        )
    )


def lowered(algorithm: str = "dtensor-allgather", **changes: Any) -> OpGraph:
    return lower_scenario(scenario(algorithm, **changes))


def rows_of(graph: OpGraph, name: str) -> np.ndarray:
    return np.flatnonzero(graph.operations.name == graph.strings.index(name))


@pytest.mark.parametrize("algorithm", ["dtensor-allgather", "dtensor-alltoall"])
def test_attention_does_the_work_of_any_balanced_ring(algorithm):
    ring, plain = lowered(algorithm).operations, lowered("p2p").operations
    work = [
        sorted(operations.flops[operations.kind == OpKind.ATTENTION].tolist()) for operations in (ring, plain)
    ]
    assert work[0] == work[1]
    assert len(work[0]) == 2 * CP * LAYERS


def test_keys_and_values_of_all_heads_are_gathered_once_a_pass():
    operations = (graph := lowered()).operations
    rows = rows_of(graph, "ring_kv_gather")
    assert len(rows) == 2 * LAYERS
    assert set(operations.communication[rows].tolist()) == {Communication.ALL_GATHER}
    assert set(operations.communication_bytes[rows].tolist()) == {CP * WIDE_KV}


def test_or_passed_on_one_shard_a_step():
    operations = (graph := lowered("dtensor-alltoall")).operations
    rows = rows_of(graph, "ring_kv")
    assert len(rows) == 2 * (CP - 1) * LAYERS
    assert set(operations.communication_bytes[rows].tolist()) == {WIDE_KV}
    assert "ring_kv_gather" not in graph.strings


@pytest.mark.parametrize("algorithm", ["dtensor-allgather", "dtensor-alltoall"])
def test_their_gradients_go_all_the_way_round_in_fp32(algorithm):
    operations = (graph := lowered(algorithm)).operations
    rows = rows_of(graph, "ring_kv_gradient")
    assert len(rows) == CP * LAYERS
    assert set(operations.communication_bytes[rows].tolist()) == {2 * WIDE_KV}
    assert set(operations.dtype[rows].tolist()) == {DType.FP32}


@pytest.mark.parametrize(
    ("eager", "kernels", "read", "written"),
    [
        # Compiled: the first two outputs at once, the result in bf16 from the last; between them fp32 is read and
        # written. In halves of fp32: 1 + 1, 2 + 1, 2 + 1 read and 2, 2, 1 written.
        (False, CP - 1, 8 * QUERIES, 5 * QUERIES),
        # Eagerly, of each later output: out, block, difference, out, product read; difference, product, out written.
        (True, CP - 1, 5 * 2 * (CP - 1) * QUERIES, 3 * 2 * (CP - 1) * QUERIES),
    ],
)
def test_outputs_are_merged_in_fp32(eager, kernels, read, written):
    operations = (graph := lowered(libraries__eager=eager)).operations
    rows = rows_of(graph, "attention_merge")
    assert len(rows) == kernels * LAYERS
    assert operations.bytes_read[rows].sum() == read * LAYERS
    assert operations.bytes_written[rows].sum() == written * LAYERS


def test_two_ranks_merge_once_from_bf16_to_bf16():
    operations = (graph := lowered(parallel__cp=2)).operations
    rows = rows_of(graph, "attention_merge")
    assert set(operations.bytes_read[rows].tolist()) == {2 * 2 * QUERIES}
    assert set(operations.bytes_written[rows].tolist()) == {2 * QUERIES}


@pytest.mark.parametrize("eager", [False, True])
def test_gradients_are_added_up_in_fp32(eager):
    operations = (graph := lowered(libraries__eager=eager)).operations
    rows = rows_of(graph, "query_gradient_sum")
    # The sum so far and the step's gradient; a compiler makes the first one a cast.
    assert operations.bytes_read[rows].sum() == LAYERS * (3 * CP - (0 if eager else 2)) * QUERIES
    assert operations.bytes_written[rows].sum() == LAYERS * 2 * CP * QUERIES


def test_heads_of_their_own_are_not_repeated():
    graph = lowered(model__kv_heads=HEADS, libraries__eager=True)
    assert "repeat_kv" not in graph.strings
    assert "repeat_kv" in lowered(libraries__eager=True).strings


@pytest.mark.parametrize("algorithm", ["dtensor-allgather", "dtensor-alltoall"])
def test_in_place_everything_is_exposed_and_eagerly_gathers_hide(algorithm):
    found = {}
    for policy in ("in-place", "under-attention"):
        simulation = simulate(scenario(algorithm, overlap__cp=policy, training__seq_len=65536))
        operations, execution = simulation.graph.operations, simulation.execution
        total = (execution.end - execution.start)[operations.stream == Stream.CP].sum() / 1e6
        found[policy] = (
            simulation.report["stages"][0]["exposed_communication_ms"]["cp"] / total,
            execution.iteration_ns,
        )
    assert found["in-place"][0] == pytest.approx(1, rel=1e-3)
    assert found["under-attention"][0] < 0.9
    assert found["under-attention"][1] < found["in-place"][1]


@pytest.mark.parametrize("algorithm", ["dtensor-allgather", "dtensor-alltoall"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("policy", ["in-place", "under-attention"])
@pytest.mark.parametrize("recompute", ["none", "full", {"modules": ["core_attn"]}])
def test_nothing_leaks(algorithm, eager, policy, recompute):
    assert_nothing_leaks(
        lowered(algorithm, libraries__eager=eager, overlap__cp=policy, training__recompute=recompute)
    )


def test_repeated_keys_and_values_are_kept_for_backward():
    graph, plain = lowered(), lowered("p2p", libraries__transformer_engine=False)
    kept = graph.buffers.size[graph.buffers.name == graph.strings.index("contiguous_kv")]
    assert kept.tolist() == [WIDE_KV] * LAYERS
    assert "contiguous_kv" not in plain.strings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "gpt-oss-20b", "parallel__cp": 2, "parallel__cp_comm": "dtensor-allgather"},
            "cannot run the attention windows of gpt-oss-20b; use a2a or allgather",
        ),
        (
            {
                "model": "deepseek-v2-lite",
                "parallel__cp": 2,
                "parallel__cp_comm": "dtensor-alltoall",
                "training__mla": "absorbed",
            },
            "repeats keys and values for every head, which mla: absorbed does not make; use p2p or allgather",
        ),
    ],
)
def test_what_it_does_not_go_with(changes, said):
    assert said in problems_of(llama(**changes))


TITAN = {
    "gpu": "H100-80GB",
    "local_batch": 1,
    "metrics": {"tokens_per_s_per_gpu": 1000},
    "model": {"name": "Llama 3.1 8B", "seq": 65536},
    "num_gpus": 8,
    "parallel": {"cp": 2, "fsdp": 4},
    "recompute": "full AC",
    "source": "torchtitan-bench",
    "table": "2024-12 Table 2",
}


@pytest.mark.parametrize(("technique", "policy"), [("compile+float8", "in-place"), ("float8", True)])
def test_the_scoreboard_reads_torchtitans_rows_so(technique, policy, tmp_path):
    found = expressed({**TITAN, "technique": technique}, tmp_path).scenario
    assert (found.parallel.cp_comm, found.overlap.cp) == ("dtensor-allgather", policy)
