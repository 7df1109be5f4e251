"""From a scenario to its operations: FLOPs, communication and memory against closed forms of the literature.

The formulas are written out here from their papers and share nothing with the package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import tracesim.lowering
from op_graphs.buckets import parameter_module
from op_graphs.graph import OpGraph
from op_graphs.lower_step import RankPrograms
from op_graphs.model_flops import model_flops_per_token
from op_graphs.presets import list_models, load_model
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping, dense_scenarios
from tests.graphs import bytes_by_name
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario

AG, RS, AR = Communication.ALL_GATHER, Communication.REDUCE_SCATTER, Communication.ALL_REDUCE


def lowered(**changes: Any) -> tuple[Scenario, OpGraph]:
    scenario = load_scenario(dense_mapping(**changes))
    return scenario, lower_scenario(scenario)


# -- FLOPs -------------------------------------------------------------------------------------------------------


def linear_flops(scenario: Scenario) -> float:
    """Forward FLOPs of a token in the linears of all layers: 2 for each element of each matrix."""
    model = scenario.model
    query, key_value = model.heads * model.head_size, model.kv_heads * model.head_size
    attention = model.hidden_size * (query + 2 * key_value) + query * model.hidden_size
    mlp = model.hidden_size * model.ffn_size * (2 if model.activation == "gelu" else 3)
    return 2.0 * model.layers * (attention + mlp)


def attention_flops(scenario: Scenario) -> float:
    """Forward FLOPs of a token in scores and context; half of the square where the kernel skips what is masked."""
    model = scenario.model
    full = 2 * 2.0 * model.layers * model.heads * model.head_size * scenario.training.seq_len
    return full / 2 if scenario.training.attention == "flash" else full


def step_flops(graph: OpGraph, scenario: Scenario) -> float:
    """FLOPs over all ranks: those of a stage are alike."""
    return float(graph.operations.flops.sum()) * scenario.parallel.world_size / len(graph.ranks)


@settings(max_examples=25, deadline=None)
@given(dense_scenarios())
def test_a_step_does_the_matrix_products_of_the_model(scenario):
    """Forward once, backward twice, but that fused attention computes the scores again in backward: 2.5 times."""
    backward = 2.5 if scenario.training.attention == "flash" else 2.0
    head = 2.0 * scenario.model.hidden_size * scenario.model.vocab_size
    recompute = {
        "none": 0.0,
        "full": linear_flops(scenario) + attention_flops(scenario),
        "selective": attention_flops(scenario),
    }[scenario.training.recompute.mode]
    token = 3 * (linear_flops(scenario) + head) + (1 + backward) * attention_flops(scenario) + recompute
    assert step_flops(lower_scenario(scenario), scenario) == pytest.approx(scenario.tokens * token, rel=1e-12)
    # The convention MFU uses counts the scores of backward once.
    causal = scenario.training.attention == "flash"
    model_flops = token - recompute - (backward - 2) * attention_flops(scenario)
    counted = model_flops_per_token(scenario.model, scenario.training.seq_len, causal=causal)
    assert counted == pytest.approx(model_flops, rel=1e-12)


@pytest.mark.parametrize(
    ("recompute", "layers_again"),
    [
        ("full", 8),
        ({"method": "uniform", "layers": 2}, 8),
        ({"method": "uniform", "layers": 3}, 8),
        # block recomputes the first layers of each stage
        ({"method": "block", "layers": 1}, 2),
        ({"method": "block", "layers": 3}, 6),
        ({"method": "block", "layers": 9}, 8),
    ],
)
def test_recompute_adds_exactly_the_forward_of_its_layers(recompute, layers_again):
    scenario, plain = lowered(model__layers=8, parallel__pp=2)
    _, again = lowered(model__layers=8, parallel__pp=2, training__recompute=recompute)
    layer = (linear_flops(scenario) + attention_flops(scenario)) / 8
    added = step_flops(again, scenario) - step_flops(plain, scenario)
    assert added == pytest.approx(scenario.tokens * layers_again * layer, rel=1e-9)
    recomputed = again.operations.phase == Phase.RECOMPUTE
    of_kind = Counter(again.operations.kind[recomputed].tolist())
    assert of_kind[OpKind.GEMM] == 4 * layers_again * scenario.training.num_microbatches


def test_the_padded_rows_of_the_vocabulary_are_computed_too():
    """As Megatron pads it: 1000 words become 1024 with tp 1 and with tp 8 (a multiple of 128 * tp)."""
    scenario, graph = lowered(model__vocab_size=1000, model__heads=8, model__kv_heads=8, parallel__tp=8)
    _, even = lowered(model__vocab_size=1024, model__heads=8, model__kv_heads=8, parallel__tp=8)
    assert step_flops(graph, scenario) == step_flops(even, scenario)


def test_key_value_heads_fewer_than_ranks_are_computed_by_each():
    """tp 4 with 2 key-value heads: each rank projects one, so 4 are projected."""
    scenario, graph = lowered(model__kv_heads=2, parallel__tp=4)
    _, whole = lowered(model__kv_heads=4, parallel__tp=4)
    assert step_flops(graph, scenario) == step_flops(whole, scenario)


# -- tensor-parallel communication -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        # Korthikanti et al. 2022, section 4.2.2: g and its conjugate around each block, and one gather more for each
        # block in backward, of the input that each rank keeps a part of
        (True, {AG: 2, RS: 2}, {AG: 4, RS: 2}),
        # Shoeybi et al. 2019, section 3: two all-reduces in each pass
        (False, {AR: 2}, {AR: 2}),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_tensor_parallel_collectives_of_a_layer(sequence_parallel, forward, backward, overlap):
    scenario, graph = lowered(
        model__layers=3, parallel__tp=4, parallel__sp=sequence_parallel, overlap__tp=overlap
    )
    operations = graph.operations
    on_layers = (operations.stream == Stream.TP) & (operations.layer >= 0)
    assert set(operations.layer[on_layers].tolist()) == {0, 1, 2}
    full = 2 * scenario.training.micro_batch_size * scenario.training.seq_len * scenario.model.hidden_size
    assert set(operations.communication_bytes[on_layers].tolist()) == {full}
    for layer in range(3):
        for is_forward, expected in ((True, forward), (False, backward)):
            rows = on_layers & (operations.layer == layer)
            rows &= (operations.phase == Phase.FORWARD) == is_forward
            found = Counter(operations.communication[rows].tolist())
            assert found == {k: n * scenario.training.num_microbatches for k, n in expected.items()}


def test_without_tensor_parallelism_nothing_is_sent_over_it():
    _, graph = lowered(parallel__dp=2)
    assert not (graph.operations.stream == Stream.TP).any()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_full_recompute_repeats_the_collectives_of_the_forward(recompute):
    scenario, graph = lowered(
        model__layers=2, parallel__tp=2, parallel__sp=True, training__recompute=recompute
    )
    operations = graph.operations
    rows = (operations.stream == Stream.TP) & (operations.layer >= 0) & (operations.phase == Phase.RECOMPUTE)
    expected = 4 * 2 * scenario.training.num_microbatches if recompute == "full" else 0
    assert int(rows.sum()) == expected


# -- parameters, their communication and their memory ------------------------------------------------------------


def stage_parameters(scenario: Scenario, layers: int, *, first: bool, last: bool) -> int:
    """Parameters of one tensor-parallel rank: Megatron's cutting, written out."""
    model, tp = scenario.model, scenario.parallel.tp
    hidden, query, key_value = (
        model.hidden_size,
        model.heads * model.head_size,
        model.kv_heads * model.head_size,
    )
    width = model.ffn_size * (1 if model.activation == "gelu" else 2)
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    layer = 2 * norm + hidden * (query + 2 * key_value) // tp + query // tp * hidden
    layer += hidden * width // tp + model.ffn_size // tp * hidden
    layer += (query + 2 * key_value) // tp * model.qkv_bias + hidden * model.attention_output_bias
    layer += (width // tp + hidden) * model.mlp_bias
    layer += 2 * model.head_size * model.qk_norm
    vocabulary = model.vocab_size // tp * hidden
    total = layers * layer
    if first:
        positions = model.max_positions or scenario.training.seq_len
        total += vocabulary + (positions * hidden if model.positions == "learned" else 0)
    if last:
        total += norm + (0 if model.tied_embeddings and first else vocabulary)
    return total


def parameters_of_ranks(scenario: Scenario) -> list[int]:
    pp, vpp = scenario.parallel.pp, scenario.parallel.vpp
    layers = scenario.model.layers // (pp * vpp)
    stages = pp * vpp
    return [
        sum(
            stage_parameters(scenario, layers, first=stage == 0, last=stage == stages - 1)
            for stage in range(rank, stages, pp)
        )
        for rank in range(pp)
    ]


@settings(max_examples=25, deadline=None)
@given(dense_scenarios())
def test_memory_of_parameters_gradients_and_states(scenario):
    """bf16 training with Adam: 2 bytes of weights, 4 of gradients, 12 of states, which ZeRO-1 shares (Rajbhandari
    et al. 2020, arXiv:1910.02054, section 5)."""
    graph = lower_scenario(scenario)
    buffers = graph.buffers
    shared_by = scenario.parallel.dp if scenario.parallel.zero >= 1 else 1
    for rank, parameters in enumerate(parameters_of_ranks(scenario)):
        lasting = np.flatnonzero((buffers.rank == rank) & (buffers.allocate < 0))
        sizes = bytes_by_name(graph, lasting)
        assert sizes["weights"] == 2 * parameters
        assert sizes["main_gradients"] == 4 * parameters
        assert sizes["optimizer_states"] == round(12 * parameters / shared_by)


@pytest.mark.parametrize(
    ("training", "weights", "gradients", "states"),
    [
        ({}, 2, 4, 12),
        ({"training__dtype": "fp16"}, 2, 4, 12),
        # fp32 weights are their own master copy
        ({"training__dtype": "fp32"}, 4, 4, 8),
        ({"training__grad_reduce_dtype": "bf16"}, 2, 2, 12),
    ],
)
def test_bytes_a_parameter_by_precision(training, weights, gradients, states):
    scenario, graph = lowered(**training)
    (parameters,) = parameters_of_ranks(scenario)
    sizes = bytes_by_name(graph)
    assert sizes["weights"] == weights * parameters
    assert sizes["main_gradients"] == gradients * parameters
    assert sizes["optimizer_states"] == states * parameters


def data_parallel_bytes(graph: OpGraph, rank: int, phase: Phase) -> int:
    operations = graph.operations
    groups = [number for number, group in enumerate(graph.groups) if group.name == "dp"]
    rows = (operations.rank == rank) & (operations.phase == phase) & np.isin(operations.group, groups)
    return int(operations.communication_bytes[rows].sum())


@settings(max_examples=25, deadline=None)
@given(dense_scenarios())
def test_every_gradient_is_reduced_once_and_every_parameter_gathered_once(scenario):
    graph = lower_scenario(scenario)
    replicated = scenario.parallel.dp > 1
    for rank, parameters in enumerate(parameters_of_ranks(scenario)):
        reduced = data_parallel_bytes(graph, rank, Phase.GRADIENT_SYNC)
        gathered = data_parallel_bytes(graph, rank, Phase.PARAM_SYNC)
        assert reduced == (4 * parameters if replicated else 0)
        assert gathered == (2 * parameters if replicated and scenario.parallel.zero >= 1 else 0)


def programs_of(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[RankPrograms]:
    kept: list[RankPrograms] = []
    monkeypatch.setattr(tracesim.lowering, "assemble", lambda programs, *others: kept.extend(programs))
    lower_scenario(scenario)
    return kept


def preset_scenario(name: str, **changes: Any) -> Scenario:
    """Six layers of a preset over two tensor-parallel, pipeline and data-parallel ranks.

    Skips what is not simulated yet.
    """
    model = load_model(name)
    # An image with its class token is of odd length, and as long as it is.
    reads_images = model.patches is not None
    cut: dict[str, Any] = {"base": name, "layers": 6}
    if model.layer_pattern:
        first = model.layer_pattern.index("*") - 3
        cut["layer_pattern"] = model.layer_pattern[first : first + 6]
    mapping: Mapping[str, Any] = {
        "model": cut,
        "hardware": "h100-sxm",
        "parallel": {"tp": 2, "sp": not reads_images, "pp": 2, "dp": 2},
        "training": {"num_microbatches": 2, **({} if reads_images else {"seq_len": 256}), **changes},
    }
    try:
        return load_scenario(mapping)
    except ScenarioError as error:
        if "not simulated yet" in str(error):
            pytest.skip(str(error).splitlines()[1].strip())
        raise


@pytest.mark.parametrize("name", list_models())
def test_every_parameter_of_every_preset_is_read_and_gets_a_gradient(name, monkeypatch):
    for rank in programs_of(replace(preset_scenario(name), schedule="zb-h1"), monkeypatch):
        for chunk in rank.chunks:
            modules = {parameter_module(tensor) for tensor in chunk.parameters}
            assert modules <= set(chunk.forward.parameter_rows)
            assert modules <= set(chunk.backward.gradient_rows)
            assert modules <= set(chunk.backward_weight.gradient_rows)
            held = sum(tensor.elements for tensor in chunk.parameters)
            assert sum(bucket.elements for bucket in chunk.buckets) == held
            # The last backward reduces all of them, none before its gradient is complete.
            operations = chunk.backward_last.operations
            reductions = np.flatnonzero(operations.communication == RS)
            reductions = reductions[operations.phase[reductions] == Phase.GRADIENT_SYNC]
            sizes = operations.communication_bytes[reductions]
            assert sorted(sizes.tolist()) == sorted(4 * bucket.elements for bucket in chunk.buckets)
            for bucket in chunk.buckets:
                complete = max(chunk.backward_last.gradient_rows[module] for module in bucket.modules)
                assert (reductions[sizes == 4 * bucket.elements] > complete).any()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", list_models())
def test_no_preset_leaks_memory(name, recompute):
    assert_nothing_leaks(lower_scenario(preset_scenario(name, recompute=recompute)))


def assert_nothing_leaks(graph: OpGraph) -> None:
    buffers = graph.buffers
    passing = np.flatnonzero(buffers.allocate >= 0)
    leaked = passing[buffers.release[passing] < 0]
    # The shards that FSDP's reductions leave are dropped by the next step.
    assert {graph.strings[name] for name in buffers.name[leaked]} <= {"main_gradients"}
    passing = np.setdiff1d(passing, leaked)
    backwards = passing[buffers.release[passing] < buffers.allocate[passing]]
    assert sorted({graph.strings[name] for name in buffers.name[backwards]}) == []
    rank_of_row = graph.operations.rank
    assert (rank_of_row[buffers.allocate[passing]] == buffers.rank[passing]).all()
    assert (rank_of_row[buffers.release[passing]] == buffers.rank[passing]).all()
    assert (buffers.size > 0).all()


@settings(max_examples=25, deadline=None)
@given(dense_scenarios())
def test_no_scenario_leaks_memory(scenario):
    assert_nothing_leaks(lower_scenario(scenario))


# -- activations -------------------------------------------------------------------------------------------------


def saved_bytes(graph: OpGraph, layer: int) -> int:
    """Activations that a layer keeps from its forward to its backward, of one microbatch.

    A layer's output is the next one's input, kept for its norm: it counts for the layer that writes it.
    """
    operations, buffers = graph.operations, graph.buffers
    passing = np.flatnonzero(buffers.allocate >= 0)
    first, last = buffers.allocate[passing], buffers.release[passing]
    kept = (
        (operations.phase[first] == Phase.FORWARD)
        & (operations.phase[last] != Phase.FORWARD)
        & (operations.layer[first] == layer)
    )
    assert (buffers.category[passing[kept]] == MemoryCategory.ACTIVATIONS).all()
    return int(buffers.size[passing[kept]].sum())


GPT = {
    "model__activation": "gelu",
    "model__ffn_size": 4 * 256,
    "model__norm": "layernorm",
    "model__kv_heads": 16,
    "model__heads": 16,
    "model__head_size": 16,
    "model__hidden_dropout": 0.1,
    "model__attention_dropout": 0.1,
    "training__attention": "unfused",
    "training__num_microbatches": 1,
}


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        # Korthikanti et al. 2022, arXiv:2205.05198, equations 1, 2 and 4, and table 2
        ({}, lambda sbh, scores, t: sbh * 34 + 5 * scores),
        ({"parallel__tp": 4}, lambda sbh, scores, t: sbh * (10 + 24 / t) + 5 * scores / t),
        ({"parallel__tp": 4, "parallel__sp": True}, lambda sbh, scores, t: (sbh * 34 + 5 * scores) / t),
        ({"parallel__tp": 4, "parallel__sp": True, "training__recompute": {"modules": ["core_attn"]}},
         lambda sbh, scores, t: sbh * 34 / t),
        ({"training__recompute": "full"}, lambda sbh, scores, t: 2 * sbh),
    ],
)  # fmt: skip
def test_activations_of_a_gpt_layer(changes, formula):
    scenario, graph = lowered(**{**GPT, **changes})
    batch, length = scenario.training.micro_batch_size, scenario.training.seq_len
    sbh = length * batch * scenario.model.hidden_size
    scores = scenario.model.heads * length * length * batch
    expected = formula(sbh, scores, scenario.parallel.tp)
    assert [saved_bytes(graph, layer) for layer in range(scenario.model.layers)] == [
        expected
    ] * scenario.model.layers


