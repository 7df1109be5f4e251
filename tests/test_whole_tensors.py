"""ZeRO 1 by whole tensors: who owns what, and what is reduced, updated and sent in a step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.graph import OpGraph
from op_graphs.parameters import ParameterTensor, elements_of
from op_graphs.vocabulary import Communication, MemoryCategory
from op_graphs.whole_tensors import tensors_by_rank
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks, lowered
from tracesim.errors import ScenarioError
from tracesim.memory.curves import memory_curve
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

WHOLE: dict[str, Any] = {"parallel__whole_tensors": True, "overlap__param_gather": False}


def tensor(name: str, elements: int) -> ParameterTensor:
    return ParameterTensor(name, (elements,), "weight")


def rows_of(graph: OpGraph, name: str) -> list[int]:
    """Rows of the first represented rank."""
    operations = graph.operations
    return [
        row
        for row in range(len(operations))
        if graph.strings[operations.name[row]] == name and operations.rank[row] == operations.rank[0]
    ]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_every_tensor_has_one_owner_and_no_rank_is_over_by_more_than_a_tensor(sizes, ranks):
    tensors = [tensor(str(place), size) for place, size in enumerate(sizes)]
    owners = tensors_by_rank(tensors, ranks)
    assert sorted(own.name for owned in owners for own in owned) == sorted(one.name for one in tensors)
    loads = [elements_of(owned) for owned in owners]
    assert loads == sorted(loads, reverse=True)
    assert len(owners) == min(ranks, len(tensors))
    assert loads[0] <= sum(sizes) / ranks + max(sizes)


def test_the_largest_go_first_to_the_emptiest():
    owners = tensors_by_rank(
        [tensor(name, size) for name, size in zip("abcde", (3, 9, 5, 4, 1), strict=True)], 2
    )
    assert [[own.name for own in owned] for owned in owners] == [["b", "a"], ["c", "d", "e"]]


@pytest.mark.parametrize(("dp", "shard"), [(4, None), (8, 4), (8, 2)])
def test_gradients_are_reduced_whole_and_each_owner_sends_its_own(dp, shard):
    changes = {"parallel__dp": dp, "parallel__hsdp_shard": shard}
    _, slices = lowered(**changes, overlap__param_gather=False)
    _, graph = lowered(**changes, **WHOLE)
    operations = graph.operations
    kinds = {Communication(int(kind)) for kind in operations.communication}
    assert Communication.REDUCE_SCATTER not in kinds
    assert Communication.ALL_GATHER not in kinds
    reduced = rows_of(graph, "gradient_all_reduce")
    assert {len(graph.groups[operations.group[row]].ranks) for row in reduced} == {dp}
    sent = rows_of(graph, "parameter_broadcast")
    assert len(sent) == (shard or dp)
    assert {len(graph.groups[operations.group[row]].ranks) for row in sent} == {shard or dp}
    gathered = rows_of(slices, "parameter_all_gather")
    total = slices.operations.communication_bytes[gathered].sum()
    assert operations.communication_bytes[sent].sum() == total
    scattered = slices.operations.communication_bytes[rows_of(slices, "gradient_reduce_scatter")].sum()
    assert operations.communication_bytes[reduced].sum() == scattered
    assert_nothing_leaks(graph)


def test_the_fullest_rank_is_updated_and_keeps_the_states():
    """Embedding and head are larger than all else: over many ranks one of them is the part of a rank."""
    scenario, graph = lowered(parallel__dp=64, model__vocab_size=65536, **WHOLE)
    largest = scenario.model.padded_vocab(1) * scenario.model.hidden_size
    adam = rows_of(graph, "adam")
    moved = graph.operations.bytes_read[adam] + graph.operations.bytes_written[adam]
    assert moved.tolist() == [28.0 * largest]
    curve = memory_curve(graph, simulate(scenario).execution, 0)
    assert curve.by_category[MemoryCategory.OPTIMIZER_STATES].max() == 12 * largest


def test_without_replicas_nothing_is_sent():
    _, graph = lowered(parallel__dp=1, **WHOLE)
    assert not rows_of(graph, "parameter_broadcast")
    assert not rows_of(graph, "gradient_all_reduce")


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_other_stages_are_refused(zero):
    with pytest.raises(
        ScenarioError, match=r"parallel\.whole_tensors: .*zero is \d; leave it out, or set zero: 1"
    ):
        load_scenario(dense_mapping(parallel={"whole_tensors": True, "zero": zero, "dp": 2}))


def test_gathers_in_the_forward_pass_are_refused():
    with pytest.raises(
        ScenarioError, match=r"overlap\.param_gather: .*are broadcast behind the step; set it to false"
    ):
        load_scenario(dense_mapping(parallel={"whole_tensors": True, "dp": 2}))


@pytest.mark.parametrize(
    "training", [{"optimizer": "muon"}, {"optimizer": "sgd"}, {"offload": {"optimizer": 0.5}}]
)
def test_it_goes_with_optimizers_and_states_on_the_host(training):
    _, graph = lowered(
        parallel__dp=4, **{f"training__{key}": value for key, value in training.items()}, **WHOLE
    )
    assert rows_of(graph, "parameter_broadcast")
    assert_nothing_leaks(graph)
