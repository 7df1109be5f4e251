"""What a checkpoint costs beside what runs again: the host's work, and copies into storage that was freed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.recompute import KEEP_RULES, MODULE_RULES
from op_graphs.vocabulary import OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.graphs import graph_of
from tests.test_recompute_rules import EVERYTHING, again, lowered
from tracesim.host import HostTimes, execute_with_host
from tracesim.scenario import load_scenario
from tracesim.simulation import iteration_ms

LAYERS, TOKENS, HIDDEN = 2, 256, 256
"""Of a dense layer and one with experts (``EVERYTHING``), in one microbatch."""


def named(graph: OpGraph, name: str) -> np.ndarray:
    names = np.array([graph.strings[index] for index in graph.operations.name.tolist()])
    return np.flatnonzero(names == name)


def restored_bytes(graph: OpGraph) -> int:
    names = [graph.strings[index] for index in graph.operations.name.tolist()]
    rows = [row for row, name in enumerate(names) if name.endswith("_restored")]
    assert (graph.operations.bytes_read[rows] == graph.operations.bytes_written[rows]).all()
    assert (graph.operations.phase[rows] == Phase.RECOMPUTE).all()
    return int(graph.operations.bytes_written[rows].sum())


EXPERTS_AT_ONCE = 2
"""Experts that a token goes to."""

MODULES = {
    # checkpoints of the two layers, and bytes of outputs that were freed
    "core_attn": (2, 0),
    "layernorm": (4, 4 * TOKENS * HIDDEN * 2),
    "mlp": (1, 0),
    "moe": (1, 0),
    "shared_experts": (1, 0),
    # 8 heads of 24 for queries and keys and 16 for values
    "mla_up_proj": (2, 2 * TOKENS * 8 * (24 + 24 + 16) * 2),
    "moe_act": (1, EXPERTS_AT_ONCE * TOKENS * 64 * 2),
}


@pytest.mark.parametrize("name", list(MODULE_RULES))
def test_the_host_works_twice_for_each_checkpoint_and_freed_outputs_are_copied_back(name: str) -> None:
    checkpoints, copied = MODULES[name]
    graph = lowered({"modules": [name]}, **EVERYTHING)
    entered, repeated = named(graph, "checkpoint"), named(graph, "checkpoint_again")
    assert len(entered) == len(repeated) == checkpoints
    operations = graph.operations
    assert (operations.phase[entered] == Phase.FORWARD).all()
    assert (operations.phase[repeated] == Phase.RECOMPUTE).all()
    for rows in (entered, repeated):
        assert (operations.kind[rows] == OpKind.HOST).all()
        assert (operations.stream[rows] == Stream.HOST).all()
        waiting = np.repeat(np.arange(len(operations)), np.diff(graph.dependency_offsets))
        behind = operations.phase[waiting[np.isin(graph.dependencies, rows)]]
        assert (behind == Phase.OPTIMIZER).all(), "no kernel of a pass waits for the host's own work"
    assert restored_bytes(graph) == copied


@pytest.mark.parametrize(("recompute", "checkpoints"), [("full", 4), ({"layers": 2, "method": "uniform"}, 2)])
def test_groups_of_layers_are_checkpoints_that_keep_their_outputs(recompute: Any, checkpoints: int) -> None:
    graph = lowered(recompute, training__num_microbatches=1)
    assert len(named(graph, "checkpoint")) == len(named(graph, "checkpoint_again")) == checkpoints
    assert restored_bytes(graph) == 0


@pytest.mark.parametrize("name", list(KEEP_RULES))
def test_policies_by_operators_and_passes_written_by_hand_have_neither(name: str) -> None:
    by_hand = lowered({"modules": ["layernorm", "mlp"]}, libraries__checkpoints=False)
    assert again(by_hand)
    for graph in (lowered({"keep": name}), by_hand):
        assert not len(named(graph, "checkpoint"))
        assert not len(named(graph, "checkpoint_again"))
        assert restored_bytes(graph) == 0


def test_what_is_made_again_and_its_copy_are_both_there_until_the_backward_of_the_part() -> None:
    graph = lowered({"modules": ["mla_up_proj"]}, **EVERYTHING)
    buffers, size = graph.buffers, TOKENS * 8 * (24 + 24 + 16) * 2
    row = int(named(graph, "qkv_restored")[0])
    names = np.array([graph.strings[index] for index in buffers.name.tolist()])
    there = (buffers.allocate <= row) & (buffers.release > row)
    again, copy = (np.flatnonzero(there & (names == name)) for name in ("qkv_made_again", "qkv"))
    assert buffers.size[again].tolist() == buffers.size[copy].tolist() == [size]
    behind = int(named(graph, "rotary_and_layout_backward")[0])
    assert buffers.release[copy[0]] < behind <= buffers.release[again[0]]


def test_a_step_bound_by_its_host_is_longer_by_that_work() -> None:
    """Four layers and two microbatches: of each norm a kernel, a copy and both sides of the checkpoint run besides."""
    plan = {
        "model__layers": 4,
        "training__num_microbatches": 2,
        "hardware": {"base": "h100-sxm", "host": {"operation_us": 1000.0}},
    }
    plain, recomputed = (
        iteration_ms(load_scenario(dense_mapping(training__recompute=recompute, **plan)))
        for recompute in ("none", {"modules": ["layernorm"]})
    )
    assert recomputed - plain == pytest.approx(4 * 2 * 2 * (1 + 0.3 + 1.5 + 0.9), rel=0.01)


def test_work_of_the_host_alone_delays_what_is_launched_behind_it_and_waits_for_nothing() -> None:
    rows: list[dict[str, Any]] = [{"stream": Stream.COMPUTE, "kind": OpKind.NORM} for _ in range(5)]
    rows[2] = {"stream": Stream.HOST, "kind": OpKind.HOST}
    run = execute_with_host(graph_of(rows, [(0, 5, 0)]), np.array([50, 5, 0, 5, 5]), host=HostTimes(20))
    # Modules are launched at 0, 20, 70 and 90, whatever still runs: a checkpoint takes half as much again as one.
    assert run.start[[0, 1, 3, 4]].tolist() == [0, 50, 70, 90]
