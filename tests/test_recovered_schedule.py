"""Schedules recovered from traces: the order that was simulated, bubbles by hand, real jobs, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from exporters import write_perfetto
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
from schedules import build_schedule, schedule_names, usual_chunks, without_communication
from tests.dense_scenarios import dense_mapping
from tests.timelines import timeline_of
from tracesim.analysis import analyze
from tracesim.cli import main
from tracesim.errors import TraceError
from tracesim.recovered_report import describe_recovered, intended_beside
from tracesim.recovered_schedule import BUBBLE_CAUSES, recover_schedule
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

PIPELINE, COMPUTE, PP = TrackRole.PIPELINE, TrackRole.COMPUTE, TrackRole.COMMUNICATION_PP
MILLISECOND = 1_000_000


def drawn(*rows: str, transfers: dict[int, tuple[int, int]] | None = None, **more: Any) -> Timeline:
    """A pipeline track a rank, from ``F0@0-10`` (milliseconds); transfers: communication of a rank."""
    slices, tracks, ranks = [], [], []
    for rank, row in enumerate(rows):
        ranks.append({"rank": rank, "pp": rank})
        tracks += [(rank, PIPELINE, "pipeline"), (rank, COMPUTE, "compute"), (rank, PP, "pp")]
        for text in row.split():
            name, _, span = text.partition("@")
            start, end = (int(t) * MILLISECOND for t in span.split("-"))
            phase = Phase.FORWARD if name[0] == "F" else Phase.BACKWARD_INPUT
            common = {"start": start, "duration": end - start, "phase": phase, "microbatch": int(name[1:])}
            slices.append(common | {"track": 3 * rank, "name": name, "kind": OpKind.ANNOTATION, "chunk": 0})
            slices.append(common | {"track": 3 * rank + 1, "name": "gemm", "kind": OpKind.GEMM})
        if transfers and rank in transfers:
            start, end = (t * MILLISECOND for t in transfers[rank])
            slices.append(
                {"track": 3 * rank + 2, "start": start, "duration": end - start, "name": "receive",
                 "kind": OpKind.P2P, "communication": Communication.RECEIVE}
            )  # fmt: skip
    return timeline_of(slices, tracks, ranks, simulated=True, **more)


def bubbles(timeline: Timeline, rank: int) -> dict[str, float]:
    totals = recover_schedule(analyze(timeline)).totals()[rank]
    return {cause: round(time, 6) for cause, time in totals.items() if time}


NAMES = [name for name in schedule_names() if name not in ("forward",)]


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_a_simulated_run_is_that_of_its_schedule(name):
    pp, microbatches = 2, 4
    vpp = usual_chunks(name)
    scenario = load_scenario(
        dense_mapping(
            model__layers=4,
            schedule=name,
            parallel__pp=pp,
            parallel__vpp=vpp,
            training__num_microbatches=microbatches,
        )
    )
    recovered = recover_schedule(analyze(simulate(scenario).timeline()))
    plan = without_communication(build_schedule(name, pp, vpp, microbatches))
    assert recovered.times.schedule.actions == plan.actions
    assert name in recovered.matches
    description = describe_recovered(recovered, intended_beside(recovered, name))
    assert description["ok"], description["problem"]
    assert description["intended"]["differences"] == []
    for row, busy in zip(recovered.totals(), recovered.times.rank_busy, strict=True):
        assert sum(row.values()) + busy == pytest.approx(recovered.times.makespan)


@pytest.mark.parametrize(
    ("rows", "transfers", "rank", "expected"),
    [
        # the first rank waits for the gradient of its first microbatch, and the last rank for its first input
        (("F0@0-10 F1@10-20 B0@40-60 B1@70-90", "F0@10-20 B0@20-40 F1@40-50 B1@50-70"), {}, 0,
         {"warm_up": 20, "cool_down": 10}),
        (("F0@0-10 F1@10-20 B0@40-60 B1@70-90", "F0@10-20 B0@20-40 F1@40-50 B1@50-70"), {}, 1,
         {"warm_up": 10, "cool_down": 20}),
        # the other stage takes 10 ms more for a backward on average: these of a wait of 12 are its, 2 are no rule
        (("F0@0-10 F1@10-20 B0@45-65 F2@65-75 B1@87-107 F3@107-117 B2@130-150 B3@170-190",
          "F0@10-20 B0@20-45 F1@45-55 B1@55-87 F2@87-97 B2@97-130 F3@130-140 B3@140-170"), {}, 0,
         {"warm_up": 25, "stage_imbalance": 10, "late_peer": 2, "cool_down": 33}),
        # a transfer behind the end of the awaited action; what is left is no one's
        (("F0@0-10 B0@40-60", "F0@15-20 B0@20-30"), {0: (30, 37), 1: (10, 15)}, 0,
         {"warm_up": 20, "exposed_communication": 7, "other": 3}),
        (("F0@0-10 B0@40-60", "F0@15-20 B0@20-30"), {0: (30, 37), 1: (10, 15)}, 1,
         {"warm_up": 10, "exposed_communication": 5, "cool_down": 30}),
    ],
)  # fmt: skip
def test_what_bubbles_waited_for(rows, transfers, rank, expected):
    assert bubbles(drawn(*rows, transfers=transfers), rank) == expected


def test_annotations_of_torch_are_read_with_their_stage():
    """Host annotations ``PP:0F0`` whose launched kernels make the actions; ranks in the order of their stages."""
    slices, tracks, flows = [], [], []
    plan = {3: ("0F0", "0F1", "0B0", "0B1"), 5: ("1F0", "1B0", "1F1", "1B1")}
    begin = {"0F0": 0, "0F1": 10, "1F0": 10, "1B0": 20, "1F1": 40, "0B0": 40, "1B1": 50, "0B1": 70}
    for number, actions in enumerate(plan.values()):
        roles = (TrackRole.ANNOTATION, TrackRole.HOST, TrackRole.DEVICE)
        tracks += [(number, role, role.name.lower()) for role in roles]
        for order, action in enumerate(actions):
            host, device = 10 * order, 1000 + begin[action]
            length = 10 if "F" in action else 20
            slices.append({"track": 3 * number, "start": host, "duration": 5, "name": f"PP:{action}",
                           "kind": OpKind.ANNOTATION})  # fmt: skip
            slices.append({"track": 3 * number + 1, "start": host + 1, "duration": 1, "name": "cudaLaunchKernel",
                           "kind": OpKind.HOST})  # fmt: skip
            slices.append({"track": 3 * number + 2, "start": device, "duration": length, "name": "gemm",
                           "kind": OpKind.GEMM})  # fmt: skip
            flows.append((len(slices) - 2, len(slices) - 1, FlowKind.LAUNCH))
    timeline = timeline_of(slices, tracks, [{"rank": rank} for rank in plan], flows=flows)
    recovered = recover_schedule(analyze(timeline))
    assert (recovered.method, recovered.ranks) == ("annotations", (3, 5))
    assert [" ".join(map(str, row)) for row in recovered.times.schedule.actions] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
    ]
    assert "1f1b" in recovered.matches
    assert recovered.times.starts[0] == (0.0, 10 / MILLISECOND, 40 / MILLISECOND, 70 / MILLISECOND)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["schedule", "show", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    timeline = drawn("F0@0-10 F1@10-20 B0@40-60 B1@70-90", "F0@10-20 B0@20-40 F1@40-50 B1@50-70", name="mine")
    path = tmp_path / "mine.pftrace"
    with path.open("wb") as stream:
        write_perfetto(timeline, stream)
    return path


def test_the_command_draws_what_ran_above_what_was_meant(trace, tmp_path):
    code, output, _ = run("--trace", str(trace), "--width", "60")
    assert code == 0
    lines = output.splitlines()
    assert lines[0].startswith("rank 0  ")
    assert lines[2] == "1f1b, as intended:"
    assert "its order is that of 1f1b" in output
    assert "check: ok" in output
    picture = tmp_path / "mine.svg"
    code, output, _ = run("gpipe", "--trace", str(trace), "--svg", str(picture), "--json")
    document = json.loads(output)
    assert document["intended"]["differences"] == ["rank 1 step 1: ran 1B0, gpipe has 1F1"]
    assert document["schema"] == "tracesim.recovered-schedule/1"
    assert [set(row["bubbles"]) for row in document["ranks"]] == [set(BUBBLE_CAUSES)] * 2
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (("F0@0-10 F1@10-20 B0@40-60", "F0@10-20 B0@20-40 F1@40-50 B1@50-70"), "0B1"),
        (("F0@0-10 F0@10-20 B0@40-60", "F0@10-20 B0@20-40"), "0F0"),
    ],
)
def test_a_broken_run_is_told_with_the_action(rows, problem):
    recovered = recover_schedule(analyze(drawn(*rows)))
    description = describe_recovered(recovered, intended_beside(recovered, None))
    assert not description["ok"]
    assert problem in description["problem"]
    assert description["intended"] is None


@pytest.mark.parametrize(
    ("timeline", "step", "message"),
    [
        (timeline_of([{"track": 0, "start": 0, "duration": 5, "name": "gemm", "kind": OpKind.GEMM}]), None,
         "shows no pipeline actions"),
        (drawn("F0@0-10 B0@10-20"), 7, "step 7 is not a whole step of the trace; choose one of -1"),
    ],
)  # fmt: skip
def test_what_cannot_be_recovered_is_the_users_error(timeline, step, message):
    with pytest.raises(TraceError, match=message):
        recover_schedule(analyze(timeline), step)


def test_a_missing_rank_is_named():
    whole = drawn("F0@0-10 B0@40-60", "F0@10-20 B0@30-40", "F0@20-25 B0@25-30")
    with pytest.raises(TraceError, match="shows no rank of pipeline rank 1"):
        recover_schedule(analyze(whole.select_ranks(np.array([0, 2], dtype=np.int32))))


@pytest.mark.shared_data
def test_a_real_job_ran_1f1b_and_its_last_stage_is_the_longest(shared_data):
    path = shared_data / "traces" / "straggler" / "timeline-ST.json.gz"
    code, output, _ = run("--trace", str(path), "--json")
    assert code == 0
    document = json.loads(output)
    assert document["matches"] == ["1f1b"]
    assert document["ok"]
    assert (document["pp"], document["microbatches"]) == (4, 4)
    busy = [row["busy"] for row in document["ranks"]]
    assert busy.index(max(busy)) == 3
    for row in document["ranks"]:
        assert row["busy"] + sum(row["bubbles"].values()) == pytest.approx(document["time"])
    code, _, error = run("--trace", str(path), "--step", "24")
    assert code == 2
    assert "choose one of 23, 25" in error
