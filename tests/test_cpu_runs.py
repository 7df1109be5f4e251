"""Runs on CPU, as ``tests/data/record_cpu_traces.py`` records them: threads are the devices, gloo joins the ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, Phase, TrackRole
from tracesim.analysis import Analysis, analyze
from tracesim.analysis.cpu_runs import is_cpu_run, threads_as_devices
from tracesim.analysis.transfers import stragglers
from tracesim.diff import compare_timelines
from tracesim.errors import TraceError
from tracesim.readers import read_trace
from tracesim.recovered_schedule import recover_schedule
from tracesim.replay import Rebuilt, ask, describe_limits, rebuild, replay, step_times, unexplained
from tracesim.replay.run import step_duration, stream_deviations

TRACES = Path(__file__).with_name("data") / "cpu_traces"
RUNS = {"ddp": 9, "ddp_slow_rank": 9, "pipeline_1f1b": 16, "pipeline_interleaved": 48}
"""Operations of gloo that both ranks show: of three steps with two buckets and the loss; of two with 8 and 24 sends."""


@cache
def analysis_of(run: str) -> Analysis:
    return analyze(read_trace(TRACES / run))


@cache
def rebuilt_from(run: str) -> Rebuilt:
    return rebuild(read_trace(TRACES / run))


def names_on(timeline: Timeline, track: str) -> list[tuple[str, int, int]]:
    """(name, start, end) of the slices of a track in microseconds, from the first of the rank."""
    slices, rows = timeline.slices, []
    for number, name in enumerate(timeline.tracks.name.tolist()):
        if timeline.strings[name] == track:
            rows += np.flatnonzero(slices.track == number).tolist()
    end = slices.start + slices.duration
    return [
        (timeline.strings[slices.name[r]], int(slices.start[r]) // 1000, int(end[r]) // 1000) for r in rows
    ]


def one_rank(tmp_path: Path, backend: str = "gloo") -> Timeline:
    """A thread that adds, starts an all-reduce that another thread runs, multiplies, waits, and adds again."""

    def event(
        name: str, start: int, end: int, tid: int = 1, category: str = "cpu_op", **arguments: Any
    ) -> dict[str, Any]:
        place = {"pid": 1, "tid": tid, "ts": start, "dur": end - start}
        return {"ph": "X", "cat": category, "name": name, "args": arguments, **place}

    message = {"Input Dims": [[1000]], "Input type": ["float"]}
    events = [
        event("ProfilerStep#7", 0, 1000, category="user_annotation"),
        event("aten::add", 10, 110),
        event("c10d::allreduce_", 120, 150, **{**message, "Input Dims": [[[1000]]]}),
        event("gloo:all_reduce", 140, 700, 2, "user_annotation", **message),
        event("autograd::engine::evaluate_function: MmBackward0", 160, 400),
        event("aten::mm", 200, 380, **{"Input Dims": [[8, 4], [4, 2]]}),
        event("aten::view", 210, 220),
        event("aten::add_", 750, 950),
    ]
    path = tmp_path / "rank0.json"
    distributed = {"backend": backend, "rank": 0, "world_size": 2}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": distributed, "traceEvents": events}))
    return read_trace(path)


def test_a_thread_computes_works_for_the_host_and_waits(tmp_path: Path) -> None:
    timeline = threads_as_devices(one_rank(tmp_path))
    assert names_on(timeline, "compute of thread 1") == [
        ("host work", 0, 10),
        ("aten::add", 10, 110),
        ("host work", 110, 120),
        # The call, up to the moment at which another thread took over; what is left of it is work.
        ("c10d::allreduce_", 120, 140),
        ("host work", 140, 200),
        # With the operator inside it that describes its input.
        ("aten::mm", 200, 380),
        # Usual work of 20 us, then nothing until gloo was done.
        ("host work", 380, 400),
        ("host work", 700, 750),
        ("aten::add_", 750, 950),
        ("host work", 950, 1000),
    ]
    assert names_on(timeline, "gloo") == [("gloo:all_reduce", 140, 700)]
    slices = timeline.slices
    (product,) = np.flatnonzero((slices.kind == OpKind.GEMM) & timeline.on_device())
    assert (slices.flops[product], slices.phase[product]) == (2 * 8 * 4 * 2, Phase.BACKWARD_INPUT)
    (reduction,) = np.flatnonzero((slices.kind == OpKind.COLLECTIVE) & timeline.on_device())
    assert slices.communication_bytes[reduction] == 4000


def test_time_of_the_thread_is_what_a_replay_can_change(tmp_path: Path) -> None:
    run = rebuild(one_rank(tmp_path))
    lateness = unexplained(run)
    assert [t.error for t in step_times(replay(run))] == [0.0]
    # The pause hangs on gloo: 70 us of host work before it, and its 560.
    assert ask(run, ["communication=0"], lateness).step == (940 - 300) * 1000
    assert ask(run, ["scale.kind.gemm=0.5"], lateness).step == 940 * 1000
    assert ask(run, ["scale.kind.gemm=3"], lateness).step == (940 + 2 * 180 - 300) * 1000


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_run_on_gpus_recorded_without_them_is_none_on_cpu(tmp_path: Path, backend: str) -> None:
    timeline = one_rank(tmp_path, backend)
    assert not is_cpu_run(timeline)
    assert threads_as_devices(timeline) is timeline
    with pytest.raises(TraceError, match=r"no kernels or copies.*ProfilerActivity.CUDA"):
        rebuild(timeline)


@pytest.mark.parametrize("run", RUNS)
def test_a_thread_only_pauses_until_an_operation_of_gloo_has_ended(run: str) -> None:
    timeline = analysis_of(run).timeline
    slices, end = timeline.slices, timeline.slices.start + timeline.slices.duration
    device, rank = timeline.on_device(), timeline.slice_ranks()
    names = [timeline.strings[name] for name in timeline.tracks.name]
    for track in np.unique(slices.track[device]).tolist():
        if not names[track].startswith("compute of"):
            continue
        rows = np.flatnonzero(slices.track == track)
        gloo = device & (rank == timeline.tracks.rank[track]) & (slices.communication > 0)
        resumed = slices.start[rows][1:][end[rows][:-1] < slices.start[rows][1:]]
        assert (slices.start[rows][1:] >= end[rows][:-1]).all(), "slices of a thread overlap"
        assert np.isin(resumed, end[gloo]).all()
        assert len(resumed)


@pytest.mark.parametrize(("run", "operations"), RUNS.items())
def test_operations_of_gloo_are_matched_across_ranks(run: str, operations: int) -> None:
    matches = analysis_of(run).transfers.matches
    assert (len(matches.method), len(matches.row), matches.unmatched) == (operations, 2 * operations, {})
    first = matches.row.reshape(-1, 2)
    size = analysis_of(run).timeline.slices.communication_bytes[first]
    assert (size[:, 0] == size[:, 1]).all()


@pytest.mark.parametrize("run", RUNS)
def test_steps_are_replayed_in_order_and_nothing_is_unexplained(run: str) -> None:
    run_rebuilt = rebuilt_from(run)
    replayed = replay(run_rebuilt)
    assert [abs(t.error) <= 0.01 for t in step_times(replayed)] == [True] * (6 if "ddp" in run else 4)
    assert all(stream.same_order for stream in stream_deviations(replayed))
    lateness = unexplained(run_rebuilt)
    assert lateness.step_share <= 0.02
    assert any("no device in the trace" in note for note in describe_limits(run_rebuilt, lateness))


def test_the_slow_rank_is_found_and_taken_away() -> None:
    analysis = analysis_of("ddp_slow_rank")
    late = {s.rank: s for s in stragglers(analysis.timeline, analysis.transfers)}
    assert late[1].last >= 8
    assert late[1].caused_wait > 10 * late[0].caused_wait
    run = rebuilt_from("ddp_slow_rank")
    # It computes four times as much as the other, which waits for most of the step.
    assert ask(run, ["rank.1=0.25"], unexplained(run)).change < -0.4
    assert abs(ask(run, ["rank.0=0.25"], unexplained(run)).change) < 0.1


@pytest.mark.parametrize(
    ("run", "schedule", "method"),
    [
        ("pipeline_1f1b", "1f1b", "compute slices"),
        ("pipeline_interleaved", "interleaved-1f1b", "annotations"),
    ],
)
def test_the_schedule_that_ran_is_recovered(run: str, schedule: str, method: str) -> None:
    found = recover_schedule(analysis_of(run))
    assert (found.method, schedule in found.matches) == (method, True)
    forwards = 4 if schedule == "1f1b" else 8
    assert [(s.forwards, s.backwards) for s in analysis_of(run).pipeline] == [(forwards, forwards)] * 4


@pytest.mark.parametrize("run", RUNS)
def test_what_ifs_keep_their_promises(run: str) -> None:
    rebuilt = rebuilt_from(run)
    lateness = unexplained(rebuilt)
    base = ask(rebuilt, ["scale=1"], lateness)
    assert base.change == 0
    assert ask(rebuilt, ["communication=0"], lateness).step < base.step
    assert ask(rebuilt, ["host=0.5"], lateness).step < base.step
    # Nothing waits for a clock: with all times halved, also those before the first slice, a step takes half.
    halved = replace(rebuilt, durations=rebuilt.durations // 2, unexplained=rebuilt.unexplained // 2)
    assert step_duration(step_times(replay(halved))) == pytest.approx(base.step / 2, rel=0.002)


def test_two_runs_are_compared_by_what_their_threads_do() -> None:
    sides = [read_trace(TRACES / run) for run in ("ddp", "ddp_slow_rank")]
    result = compare_timelines(*sides).result
    assert result["matched_fraction"] > 0.9
    found = result["attribution"]
    assert sum(found["parts_ns"].values()) == found["difference_ns"]
    # The rank that computes as before waits for the other one.
    waiting = {rank["rank"]: rank["parts_ns"]["waiting_for_peers"] for rank in found["ranks"]}
    assert waiting[0] > 10 * abs(waiting[1])


def test_reading_stays_what_the_file_says() -> None:
    timeline = read_trace(TRACES / "ddp")
    assert not timeline.on_device().any()
    assert (timeline.world_size, timeline.ranks.rank.tolist()) == (2, [0, 1])
    assert set(timeline.tracks.role.tolist()) == {TrackRole.HOST, TrackRole.ANNOTATION}
    simulated = replace(timeline, device="NVIDIA H100")
    assert not is_cpu_run(simulated)
