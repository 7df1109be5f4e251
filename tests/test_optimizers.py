"""Optimizers: bytes of states, traffic, FLOPs and collectives of a step, from the formulas of their papers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.optimizers import OPTIMIZERS
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping

LAYERS, HIDDEN, FFN, QKV, VOCAB = 4, 256, 512, 512, 1024
MATRICES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""Weights of a layer: fused queries, keys and values; projection; gate with value; second linear."""
IN_LAYERS = LAYERS * sum(rows * columns for rows, columns in MATRICES)
NORMS = (2 * LAYERS + 1) * HIDDEN
VOCABULARY = 2 * VOCAB * HIDDEN
PARAMETERS = IN_LAYERS + NORMS + VOCABULARY
EACH = tuple(OPTIMIZERS)


def lowered(optimizer: str, **changes: Any) -> OpGraph:
    mapping = dense_mapping(training__optimizer=optimizer, **changes)
    return lower_scenario(load_scenario(mapping))


def step_rows(graph: OpGraph) -> dict[str, dict[str, float]]:
    """Totals of the operations of a step by name, on the first rank."""
    operations = graph.operations
    found: dict[str, Counter[str]] = {}
    for row in np.flatnonzero((operations.phase == Phase.OPTIMIZER) & (operations.rank == 0)):
        totals = found.setdefault(graph.strings[operations.name[row]], Counter())
        for column in ("flops", "bytes_read", "bytes_written", "communication_bytes"):
            totals[column] += getattr(operations, column)[row]
    return {name: dict(totals) for name, totals in found.items()}


def held(graph: OpGraph, category: MemoryCategory, name: str = "") -> int:
    """Bytes a rank holds all through the step, of the first rank."""
    buffers = graph.buffers
    chosen = (buffers.allocate < 0) & (buffers.category == category) & (buffers.rank == 0)
    names = np.array([graph.strings[i].startswith(name) for i in buffers.name])
    return int(buffers.size[chosen & names].sum())


def states(graph: OpGraph) -> int:
    return held(graph, MemoryCategory.OPTIMIZER_STATES)


# -- memory ------------------------------------------------------------------------------------------------------


def factored(parts: int) -> int:
    """fp32 figures of Adafactor: rows of this rank and all columns of a matrix, whole vectors."""
    matrices = [*MATRICES * LAYERS, (VOCAB, HIDDEN), (VOCAB, HIDDEN)]
    return sum(rows // parts + columns for rows, columns in matrices) + NORMS // parts


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("adam", lambda parts: 8 * PARAMETERS / parts),
        ("sgd", lambda parts: 4 * PARAMETERS / parts),
        ("adafactor", lambda parts: 4 * factored(parts)),
        ("muon", lambda parts: (4 * IN_LAYERS + 8 * (NORMS + VOCABULARY)) / parts),
        ("adam8bit", lambda parts: (2 * (1 + 4 / 256) * (IN_LAYERS + VOCABULARY) + 8 * NORMS) / parts),
    ],
)
def test_states_of_a_parameter_lie_beside_its_master_weight(optimizer, expected, parts):
    graph = lowered(optimizer, parallel__dp=parts)
    assert states(graph) == round(expected(parts) + 4 * PARAMETERS / parts)


@pytest.mark.parametrize("optimizer", EACH)
def test_fp32_training_has_no_master_weights(optimizer):
    half, whole = lowered(optimizer), lowered(optimizer, training__dtype="fp32")
    assert states(half) - states(whole) == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("dtypes", "per_parameter"),
    [
        ({}, 12),
        ({"moments": "bf16"}, 8),
        ({"moments": "fp8"}, 6),
        ({"master": "fp16"}, 10),
        ({"master": "bf16", "moments": "fp16"}, 6),
    ],
)
def test_a_precision_aware_optimizer_keeps_what_it_is_told(dtypes, per_parameter):
    graph = lowered("adam", training__optimizer_dtypes=dtypes)
    assert states(graph) == per_parameter * PARAMETERS
    rows = step_rows(graph)
    # A master of two bytes and the bf16 weight are two halves of one fp32 figure, updated together.
    assert ("master_to_model_weights" in rows) == ("master" not in dtypes)
    moments = {"bf16": 2, "fp16": 2, "fp8": 1}.get(dtypes.get("moments", ""), 4)
    assert rows["adam"]["bytes_written"] == (4 + 2 * moments) * PARAMETERS


@pytest.mark.parametrize(("dtype", "reduced"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "fp32")])
def test_gradients_of_two_bytes_are_copied_to_fp32_inside_the_step(dtype, reduced):
    """Megatron-LM with fp16 holds 2 + 2 + 12 bytes a parameter in forward and 20 at the end of a step."""
    graph = lowered("adam", training__dtype=dtype, training__grad_reduce_dtype=reduced, parallel__zero=0)
    gradient = 4 if reduced == "fp32" else 2
    assert held(graph, MemoryCategory.GRADIENTS, "main_gradients") == gradient * PARAMETERS
    copies = [i for i, name in enumerate(graph.buffers.name) if graph.strings[name] == "fp32_gradients"]
    assert [int(graph.buffers.size[i]) for i in copies] == ([4 * PARAMETERS] if gradient == 2 else [])
    rows = step_rows(graph)
    assert rows["gradient_norm"]["bytes_read"] == 4 * PARAMETERS
    assert rows["adam"]["bytes_read"] == (4 + 12) * PARAMETERS


