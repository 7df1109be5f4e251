"""Traces that are not whole: cut in the middle of a step, sampled, with skewed clocks, without launches, some ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from op_graphs.timeline import Timeline
from tests.recordings import Recording
from tracesim.errors import ScenarioError
from tracesim.readers import read_trace
from tracesim.replay import ask, describe_limits, rebuild, replay, step_times, unexplained

TRACES = Path(__file__).with_name("data") / "cpu_traces"


def steps(marked: int, part_before: bool = False, part_behind: bool = False) -> Timeline:
    """Steps of 1 ms with forward and backward, of which some are marked; at both ends maybe a part of one."""
    recording = Recording()
    count = marked + part_before + part_behind
    for number in range(count):
        at = 1000.0 * number
        first, last = number == 0 and part_before, number == count - 1 and part_behind
        if not first:
            recording.launch("forward", at + 20, at + 27, 300)
        if not last:
            recording.launch("backward", at + 430, at + 437, 400)
        if not first and not last:
            recording.step(number, at, at + 990)
            recording.call("cudaDeviceSynchronize", at + 440, 405)
    if part_behind:
        recording.launch("half", 1000.0 * count - 500, 1000.0 * count - 493, 100)
    return recording.timeline()


def notes_of(timeline: Timeline) -> list[str]:
    run = rebuild(timeline)
    return describe_limits(run, unexplained(run))


@pytest.mark.parametrize(
    ("part_before", "part_behind", "says"),
    [
        (False, False, None),
        (
            True,
            False,
            "for 0.6 ms before the first step mark, which counts for no step, and for 0.0 ms behind",
        ),
        (False, True, "for 0.5 ms behind the last, which counts with that step"),
    ],
)
def test_a_trace_that_was_cut_in_the_middle_of_a_step_says_so(
    part_before: bool, part_behind: bool, says: str | None
) -> None:
    timeline = steps(3, part_before, part_behind)
    found = [note for note in notes_of(timeline) if "in the middle of a step" in note]
    assert [says in note for note in found] == ([True] if says else []), found
    assert all(abs(time.error) <= 0.01 for time in step_times(replay(rebuild(timeline))))


def test_a_recorded_run_that_loses_its_last_mark_is_cut() -> None:
    timeline = read_trace(TRACES / "ddp")
    assert not any("in the middle of a step" in note for note in notes_of(timeline))
    kept = timeline.steps.number < timeline.steps.number.max()
    cut = replace(timeline, steps=timeline.steps.take(np.flatnonzero(kept)))
    assert any("2 rank(s) were recorded in the middle of a step" in note for note in notes_of(cut))
    assert [abs(t.error) <= 0.01 for t in step_times(replay(rebuild(cut)))] == [True] * 4


def test_one_rank_of_two_stands_for_both_and_keeps_its_waiting() -> None:
    timeline = read_trace(TRACES / "ddp_slow_rank" / "rank0.json.gz")
    found = [note for note in notes_of(timeline) if "stand for the others" in note]
    assert found == [
        "1 of 2 ranks are given and stand for the others: 9 communication slices without a partner keep their measured "
        "duration, waiting included"
    ]
    # Rank 0 waits for the slow one most of the time, and of one rank that looks like transfer.
    run = rebuild(timeline)
    assert ask(run, ["communication=0"], unexplained(run)).change < -0.4


def test_clocks_of_host_and_device_that_differ_are_stated_and_do_not_move_the_step() -> None:
    straight = steps(3)
    slices = straight.slices
    early = np.where(straight.on_device(), slices.start - 50_000, slices.start)
    skewed = replace(straight, slices=slices.with_columns(start=np.maximum(early, 0)))
    assert any("the clocks of host and device differ" in note for note in notes_of(skewed))
    assert all(abs(time.error) <= 0.01 for time in step_times(replay(rebuild(skewed))))


def test_a_trace_with_most_kernels_missing_is_replayed_but_not_changed() -> None:
    recording = Recording()
    at = 0.0
    for number in range(40):
        launched = 5.0 * number
        # The device works all the time, but four of five of its kernels were not recorded.
        recording.launch(f"k{number}", launched, max(launched + 7, at), 100)
        at = max(launched + 7, at) + 500
    run = rebuild(recording.timeline())
    lateness = unexplained(run)
    assert abs(step_times(replay(run))[0].error) < 0.01
    assert any("events that are missing from the trace" in note for note in describe_limits(run, lateness))
    with pytest.raises(ScenarioError, match="refused"):
        ask(run, ["scale=0.5"], lateness)


@pytest.mark.shared_data
@pytest.mark.parametrize("trace", ["timeline_analysis", "trace_filter"])
def test_sampled_traces_are_refused_with_the_reason(shared_data: Path, trace: str) -> None:
    run = rebuild(read_trace(shared_data / "traces/hta" / trace))
    with pytest.raises(ScenarioError, match=r"refused, because slices start late.*may be sampled"):
        ask(run, ["scale=0.5"], unexplained(run))


@pytest.mark.shared_data
def test_a_training_run_that_loses_a_mark_keeps_its_other_steps(shared_data: Path) -> None:
    timeline = read_trace(shared_data / "traces/hta/trace_diff/control")
    cut = replace(timeline, steps=timeline.steps.take(np.arange(len(timeline.steps) - 1)))
    assert any("in the middle of a step" in note for note in notes_of(cut))
    assert all(abs(time.error) <= 0.04 for time in step_times(replay(rebuild(cut))))
