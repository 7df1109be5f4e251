"""Gradients of units that are sharded, in a pipeline: added up over its microbatches, reduced with the last."""

from __future__ import annotations

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import REDUCTION_POOL, DType, MemoryCategory, OpKind
from tests.dense_scenarios import dense_mapping
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

MICROBATCHES = 4


def lowered(pp: int, **changes: object) -> OpGraph:
    return lower_scenario(
        load_scenario(
            dense_mapping(
                **{
                    "parallel__pp": pp,
                    "parallel__dp": 4,
                    "parallel__zero": 3,
                    "training__num_microbatches": MICROBATCHES,
                    "libraries__transformer_engine": False,
                    **changes,
                }
            )
        )
    )


def rows_ending(graph: OpGraph, ending: str) -> np.ndarray:
    chosen = [number for number, name in enumerate(graph.strings) if name.endswith(ending)]
    return np.flatnonzero(np.isin(graph.operations.name, chosen))


@pytest.mark.parametrize("grad_reduce_dtype", ["fp32", "bf16"])
def test_each_microbatch_adds_its_gradients_to_a_sum_in_the_type_of_the_reduction(grad_reduce_dtype):
    graph = lowered(2, training__grad_reduce_dtype=grad_reduce_dtype)
    operations, item = graph.operations, 4 if grad_reduce_dtype == "fp32" else 2
    products, sums = rows_ending(graph, "_wgrad"), rows_ending(graph, "_wgrad_accumulate")
    assert len(products) == len(sums) > 0
    written = operations.bytes_written[products]
    assert written.tolist() == [2 * value / item for value in operations.bytes_written[sums].tolist()]
    assert (operations.bytes_read[sums] == written * (2 + item) / 2).all()
    assert (sums == products + 1).all()


def test_without_a_pipeline_each_microbatch_reduces_its_own():
    graph = lowered(1)
    assert not len(rows_ending(graph, "_wgrad_accumulate"))
    assert len(rows_ending(graph, "gradient_reduce_scatter")) % MICROBATCHES == 0


@pytest.mark.parametrize(("pp", "item"), [(1, 2), (2, 4)])
def test_what_is_reduced_is_copied_from_the_sum_or_from_the_gradient(pp, item):
    graph = lowered(pp)
    operations = graph.operations
    copies = rows_ending(graph, "gradient_scale")
    # Into a buffer in fp32, of what was added up in fp32 or of a gradient in bf16.
    ratio = operations.bytes_read[copies] / operations.bytes_written[copies]
    assert set(ratio.tolist()) == {item / 4}


def test_the_sums_are_what_pipelines_keep_whole():
    graph = lowered(2, model__kv_heads=8)
    rows = rows_ending(graph, "_wgrad_accumulate")
    assert set(graph.operations.dtype[rows].tolist()) == {DType.FP32}
    assert set(graph.operations.kind[rows].tolist()) == {OpKind.ELEMENTWISE}


def most_bytes(graph: OpGraph, name: str, rank: int = 0) -> int:
    """Most bytes of buffers of a name that a rank holds at once, in program order."""
    buffers = graph.buffers
    named = np.array(graph.strings)[buffers.name] == name
    rows = np.flatnonzero(named & (buffers.rank == rank))
    change = np.zeros(len(graph.operations) + 2, dtype=np.int64)
    np.add.at(change, np.maximum(buffers.allocate[rows], 0), buffers.size[rows])
    ends = np.where(buffers.release[rows] < 0, len(graph.operations), buffers.release[rows])
    np.add.at(change, ends + 1, -buffers.size[rows])
    return int(change.cumsum().max())