def test_a_precision_aware_optimizer_reads_gradients_as_they_are():
    dtypes = {"moments": "bf16"}
    graph = lowered("adam", training__grad_reduce_dtype="bf16", training__optimizer_dtypes=dtypes)
    rows = step_rows(graph)
    assert "gradient_copy_to_fp32" not in rows
    assert rows["adam"]["bytes_read"] == (2 + 4 + 4) * PARAMETERS


# -- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("optimizer", "moved"), [("adam", 12), ("sgd", 8)])
def test_a_fused_update_reads_and_writes_each_state_once(optimizer, moved, parts):
    rows = step_rows(lowered(optimizer, parallel__dp=parts))
    assert rows[optimizer]["bytes_written"] == moved * PARAMETERS / parts
    assert rows[optimizer]["bytes_read"] == (moved + 4) * PARAMETERS / parts


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Five iterations of X X', A A and B X for the shorter side first."""
    m, n = sorted((rows, columns))
    return 5.0 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (2, 2), (1, 8)])
def test_newton_schulz_runs_on_whole_matrices_dealt_over_data_parallel_ranks(tp, dp):
    """Four matrices of each shape; over eight ranks some get one and some none, and one that has is simulated."""
    rows = step_rows(lowered("muon", parallel__tp=tp, parallel__dp=dp))
    flops = sum(totals["flops"] for name, totals in rows.items() if name.startswith("newton_schulz"))
    # Shapes equal but for the order of rows and columns are dealt together.
    shapes = Counter(tuple(sorted(shape)) for shape in MATRICES * LAYERS)
    assert flops == sum(-(-count // dp) * newton_schulz_flops(*shape) for shape, count in shapes.items())


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_muon_gathers_its_momentum_in_bf16(tp, dp):
    graph = lowered("muon", parallel__tp=tp, parallel__dp=dp)
    rows = step_rows(graph)
    over_dp = rows.get("muon_momentum_all_gather", {}).get("communication_bytes", 0)
    over_tp = rows.get("muon_cut_all_gather", {}).get("communication_bytes", 0)
    assert over_dp == (2 * IN_LAYERS / tp if dp > 1 else 0)
    assert over_tp == (2 * IN_LAYERS / dp if tp > 1 else 0)
    names = {"muon_momentum_all_gather", "muon_cut_all_gather"}
    kinds = {
        graph.operations.communication[row]
        for row, name in enumerate(graph.operations.name)
        if graph.strings[name] in names
    }
    assert kinds <= {Communication.ALL_GATHER}
    assert rows["muon_adam"]["bytes_written"] == pytest.approx(12 * (NORMS + VOCABULARY / tp) / dp)


def test_adafactor_sums_column_means_over_the_ranks_that_share_rows():
    alone, shared = (step_rows(lowered("adafactor", parallel__dp=parts)) for parts in (1, 2))
    assert "adafactor_column_all_reduce" not in alone
    columns = LAYERS * sum(columns for _, columns in MATRICES) + 2 * HIDDEN
    assert shared["adafactor_column_all_reduce"]["communication_bytes"] == 4 * columns
    assert alone["adafactor_apply"]["bytes_written"] == 4 * PARAMETERS


def test_experts_are_updated_over_their_own_data_parallel_ranks():
    moe = {"experts": 4, "top_k": 2, "expert_ffn_size": 128}
    graph = lowered("muon", model__moe=moe, parallel__dp=4, parallel__ep=2)
    experts = LAYERS * 2 * 3 * HIDDEN * 128
    found = [
        graph.operations.communication_bytes[row]
        for row, name in enumerate(graph.operations.name)
        if graph.strings[name] == "muon_momentum_all_gather"
    ]
    dense = LAYERS * (QKV * HIDDEN + HIDDEN * HIDDEN + 4 * HIDDEN)
    assert found == [2 * dense, 2 * experts]


@pytest.mark.parametrize("optimizer", EACH)
def test_a_step_releases_what_it_allocates_and_only_newton_schulz_multiplies(optimizer):
    graph = lowered(optimizer, parallel__dp=2, parallel__tp=2, parallel__zero=1)
    assert (graph.buffers.release[graph.buffers.allocate >= 0] >= 0).all()
    operations = graph.operations
    multiplies = (operations.phase == Phase.OPTIMIZER) & (operations.kind == OpKind.GEMM)
    assert multiplies.any() == (optimizer == "muon")


# -- scenarios ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", EACH)
def test_a_scenario_written_out_loads_equal(optimizer):
    scenario = load_scenario(dense_mapping(training__optimizer=optimizer))
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__optimizer": "adamw"},
            "must be one of adam, sgd, adafactor, muon, adam8bit; did you mean adam?",
        ),
        ({"training__optimizer_dtypes": "bf16"}, "must be a mapping such as {moments: bf16}"),
        ({"training__optimizer_dtypes": {"moment": "bf16"}}, "did you mean moments?"),
        ({"training__optimizer_dtypes": {"moments": "fp4"}}, "is not a type for it"),
        (
            {"training__optimizer": "adam8bit", "training__optimizer_dtypes": {"moments": "bf16"}},
            "does not apply to adam8bit, whose states have a type of their own",
        ),
        (
            {"training__dtype": "fp32", "training__optimizer_dtypes": {"master": "bf16"}},
            "does not apply to dtype fp32, which has no master weights",
        ),
        (
            {"parallel__zero": 3, "training__optimizer_dtypes": {"master": "fp16"}},
            "does not apply to zero: 3, whose sharded weights are fp32",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(changes, said):
    with pytest.raises(ScenarioError) as found:
        load_scenario(dense_mapping(**changes))
    assert said in str(found.value)
