"""What operations take from a device, held against kernels measured with and without communication beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware_profiles import load_profile
from op_graphs.graph import GemmShape
from op_graphs.vocabulary import Communication, Stream
from tests.dense_scenarios import dense_mapping
from tracesim.cost import CostModel
from tracesim.cost.contention import (
    DOMAIN_IN,
    DOMAIN_OUT,
    FABRIC_IN,
    FABRIC_OUT,
    HBM,
    communication_sms,
    gemm_blocks,
    sharing_policy,
)
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping
from tracesim.sharing import Demand, SharingPolicy
from tracesim.simulation import simulate

H100 = load_profile("h100-sxm")


@pytest.mark.parametrize(
    ("blocks", "linear", "sms", "taken", "measured", "within"),
    [
        # V100, 80 SMs, an all-reduce of 8 blocks: a GEMM of 1,105 blocks, one on an SM
        (1105, False, 80, 8, 1.140, 0.01),
        # A100, 108 SMs, 8 blocks: products with room in their last wave
        (96, False, 108, 8, 1.0, 0.01),
        (192, False, 108, 8, 1.0, 0.01),
        # ... and kernels that stream memory
        (0, True, 108, 8, 1.07, 0.02),
        # V100, sends and receives of 2 blocks
        (0, True, 80, 2, 1.04, 0.02),
    ],
)
def test_kernels_slow_by_waves_as_measured(blocks, linear, sms, taken, measured, within):
    demand = Demand(blocks=blocks, linear=linear)
    policy = SharingPolicy(np.zeros(1, dtype=np.int64), (demand,), sms=sms)
    assert 1 / policy.sm_rate(demand, taken) == pytest.approx(measured, rel=within)


def test_blocks_of_a_product_are_its_output_tiles():
    tile = H100.gemm.tiles[0]
    one_tile = replace(H100, gemm=replace(H100.gemm, tiles=(tile,)))
    shape = GemmShape(4 * tile.m, 3 * tile.n + 1, 4096)
    assert gemm_blocks(shape, one_tile) == 16
    assert gemm_blocks(replace(shape, count=5), one_tile) == 80


@pytest.mark.parametrize(
    ("what", "size", "sms"),
    [
        (Communication.ALL_REDUCE, 1 << 30, 24),
        (Communication.ALL_REDUCE, 1 << 10, 1),
        (Communication.SEND, 1 << 30, 2),
        (Communication.RECEIVE, 1 << 10, 1),
    ],
)
def test_small_messages_and_sends_take_few_sms(what, size, sms):
    assert communication_sms(H100, what, size) == sms


def scenario(**changes):
    return load_scenario(
        dense_mapping(**{"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2, **changes})
    )


def test_each_kind_of_operation_uses_its_resources():
    # sixteen GPUs and domains of eight: pipeline neighbours sit in different domains
    changed = scenario(parallel__dp=4)
    graph = lower_scenario(changed)
    costs = CostModel(changed.hardware)
    durations = costs.durations_ns(graph)
    policy = sharing_policy(costs, graph, durations)
    uses = {}
    for row in range(len(durations)):
        demand = policy.demands[policy.classes[row]]
        stream = Stream(int(graph.operations.stream[row]))
        uses.setdefault(stream, set()).update(resource for resource, _ in demand.uses)
        assert all(units > 0 for _, units in demand.uses)
    assert uses[Stream.COMPUTE] == {HBM}
    assert uses[Stream.TP] == {HBM, DOMAIN_OUT, DOMAIN_IN}
    assert uses[Stream.PP_SEND_NEXT] == {HBM, FABRIC_OUT}
    assert uses[Stream.PP_RECEIVE_PREVIOUS] == {HBM, FABRIC_IN}


@pytest.mark.parametrize(
    "changes",
    [{}, {"parallel__sp": True, "overlap__tp": True}, {"parallel__zero": 0}, {"schedule": "gpipe"}],
)
def test_contention_makes_a_step_longer_and_is_off_by_default(changes):
    free, shared = (simulate(scenario(overlap__contention=on, **changes)) for on in (False, True))
    assert simulate(scenario(**changes)).execution.end.tolist() == free.execution.end.tolist()
    assert shared.execution.end.max() >= free.execution.end.max()
    longer = (shared.execution.end - shared.execution.start) >= (free.execution.end - free.execution.start)
    assert longer.all()
    assert simulate(scenario(overlap__contention=True, **changes)).report == shared.report


def test_without_communication_nothing_changes():
    free, shared = (simulate(load_scenario(dense_mapping(overlap__contention=on))) for on in (False, True))
    assert shared.execution.end.tolist() == free.execution.end.tolist()
    assert shared.execution.waited_for.tolist() == free.execution.waited_for.tolist()


def test_the_field_is_kept_in_a_scenario_that_is_written_back():
    assert scenario_to_mapping(scenario(overlap__contention=True))["overlap"]["contention"] is True


def test_a_report_with_contention_adds_up_and_says_what_hiding_saves():
    report = simulate(scenario(overlap__contention=True)).report
    for stage in report["stages"]:
        parts = [stage["compute_ms"], *stage["exposed_communication_ms"].values(), stage["idle_ms"]]
        assert sum(parts) + stage["optimizer_ms"] == pytest.approx(report["iteration_time_ms"])
    assert report["exposed_communication"]


def test_traffic_of_two_groups_shares_a_nic():
    """A reduction of gradients and a transfer to the next stage leave the node at once: each waits for the other."""
    changed = scenario(parallel__tp=8, parallel__dp=2, parallel__pp=2)
    costs = CostModel(changed.hardware)
    graph = lower_scenario(changed)
    durations = costs.durations_ns(graph)
    policy = sharing_policy(costs, graph, durations)
    rows = {int(stream): row for row, stream in enumerate(graph.operations.stream.tolist())}
    sending, reducing = rows[Stream.PP_SEND_NEXT], rows[Stream.DP]
    uses = [dict(policy.demands[policy.classes[row]].uses) for row in (sending, reducing)]
    wanted = [use[FABRIC_OUT] for use in uses]
    rates = policy.rates([int(policy.classes[sending]), int(policy.classes[reducing])])
    capacity = policy.capacities[FABRIC_OUT]
    if sum(wanted) > capacity:
        assert sum(rate * want for rate, want in zip(rates, wanted, strict=True)) == pytest.approx(capacity)
        assert min(rates) < 1
    # Receiving uses the other direction of the same NIC.
    receiving = rows[Stream.PP_RECEIVE_NEXT]
    assert policy.rates([int(policy.classes[sending]), int(policy.classes[receiving])]) == (1.0, 1.0)


def test_products_that_leave_sms_free_lose_nothing_to_what_takes_no_more():
    profile = load_profile("h800-sxm")
    costs = CostModel(profile, reserved_sms=20)
    policy = SharingPolicy(
        np.zeros(1, dtype=np.int64),
        (Demand(blocks=1000, sms=costs.compute.product_sms),),
        sms=profile.sm_count,
    )
    (demand,) = policy.demands
    assert [policy.sm_rate(demand, taken) for taken in (0, 8, 20)] == [1.0, 1.0, 1.0]
    assert policy.sm_rate(demand, 24) == pytest.approx(-(-1000 // 112) / -(-1000 // 108))
    assert policy.sm_rate(demand, 40) < 1
    # ... and pay for it where nothing runs beside them.
    shape = GemmShape(4096, 4096, 7168)
    assert costs.compute.duration_ns(shape) > CostModel(profile).compute.duration_ns(shape)


@pytest.mark.parametrize(("taken", "waves"), [(0, 1), (1, 2), (66, 2), (90, 4)])
def test_a_norm_needs_a_wave_more_for_what_does_not_fit(taken, waves):
    demand = Demand(second_wave=0.66)
    policy = SharingPolicy(np.zeros(1, dtype=np.int64), (demand,), sms=132)
    assert 1 / policy.sm_rate(demand, taken) == pytest.approx(1 + 0.66 * (waves - 1))


@pytest.mark.parametrize("reserved", [-1, 132, "many"])
def test_reserved_sms_must_leave_some(reserved):
    with pytest.raises(ScenarioError, match=r"overlap\.reserved_sms"):
        load_scenario(dense_mapping(overlap__reserved_sms=reserved))
