"""Gradients of units that are sharded, in a pipeline: added up over its microbatches, reduced with the last."""

from __future__ import annotations

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import DType, OpKind
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