def test_chunks_of_an_interleaved_schedule_hold_whole_gradients_one_after_another():
    """All forwards come first with as many microbatches as stages, so one chunk is done before the other begins."""
    plain = lowered(2, training__num_microbatches=2)
    graph = lowered(2, training__num_microbatches=2, parallel__vpp=2, schedule="interleaved-1f1b")
    for rank in (0, 1):
        both = most_bytes(plain, "accumulated_gradients", rank)
        assert both / 2 <= most_bytes(graph, "accumulated_gradients", rank) < 0.8 * both
        # Weights are there from the first forward to the last backward, 2 bytes where gradients have 4.
        assert most_bytes(plain, "accumulated_gradients", rank) == 2 * np.sum(
            graph_sizes(plain, "gathered_weights", rank, MemoryCategory.WEIGHTS)
        )


def graph_sizes(graph: OpGraph, name: str, rank: int, category: MemoryCategory) -> np.ndarray:
    buffers = graph.buffers
    named = np.array(graph.strings)[buffers.name] == name
    return buffers.size[named & (buffers.rank == rank) & (buffers.category == category)]


def test_between_steps_only_shards_and_states_are_left():
    graph = lowered(2)
    buffers = graph.buffers
    stays = {graph.strings[name] for name in buffers.name[(buffers.allocate < 0) & (buffers.rank == 0)]}
    assert stays <= {"weights", "optimizer_states", "library_workspaces", "sent_gradient"}
    # What reductions leave has blocks of its own.
    shards = buffers.take(np.flatnonzero(np.array(graph.strings)[buffers.name] == "main_gradients"))
    assert (shards.release < 0).all()
    assert set(shards.pool.tolist()) == {REDUCTION_POOL}


@pytest.mark.parametrize("loss", ["torch", "compiled"])
def test_stages_of_pytorch_hold_what_they_receive_and_send(loss):
    changes = {"libraries__torch_pipelining": True, "training__cross_entropy_fusion": loss}
    plain, held = lowered(2, training__cross_entropy_fusion=loss), lowered(2, **changes)
    tokens = 2 * 128
    hidden, logits = 2 * tokens * 256, 2 * tokens * 1024
    # The first stage gets gradients, the last activations; both from the start of the job.
    assert [most_bytes(held, "received", rank) for rank in (0, 1)] == [MICROBATCHES * hidden] * 2
    assert most_bytes(held, "received_activation", 1) == most_bytes(held, "received_gradient", 0) == 0
    # 1F1B has two microbatches of the first stage in flight, whose outputs wait beside the inputs of its two layers.
    assert most_bytes(plain, "hidden_states") < most_bytes(held, "hidden_states")
    assert most_bytes(held, "logits", 1) == MICROBATCHES * logits
    assert most_bytes(held, "merged_outputs", 1) == MICROBATCHES * logits
    assert most_bytes(plain, "logits", 1) == logits


@pytest.mark.parametrize(
    ("loss", "tp", "size"),
    # Logits of 2 bytes; with torch their logarithmic softmax, two gradients and, over ranks, exponentials, each of 4.
    [("true", 1, 2), ("compiled", 1, 4), ("torch", 1, 12), ("torch", 2, 16)],
)
def test_bytes_a_logit_that_a_loss_takes_at_once(loss, tp, size):
    graph = lower_scenario(
        load_scenario(
            dense_mapping(
                parallel={"tp": tp},
                training__cross_entropy_fusion=True if loss == "true" else loss,
                training__num_microbatches=1,
            )
        )
    )
    buffers, names = graph.buffers, np.array(graph.strings)
    chosen = [
        "logits", "logits_fp32", "shifted_logits", "log_softmax_fp32", "picked_gradient", "logit_gradient_fp32",
        "exponentials", "logit_gradient",
    ]  # fmt: skip
    rows = np.flatnonzero(np.isin(names[buffers.name], chosen))
    change = np.zeros(len(graph.operations) + 1, dtype=np.int64)
    np.add.at(change, buffers.allocate[rows], buffers.size[rows])
    np.add.at(change, buffers.release[rows] + 1, -buffers.size[rows])
    assert change.cumsum().max() == size * 2 * 128 * 1024 // tp
