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
