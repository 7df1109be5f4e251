"""An output head on quantised operands (``training.fp8_head``), and NVFP4's copies along columns.

Oracles: FLOPs by element type in closed form, kernels by name, bytes of a copy, and buffers that all come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import DType, OpKind
from tests.dense_scenarios import dense_mapping
from tests.megatron_lists import GPT
from tests.test_lowering import assert_nothing_leaks
from tests.test_precision import held
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.megatron import import_megatron
from tracesim.scenario import load_scenario, scenario_to_mapping

TOKENS, HIDDEN, VOCABULARY, MICROBATCHES = 256, 256, 1024, 2
MXFP8 = 1 + 1 / 32


def lowered(**changes: Any) -> OpGraph:
    fields = {"hardware": "b200-sxm", "training__dtype": "mxfp8", "model__vocab_size": VOCABULARY, **changes}
    return lower_scenario(load_scenario(dense_mapping(**fields)))


def names(graph: OpGraph) -> list[str]:
    return [graph.strings[name] for name in graph.operations.name.tolist()]


def flops_of(graph: OpGraph, dtype: DType) -> float:
    products = (graph.operations.kind == OpKind.GEMM) & (graph.operations.dtype == dtype)
    return float(graph.operations.flops[products].sum())


def test_the_three_products_of_the_head_are_in_8_bits_and_no_flop_is_lost():
    plain, low = lowered(), lowered(training__fp8_head=True)
    head = 3 * 2 * TOKENS * HIDDEN * VOCABULARY * MICROBATCHES
    assert flops_of(plain, DType.BF16) == head
    assert flops_of(low, DType.BF16) == 0
    assert flops_of(low, DType.FP8) == flops_of(plain, DType.FP8) + head


def test_input_and_gradient_are_quantised_each_microbatch_and_the_weight_once_a_step():
    found = names(lowered(training__fp8_head=True))
    casts = {name: found.count(name) for name in set(found) if name.startswith("head_") and "cast" in name}
    assert casts == {
        "head_input_cast_transpose": MICROBATCHES,
        "head_gradient_cast_transpose": MICROBATCHES,
        "head_weight_cast_transpose": 1,
    }


def test_the_gradient_of_the_logits_is_read_once_and_written_along_both_axes():
    graph = lowered(training__fp8_head=True)
    row = names(graph).index("head_gradient_cast_transpose")
    logits = TOKENS * VOCABULARY
    assert graph.operations.bytes_read[row] == 2 * logits
    assert graph.operations.bytes_written[row] == 2 * MXFP8 * logits


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"parallel__tp": 2, "parallel__sp": True},
        {"parallel__pp": 2, "training__num_microbatches": 4},
        {"parallel__dp": 2, "parallel__zero": 3},
        {"model__mtp_layers": 2},
    ],
)
def test_all_buffers_come_back(plan):
    assert_nothing_leaks(lowered(training__fp8_head=True, **plan))


def test_the_quantised_copies_of_the_heads_weight_are_held():
    with_head, without = (
        held(lowered(training__fp8_head=flag), "quantized_weights") for flag in (True, False)
    )
    assert with_head - without == 2 * MXFP8 * HIDDEN * VOCABULARY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__dtype": "bf16"}, "needs scales of 32 elements, dtype is bf16; set dtype: mxfp8"),
        ({"model__tied_embeddings": True}, "shares it with the embedding, which stays in bf16; leave it out"),
        ({"training__lora": {"rank": 8}}, "has no rule beside frozen weights"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, said):
    fields = {"hardware": "b200-sxm", "training__dtype": "mxfp8", "training__fp8_head": True, **changes}
    with pytest.raises(ScenarioError, match=said):
        load_scenario(dense_mapping(**fields))


def test_it_is_written_out_and_read_from_megatrons_arguments():
    fields = {"hardware": "b200-sxm", "training__dtype": "mxfp8", "training__fp8_head": True}
    scenario = load_scenario(dense_mapping(**fields))
    assert load_scenario(scenario_to_mapping(scenario)) == scenario
    arguments = {
        **GPT,
        "fp8-format": "e4m3",
        "fp8-recipe": "mxfp8",
        "untie-embeddings-and-output-weights": True,
    }
    for flag in (True, False):
        imported = import_megatron({**arguments, "fp8-output-proj": flag}, "b200-sxm")
        assert load_scenario(imported.mapping).training.fp8_head is flag


def test_nvfp4_makes_the_copy_that_is_rotated_in_a_kernel_of_its_own():
    graph = lowered(training__dtype="nvfp4")
    all_names = names(graph)
    elements, copy = TOKENS * HIDDEN, 0.5 + 1 / 16
    for name in ("qkv_input_cast", "qkv_input_cast_columns"):
        row = all_names.index(name)
        assert graph.operations.bytes_read[row] == 2 * elements
        assert graph.operations.bytes_written[row] == copy * elements
    # Weights are not rotated: one kernel writes both.
    assert "qkv_weight_cast_transpose" in all_names
    assert not np.any(np.char.startswith(np.array(all_names), "qkv_weight_cast_columns"))
