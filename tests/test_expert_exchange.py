"""Exchanges of tokens with experts that send a token once to a domain: chances, bytes, time, kernels and memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles import load_profile
from op_graphs.graph import ExchangeShape, OpGraph
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.cost import CollectiveCost
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario

H800 = load_profile("h800-sxm")


@pytest.mark.parametrize(
    ("top_k", "groups", "top_groups", "parts", "expected"),
    [
        # one choice falls on one part
        (1, 1, 1, 8, 1 / 8),
        # two independent choices over two halves: 3/4
        (2, 1, 1, 2, 3 / 4),
        # all choices in one of four groups, over four parts
        (8, 4, 1, 4, 1 / 4),
        # ... and over two parts of two groups each
        (8, 4, 1, 2, 1 / 2),
        # DeepSeek-V3: four of eight groups, eight domains of one group each
        (8, 8, 4, 8, (1 - 0.75**8) / 2),
        (8, 8, 4, 64, (1 - (1 - 1 / 32) ** 8) / 2),
        # two domains: a token misses one only if all its four groups lie on the other, or all its choices do
        (1, 8, 4, 2, 1 / 2),
        (5, 8, 8, 1, 1),
    ],
)
def test_chance_that_a_token_has_an_expert_on_a_part(top_k, groups, top_groups, parts, expected):
    assert ExchangeShape(1.0, top_k, groups, top_groups).chance(parts) == pytest.approx(expected)


@given(st.sampled_from([1, 2, 4, 8]), st.data(), st.integers(1, 6), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_chance_is_that_of_counting_all_choices(groups, data, top_k, parts):
    top_groups = data.draw(st.integers(1, groups))
    # The finest cut: cells of which each lies in one group and on one part.
    cells = max(groups, parts)
    on_part = np.arange(cells) * parts // cells == 0
    group_of = np.arange(cells) * groups // cells
    chances = []
    for chosen in itertools.combinations(range(groups), top_groups):
        allowed = np.isin(group_of, chosen)
        chances.append(1 - (1 - on_part[allowed].mean()) ** top_k)
    shape = ExchangeShape(1.0, top_k, groups, top_groups)
    assert shape.chance(parts) == pytest.approx(float(np.mean(chances)))


def exchange(ranks: int, **changes: Any) -> Any:
    shape = replace(ExchangeShape(4096 * 7168 * 2.0, 8, 8, 4), **changes)
    profile = replace(H800, measured_collectives=())
    return CollectiveCost(profile).duration_ns(
        Communication.ALL_TO_ALL, 1.0, tuple(range(ranks)), exchange=shape
    )


def test_the_bytes_of_a_combine_of_deepseek_over_eight_nodes():
    found = exchange(64)
    tokens = 4096 * 7168 * 2
    assert found.fabric_bytes == pytest.approx(tokens * 7 * (1 - 0.75**8) / 2)
    assert found.domain_bytes == pytest.approx(tokens * 64 * (1 - (31 / 32) ** 8) / 2 * 7 / 8)
    # ... which the NICs carry in 4 ms and the links in the domain in less.
    assert found.time_ns == pytest.approx(found.fabric_bytes / (50 * 0.92), rel=0.02)


def test_inside_a_domain_nothing_leaves_it_and_over_two_the_links_inside_decide():
    assert exchange(8).fabric_bytes == 0
    two = exchange(16)
    assert two.domain_bytes / (200 * 0.8) > two.fabric_bytes / (50 * 0.92)
    assert two.time_ns == pytest.approx(two.domain_bytes / (200 * 0.8), rel=0.05)


def test_it_lasts_as_long_as_its_most_loaded_rank():
    assert exchange(64, most=2.0).fabric_bytes == pytest.approx(2 * exchange(64).fabric_bytes)


EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn_size": 128}


def mixture(**changes: Any) -> OpGraph:
    plan = {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}
    training = {"training__dtype": "fp8-blockwise", "training__num_microbatches": 2}
    mapping = dense_mapping(**{"model__moe": EXPERTS, "parallel": plan, **training, **changes})
    return lower_scenario(load_scenario(mapping))


def traffic(graph: OpGraph, *names: str) -> dict[str, tuple[float, float]]:
    """Bytes read and written by the first operation of each name."""
    all_names = [graph.strings[i] for i in graph.operations.name.tolist()]
    rows = {name: all_names.index(name) for name in names}
    read, written = graph.operations.bytes_read, graph.operations.bytes_written
    return {name: (float(read[row]), float(written[row])) for name, row in rows.items()}


def test_tokens_travel_in_8_bits_out_and_in_16_back():
    plain, low = mixture(), mixture(training__fp8_dispatch=True)

    def sent(graph: OpGraph) -> dict[str, float]:
        rows = np.flatnonzero(graph.operations.communication == Communication.ALL_TO_ALL)
        sizes = graph.operations.communication_bytes
        return {graph.strings[graph.operations.name[row]]: float(sizes[row]) for row in rows}

    ratio = {name: size / sent(low)[name] for name, size in sent(plain).items()}
    narrow = 2 / (1 + 4 / 128)
    assert ratio == {
        "dispatch_all_to_all": pytest.approx(narrow, rel=1e-4),
        "combine_all_to_all": 1,
        "combine_backward_all_to_all": pytest.approx(narrow, rel=1e-4),
        "dispatch_backward_all_to_all": 1,
    }


def test_what_arrives_quantised_is_not_quantised_again():
    plain, low = (
        {graph.strings[i] for i in graph.operations.name.tolist()}
        for graph in (mixture(), mixture(training__fp8_dispatch=True))
    )
    assert plain - low == {"expert_fc1_input_cast_transpose", "expert_fc2_gradient_cast_transpose"}
    assert low - plain == {
        *("dispatch_cast", "combine_backward_cast"),
        *("expert_fc1_input_transpose", "expert_fc2_gradient_transpose"),
    }


def test_copies_are_made_and_added_up_where_the_experts_are():
    # 256 tokens of 256 elements in 2 bytes; each reaches 4 ranks with 2 experts each, or 2 of its choices one rank.
    token = 256 * 2
    arrived, copies = 256 * 4 * (1 - (1 - 1 / 4) ** 2) * token, 256 * 2 * token
    found = traffic(mixture(training__dtype="bf16"), "dispatch_permute", "combine_unpermute")
    assert found["dispatch_permute"] == pytest.approx((arrived, copies))
    assert found["combine_unpermute"] == pytest.approx((copies, arrived))


def hybrid(**changes: Any) -> OpGraph:
    plan = {"ep": 4, "dp": 4, "ep_dispatcher": "hybridep"}
    return mixture(**{"parallel": plan, "training__dtype": "bf16", **changes})


def test_scores_for_all_experts_travel_with_tokens_and_back_with_gradients():
    # 256 tokens of 512 bytes; each reaches 4 ranks with 2 experts each, or 2 of its choices one rank; 8 scores of fp32.
    copies, token, scores = 256 * 4 * (1 - (1 - 1 / 4) ** 2), 256 * 2, 8 * 4
    graph = hybrid()
    rows = np.flatnonzero(graph.operations.communication == Communication.ALL_TO_ALL)
    sizes = graph.operations.communication_bytes
    assert {graph.strings[graph.operations.name[row]]: float(sizes[row]) for row in rows} == {
        "dispatch_all_to_all": pytest.approx(copies * (token + scores)),
        "combine_all_to_all": pytest.approx(copies * token),
        "combine_backward_all_to_all": pytest.approx(copies * token),
        "dispatch_backward_all_to_all": pytest.approx(copies * (token + scores)),
    }


def test_maps_of_all_ranks_are_gathered_and_scanned_once_a_layer():
    # A byte for each of 256 tokens of 4 ranks and 8 experts; a place for each token and rank, the map of 2 own experts.
    graph = hybrid()
    gathered = 256 * 4 * 8
    assert traffic(graph, "dispatch_map_scan")["dispatch_map_scan"] == (
        gathered,
        256 * 4 * 4 + 256 * 4 * 2,
    )
    names = [graph.strings[i] for i in graph.operations.name.tolist()]
    assert (
        names.count("dispatch_map_scan")
        == names.count("dispatch_all_to_all")
        == names.count("dispatch_places")
    )
    shapes = {
        graph.strings[name]: graph.shapes[shape].map_bytes
        for name, shape in zip(graph.operations.name, graph.operations.shape, strict=True)
        if shape >= 0 and isinstance(graph.shapes[shape], ExchangeShape)
    }
    assert shapes.pop("dispatch_all_to_all") == 256 * 8
    assert set(shapes.values()) == {0.0}


def test_scores_and_maps_take_the_ways_of_their_domain():
    # Two domains of eight: a copy has the scores of one of them; all maps but the own are received.
    plain, full = exchange(16), exchange(16, score_bytes=2.0**20, map_bytes=2.0**20)
    copies = ExchangeShape(1.0, 8, 8, 4)
    across = copies.chance(2) * 2.0**19 + 2.0**20
    inside = (16 * copies.chance(16) * 2.0**19 + 16 * 2.0**20) * (1 - 1 / 8)
    assert full.fabric_bytes - plain.fabric_bytes == pytest.approx(across)
    assert full.domain_bytes - plain.domain_bytes == pytest.approx(inside)


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    # Kernel-only times of Hybrid-EP on GB200 with 32 SMs, GB/s (its Hybrid-EP_Implementation.md): 4,096 tokens of 7,168
    # elements in bf16, 8 of 8 experts a rank, chosen uniformly, what arrives from the own rank counted.
    [
        (8, 764.03, 737.13),
        (16, 706.95, 666.26),
        (24, 665.97, 639.80),
        (32, 642.23, 605.15),
        (36, 632.31, 596.99),
    ],
)
def test_exchanges_take_the_time_that_its_authors_measured(ranks, dispatch, combine):
    shape = ExchangeShape(4096 * 7168 * 2.0, 8, score_bytes=4096 * ranks * 8 * 4.0)
    received = ranks * shape.chance(ranks) * shape.token_bytes
    cost = CollectiveCost(load_profile("gb200-nvl72"))
    both = 0.0
    for scored in (True, False):
        used = shape if scored else replace(shape, score_bytes=0.0)
        both += cost.duration_ns(
            Communication.ALL_TO_ALL, received, tuple(range(ranks)), exchange=used
        ).time_ns
    measured = received / dispatch + received / combine
    assert both == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    "changes", [{"fp8_dispatch": True}, {"fp8_storage": True}, {"fp8_dispatch": True, "fp8_storage": True}]
)
@pytest.mark.parametrize("recompute", ["none", {"modules": ["moe_act", "layernorm"]}, "full"])
def test_memory_comes_back_and_nothing_is_released_twice(changes, recompute):
    plan = {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}
    training = {f"training__{name}": value for name, value in changes.items()}
    mapping = dense_mapping(
        **{"model__moe": EXPERTS, "parallel": plan, "training__dtype": "fp8-blockwise",
           "training__recompute": recompute, **training}
    )  # fmt: skip
    assert_nothing_leaks(lower_scenario(load_scenario(mapping)))


def test_storing_in_8_bits_keeps_less_and_costs_kernels():
    plain, stored = (mixture(training__fp8_storage=flag) for flag in (False, True))

    def kept(graph: OpGraph) -> int:
        """Activations that the first forward leaves behind."""
        forward = int(np.flatnonzero(graph.operations.phase == Phase.BACKWARD_INPUT)[0])
        buffers = graph.buffers
        own = (buffers.category == MemoryCategory.ACTIVATIONS) & (buffers.allocate < forward)
        return int(buffers.size[own & (buffers.release >= forward)].sum())

    def weights(graph: OpGraph) -> int:
        names = [graph.strings[name] for name in graph.buffers.name.tolist()]
        return sum(
            size
            for size, name in zip(graph.buffers.size.tolist(), names, strict=True)
            if name == "quantized_weights"
        )

    def casts(graph: OpGraph) -> int:
        return int((graph.operations.kind == OpKind.CAST).sum())

    assert kept(stored) < kept(plain)
    assert weights(stored) * 2 == weights(plain)
    assert casts(stored) > casts(plain)
