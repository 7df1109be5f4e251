"""A forward beside a backward with expert exchanges: what runs beside what, and a public trace of that pairing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chunk_pair import (
    TRACE_COMPUTE_MS,
    TRACE_EXCHANGES_MS,
    TRACE_HIDDEN,
    TRACE_MS,
    deepseek,
    pair_graph,
    run_pair,
)
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase, Stream
from tracesim.analysis.intervals import union
from tracesim.cost import CostModel
from tracesim.engine import execute
from tracesim.memory.curves import memory_curve
from tracesim.readers import read_trace
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import step_durations


def small(**parallel: Any) -> Scenario:
    moe = {"experts": 8, "top_k": 2, "expert_ffn_size": 128, "shared_ffn_size": 128}
    model = {
        "name": "small", "layers": 3, "hidden_size": 128, "ffn_size": 256, "heads": 4, "vocab_size": 512, "moe": moe,
    }  # fmt: skip
    training = {"seq_len": 64, "micro_batch_size": 1, "num_microbatches": 4}
    return load_scenario(
        {"name": "small", "model": model, "hardware": "h100-sxm", "parallel": parallel, "training": training,
         "overlap": {"ep": True}}
    )  # fmt: skip


def pair_rows(graph: OpGraph) -> range:
    names = [graph.strings[name] for name in graph.segments.name.tolist()]
    number = names.index("F3+B1")
    return range(int(graph.segments.begin[number]), int(graph.segments.end[number]))


PLANS = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "ep_dispatcher": "deepep"},
    {"dp": 2, "ep": 2, "tp": 2, "sp": True},
]


@pytest.mark.parametrize("parallel", PLANS)
def test_expert_weight_gradients_come_behind_the_exchange_of_their_layer(parallel):
    graph = pair_graph(small(**parallel))
    operations = graph.operations
    backward = [row for row in pair_rows(graph) if operations.microbatch[row] == 1]
    names = {row: graph.strings[operations.name[row]] for row in backward}
    weights = [row for row in backward if names[row].startswith("expert_fc") and names[row].endswith("wgrad")]
    assert len(weights) == 6
    for row in weights:
        (exchange,) = [
            other
            for other in backward
            if names[other] == "dispatch_backward_all_to_all"
            and operations.layer[other] == operations.layer[row]
        ]
        assert exchange < row
        assert not np.isin(graph.dependencies_of(exchange), weights).any()
        # ... which still waits for the gradients that it carries
        carried = [other for other in graph.dependencies_of(exchange).tolist() if other in names]
        assert any(operations.stream[other] == Stream.COMPUTE for other in carried)
        assert operations.phase[carried].tolist().count(Phase.BACKWARD_WEIGHT) == 0


@pytest.mark.parametrize("parallel", PLANS)
def test_a_pair_keeps_every_operation_and_its_memory(parallel):
    graph = pair_graph(small(**parallel))
    operations = graph.operations
    names = [graph.strings[name] for name in graph.segments.name.tolist()]
    sizes = dict(zip(names, (graph.segments.end - graph.segments.begin).tolist(), strict=True))
    assert sizes["F3+B1"] == sizes["F1"] + sizes["B2"]
    rows = np.repeat(np.arange(len(operations)), np.diff(graph.dependency_offsets))
    same = operations.stream[rows] == operations.stream[graph.dependencies]
    assert (graph.dependencies[same] < rows[same]).all(), "nothing waits for what its stream runs later"
    execution = execute(graph, CostModel(small(**parallel).hardware).durations_ns(graph))
    curve = memory_curve(graph, execution, 0)
    activations = curve.by_category[MemoryCategory.ACTIVATIONS]
    assert activations[-1] == 0
    assert activations.min() == 0
    assert curve.by_category[MemoryCategory.TEMPORARY].min() == 0


@pytest.mark.parametrize("overlap", [{}, {"contention": True}])
def test_the_deepseek_pair_takes_as_long_and_hides_as_much_as_in_the_trace(overlap: dict[str, bool]):
    """As a step of its scenario is simulated, without a word on contention and with it: on the slowest of 64 ranks."""
    pair = run_pair(deepseek(**overlap))
    assert pair.time / 1e6 == pytest.approx(TRACE_MS, rel=0.03)
    assert pair.hidden_share == pytest.approx(TRACE_HIDDEN, abs=0.04)


def test_a_rank_by_itself_computes_as_long_as_the_one_of_the_trace():
    """What it then waits, 4.7 ms of 129.0, is for the slowest rank."""
    pair = run_pair(deepseek(jitter=False, contention=True))
    assert pair.compute / 1e6 == pytest.approx(TRACE_COMPUTE_MS, rel=0.01)
    assert pair.time / 1e6 == pytest.approx(TRACE_MS, rel=0.05)


def test_beside_exchanges_as_long_as_in_the_trace_it_takes_as_long_to_three_percent():
    """Waiting for other ranks is put into the exchanges instead: the rest is contention."""
    scenario = deepseek(jitter=False, contention=True)
    graph = pair_graph(scenario)
    names = [graph.strings[name] for name in graph.operations.name.tolist()]
    given = np.array([round(1e6 * TRACE_EXCHANGES_MS.get(name, 0)) for name in names])
    pair = run_pair(scenario, np.where(given > 0, given, step_durations(scenario, graph)))
    assert pair.time / 1e6 == pytest.approx(TRACE_MS, rel=0.03)
    assert pair.compute / 1e6 == pytest.approx(TRACE_COMPUTE_MS, rel=0.02)
    assert pair.hidden_share == pytest.approx(TRACE_HIDDEN, abs=0.01)


def test_without_contention_it_is_shorter_by_what_compute_loses_beside_exchanges():
    free, shared = run_pair(deepseek()), run_pair(deepseek(contention=True))
    assert free.communication == shared.communication
    assert 0.94 < free.compute / shared.compute < 0.97


MEASURED_KINDS = {
    "products": ((OpKind.GEMM, OpKind.GROUPED_GEMM), 0.02),
    "attention": ((OpKind.ATTENTION,), 0.06),
    "norms": ((OpKind.NORM,), 0.2),
    "other memory traffic": (
        (OpKind.ELEMENTWISE, OpKind.REDUCTION, OpKind.ROUTER, OpKind.PERMUTE, OpKind.CAST), 0.1
    ),
}  # fmt: skip


@pytest.mark.shared_data
@pytest.mark.parametrize("what", MEASURED_KINDS)
def test_each_kind_of_kernel_takes_as_long_as_in_the_trace(shared_data: Path, what: str):
    kinds, tolerance = MEASURED_KINDS[what]
    slices = read_trace([shared_data / "traces/deepseek/train.json.gz"]).slices
    rows = np.flatnonzero(np.isin(slices.kind, kinds) & (slices.duration > 0))
    # Weight gradients of two experts run on two streams, each on what SMs the other leaves.
    measured = union(slices.start[rows], slices.start[rows] + slices.duration[rows]).total
    kernels = run_pair(deepseek(jitter=False, contention=True)).kernels
    simulated = sum(kernels.get(kind, 0) for kind in kinds)
    assert simulated == pytest.approx(measured, rel=tolerance)
