"""Two timelines side by side, and the description of one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CounterSamples,
    CounterTracks,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import Communication, OpKind, TrackRole
from tracesim.diff import diff_timelines, render_diff
from tracesim.readers import read_trace
from tracesim.trace_report import describe_trace, render_description

MS = 1_000_000


def run(ranks: dict[int, int], *, communication_ms: int = 2, simulated: bool = True) -> Timeline:
    """Ranks with a step of some ms: 5 ms of GEMM, then communication, then nothing."""
    numbers = list(ranks)
    rows = []
    for row in range(len(numbers)):
        rows += [
            {"track": 2 * row, "start": 0, "duration": 5 * MS, "name": 0, "kind": OpKind.GEMM},
            {"track": 2 * row + 1, "start": 5 * MS, "duration": communication_ms * MS, "name": 1,
             "kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE, "communication_bytes": 1 << 30},
        ]  # fmt: skip
    roles = (TrackRole.COMPUTE, TrackRole.COMMUNICATION_TP)
    return Timeline(
        strings=("mlp.fc1", "all_reduce [x]", "compute", "allocated"),
        ranks=Ranks.from_rows([{"rank": n} for n in numbers], tp=0, cp=0, ep=0, pp=0, dp=0),
        tracks=Tracks.from_rows(
            {"rank": r, "role": role, "stream": i, "name": 2}
            for r in range(len(numbers))
            for i, role in enumerate(roles)
        ),
        slices=Slices.from_rows(rows, **SLICE_DEFAULTS),
        flows=Flows.empty(),
        counter_tracks=CounterTracks.from_rows([{"rank": 0, "name": 3, "category": -1, "is_bytes": True}]),
        counter_samples=CounterSamples(np.array([0, 0]), np.array([0, 5]), np.array([1.0, 9.0])),
        steps=Steps.from_rows(
            [{"rank": r, "number": 1, "start": 0, "end": ranks[n] * MS} for r, n in enumerate(numbers)]
        ),
        name="run [bold]",
        simulated=simulated,
        device="h100-sxm",
        world_size=8,
        quirks=(Quirk("odd [thing]", 3),),
    )


def printed(render, result) -> str:
    out = io.StringIO()
    render(result, Console(file=out, width=120))
    return out.getvalue()


def test_a_difference_is_b_less_a():
    result = diff_timelines(run({0: 10}), run({0: 12}, communication_ms=4, simulated=False))
    metrics = result["averages"]["metrics"]
    assert metrics["iteration_time_ms"] == {
        "a": 10.0,
        "b": 12.0,
        "absolute": 2.0,
        "relative": pytest.approx(0.2),
    }
    assert metrics["exposed_communication_tp_ms"] == {"a": 2.0, "b": 4.0, "absolute": 2.0, "relative": 1.0}
    assert metrics["idle_ms"] == {"a": 3.0, "b": 3.0, "absolute": 0.0, "relative": 0.0}
    assert metrics["memory_ms"] == {"a": 0.0, "b": 0.0, "absolute": 0.0, "relative": None}
    assert result["averages"]["kinds"]["collective"]["total_ms"]["b"] == 4.0
    assert result["averages"]["kinds"]["gemm"]["count"]["a"] == 1.0
    assert (result["a"]["simulated"], result["b"]["simulated"]) == (True, False)


def test_on_both_sides_the_parts_add_up_to_the_iteration():
    metrics = diff_timelines(run({0: 10, 1: 11}), run({0: 12}))["averages"]["metrics"]
    for side in ("a", "b"):
        parts = ("compute_ms", "optimizer_ms", "exposed_communication_ms", "memory_ms", "idle_ms")
        assert sum(metrics[key][side] for key in parts) == pytest.approx(
            metrics["iteration_time_ms"][side], abs=1e-9
        )


def test_averages_are_over_all_ranks_and_ranks_are_matched_by_number():
    result = diff_timelines(run({0: 10, 4: 20}), run({4: 30, 7: 40}))
    assert result["averages"]["metrics"]["iteration_time_ms"]["a"] == 15.0
    assert result["averages"]["metrics"]["iteration_time_ms"]["b"] == 35.0
    assert [entry["rank"] for entry in result["ranks"]] == [4]
    assert result["ranks"][0]["metrics"]["iteration_time_ms"]["absolute"] == 10.0


def test_a_timeline_equals_itself():
    result = diff_timelines(run({0: 10, 1: 12}), run({0: 10, 1: 12}))
    for values in result["averages"]["metrics"].values():
        assert values["absolute"] == 0


def test_a_side_without_device_time_still_prints():
    timeline = run({0: 10})
    empty = replace(
        timeline, slices=Slices.empty(), steps=Steps.empty(), counter_samples=CounterSamples.empty()
    )
    result = diff_timelines(empty, timeline)
    assert result["averages"]["metrics"]["iteration_time_ms"] == {
        "a": 0.0,
        "b": 10.0,
        "absolute": 10.0,
        "relative": None,
    }
    assert "iteration time" in printed(render_diff, result)
    assert "1 of 8 rank(s), 0.000 ms, 0 slices" in printed(render_description, describe_trace(empty))


def test_results_are_json_and_stable():
    first, second = (json.dumps(diff_timelines(run({0: 10, 1: 12}), run({0: 11}))) for _ in range(2))
    assert first == second
    json.dumps(describe_trace(run({0: 10})))


def test_tables_show_the_figures_and_keep_brackets():
    text = printed(render_diff, diff_timelines(run({0: 10, 1: 10}), run({0: 12, 1: 12})))
    assert "run [bold]" in text
    line = next(line for line in text.splitlines() if "iteration time" in line and "10.000" in line)
    assert "12.000" in line
    assert "+2.000" in line
    assert "+20.0" in line
    assert "rank 1" in text


def test_the_description_of_a_trace():
    result = describe_trace(run({0: 10, 1: 12}))
    assert result["slices"] == {"compute": 2, "communication_tp": 2}
    assert [(r["rank"], r["steps"], r["a_step"]["iteration_time_ms"]) for r in result["ranks"]] == [
        (0, [1], 10.0),
        (1, [1], 12.0),
    ]
    assert result["tracks"][1] == {
        "rank": 0, "name": "compute", "role": "communication_tp", "slices": 1, "busy_ms": 2.0
    }  # fmt: skip
    assert result["communication"] == [{"operation": "all_reduce", "count": 2, "gib": 2.0, "total_ms": 4.0}]
    assert result["counters"] == [
        {"rank": 0, "name": "allocated", "is_bytes": True, "samples": 2, "maximum": 9.0}
    ]
    assert result["coverage"]["classified_fraction"] == 1.0
    text = printed(render_description, result)
    assert "simulated on h100-sxm, 2 of 8 rank(s)" in text
    assert "odd [thing]" in text


@pytest.mark.shared_data
def test_a_simulated_run_against_a_measured_one(shared_data):
    measured = read_trace(shared_data / "traces" / "deepseek" / "train.json.gz")
    result = diff_timelines(run({0: 10}), measured)
    assert result["averages"]["metrics"]["iteration_time_ms"]["b"] == pytest.approx(129.0, abs=0.05)
    assert "NVIDIA H800" in printed(render_diff, result)


@pytest.mark.shared_data
def test_two_measured_runs_of_one_model_on_two_generations(shared_data):
    traces = shared_data / "traces" / "hta" / "trace_diff"
    result = diff_timelines(read_trace(traces / "control"), read_trace(traces / "test"))
    metrics = result["averages"]["metrics"]
    assert metrics["compute_ms"]["b"] > 1.5 * metrics["compute_ms"]["a"]
    assert result["a"]["steps"] == result["b"]["steps"] == 6
    assert "embedding" in printed(render_diff, result)
