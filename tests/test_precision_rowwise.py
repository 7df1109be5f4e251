"""fp8 with a scale for each row: what is cast and when, what is kept and gathered, and products kept in 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, DType, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

TOKENS, HIDDEN, FFN, QKV, LAYERS, MICROBATCHES = 256, 256, 512, 512, 4, 2
LINEARS = ("qkv", "proj", "fc1", "fc2")


def lowered(dtype: str = "fp8-rowwise", **changes: Any) -> OpGraph:
    return lower_scenario(load_scenario(dense_mapping(training__dtype=dtype, **changes)))


def rows_of(graph: OpGraph, name: str) -> np.ndarray:
    return np.flatnonzero(np.array(graph.strings)[graph.operations.name] == name)


def activations(dtype: str, **changes: Any) -> int:
    mapping = dense_mapping(training__dtype=dtype, training__num_microbatches=1, **changes)
    return int(simulate(load_scenario(mapping)).memory[0].by_category[MemoryCategory.ACTIVATIONS].max())


def test_every_product_of_a_linear_runs_in_8_bits() -> None:
    graph, plain = lowered(), lowered("bf16")
    assert graph.operations.flops.sum() == plain.operations.flops.sum()
    weights = HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    eight = graph.operations.flops[graph.operations.dtype == DType.FP8].sum()
    assert eight == 3 * 2 * TOKENS * weights * LAYERS * MICROBATCHES


@pytest.mark.parametrize("linear", LINEARS)
def test_inputs_gradients_and_weights_are_cast_for_each_product(linear: str) -> None:
    graph = lowered()
    times = LAYERS * MICROBATCHES
    # Forward along rows, backward for the weight gradient along columns, with the magnitudes of columns before it.
    assert len(rows_of(graph, f"{linear}_input_cast")) == 2 * times
    assert len(rows_of(graph, f"{linear}_input_amax")) == times
    assert len(rows_of(graph, f"{linear}_gradient_cast_transpose")) == times
    assert len(rows_of(graph, f"{linear}_gradient_amax")) == times
    # A weight once in forward and once in backward of every microbatch.
    assert len(rows_of(graph, f"{linear}_weight_cast")) == 2 * times
    assert len(rows_of(graph, f"{linear}_weight_amax")) == times
    read = graph.operations.bytes_read[rows_of(graph, f"{linear}_input_amax")]
    inputs = FFN if linear == "fc2" else HIDDEN
    assert set(read.tolist()) == {2 * TOKENS * inputs}


def test_what_is_kept_is_kept_in_16_bits() -> None:
    assert activations("fp8-rowwise") == activations("bf16")
    assert "quantized_weights" not in lowered().strings


@pytest.mark.parametrize("policy", ["in-place", "gathered-once", "async-tp"])
def test_inputs_are_gathered_before_they_are_cast(policy: str) -> None:
    """Also asynchronously: no gather is cut in front of products whose scales are of rows."""
    graph = lowered(parallel={"tp": 2, "sp": True}, overlap__tp=policy)
    operations = graph.operations
    (size,) = set(operations.communication_bytes[rows_of(graph, "qkv_all_gather")].tolist())
    assert size == 2 * TOKENS * HIDDEN
    assert "qkv_all_gather_copy" not in graph.strings
    assert ("qkv_all_gather_order" in graph.strings) == (policy != "in-place")
    assert_nothing_leaks(graph)
    again = rows_of(graph, "qkv_input_all_gather") if "qkv_input_all_gather" in graph.strings else []
    assert (len(again) == 0) == (policy != "in-place")


def test_nothing_is_reduced_over_ranks_for_a_scale() -> None:
    graph = lowered(parallel={"tp": 2, "sp": True})
    reduced = graph.operations.communication == Communication.ALL_REDUCE
    small = graph.operations.communication_bytes[reduced & (graph.operations.phase != Phase.OPTIMIZER)]
    assert (small != 4).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "a100-sxm-80g"}, "has no peak rate"),
        ({"training__fp8_param_gather": True}, "rows have one each"),
        ({"model": "mixtral-8x7b"}, "mixtral-8x7b has experts; nearest: fp8-blockwise"),
        ({"model": "deepseek-v2-lite"}, "has experts and latent attention"),
        ({"training__fp8_storage": True}, "needs block scales"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(dense_mapping(training__dtype="fp8-rowwise", **changes))
    assert message in str(caught.value)


# -- products kept in backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp8-tensorwise", "fp8-blockwise", "fp8-rowwise"])
def test_outputs_of_8_bit_products_are_kept_as_those_of_16_bits_are(dtype: str) -> None:
    keep = {"training__recompute": {"keep": "products"}}
    graph = lowered(dtype, **keep)
    assert_nothing_leaks(graph)
    assert activations(dtype, **keep) == activations("bf16", **keep)
    # What was recomputed is quantised again for the weight gradient.
    backward = graph.operations.phase == Phase.BACKWARD_INPUT
    casts = [
        graph.strings[name]
        for name in graph.operations.name[backward & (graph.operations.kind == OpKind.CAST)]
    ]
    assert {f"{linear}_input_cast" for linear in LINEARS} <= set(casts)


def test_8_bit_products_that_run_again_cast_their_operands_again() -> None:
    graph = lowered(training__recompute={"keep": "every-second-product"}, parallel={"dp": 2, "zero": 3})
    assert_nothing_leaks(graph)
    again = graph.operations.phase == Phase.RECOMPUTE
    products = {
        graph.strings[name] for name in graph.operations.name[again & (graph.operations.kind == OpKind.GEMM)]
    }
    casts = {
        graph.strings[name] for name in graph.operations.name[again & (graph.operations.kind == OpKind.CAST)]
    }
    assert products == {"keys", "proj", "fc1_up"}
    assert casts == {f"{name}_{part}_cast" for name in products for part in ("input", "weight")}
