"""``libraries.separate_projections``: queries, keys, values and the halves of a gated MLP as linears of their own."""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.graph import GemmShape, OpGraph
from op_graphs.vocabulary import OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks, step_flops
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

SIZES: dict[str, Any] = {
    "model__hidden_size": 512,
    "model__heads": 8,
    "model__kv_heads": 2,
    "model__head_size": 64,
    "model__ffn_size": 1024,
    "training__micro_batch_size": 2,
}
HIDDEN, QUERIES, KEYS, FFN = 512, 512, 128, 1024


def lowered(**changes: Any) -> tuple[Scenario, OpGraph]:
    scenario = load_scenario(dense_mapping(**{**SIZES, **changes}))
    return scenario, lower_scenario(scenario)


def shapes(graph: OpGraph, name: str) -> set[tuple[int, int, int]]:
    rows = graph.operations.name == graph.strings.index(name)
    found = {graph.shapes[shape] for shape in graph.operations.shape[rows].tolist()}
    return {(shape.m, shape.n, shape.k) for shape in found if isinstance(shape, GemmShape)}


@pytest.mark.parametrize(
    ("linear", "parts"),
    [("qkv", {"queries": QUERIES, "keys": KEYS, "values": KEYS}), ("fc1", {"gate": FFN, "up": FFN})],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_each_product_has_its_own_shapes(linear: str, parts: dict[str, int], tp: int) -> None:
    scenario, graph = lowered(libraries__separate_projections=True, parallel__tp=tp, parallel__sp=tp > 1)
    tokens = scenario.training.micro_batch_size * scenario.training.seq_len
    for part, width in parts.items():
        assert shapes(graph, f"{linear}_{part}") == {(tokens, width // tp, HIDDEN)}
        assert shapes(graph, f"{linear}_{part}_dgrad") == {(tokens, HIDDEN, width // tp)}
        assert shapes(graph, f"{linear}_{part}_wgrad") == {(width // tp, HIDDEN, tokens)}


@pytest.mark.parametrize(("eager", "kernels"), [(False, 1), (True, 2)])
def test_gradients_of_the_input_are_added_up(eager: bool, kernels: int) -> None:
    """Compiled, three are read and their sum is written; eagerly two kernels read two and write one."""
    scenario, graph = lowered(
        libraries__separate_projections=True, libraries__eager=eager, libraries__transformer_engine=False
    )
    size = 2 * scenario.training.micro_batch_size * scenario.training.seq_len * HIDDEN
    rows = graph.operations.name == graph.strings.index("qkv_gradient_sum")
    assert rows.sum() == scenario.model.layers * scenario.training.num_microbatches
    assert set(graph.operations.bytes_read[rows].tolist()) == {(3 if kernels == 1 else 4) * size}
    assert set(graph.operations.bytes_written[rows].tolist()) == {kernels * size}
    assert "input_gradient_sum" not in graph.strings


@pytest.mark.parametrize("policy", ["in-place", "gathered-once", "userbuffers", "async-tp"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8-tensorwise", "fp8-rowwise"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_work_is_the_same(policy: str, dtype: str, schedule: str) -> None:
    changes: dict[str, Any] = {
        "parallel": {"tp": 2, "sp": True, "pp": 2},
        "overlap__tp": policy,
        "training__dtype": dtype,
        "hardware": "h100-sxm",
        "schedule": schedule,
    }
    scenario, fused = lowered(**changes)
    _, separate = lowered(**changes, libraries__separate_projections=True)
    assert_nothing_leaks(separate)
    assert step_flops(separate, scenario) == pytest.approx(step_flops(fused, scenario), rel=1e-12)


def test_what_is_not_fused_takes_longer() -> None:
    def time(separate: bool) -> float:
        mapping = dense_mapping(**SIZES, libraries__separate_projections=separate)
        return float(simulate(load_scenario(mapping)).report["iteration_time_ms"])

    assert time(True) > time(False)


@pytest.mark.parametrize(
    ("separate", "in_pieces"),
    [(False, {"proj", "fc2", "qkv_gradient", "fc1_gradient"}), (True, {"proj", "fc2"})],
)
def test_a_sum_is_reduced_whole_under_asynchronous_tensor_parallelism(
    separate: bool, in_pieces: set[str]
) -> None:
    """In front of a reduction the compiler looks for a product; a sum of several is none."""
    _, graph = lowered(
        parallel={"tp": 4, "sp": True}, overlap__tp="async-tp", libraries__separate_projections=separate
    )
    names = {graph.strings[name] for name in graph.operations.name[graph.operations.kind == OpKind.P2P]}
    assert {name for name in names if name.endswith("_scatter_copy")} - {"head_gradient_scatter_copy"} == {
        f"{name}_scatter_copy" for name in in_pieces
    }
    whole = {"qkv_gradient_reduce_scatter", "fc1_gradient_reduce_scatter"} & set(graph.strings)
    assert bool(whole) == separate


@pytest.mark.parametrize("policy", ["gathered-once", "async-tp"])
@pytest.mark.parametrize(
    ("eager", "dtype", "joined"),
    [
        (False, "bf16", True),
        (False, "fp8-tensorwise", True),
        (False, "fp8-rowwise", False),
        (True, "bf16", False),
    ],
)
def test_a_compiled_sum_writes_in_the_order_of_ranks(
    policy: str, eager: bool, dtype: str, joined: bool
) -> None:
    """Unless it reads the scales of its products too: no copy between it and the reduce-scatter."""
    _, graph = lowered(
        parallel={"tp": 4, "sp": True},
        overlap__tp=policy,
        training__dtype=dtype,
        hardware="h100-sxm",
        libraries={"separate_projections": True, "eager": eager},
    )
    assert "qkv_gradient_reduce_scatter" in graph.strings
    for name in ("qkv", "fc1"):
        assert (f"{name}_gradient_scatter_order" in graph.strings) == (not joined)


def test_weight_gradients_read_copies_of_what_was_gathered_in_pieces() -> None:
    """Pieces lie one behind the other along the sequence; what they are multiplied with is in the order of tokens."""
    scenario, graph = lowered(parallel={"tp": 4, "sp": True}, overlap__tp="async-tp")
    training, operations = scenario.training, graph.operations
    size = 2 * training.micro_batch_size * training.seq_len * scenario.model.hidden_size
    names = {
        "qkv_input_order",
        "fc1_input_order",
        "proj_gradient_all_gather_order",
        "fc2_gradient_all_gather_order",
    }
    for name in names:
        rows = operations.name == graph.strings.index(name)
        assert rows.sum() == scenario.model.layers * training.num_microbatches
        assert (
            set(operations.bytes_read[rows].tolist())
            == set(operations.bytes_written[rows].tolist())
            == {size}
        )
    assert_nothing_leaks(graph)
    # A single sequence is in the order of tokens as it is.
    single = lowered(parallel={"tp": 4, "sp": True}, overlap__tp="async-tp", training__micro_batch_size=1)[1]
    assert not names & set(single.strings)
    for policy in ("gathered-once", "userbuffers", "in-place"):
        other = lowered(parallel={"tp": 4, "sp": True}, overlap__tp=policy)[1]
        assert "qkv_input_order" not in other.strings


def test_whole_collectives_of_dtensor_copy_what_they_move() -> None:
    """Behind each gather, in front of each reduce-scatter: all bytes, read and written once."""
    _, graph = lowered(parallel={"tp": 4, "sp": True}, overlap__tp="gathered-once")
    operations = graph.operations
    for collective, copy in (("all_gather", "all_gather_order"), ("reduce_scatter", "scatter_order")):
        for name in list(graph.strings):
            if not name.endswith(f"_{collective}") or name.startswith(("parameter", "gradient_")):
                continue
            moved = operations.communication_bytes[operations.name == graph.strings.index(name)]
            order = name.removesuffix(collective) + copy
            rows = operations.name == graph.strings.index(order)
            assert operations.bytes_read[rows].tolist() == moved.tolist(), name
            assert operations.bytes_written[rows].tolist() == moved.tolist()
    in_place = lowered(parallel={"tp": 4, "sp": True}, overlap__tp="in-place")[1]
    assert not [name for name in in_place.strings if name.endswith("_order")]


@pytest.mark.parametrize("eager", [False, True])
def test_a_compiler_copies_nothing_behind_the_gather_of_a_single_sequence(eager: bool) -> None:
    _, graph = lowered(
        parallel={"tp": 4, "sp": True},
        overlap__tp="gathered-once",
        training__micro_batch_size=1,
        libraries={"eager": eager},
    )
    assert ("qkv_all_gather_order" in graph.strings) == eager
    assert "proj_scatter_order" in graph.strings
