"""Kernels one by one, PyTorch's loss, and the copies of FSDP2: traffic and memory in closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import MemoryCategory, OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks, lowered, saved_bytes
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping

EAGER: dict[str, Any] = {"libraries__eager": True}


def traffic(graph: OpGraph, name: str) -> float:
    """Bytes read and written by one operation of a name."""
    rows = [row for row, string in enumerate(graph.operations.name) if graph.strings[string] == name]
    assert rows, name
    operations = graph.operations
    found = {float(operations.bytes_read[row] + operations.bytes_written[row]) for row in rows}
    assert len(found) == 1, name
    return found.pop()


def names(graph: OpGraph) -> set[str]:
    return {graph.strings[name] for name in graph.operations.name}


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [
        ("input_layernorm", 36),
        ("input_layernorm_backward", 84),
        ("pre_mlp_layernorm", 36),
        ("final_norm_backward", 84),
    ],
)
def test_an_rms_norm_of_tensor_operations(name, bytes_each):
    scenario, graph = lowered(**EAGER)
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    assert traffic(graph, name) == bytes_each * tokens * scenario.model.hidden_size
    assert_nothing_leaks(graph)


def test_a_layer_norm_is_one_kernel_either_way():
    fused, eager = (lowered(model__norm="layernorm", libraries__eager=flag)[1] for flag in (False, True))
    for name in ("input_layernorm", "input_layernorm_backward"):
        assert traffic(fused, name) == traffic(eager, name)


def test_positions_activation_and_sums_of_gradients():
    scenario, graph = lowered(**EAGER)
    model = scenario.model
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    rotated = tokens * model.head_size * (model.heads + model.kv_heads)
    assert traffic(graph, "rotary") == traffic(graph, "rotary_backward") == 20 * rotated
    assert traffic(graph, "swiglu") == 10 * tokens * model.ffn_size
    assert traffic(graph, "swiglu_backward") == 18 * tokens * model.ffn_size
    sums = [row for row in range(len(graph.operations)) if _name(graph, row) == "input_gradient_sum"]
    hidden = tokens * model.hidden_size
    # Two sums in front of attention, one in front of the MLP.
    moved = graph.operations.bytes_read[sums] + graph.operations.bytes_written[sums]
    assert sorted(set(moved.tolist())) == [6 * hidden, 12 * hidden]


def _name(graph: OpGraph, row: int) -> str:
    return graph.strings[graph.operations.name[row]]


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_keys_and_values_are_repeated_for_all_heads(kv_heads):
    scenario, graph = lowered(model__kv_heads=kv_heads, **EAGER)
    model = scenario.model
    assert model.heads == 8
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    if kv_heads == model.heads:
        assert "repeated_heads" not in names(graph)
        return
    moved = 2 * 2 * tokens * model.head_size * (model.heads + kv_heads)
    assert traffic(graph, "repeated_heads") == traffic(graph, "repeated_heads_backward") == moved


def test_what_is_kept_beside():
    """Norms keep fp32 inputs and scaled values in place of their input; the gate once activated; heads repeated."""
    scenario, fused = lowered()
    _, eager = lowered(**EAGER)
    model = scenario.model
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    repeated = 2 * 2 * (model.heads - model.kv_heads) * model.head_size
    more = tokens * (2 * 4 * model.hidden_size + 2 * model.ffn_size + repeated)
    for layer in range(model.layers):
        kept = saved_bytes(eager, layer) - saved_bytes(fused, layer)
        assert kept == more * scenario.training.num_microbatches


@pytest.mark.parametrize("recompute", ["full", {"keep": "products"}, {"keep": "every-second-product"}])
@pytest.mark.parametrize("parallel", [{}, {"tp": 4, "sp": True}, {"dp": 2, "zero": 3}])
def test_it_goes_with_recompute_and_leaves_nothing_behind(recompute, parallel):
    _, graph = lowered(parallel=parallel, training__recompute=recompute, **EAGER)
    assert_nothing_leaks(graph)


@pytest.mark.parametrize(("optimizer", "fused", "eager"), [("adam", 28, 80), ("sgd", 20, 32)])
def test_an_optimizer_of_tensor_operations(optimizer, fused, eager):
    """Bytes a parameter. Adam: decay 8, first moment 12, second 8 and 12, its root 8, 8 and 8, update 16. SGD: decay 8,
    moment 12, update 12."""
    moved = [
        traffic(lowered(training__optimizer=optimizer, libraries__eager=flag)[1], optimizer)
        for flag in (False, True)
    ]
    assert moved[1] / eager == moved[0] / fused


def test_the_loss_of_pytorch():
    """Cast 6 bytes a logit and logarithmic softmax 8; backward 4, 12 and 6, with three fp32 tensors at once."""
    scenario, graph = lowered(training__cross_entropy_fusion="torch")
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    logits = tokens * scenario.model.padded_vocab(1)
    expected = {
        "logits_to_fp32": 6,
        "log_softmax": 8,
        "picked_gradient_zero": 4,
        "log_softmax_backward": 12,
        "logit_gradient_cast": 6,
    }
    assert {name: traffic(graph, name) for name in expected} == {
        name: each * logits for name, each in expected.items()
    }
    assert_nothing_leaks(graph)
    buffers = graph.buffers
    of_loss = {
        graph.strings[name]: size
        for name, size in zip(buffers.name, buffers.size, strict=True)
        if graph.strings[name] in ("log_softmax_fp32", "picked_gradient", "logit_gradient_fp32")
    }
    assert of_loss == dict.fromkeys(
        ("log_softmax_fp32", "picked_gradient", "logit_gradient_fp32"), 4 * logits
    )


def test_fsdp2_copies_units_apart_and_together():
    changes: dict[str, Any] = {"dp": 4, "zero": 3}
    each = lower_scenario(load_scenario(dense_mapping(parallel=changes)))
    flat = lower_scenario(load_scenario(dense_mapping(parallel={**changes, "flat_parameters": True})))
    for graph in (each, flat):
        assert_nothing_leaks(graph)
    copied = [row for row in range(len(each.operations)) if _name(each, row) == "gathered_weights_copy_out"]
    gathered = [row for row in range(len(each.operations)) if _name(each, row) == "parameter_all_gather"]
    assert len(copied) == len(gathered)
    assert set(each.operations.kind[copied].tolist()) == {OpKind.MEMCPY}
    # Read once and written once, as many bytes as are gathered.
    size = each.operations.communication_bytes[gathered].sum()
    assert each.operations.bytes_read[copied].sum() == each.operations.bytes_written[copied].sum() == size
    assert "gathered_weights_copy_out" not in names(flat)
    # What is gathered, and what is scattered, is a buffer of its own; flat parameters are gathered in place.
    inputs = [graph.buffers.category[_rows_of(graph, "reduce_scatter_input")] for graph in (each, flat)]
    assert set(inputs[0].tolist()) == {MemoryCategory.COMMUNICATION}
    assert not len(inputs[1])


def _rows_of(graph: OpGraph, name: str) -> np.ndarray:
    return np.flatnonzero([graph.strings[index] == name for index in graph.buffers.name])


@pytest.mark.parametrize(("transformer_engine", "times"), [(True, 1), (False, 3)])
def test_only_transformer_engine_keeps_quantised_weights_between_microbatches(transformer_engine, times):
    """Once a step in each of three microbatches, and then nothing stays; backward casts for itself."""
    changes: dict[str, Any] = {
        "training__dtype": "fp8-tensorwise",
        "training__num_microbatches": 3,
        "libraries__transformer_engine": transformer_engine,
    }
    scenario, graph = lowered(**changes)
    found = [_name(graph, row) for row in range(len(graph.operations))]
    forward = [name for name in found if name.startswith("fc1_weight_cast")]
    each = scenario.model.layers * times
    assert len(forward) == (each if transformer_engine else 2 * each)
    assert bool(len(_rows_of(graph, "quantized_weights"))) is transformer_engine
    assert_nothing_leaks(graph)


def test_gradients_of_a_pipeline_wait_in_the_type_of_their_reduction():
    parallel: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 3}
    sizes = {}
    for dtype in ("fp32", "bf16"):
        _, graph = lowered(parallel=parallel, training__grad_reduce_dtype=dtype)
        sizes[dtype] = [
            int(graph.buffers.size[_rows_of(graph, name)].sum())
            for name in ("accumulated_gradients", "main_gradients")
        ]
    # All elements in four bytes or two, and four bytes a sharded element over two ranks.
    assert sizes["fp32"][0] == pytest.approx(2 * sizes["bf16"][0], rel=1e-3)
    assert sizes["fp32"][1] == sizes["bf16"][1] == pytest.approx(sizes["fp32"][0] / 2, rel=1e-3)


NORMS = ("input_layernorm", "input_layernorm_backward", "final_norm_backward")


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("norms", set(NORMS)),
        ("positions", {"rotary", "rotary_backward"}),
        ("attention", {"repeated_heads", "input_gradient_sum"}),
        ("mlp", {"swiglu", "swiglu_backward", "input_gradient_sum"}),
        ("optimizer", {"adam"}),
    ],
)
def test_one_part_runs_eagerly_and_the_others_do_not(part, changed):
    _, fused = lowered(model__kv_heads=2)
    _, eager = lowered(model__kv_heads=2, libraries__eager=[part])
    watched = {*NORMS, "rotary", "rotary_backward", "swiglu", "swiglu_backward", "adam"}
    differing = {name for name in watched if traffic(fused, name) != traffic(eager, name)}
    assert differing | (names(eager) - names(fused)) - {"repeated_heads_backward"} == changed
    assert_nothing_leaks(eager)


def test_all_parts_are_what_true_says():
    _, parts = lowered(libraries__eager=["optimizer", "mlp", "attention", "positions", "norms"])
    _, whole = lowered(**EAGER)
    assert [_name(parts, row) for row in range(len(parts.operations))] == [
        _name(whole, row) for row in range(len(whole.operations))
    ]
    assert np.array_equal(parts.operations.bytes_read, whole.operations.bytes_read)


@pytest.mark.parametrize("value", [[], ["mlp", "mlp"], ["loss"], "mlp", 1])
def test_other_parts_are_refused(value):
    with pytest.raises(
        ScenarioError, match=r"libraries.eager.*must be true, false or a list of norms, positions"
    ):
        load_scenario(dense_mapping(libraries={"eager": value}))


def test_a_list_of_parts_survives_writing_a_scenario():
    scenario = load_scenario(
        dense_mapping(libraries={"eager": ["mlp", "optimizer"], "fp32_norm_inputs": True})
    )
    assert scenario.libraries.eager == ("mlp", "optimizer")
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_of_an_fp32_copy(kind):
    """Forward: cast 6 bytes an element, norm 4 read and 2 written. Backward: 4 + 2 read, 4 written, cast back 6."""
    scenario, graph = lowered(model__norm=kind, libraries__fp32_norm_inputs=True)
    _, plain = lowered(model__norm=kind)
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    hidden = tokens * scenario.model.hidden_size
    for name in ("input_layernorm", "final_norm"):
        assert traffic(graph, f"{name}_input_to_fp32") == traffic(graph, name) == 6 * hidden
        assert traffic(graph, f"{name}_backward") == 10 * hidden
        assert traffic(graph, f"{name}_backward_cast") == 6 * hidden
    assert_nothing_leaks(graph)
    for layer in range(scenario.model.layers):
        # The copy is kept in place of the input, of half its size.
        more = saved_bytes(graph, layer) - saved_bytes(plain, layer)
        assert more == 2 * 2 * hidden * scenario.training.num_microbatches


def test_eager_norms_cast_anyway():
    _, eager = lowered(**EAGER)
    _, both = lowered(libraries__fp32_norm_inputs=True, **EAGER)
    assert names(eager) == names(both)


@pytest.mark.parametrize("recompute", ["full", {"modules": ["layernorm"]}, {"keep": "products"}])
@pytest.mark.parametrize("parallel", [{}, {"tp": 4, "sp": True}, {"dp": 2, "zero": 3}])
def test_fp32_copies_go_with_recompute(recompute, parallel):
    _, graph = lowered(parallel=parallel, training__recompute=recompute, libraries__fp32_norm_inputs=True)
    assert_nothing_leaks(graph)
