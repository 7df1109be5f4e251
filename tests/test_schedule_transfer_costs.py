"""Schedules with transfers that take time: closed forms, and the bubble rates that arXiv:2401.10241 calculates.

Table 6 of the paper has profiled passes (forward, backward for the input, for the weights) and a transfer of four
models, table 5 what follows from them by its definition: the longest rank less its passes, over its time.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.schedule_bubble import bubble_rate, calculated_bubble
from schedules import (
    ActionCosts,
    Objective,
    ScheduleError,
    add_communication,
    build_schedule,
    check_schedule,
    simulate_costs,
)
from schedules.greedy import greedy
from tests.dense_scenarios import dense_mapping
from tracesim.cli import main
from tracesim.profiled_schedule import pass_costs
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

# (model, p, m): forward, backward for input, for weights, transfer in ms (table 6);
# bubble rates of 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p in per cent (table 5).
PAPER = {
    ("1.5B", 8, 24): ((18.522, 18.086, 9.337, 0.601), (24.31, 15.85, 10.83, 15.85, 4.33)),
    ("1.5B", 8, 32): ((18.513, 18.086, 9.331, 0.626), (19.85, 12.42, 8.37, 12.42, 0.39)),
    ("1.5B", 8, 64): ((18.546, 18.097, 9.321, 0.762), (12.40, 6.74, 4.44, 6.74, 0.26)),
    ("6.2B", 8, 24): ((29.718, 29.444, 19.927, 0.527), (23.47, 13.23, 6.98, 13.23, 0.29)),
    ("6.2B", 8, 32): ((29.802, 29.428, 19.530, 0.577), (18.98, 10.45, 5.59, 10.45, 0.22)),
    ("6.2B", 8, 64): ((29.935, 29.621, 19.388, 0.535), (10.91, 5.54, 2.94, 5.54, 0.10)),
    ("14.6B", 16, 48): ((11.347, 11.248, 8.132, 0.377), (25.52, 13.97, 6.72, 13.97, 0.66)),
    ("14.6B", 16, 64): ((11.307, 11.254, 8.101, 0.379), (20.82, 10.88, 5.16, 10.88, 0.54)),
    ("14.6B", 16, 128): ((11.325, 11.308, 8.109, 0.378), (12.51, 5.76, 2.66, 5.76, 0.28)),
    ("28.3B", 32, 96): ((10.419, 10.207, 7.715, 0.408), (26.46, 14.21, 6.41, 14.21, 0.38)),
    ("28.3B", 32, 128): ((10.408, 10.204, 7.703, 0.408), (21.68, 11.06, 4.90, 11.06, 0.29)),
    ("28.3B", 32, 256): ((10.402, 10.248, 7.698, 0.460), (13.52, 5.94, 2.57, 5.94, 0.18)),
}


@pytest.mark.parametrize("key", PAPER, ids=lambda key: f"{key[0]} m{key[2]}")
def test_bubble_rates_are_those_of_the_zero_bubble_paper(key):
    model, pp, microbatches = key
    (forward, for_input, for_weight, transfer), rates = PAPER[key]
    costs = ActionCosts(forward, for_input, for_weight, transfer=transfer)
    schedules = [build_schedule(name, pp, 1, microbatches) for name in ("1f1b", "zb-h1", "zb-h2")]
    # Of the 34 h + 5 a s bytes a token of a layer its weight gradients wait for 32 h (table 1); a s / h is sequence
    # length over head size.
    share = 32 / (34 + 5 * 1024 / (96 if model == "1.5B" else 128))
    for limit in (pp, 2 * pp):
        schedules.append(greedy(pp, 1, microbatches, limit, costs, share, Objective.LONGEST_RANK))
        check_schedule(schedules[-1], memory_limit=limit, weight_memory=share)
    assert [round(100 * bubble_rate(schedule, costs), 2) for schedule in schedules] == list(rates)


@pytest.mark.parametrize("transfer", [0.0, 0.25, 3.0])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 1), (4, 8), (8, 3)])
def test_gpipe_with_transfers_is_its_closed_form(pp, microbatches, transfer):
    # Each way a transfer a boundary, behind each other; the others run under the passes before them.
    costs = ActionCosts(1.0, 1.0, 1.0, transfer=transfer)
    times = simulate_costs(build_schedule("gpipe", pp, 1, microbatches), costs)
    assert times.makespan == pytest.approx(3 * (microbatches + pp - 1) + 2 * (pp - 1) * transfer)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipev"])
def test_written_out_transfers_cost_the_same(name):
    vpp = 2 if name not in ("1f1b", "zb-h1") else 1
    schedule = build_schedule(name, 4, vpp, 8)
    costs = ActionCosts(1.0, 1.0, 0.5, transfer=0.25)
    assert (
        simulate_costs(add_communication(schedule), costs).makespan
        == simulate_costs(schedule, costs).makespan
    )


def test_stages_of_one_rank_need_no_transfer():
    # The two middle stages of a V are on the last rank: 3 boundaries each way.
    schedule = build_schedule("zb-v", 2, 2, 1)
    free, slow = (
        simulate_costs(schedule, ActionCosts(transfer=transfer)).makespan for transfer in (0.0, 10.0)
    )
    assert slow - free == 4 * 10.0


def test_a_transfer_cannot_take_less_than_nothing():
    with pytest.raises(ScheduleError, match=r"cost transfer=-1\.0 must be a number of at least 0"):
        ActionCosts(transfer=-1.0)


def test_the_command_takes_transfers():
    arguments = [
        "schedule",
        "show",
        "gpipe",
        "--pp",
        "2",
        "--microbatches",
        "2",
        "--transfer-cost",
        "0.5",
        "--json",
    ]
    shown = json.loads(CliRunner().invoke(main, arguments).output)
    assert (shown["time"], shown["longest_rank"], shown["costs"]["transfer"]) == (10.0, 10.0, 0.5)


def test_the_bubble_of_a_simulated_step_follows_from_its_own_passes():
    scenario = load_scenario(
        dense_mapping(
            schedule="zb-h1", parallel__pp=4, training__num_microbatches=8, model__layers=8, overlap__p2p=True
        )
    )
    simulation = simulate(scenario)
    costs = pass_costs(simulation.graph, simulation.execution, 2)
    work = costs.forward + costs.backward_input + costs.backward_weight
    assert 0 < costs.transfer < costs.forward < work
    found = calculated_bubble(scenario, simulation.graph, simulation.execution)
    # (p - 1) (F + I - W) with free transfers (table 2 of the paper), and a little for those that are not.
    free = 3 * (costs.forward + costs.backward_input - costs.backward_weight)
    assert free / (8 * work + free) <= found < 1.2 * (free + 14 * costs.transfer) / (8 * work + free)
