"""fp8 with a scale for each row: what is cast and when, what is kept and gathered, and products kept in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hardware_profiles.loader import load_profile
from op_graphs.graph import MemoryShape, OpGraph
from op_graphs.vocabulary import Communication, DType, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.cost.compute import ComputeCost
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


def count(graph: OpGraph, name: str) -> int:
    return len(rows_of(graph, name)) if name in graph.strings else 0


@pytest.mark.parametrize("linear", LINEARS)
def test_inputs_gradients_and_weights_are_cast_for_each_product(linear: str) -> None:
    graph = lowered(libraries={"eager": True})
    times = LAYERS * MICROBATCHES
    # Along rows, one kernel each: the input and the weight in forward, the gradient in backward.
    for operand in ("input", "gradient", "weight"):
        assert count(graph, f"{linear}_{operand}_cast") == times
    # Along columns, all three in backward, with a kernel for the magnitudes in front.
    for operand in ("input", "gradient", "weight"):
        assert (
            count(graph, f"{linear}_{operand}_amax")
            == count(graph, f"{linear}_{operand}_columns_cast")
            == times
        )
    read = graph.operations.bytes_read[rows_of(graph, f"{linear}_input_amax")]
    inputs = FFN if linear == "fc2" else HIDDEN
    assert set(read.tolist()) == {2 * TOKENS * inputs}


def test_a_compiler_joins_casts_to_norms_and_activations_but_not_to_attention() -> None:
    compiled = lowered(libraries={"eager": False})
    times = LAYERS * MICROBATCHES
    assert {linear: count(compiled, f"{linear}_input_cast") for linear in LINEARS} == {
        "qkv": 0,
        "proj": times,
        "fc1": 0,
        "fc2": 0,
    }
    # Nor where a collective makes the input, or the magnitudes have to be reduced first.
    parallel = lowered(libraries={"eager": False}, parallel={"tp": 2, "sp": True})
    assert all(count(parallel, f"{linear}_input_cast") == times for linear in LINEARS)


def test_products_of_backward_are_scaled_by_kernels_where_nothing_else_does_it() -> None:
    graph, plain = lowered(), lowered("fp8-tensorwise")
    times = LAYERS * MICROBATCHES
    assert all(count(graph, f"{linear}_wgrad_rescale") == times for linear in LINEARS)
    assert [linear for linear in LINEARS if count(graph, f"{linear}_dgrad_rescale")] == ["proj"]
    written = graph.operations.bytes_written[rows_of(graph, "fc2_wgrad_rescale")]
    assert set(written.tolist()) == {2 * FFN * HIDDEN}
    assert not any("rescale" in name for name in plain.strings)


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


def test_magnitudes_of_rows_that_are_cut_are_reduced_over_the_ranks() -> None:
    """8 bytes a row: inputs of row-parallel linears, gradients of the others, and the weights of both."""
    graph = lowered(parallel={"tp": 2, "sp": True})
    operations = graph.operations
    reduced = np.flatnonzero(
        (operations.communication == Communication.ALL_REDUCE) & (operations.phase != Phase.OPTIMIZER)
    )
    sizes = {
        graph.strings[operations.name[row]]: int(operations.communication_bytes[row])
        for row in reduced
        if graph.strings[operations.name[row]].endswith("_amax_all_reduce")
    }
    assert sizes == {
        "proj_input_amax_all_reduce": 8 * TOKENS,
        "proj_weight_amax_all_reduce": 8 * HIDDEN,
        "fc2_input_amax_all_reduce": 8 * TOKENS,
        "fc2_weight_amax_all_reduce": 8 * HIDDEN,
        "qkv_gradient_amax_all_reduce": 8 * TOKENS,
        "qkv_weight_amax_all_reduce": 8 * HIDDEN,
        "fc1_gradient_amax_all_reduce": 8 * TOKENS,
        "fc1_weight_amax_all_reduce": 8 * HIDDEN,
    }
    # Each product that reads a cut operand has a reduction of its own.
    apart = lowered(parallel={"tp": 2, "sp": True}, libraries={"separate_projections": True})
    ratio = count(apart, "qkv_gradient_amax_all_reduce") / count(graph, "qkv_gradient_amax_all_reduce")
    assert ratio == 3
    assert not any(name.endswith("_amax_all_reduce") for name in lowered().strings)


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


def test_casts_along_columns_have_a_rate_of_their_own() -> None:
    machine = load_profile("toy")
    slow = replace(machine, memory=replace(machine.memory, column_cast_efficiency=0.1))
    floor, rate = 1e3 * machine.memory.kernel_floor_us, machine.memory.bandwidth_gb_per_s
    along_columns, along_rows = (
        ComputeCost(slow).duration_ns(MemoryShape(access), bytes_read=1e9)
        for access in ("columns", "strided")
    )
    assert along_columns == round(floor + 1e9 / (0.1 * rate))
    assert along_rows == round(floor + 1e9 / (machine.memory.strided_efficiency * rate))


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
    columns = "_columns" if dtype == "fp8-rowwise" else ""
    assert {f"{linear}_input{columns}_cast" for linear in LINEARS} <= set(casts)


def test_8_bit_products_that_run_again_cast_their_operands_again() -> None:
    graph = lowered(
        training__recompute={"keep": "every-second-product"},
        parallel={"dp": 2, "zero": 3},
        libraries={"eager": True},
    )
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
