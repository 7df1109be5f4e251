"""A vision encoder on a pipeline stage of its own: the work of the colocated one, cut at the image tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.parameters import parameters_on_stage, vision_parameters
from op_graphs.vocabulary import MemoryCategory, OpKind
from tests.dense_scenarios import dense_mapping
from tests.scenario_mappings import problems_of
from tests.test_lower_vision import VISION
from tests.test_lowering import assert_nothing_leaks, step_flops
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

BATCH, LENGTH, HIDDEN, IMAGES = 2, 128, 256, 3
HIDDEN_STATE = 2 * BATCH * LENGTH * HIDDEN
IMAGE_TOKENS = 2 * BATCH * IMAGES * 4 * HIDDEN
"""Four tokens an image, at the width of the language model."""


def build(plan: dict[str, Any], schedule: str = "1f1b", **changes: Any) -> Scenario:
    mapping = dense_mapping(
        model__vision=VISION,
        parallel=plan,
        schedule=schedule,
        training__images_per_sample=IMAGES,
        training__num_microbatches=4,
        **changes,
    )
    return load_scenario(mapping)


PAIRS = [
    ("1f1b", {"pp": 2, "layout": "VEtt|ttL"}, {"pp": 3, "layout": "V|Ett|ttL"}),
    ("1f1b", {"pp": 2}, {"pp": 3, "vision_stage": "own"}),
    ("gpipe", {"pp": 2, "tp": 2, "sp": True}, {"pp": 3, "tp": 2, "sp": True, "vision_stage": "own"}),
    ("zb-h1", {"pp": 2, "dp": 2}, {"pp": 3, "dp": 2, "vision_stage": "own"}),
    ("1f1b", {"pp": 2, "dp": 2, "zero": 3}, {"pp": 3, "dp": 2, "zero": 3, "vision_stage": "own"}),
    ("interleaved-1f1b", {"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2, "layout": "V|Ett|t|tL"}),
    ("dualpipev", {"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2, "layout": "V|Ett|t|tL"}),
]


@pytest.mark.parametrize(("schedule", "colocated", "own"), PAIRS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_does_the_work_of_the_colocated_encoder(
    schedule: str, colocated: dict[str, Any], own: dict[str, Any], recompute: str
) -> None:
    scenarios = [build(plan, schedule, training__recompute=recompute) for plan in (colocated, own)]
    together, apart = (lower_scenario(scenario) for scenario in scenarios)
    assert_nothing_leaks(apart)
    assert step_flops(apart, scenarios[1]) == pytest.approx(step_flops(together, scenarios[0]), rel=1e-12)
    simulate(scenarios[1])


def test_image_tokens_travel_to_the_embedding_and_their_gradient_back() -> None:
    graph = lower_scenario(build({"pp": 3, "vision_stage": "own"}))
    operations = graph.operations
    transfers = np.flatnonzero(operations.kind == OpKind.P2P)
    moved: dict[tuple[str, int], set[int]] = {}
    for row in transfers.tolist():
        key = (graph.strings[operations.name[row]], int(operations.rank[row]))
        moved.setdefault(key, set()).add(int(operations.communication_bytes[row]))
    assert moved == {
        ("send_activation", 0): {IMAGE_TOKENS},
        ("receive_activation", 1): {IMAGE_TOKENS},
        ("send_activation", 1): {HIDDEN_STATE},
        ("receive_activation", 2): {HIDDEN_STATE},
        ("send_gradient", 2): {HIDDEN_STATE},
        ("receive_gradient", 1): {HIDDEN_STATE},
        ("send_gradient", 1): {IMAGE_TOKENS},
        ("receive_gradient", 0): {IMAGE_TOKENS},
    }
    # Both ends of a transfer meet: what one rank sends another receives.
    for meeting in np.unique(operations.rendezvous[transfers]):
        ends = transfers[operations.rendezvous[transfers] == meeting]
        assert len(ends) == 2
        assert len(set(operations.communication_bytes[ends].tolist())) == 1


def test_weights_lie_where_the_work_is() -> None:
    scenario = build({"pp": 3, "vision_stage": "own"})
    simulation = simulate(scenario)
    held = [int(curve.by_category[MemoryCategory.WEIGHTS][0]) for curve in simulation.memory]
    model = scenario.model
    encoder = sum(tensor.elements for tensor in vision_parameters(model, 1, False))
    first = parameters_on_stage(model, range(2), 1, False, True, False, has_vision=False)
    assert held[:2] == [2 * encoder, 2 * sum(tensor.elements for tensor in first)]
    assert [stage["layers"] for stage in simulation.report["stages"]] == [0, 2, 2]


def test_a_tied_table_is_reduced_between_its_two_stages() -> None:
    scenario = build({"pp": 3, "vision_stage": "own"}, model__tied_embeddings=True)
    graph = lower_scenario(scenario)
    rows = np.array(graph.strings)[graph.operations.name] == "tied_embedding_all_reduce"
    assert set(graph.operations.rank[rows].tolist()) == {1, 2}
    assert {graph.groups[index].ranks for index in graph.operations.group[rows].tolist()} == {(1, 2)}


def test_the_language_model_begins_once_its_images_are_there() -> None:
    simulation = simulate(build({"pp": 3, "vision_stage": "own"}))
    graph, execution = simulation.graph, simulation.execution
    names = np.array(graph.strings)[graph.operations.name]
    insert = np.flatnonzero(names == "insert_image_tokens")
    receive = np.flatnonzero((names == "receive_activation") & (graph.operations.rank == 1))
    assert len(insert) == len(receive) == 4
    assert (execution.end[receive] <= execution.start[insert]).all()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"pp": 1, "vision_stage": "own"}, "a vision encoder on a stage of its own needs pp > 1"),
        ({"pp": 2, "vpp": 2, "vision_stage": "own"}, 'with vpp > 1 give a layout such as "V|Et|t|tL"'),
        ({"pp": 4, "vision_stage": "own"}, "4 layers do not divide over 3 pipeline ranks"),
        ({"pp": 2, "layout": "Ett|VttL"}, "the vision encoder (V) must come right before the embedding (E)"),
        ({"pp": 2, "layout": "VVEtt|ttL"}, "it places 2 vision encoders (V), the model has 1"),
        ({"pp": 2, "layout": "|VEtt*3L"}, "the embedding (E) must be the first part of the first stage"),
        ({"pp": 2, "layout": "VEtt|ttL", "vision_stage": "own"}, "it says where the vision encoder goes (V)"),
        (
            {"pp": 2, "vision_stage": "else"},
            "parallel.vision_stage: else (from scenario) is a text, must be one of",
        ),
    ],
)
def test_places_an_encoder_cannot_have(plan: dict[str, Any], said: str) -> None:
    assert said in problems_of(dense_mapping(model__vision=VISION, parallel=plan))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"pp": 2, "vision_stage": "own"},
            "own (from scenario) small has no vision encoder; set it to colocated",
        ),
        ({"pp": 2, "layout": "V|Et*4L"}, "it places a vision encoder (V), the model has none"),
    ],
)
def test_a_model_without_encoder_has_no_place_for_one(plan: dict[str, Any], said: str) -> None:
    assert said in problems_of(dense_mapping(parallel=plan))


def test_the_plan_survives_a_round_trip() -> None:
    for plan in ({"pp": 3, "vision_stage": "own"}, {"pp": 3, "layout": "V|Ett|ttL"}):
        loaded = build(plan)
        assert load_scenario(scenario_to_mapping(loaded)) == loaded
