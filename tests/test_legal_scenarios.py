"""What holds for every scenario: it runs or says why not, its work is the model's, its bytes meet, its memory falls."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Stream
from tests.legal_scenarios import changed, legal_scenarios, mappings, without_padding
from tests.test_lowering import assert_nothing_leaks, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
PROBLEM = re.compile(r"^(parallel|training|schedule|overlap|libraries|model|hardware)[\w.]*: ")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(mappings())
def test_every_scenario_runs_or_names_the_field_that_forbids_it(mapping: dict[str, Any]) -> None:
    try:
        scenario = load_scenario(mapping)
    except ScenarioError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        assert lines
        assert all(PROBLEM.match(line) for line in lines), lines
        return
    simulation = simulate(scenario)
    assert simulation.report["iteration_time_ms"] > 0
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


@few
@given(legal_scenarios())
def test_what_is_allocated_is_released_and_nothing_is_lost(mapping: dict[str, Any]) -> None:
    simulation = simulate(load_scenario(mapping))
    assert_nothing_leaks(simulation.graph)
    for curve in simulation.memory:
        assert (curve.by_category >= 0).all()


def whole(mapping: dict[str, Any]) -> Scenario:
    """The same step on one GPU: all microbatches of all data-parallel ranks."""
    training = {
        **mapping["training"],
        "num_microbatches": mapping["training"]["num_microbatches"] * mapping["parallel"].get("dp", 1),
        "offload": None,
    }
    return load_scenario({**mapping, "parallel": {}, "training": training, "schedule": "1f1b"})


@few
@given(legal_scenarios())
def test_the_work_of_all_ranks_is_that_of_the_model(mapping: dict[str, Any]) -> None:
    mapping = without_padding(mapping)
    mapping["training"] |= {"optimizer": "adam", "offload": None}
    # Groups of recomputed layers would be others: all layers, or none.
    if mapping["training"].get("recompute") == {"method": "block", "layers": 1}:
        mapping["training"]["recompute"] = "full"
    scenario, alone = load_scenario(mapping), whole(mapping)
    assert scenario.tokens == alone.tokens
    assert step_flops(lower_scenario(scenario), scenario) == pytest.approx(
        step_flops(lower_scenario(alone), alone), rel=1e-9
    )


def check_ends_meet(graph: OpGraph, members: list[int]) -> None:
    """The members of one rendezvous move the same bytes in one group, a send beside a receive."""
    operations = graph.operations
    assert len(set(operations.communication_bytes[members].tolist())) == 1
    kinds = sorted(int(operations.communication[row]) for row in members)
    if operations.kind[members[0]] == OpKind.P2P:
        pair = [Communication.SEND, Communication.RECEIVE]
        assert kinds in (pair, [Communication.SEND_RECEIVE] * 2)
    else:
        assert len(set(kinds)) == 1
    assert len({int(operations.rank[row]) for row in members}) == len(members)


@few
@given(legal_scenarios())
def test_what_one_rank_sends_another_receives(mapping: dict[str, Any]) -> None:
    graph = lower_scenario(load_scenario(mapping))
    operations = graph.operations
    meetings: dict[int, list[int]] = {}
    for row in np.flatnonzero(operations.rendezvous >= 0).tolist():
        meetings.setdefault(int(operations.rendezvous[row]), []).append(row)
    for members in meetings.values():
        check_ends_meet(graph, members)
    sent = operations.communication_bytes[operations.communication == Communication.SEND].sum()
    received = operations.communication_bytes[operations.communication == Communication.RECEIVE].sum()
    assert sent == received
    for row in np.flatnonzero(graph.is_communication()).tolist():
        group = graph.groups[int(operations.group[row])]
        assert len(group.ranks) > 1, "nobody talks to itself"
        assert int(graph.ranks[operations.rank[row]]) in group.ranks


def held(scenario: Scenario) -> np.ndarray:
    """Bytes of the fullest rank by category: the most over the step for activations, the start for what persists."""
    curves = simulate(scenario).memory
    start = np.max([curve.by_category[:, 0] for curve in curves], axis=0)
    start[MemoryCategory.ACTIVATIONS] = max(
        int(curve.by_category[MemoryCategory.ACTIVATIONS].max()) for curve in curves
    )
    return start


PERSISTENT = [MemoryCategory.WEIGHTS, MemoryCategory.OPTIMIZER_STATES]
ROUNDING = 1 << 14
"""Bytes by which a norm or a row of statistics that every rank holds may hide what falls."""


def assert_falls(
    mapping: dict[str, Any], key: str, values: list[Any], categories: list[MemoryCategory]
) -> None:
    """Memory of the categories never rises from one legal value to the next."""
    before: np.ndarray | None = None
    for value in values:
        scenario = changed(mapping, **{key: value})
        if scenario is None:
            continue
        now = held(scenario)[categories]
        if before is not None:
            assert (now <= before + ROUNDING).all(), (key, value, before, now)
        before = now


@settings(few, max_examples=6)
@given(legal_scenarios())
def test_memory_falls_with_every_degree_that_cuts_it(mapping: dict[str, Any]) -> None:
    mapping = without_padding(mapping)
    mapping["overlap"]["contention"] = False
    activations = [MemoryCategory.ACTIVATIONS]
    mapping["parallel"]["sp"] = True
    assert_falls(mapping, "parallel__tp", [1, 2, 4], [*PERSISTENT, *activations])
    assert_falls(mapping, "parallel__cp", [1, 2, 4], activations)
    assert_falls(mapping, "parallel__ep", [1, 2, 4], PERSISTENT)
    assert_falls(mapping, "parallel__zero", [0, 1], [*PERSISTENT, MemoryCategory.GRADIENTS])
    assert_falls(mapping, "parallel__zero", [1, 2], [*PERSISTENT, MemoryCategory.GRADIENTS])
    assert_falls(mapping, "training__recompute", ["none", {"modules": ["core_attn"]}], activations)
    assert_falls(mapping, "training__recompute", ["none", "full"], activations)
    assert_falls(mapping, "training__offload", [None, {"layers": 2, "minimum_bytes": 0}], activations)


@few
@given(legal_scenarios())
def test_a_degree_of_one_is_the_same_as_none(mapping: dict[str, Any]) -> None:
    """Nothing travels along it, and how it would travel changes nothing."""
    for degree, how, stream in (
        ("cp", [{"cp_comm": "p2p"}, {"cp_comm": "allgather"}], Stream.CP),
        (
            "ep",
            [{"ep_dispatcher": "alltoall"}, {"ep_dispatcher": "deepep"}, {"ep_dispatcher": "hybridep"}],
            Stream.EP,
        ),
        ("tp", [{"sp": False}, {"sp": True}], Stream.TP),
    ):
        changes = {f"parallel__{degree}": 1, **({"parallel__etp": 1} if degree == "ep" else {})}
        scenarios = [
            changed(mapping, **changes, **{f"parallel__{key}": value for key, value in one.items()})
            for one in how
        ]
        graphs = [lower_scenario(scenario) for scenario in scenarios if scenario is not None]
        for graph in graphs:
            assert not (graph.operations.stream == stream).any()
            first, this = vars(graphs[0].operations), vars(graph.operations)
            assert all(np.array_equal(first[column], this[column]) for column in first if column != "group")


@pytest.mark.parametrize("pp", [1, 2, 3, 6])
@pytest.mark.parametrize("dense", [1, 3])
def test_dense_first_layers_survive_stages_smaller_than_they_are(pp: int, dense: int) -> None:
    """However the six layers are cut, as many have an MLP and experts as the model says, and no layer is lost."""
    model = {
        "name": "m",
        "layers": 6,
        "hidden_size": 64,
        "ffn_size": 128,
        "heads": 4,
        "vocab_size": 128,
        "moe": {"experts": 4, "top_k": 2, "expert_ffn_size": 32, "first_dense_layers": dense},
    }
    training = {"seq_len": 32, "num_microbatches": 2}
    scenario = load_scenario(
        {"model": model, "hardware": "h100-sxm", "parallel": {"pp": pp}, "training": training}
    )
    graph = lower_scenario(scenario)
    names = np.array(graph.strings)[graph.operations.name]
    layers = {
        what: set(graph.operations.layer[names == what].tolist()) for what in ("fc1", "expert_fc1", "qkv")
    }
    assert layers == {"fc1": set(range(dense)), "expert_fc1": set(range(dense, 6)), "qkv": set(range(6))}


@pytest.mark.parametrize(("tp", "link"), [(1, "domain"), (8, "fabric")])
def test_a_hop_between_nodes_takes_the_time_of_the_fabric(tp: int, link: str) -> None:
    """Two stages of eight ranks lie on two nodes of eight GPUs; two stages of one rank on one."""
    model = {"name": "m", "layers": 2, "hidden_size": 1024, "ffn_size": 1024, "heads": 8, "vocab_size": 1024}
    scenario = load_scenario(
        {
            "model": model,
            "hardware": "toy",
            "parallel": {"pp": 2, "tp": tp},
            "training": {"seq_len": 1024, "num_microbatches": 2},
        }
    )
    simulation = simulate(scenario)
    sends = np.flatnonzero(simulation.graph.operations.communication == Communication.SEND)
    rate = getattr(scenario.hardware.network, link).bandwidth_gb_per_s
    message = 2 * 1024 * 1024
    for row in sends.tolist():
        assert simulation.graph.operations.communication_bytes[row] == message
        duration = simulation.execution.end[row] - simulation.execution.start[row]
        assert duration == pytest.approx(message / rate, rel=1e-3)
