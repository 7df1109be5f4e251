"""Capacity of experts: tokens dropped beyond it, padding up to it, and padding for quantised products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.expert_tokens import capacity, padded, routed
from op_graphs.graph import OpGraph
from op_graphs.imbalance import Level, expert_chances, stage_loads
from op_graphs.model import MixtureOfExperts
from op_graphs.plan import Routing
from op_graphs.vocabulary import Communication, OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 2, 256, 128
SHARE = TOKENS * TOP_K // EXPERTS
MOE = {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn_size": WIDTH}
DROPS = {"pad_to_capacity": False}


def mixture(moe: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """One layer with experts over four ranks, one microbatch of 256 tokens a rank."""
    plan = {"ep": 4, "dp": 4}
    # So small a model would be bound by its launches.
    hardware = {"base": "h100-sxm", "host": {"operation_us": 0}}
    fixed = {
        "model__layers": 1,
        "training__num_microbatches": 1,
        "parallel": plan,
        "hardware": hardware,
    }
    return load_scenario(dense_mapping(**{**fixed, "model__moe": {**MOE, **(moe or {})}, **changes}))


def expert_flops(scenario: Scenario, level: Level = "most") -> float:
    operations = lower_scenario(scenario, level).operations
    return float(operations.flops[operations.kind == OpKind.GROUPED_GEMM].sum())


def exchanged(scenario: Scenario) -> set[float]:
    operations = lower_scenario(scenario).operations
    return set(operations.communication_bytes[operations.communication == Communication.ALL_TO_ALL].tolist())


def rows(scenario: Scenario) -> set[int]:
    """Rows of an expert in the first product of each expert."""
    graph = lower_scenario(scenario)
    shapes = [graph.shapes[index] for index in graph.operations.shape[names_of(graph) == "expert_fc1"]]
    return {shape.m for shape in shapes}  # type: ignore[union-attr]


def names_of(graph: OpGraph) -> np.ndarray:
    return np.array(graph.strings)[graph.operations.name]


def moved(graph: OpGraph, name: str) -> tuple[float, float]:
    row = names_of(graph).tolist().index(name)
    return float(graph.operations.bytes_read[row]), float(graph.operations.bytes_written[row])


# -- counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "factor", "expected"),
    [(256, None, None), (256, 1.0, 64), (256, 1.25, 80), (256, 1.001, 65), (255, 1.0, 64), (256, 9.0, 256)],
)
def test_capacity_is_the_balanced_share_times_a_factor_rounded_up(tokens, factor, expected):
    assert capacity(MixtureOfExperts(**MOE, capacity_factor=factor), tokens) == expected


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        ({}, [0, 10, 64, 200]),
        ({"capacity_factor": 1.0, **DROPS}, [0, 10, 64, 64]),
        ({"capacity_factor": 1.5, **DROPS}, [0, 10, 64, 96]),
        ({"capacity_factor": 1.5}, [96, 96, 96, 96]),
    ],
)
def test_what_an_expert_gets(moe, expected):
    demand = np.array([0.0, 10.0, 64.0, 200.0])
    assert routed(MixtureOfExperts(**MOE, **moe), TOKENS, demand).tolist() == expected
    assert [routed(MixtureOfExperts(**MOE, **moe), TOKENS, one) for one in demand.tolist()] == expected


@pytest.mark.parametrize(
    ("count", "multiple", "expected"),
    # Half of a token is one token half of the time.
    [(7.3, 1, 7.3), (0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 32, 32), (0.5, 16, 8), (16.25, 16, 20)],
)
def test_padding(count, multiple, expected):
    assert padded(count, multiple) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20), st.sampled_from([1, 16, 32, 128]))
def test_padding_adds_less_than_the_multiple_and_nothing_twice(counts, multiple):
    found = padded(np.array(counts), multiple)
    assert (found >= np.array(counts) - 1e-6).all()
    assert (found <= np.array(counts) + multiple).all()
    whole = padded(np.ceil(counts), multiple)
    assert (padded(whole, multiple) == whole).all()


# -- padded to the capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
def test_padded_experts_compute_and_exchange_exactly_their_capacity(factor):
    scenario = mixture({"capacity_factor": factor})
    each = SHARE * factor
    assert rows(scenario) == {each * 4}
    assert exchanged(scenario) == {each * EXPERTS * HIDDEN * 2}
    # Both linears of two experts, forward and twice backward; fc1 has gate and value.
    assert expert_flops(scenario) == 3 * 2 * (4 * each * 2) * HIDDEN * WIDTH * 3
    assert_nothing_leaks(lower_scenario(scenario))


def test_memory_and_time_rise_with_the_capacity():
    reports = [
        simulate(mixture({"capacity_factor": factor}, training__seq_len=2048)).report
        for factor in (1.0, 1.5, 2.0)
    ]
    peaks = [report["stages"][0]["peak_allocated_gib"] for report in reports]
    times = [report["iteration_time_ms"] for report in reports]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times))


# -- dropped beyond it -------------------------------------------------------------------------------------------


def test_balanced_tokens_fit_into_a_capacity_of_one_and_fill_half_of_it():
    dropless = mixture()
    for factor, kept in ((1.0, 1.0), (3.0, 1.0), (0.5, 0.5)):
        scenario = mixture({"capacity_factor": factor, **DROPS})
        assert expert_flops(scenario) == expert_flops(dropless) * kept
        assert exchanged(scenario) == {SHARE * kept * EXPERTS * HIDDEN * 2}


ZIPF = {"training__routing": {"zipf": 1.2}}


def test_dropping_caps_the_most_loaded_rank():
    chances = np.array(expert_chances(Routing(zipf=1.2), EXPERTS, TOP_K)) * TOKENS
    limit = 80
    by_rank = np.minimum(chances, limit).reshape(2, 4).sum(axis=0)
    scenario = mixture({"capacity_factor": limit / SHARE, **DROPS}, **ZIPF)
    one_copy = expert_flops(mixture()) / (TOKENS * TOP_K)
    for level, copies in (("most", by_rank.max()), ("mean", by_rank.mean()), ("least", by_rank.min())):
        assert expert_flops(scenario, level) == pytest.approx(one_copy * 4 * copies, rel=0.01)
    assert list(exchanged(scenario)) == pytest.approx([4 * by_rank.max() * HIDDEN * 2], rel=0.01)
    found = stage_loads(scenario.model, scenario.parallel, scenario.training)
    assert found.most.sent == pytest.approx(by_rank.sum() / (TOKENS * TOP_K))
    # What all ranks send, all of them get.
    assert sum(by_rank / by_rank.mean()) == pytest.approx(4)
    assert found.most.copies == pytest.approx(by_rank.max() / by_rank.mean())


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_work_rises_with_the_capacity_up_to_that_without(dispatcher):
    plan = {"ep": 4, "dp": 4, "ep_dispatcher": dispatcher}
    factors = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, None)
    scenarios = [
        mixture({} if factor is None else {"capacity_factor": factor, **DROPS}, parallel=plan, **ZIPF)
        for factor in factors
    ]
    flops = [expert_flops(scenario) for scenario in scenarios]
    assert flops == sorted(flops)
    assert flops[0] < flops[2] < flops[-1] == flops[-2]
    for scenario in scenarios:
        assert_nothing_leaks(lower_scenario(scenario))


def test_experts_of_one_rank_drop_too():
    chances = np.array(expert_chances(Routing(zipf=1.2), EXPERTS, TOP_K)) * TOKENS
    scenario = mixture({"capacity_factor": 1.0, **DROPS}, parallel={}, **ZIPF)
    kept = np.minimum(chances, SHARE).sum() / (TOKENS * TOP_K)
    assert expert_flops(scenario) == pytest.approx(expert_flops(mixture(parallel={})) * kept, rel=0.02)
    assert "spread" not in simulate(scenario).report["stages"][0]


@pytest.mark.parametrize(
    ("moe", "read", "written"),
    # In entries of the map: scores and mask are read, a mask of ones or places is made, scores are cut.
    [
        ({"capacity_factor": 8.0}, 9, 9),
        ({"capacity_factor": 8.0, **DROPS}, 11, 10),
        ({"capacity_factor": 1.0}, 9 + 72 + 2, 9 + 4),
        ({"capacity_factor": 1.0, **DROPS}, 11 + 72 + 2, 10 + 4),
        ({"capacity_factor": 1.0, "drop_policy": "position"}, 9 + 72 + 2 + 1, 9 + 4 + 4),
    ],
)
def test_the_kernels_that_drop(moe, read, written):
    graph = lower_scenario(mixture(moe))
    entries = TOKENS * EXPERTS
    assert moved(graph, "router_drop") == (read * entries, written * entries)
    assert moved(graph, "router_drop_backward") == (5 * entries, 4 * entries)
    assert "router_drop" not in names_of(lower_scenario(mixture()))


# -- padded for quantised products -------------------------------------------------------------------------------

FP8 = {"training__dtype": "fp8-tensorwise"}
SHORT = {"training__seq_len": 20, "training__micro_batch_size": 1}
"""20 tokens: five for each expert from a rank, twenty from four."""


def test_experts_pad_their_rows_themselves():
    scenario = mixture(**FP8, **SHORT)
    graph = lower_scenario(scenario)
    assert rows(scenario) == {32}
    assert exchanged(scenario) == {5 * EXPERTS * HIDDEN * 2}
    copies, padded_copies = 2 * 20 * HIDDEN * 2, 2 * 32 * HIDDEN * 2
    for name in ("expert_pad", "expert_unpad_backward"):
        assert moved(graph, name) == (copies, padded_copies)
    for name in ("expert_unpad", "expert_pad_backward"):
        assert moved(graph, name) == (copies, copies)
    assert_nothing_leaks(graph)


def test_a_router_that_pads_sends_more_instead():
    scenario = mixture(**FP8, **SHORT, training__router_padding=True)
    assert rows(scenario) == {4 * 16}
    assert exchanged(scenario) == {16 * EXPERTS * HIDDEN * 2}
    assert not [name for name in names_of(lower_scenario(scenario)) if "pad" in name]


@pytest.mark.parametrize(
    ("fused", "router", "padded_by_experts"),
    [(True, False, False), (True, True, False), (False, True, False), (False, False, True)],
)
def test_what_deepep_brings_is_padded_where_it_is_copied(fused, router, padded_by_experts):
    plan = {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}
    libraries = {"permute_fusion": fused}
    scenario = mixture(**FP8, **SHORT, parallel=plan, training__router_padding=router, libraries=libraries)
    assert rows(scenario) == {32}
    assert exchanged(scenario) == exchanged(mixture(**SHORT, parallel=plan))
    graph = lower_scenario(scenario)
    assert ("expert_pad" in names_of(graph)) == padded_by_experts
    copies = 2 * (20 if padded_by_experts else 32)
    assert moved(graph, "dispatch_permute")[1] == copies * HIDDEN * 2
    assert_nothing_leaks(graph)


@pytest.mark.parametrize(
    ("dtype", "multiple"), [("fp8-tensorwise", 16), ("fp8-blockwise", 16), ("mxfp8", 32), ("nvfp4", 128)]
)
def test_multiples_of_the_recipes(dtype, multiple):
    scenario = mixture(hardware="b200-sxm", training__dtype=dtype, **SHORT)
    assert rows(scenario) == {-(-20 // multiple) * multiple}
    # Where rows are a multiple already, nothing is padded.
    whole = mixture(hardware="b200-sxm", training__dtype=dtype)
    assert rows(whole) == {SHARE * 4}
    assert "expert_pad" not in names_of(lower_scenario(whole))


def test_uneven_experts_are_padded_one_by_one():
    scenario = mixture(**FP8, **SHORT, **ZIPF)
    counts = np.array(expert_chances(Routing(zipf=1.2), EXPERTS, TOP_K)) * 20 * 4
    by_rank = padded(counts, 16).reshape(2, 4).sum(axis=0)
    one_row = expert_flops(mixture()) / (TOKENS * TOP_K)
    most = counts.reshape(2, 4).sum(axis=0).argmax()
    assert expert_flops(scenario) == pytest.approx(one_row * by_rank[most], rel=0.02)


# -- the fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moe", "changes", "said"),
    [
        (DROPS, {}, "moe.pad_to_capacity: false says what follows from a capacity; give capacity_factor"),
        ({"drop_policy": "position"}, {}, "moe.drop_policy: position, but no token is dropped"),
        ({"capacity_factor": 1, "drop_policy": "prob"}, {}, "one of probs, position, not 'prob'; did you mean probs?"),
        (
            {"capacity_factor": 1},
            {"parallel": {"ep": 4, "dp": 4, "ep_dispatcher": "deepep"}},
            "parallel.ep_dispatcher: deepep (from scenario) does not pad experts to their capacity (capacity_factor "
            "1); set ep_dispatcher: alltoall, or moe.pad_to_capacity: false",
        ),
        ({"capacity_factor": 1}, ZIPF, "leave it out, or set pad_to_capacity: false"),
        ({}, {"training__router_padding": True}, "is for products in 8 or 4 bits, dtype is bf16"),
        (
            {},
            {**FP8, "training__router_padding": True, "parallel": {"ep_dispatcher": "allgather"}},
            "training.router_padding: true (from scenario) is not there for ep_dispatcher allgather",
        ),
        (
            {"capacity_factor": 1},
            {**FP8, "training__router_padding": True},
            "pads what varies, experts padded to their capacity do not",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(moe, changes, said):
    with pytest.raises(ScenarioError) as error:
        mixture(moe, **changes)
    assert said in str(error.value)


def test_a_router_pads_for_experts_only():
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(**FP8, training__router_padding=True))
    assert "pads what experts get, small has none; leave it out" in str(error.value)


@pytest.mark.parametrize("moe", [{"capacity_factor": 1.5}, {"capacity_factor": 1.5, **DROPS}])
def test_a_scenario_writes_its_capacity_back(moe):
    scenario = mixture(moe, **FP8, training__router_padding="pad_to_capacity" in moe)
    assert load_scenario(scenario_to_mapping(scenario)) == scenario
