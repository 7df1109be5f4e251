"""Schedules recovered from kernels alone: simulated runs, stripped of everything a profiler does not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from exporters import write_perfetto
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication
from schedules import (
    Action,
    ActionKind,
    build_schedule,
    schedule_names,
    usual_chunks,
    without_communication,
)
from tests.dense_scenarios import dense_mapping
from tests.stripped_timelines import only, stripped, with_launches, without_transfers
from tests.test_overlap_policies import MOE
from tracesim.analysis import analyze
from tracesim.cli import main
from tracesim.errors import TraceError
from tracesim.recovered_report import describe_recovered, intended_beside
from tracesim.recovered_schedule import RecoveredSchedule, recover_schedule
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

MICROBATCHES = 8
PAIRED = ("1f1b-overlap", "1f1b-overlap-wgrad", "dualpipe", "dualpipev")
NAMES = [name for name in schedule_names() if name not in ("forward", *PAIRED)]
TURNS = ("zb-v", "v-half", "v-min")
"""Schedules that hold two neighbouring stages on one rank, whose kernels are the same."""


def run(name: str, pp: int = 4, **changes: Any) -> Timeline:
    mapping = dense_mapping(
        model__layers=16,
        schedule=name,
        parallel__pp=pp,
        parallel__vpp=usual_chunks(name),
        training__num_microbatches=MICROBATCHES,
        **changes,
    )
    return simulate(load_scenario(mapping)).timeline()


def recovered(timeline: Timeline) -> RecoveredSchedule:
    found = recover_schedule(analyze(timeline))
    assert found.method == "kernels"
    return found


def planned(name: str, pp: int = 4) -> tuple[tuple[Action, ...], ...]:
    return without_communication(build_schedule(name, pp, usual_chunks(name), MICROBATCHES)).actions


def without_weights(actions: tuple[tuple[Action, ...], ...]) -> list[list[Action]]:
    return [[action for action in row if action.kind is not ActionKind.BACKWARD_WEIGHT] for row in actions]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_launches_and_transfers_tell_the_schedule(name: str, pp: int) -> None:
    """The order of actions, and which stage and microbatch each is."""
    found = recovered(with_launches(stripped(run(name, pp)))).times.schedule.actions
    plan = planned(name, pp)
    if name == "looped-bfs":
        # Its last stage runs backwards in reverse, and nothing in a trace says which is which: numbered in order.
        plan = tuple(tuple(in_order(action) for action in row) for row in plan)
    if name in TURNS:
        # Weight gradients of two stages with the same kernels are numbered in the order of their backwards.
        assert without_weights(found) == without_weights(plan)
        assert [sorted(row) for row in found] == [sorted(row) for row in plan]
    else:
        assert found == plan


def in_order(action: Action) -> Action:
    if action.kind is ActionKind.FORWARD:
        return action
    return action._replace(microbatch=MICROBATCHES - 1 - action.microbatch)


BATCHED = ("1f1b", "gpipe")
ANY_ORDER = [name for name in NAMES if name not in (*TURNS, "looped-bfs")]


@pytest.mark.parametrize(
    ("name", "p2p"),
    [(name, p2p) for p2p in ("ahead", "in-place") for name in ANY_ORDER]
    + [(name, "batched") for name in BATCHED],
)
def test_without_launches_the_ends_of_kernels_tell_it(name: str, p2p: str) -> None:
    found = recovered(stripped(run(name, overlap__p2p=p2p)))
    assert found.times.schedule.actions == planned(name)
    assert name in found.matches or name == "greedy"


@pytest.mark.parametrize("recompute", ["full", {"modules": ["core_attn"]}])
def test_a_recomputing_backward_is_one_action(recompute: Any) -> None:
    found = recovered(with_launches(stripped(run("1f1b", training__recompute=recompute))))
    assert found.times.schedule.actions == planned("1f1b")


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", PAIRED)
def test_interleaved_pieces_are_a_pair(name: str, pp: int) -> None:
    """A forward and a backward whose pieces take turns at the exchanges of experts.

    Of ``dualpipe`` some run in pairs only, and none of their backwards stands alone at two ranks.
    """
    parallel = {**MOE["parallel"], "pp": pp, "vpp": usual_chunks(name)}
    mapping = {**MOE, "schedule": name, "model": {**MOE["model"], "layers": 16}, "parallel": parallel}
    timeline = simulate(load_scenario(mapping)).timeline()
    found = recovered(with_launches(stripped(timeline)))
    assert found.times.schedule.actions == planned(name, pp)
    assert name in found.matches


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_patterns_of_layers_are_enough_where_each_rank_is_a_stage(name: str) -> None:
    """Without any transfer, but with the pipeline coordinate of the ranks."""
    timeline = without_transfers(stripped(run(name, pp=2), coordinates=True))
    if name == "gpipe":
        # Nothing separates the forwards of a rank from each other: they make one.
        assert recovered(timeline).times.schedule.microbatches == 1
    else:
        steady = recovered(timeline).times.schedule.actions
        assert steady == planned(name, 2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_bubbles_are_those_of_the_annotated_run(name: str) -> None:
    timeline = run(name)
    told, seen = recover_schedule(analyze(timeline)), recovered(with_launches(stripped(timeline)))
    assert seen.times.makespan == pytest.approx(told.times.makespan, rel=0.01)
    for one, other, busy in zip(told.totals(), seen.totals(), seen.times.rank_busy, strict=True):
        assert sum(other.values()) + busy == pytest.approx(seen.times.makespan)
        for cause in ("warm_up", "cool_down"):
            assert other[cause] == pytest.approx(one[cause], abs=0.02 * seen.times.makespan)
    description = describe_recovered(seen, intended_beside(seen, name))
    assert description["ok"]
    assert description["intended"]["differences"] == []


def test_the_command_draws_it_beside_the_intended_one(tmp_path: Path) -> None:
    path = tmp_path / "measured.pftrace"
    with path.open("wb") as stream:
        write_perfetto(with_launches(stripped(run("1f1b", pp=2))), stream)
    result = CliRunner().invoke(main, ["schedule", "show", "gpipe", "--trace", str(path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert (document["method"], document["matches"], document["pp"]) == ("kernels", ["1f1b"], 2)
    assert document["intended"]["differences"][0] == "rank 0 step 2: ran 0B0, gpipe has 0F2"


def test_a_rank_that_is_not_there_is_the_users_error() -> None:
    whole = with_launches(stripped(run("1f1b")))
    with pytest.raises(TraceError, match=r"rank 2 has 8 of 16 sends .* \(with rank 3\); give the files"):
        recover_schedule(analyze(whole.select_ranks(np.array([0, 1, 2], dtype=np.int32))))
    alone = whole.select_ranks(np.array([1], dtype=np.int32))
    with pytest.raises(TraceError, match="the trace shows no pipeline actions"):
        recover_schedule(analyze(alone))


def test_a_send_that_the_trace_does_not_show_is_told() -> None:
    timeline = with_launches(stripped(run("1f1b", pp=2)))
    slices = timeline.slices
    sends = np.flatnonzero((timeline.slice_ranks() == 1) & (slices.communication == Communication.SEND))
    kept = np.ones(len(slices), dtype=np.bool_)
    kept[sends[-1]] = False
    with pytest.raises(
        TraceError, match="rank 0 has 1 of 8 receives whose other end the trace does not show"
    ):
        recover_schedule(analyze(only(timeline, kept)))
