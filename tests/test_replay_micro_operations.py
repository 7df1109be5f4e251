"""Jobs recorded as micro-operations: their waits are known, stragglers and launch delays can be taken away exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replay_stragglers import against_published, main
from op_graphs.timeline import Timeline
from tracesim.errors import ScenarioError
from tracesim.readers import read_trace
from tracesim.replay import Rebuilt, rebuild, replay, step_times, unexplained
from tracesim.replay.what_if.stragglers import without_stragglers

MS = 1_000_000
THREADS = {"compute": 0, "optimizer": 0, "send": 1, "recv": 1, "gather": 2, "norm": 2}


def step(number: int, slow: float, late: float) -> list[dict[str, Any]]:
    """1F1B on two stages with two microbatches: forward 10, backward 20, transfer 1, optimizer 5 ms.

    The second stage computes ``slow`` times as long, and launches its second forward ``late`` ms late.
    """
    begin = 1000.0 * number
    events = []

    def add(stage: int, name: str, kind: str, start: float, length: float) -> None:
        arguments = {"step": 7 * number, "mb_id": 0, "model_chunk": 0, "seq_id": 0}
        tid = 3 * stage + THREADS[kind]
        times = {"ts": 1000 * (begin + start), "dur": 1000 * length}
        events.append(
            {"ph": "X", "name": name, "cat": name, "pid": 0, "tid": tid, "args": arguments, **times}
        )

    def move(direction: str, start: float) -> None:
        for stage, what in enumerate(("send", "recv") if direction == "forward" else ("recv", "send")):
            add(stage, f"{direction}-{what}", what, start, 1)

    first = 12 + 30 * slow
    second = first + 1 + late + 30 * slow
    for stage in (0, 1):
        add(stage, "params-all-gather", "gather", 0, 1)
        add(stage, "optimizer-clip-main-grad", "norm", second + 21, 1)
        add(stage, "optimizer", "optimizer", second + 22, 5)
    for start in (1, 11):
        add(0, "forward-compute", "compute", start, 10)
    for start in (12, first + 1 + late):
        add(1, "forward-compute", "compute", start, 10 * slow)
        add(1, "backward-compute", "compute", start + 10 * slow, 20 * slow)
    for start in (first, second):
        add(0, "backward-compute", "compute", start + 1, 20)
        move("backward", start)
    move("forward", 11)
    move("forward", first)
    return events


def job(folder: Path, slow: float = 1.0, late: float = 0.0, steps: int = 3) -> Timeline:
    """A job of some steps, with a second between their begins of which nothing was recorded."""
    names = {
        3 * s + t: f"PP rank {s}, TP rank 0, {n}"
        for s in (0, 1)
        for t, n in enumerate(("compute", "pp", "dp"))
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in names.items()
    ]
    for number in range(steps):
        events += step(number, slow, late)
    path = folder / "timeline-job.json"
    # Metadata last: the format is recognised by its first events.
    path.write_text(json.dumps(events[len(names) :] + events[: len(names)]))
    return read_trace(path)


def milliseconds(run: Rebuilt) -> list[float]:
    """Time of each step on the slowest rank."""
    steps: dict[int, int] = {}
    for time in step_times(replay(run)):
        steps[time.step] = max(steps.get(time.step, 0), time.replayed)
    return [time / MS for time in steps.values()]


def test_groups_and_pairs_are_those_of_the_program(tmp_path: Path) -> None:
    run = rebuild(job(tmp_path, steps=1))
    groups = {(group.name, group.ranks) for group in run.timeline.groups}
    assert groups == {("dp", (0,)), ("dp", (1,)), ("pp", (0, 1)), ("world", (0, 1))}
    rendezvous = run.graph.operations.rendezvous
    # two activations, two gradients and the norm
    assert sorted(np.bincount(rendezvous[rendezvous >= 0]).tolist()) == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(("slow", "late"), [(1.0, 0.0), (2.0, 0.0), (1.0, 7.0), (0.5, 3.0)])
def test_a_step_is_replayed_exactly_and_ends_with_its_last_operation(
    tmp_path: Path, slow: float, late: float
) -> None:
    # 12 + 30 s until the first backward of the second stage, 1 + late + 30 s for its second, 27 for what follows
    expected = 40 + 60 * slow + late
    assert milliseconds(rebuild(job(tmp_path, slow, late))) == pytest.approx([expected] * 3)


def test_what_was_launched_late_is_the_only_thing_unexplained(tmp_path: Path) -> None:
    run = rebuild(job(tmp_path, late=7.0))
    assert np.unique(run.unexplained[run.unexplained > 0]).tolist() == [7 * MS]
    assert unexplained(run).slices == 3
    assert milliseconds(without_stragglers(run, "launch-delays")) == pytest.approx([100.0] * 3)


def test_without_a_slow_stage_each_takes_the_mean(tmp_path: Path) -> None:
    run = rebuild(job(tmp_path, slow=2.0, late=7.0))
    assert milliseconds(run) == pytest.approx([167.0] * 3)
    # forward 15 and backward 30 on both stages: 17 + 45, 1 + 45, 37
    assert milliseconds(without_stragglers(run, "both")) == pytest.approx([145.0] * 3)
    assert milliseconds(without_stragglers(run, "stragglers")) == pytest.approx([152.0] * 3)


def test_evening_a_run_that_is_even_changes_nothing(tmp_path: Path) -> None:
    run = rebuild(job(tmp_path))
    assert np.array_equal(without_stragglers(run).durations, run.durations)


def test_what_goes_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="even=slow: write even=stragglers"):
        without_stragglers(rebuild(job(tmp_path)), "slow")


@pytest.mark.shared_data
def test_a_production_job_without_its_causes_takes_the_published_time(shared_data: Path) -> None:
    """2.21 s measured, 2.17 s without launch delay, 1.84 s ideal."""
    rows = against_published(shared_data / "traces" / "straggler")
    assert [round(row["published_s"], 2) for row in rows] == [2.21, 2.17, 1.84]
    for row in rows:
        assert row["steps"] == 32
        assert abs(row["error_pct"]) <= 0.5, row
        assert abs(row["worst_step_error_pct"]) <= 3, row


def test_the_check_names_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "0 files timeline-*.json.gz and 0 result-*.json.gz" in capsys.readouterr().err