def moved_bytes(graph: OpGraph, name: str) -> set[tuple[int, int]]:
    """Bytes that operations of a name read and write, in all layers and microbatches."""
    operations = graph.operations
    rows = [row for row in range(len(operations)) if graph.strings[operations.name[row]] == name]
    return {(int(operations.bytes_read[row]), int(operations.bytes_written[row])) for row in rows}


def test_unfused_attention_reads_below_the_diagonal_and_brings_heads_together():
    """Megatron-LM's CoreAttention: a softmax that loads what a causal mask leaves; the context copied to the layout of
    the projection; gradients of q and k scaled (``baddbmm``'s alpha), and joined with that of v."""
    _, graph = lowered(**GPT)
    hidden, scores = 2 * 2 * 128 * 256, 2 * 2 * 16 * 128 * 128
    assert moved_bytes(graph, "scale_mask_softmax") == {(scores // 2, scores)}
    assert moved_bytes(graph, "scale_mask_softmax_backward") == {(scores, scores)}
    assert moved_bytes(graph, "attention_context_copy") == {(hidden, hidden)}
    assert moved_bytes(graph, "qkv_gradient_join") == {(5 * hidden, 5 * hidden)}
    _, all_read = lowered(**{**GPT, "model__causal": False})
    assert moved_bytes(all_read, "scale_mask_softmax") == {(scores, scores)}


@pytest.mark.parametrize("separate", [False, True])
def test_biases_of_megatrons_own_linears_have_kernels(separate):
    """``output + bias`` behind the QKV product, ``grad_output.sum(dim=0)`` for it and the sum that autograd makes for
    FC1's; those of the other two linears are summed either way."""
    biases = {"model__qkv_bias": True, "model__mlp_bias": True, "model__attention_output_bias": True}
    _, graph = lowered(**{**GPT, **biases, "libraries": {"separate_biases": separate}})
    hidden = 2 * 2 * 128 * 256
    assert moved_bytes(graph, "qkv_bias") == ({(3 * hidden, 3 * hidden)} if separate else set())
    for name, columns in (("qkv", 3), ("fc1", 4)):
        read = {size for size, _ in moved_bytes(graph, f"{name}_bias_gradient")}
        assert read == ({columns * hidden} if separate else set())
    for name in ("fc2", "proj"):
        assert {size for size, _ in moved_bytes(graph, f"{name}_bias_gradient")} == {hidden}


def test_gelu_left_apart_is_ten_operations_three_of_which_read_two_tensors():
    _, fused = lowered(**GPT)
    _, apart = lowered(**{**GPT, "libraries": {"gelu_fusion": False}})
    wide = 2 * 2 * 128 * 1024
    assert moved_bytes(fused, "gelu") == {(wide, wide)}
    assert moved_bytes(apart, "gelu") == {(13 * wide, 10 * wide)}
    assert moved_bytes(apart, "gelu_backward") == moved_bytes(fused, "gelu_backward")


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (4, False), (4, True)])
def test_activations_of_a_llama_layer(tp, sequence_parallel, qk_norm):
    """SwiGLU, grouped queries and fused attention: the inputs of both norms, of QKV and FC1, q k v, the attention
    output with its log-sum-exp (fp32, one a row and head), FC1's output and FC2's input; no masks."""
    scenario, graph = lowered(parallel__tp=tp, parallel__sp=sequence_parallel, model__qk_norm=qk_norm)
    model = scenario.model
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    query, key_value = model.heads * model.head_size, model.kv_heads * model.head_size
    whole = 2 * tokens * 4 * model.hidden_size // (tp if sequence_parallel else 1)
    cut = 2 * tokens * (query + 2 * key_value + query + 3 * model.ffn_size) + 4 * tokens * model.heads
    cut += 2 * tokens * (query + key_value) if qk_norm else 0
    expected = (whole + cut // tp) * scenario.training.num_microbatches
    assert [saved_bytes(graph, layer) for layer in range(model.layers)] == [expected] * model.layers


# -- split backward ----------------------------------------------------------------------------------------------


def test_a_split_backward_is_the_whole_one_in_two_parts(tmp_path):
    rows = "0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n"
    (tmp_path / "split.csv").write_text(rows)
    changes = {"parallel__pp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2}
    _, whole = lowered(**changes)
    _, split = lowered(**changes, schedule=str(tmp_path / "split.csv"))
    assert_nothing_leaks(split)
    assert split.operations.flops.sum() == pytest.approx(whole.operations.flops.sum(), rel=1e-12)
    for phase in (Phase.GRADIENT_SYNC, Phase.PARAM_SYNC):
        for rank in range(2):
            expected = data_parallel_bytes(whole, rank, phase)
            assert data_parallel_bytes(split, rank, phase) == expected > 0
    names = [Counter(graph.strings[name] for name in graph.operations.name) for graph in (whole, split)]
    assert {name: n for name, n in names[0].items() if n != names[1][name]} == {}
