"""Replays of real traces: how near they come, and that the waits found are the program's and not the trace's.

The traces are not part of the project; each test skips where they are absent.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks.replay import main, measure_path
from tracesim.errors import ScenarioError
from tracesim.readers import read_trace
from tracesim.replay import Rebuilt, ask, describe_limits, predict_across_steps, rebuild, replay, unexplained
from tracesim.replay.across import COPY, summary
from tracesim.replay.run import step_duration, step_times

pytestmark = pytest.mark.shared_data

TRAINING = (
    "hta/trace_diff/control",
    "hta/trace_diff/test",
    "hta/nccl_parser_config",
    "torchrec/resnet18",
    "torchrec/sst_long_a2a_optimizer_5",
    "torchrec/sst_long_a2a_optimizer_5_qcomm_run0",
    "torchrec/sst_sleep_pl_dense_after_backward_2",
    "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz",
    "tracelens/mi300__resnet_act_checkpoint.json.gz",
    "deepseek/train.json.gz",
    "megatron-lm/tp2_v100",
    "param/dlrm_8rank_v100/kineto",
)


@cache
def rebuilt_from(path: Path) -> Rebuilt:
    return rebuild(read_trace([path]))


@pytest.mark.parametrize("trace", TRAINING)
def test_every_step_is_replayed_within_two_percent_and_in_order(shared_data: Path, trace: str) -> None:
    rows = measure_path(shared_data / "traces" / trace)
    assert rows
    for row in rows:
        assert abs(row["error_pct"]) <= 2, row
        assert abs(row["worst_rank_error_pct"]) <= 2, row
        assert row["same_kernel_order"], row


@pytest.mark.parametrize("trace", ["control", "test"])
def test_the_waits_of_one_step_predict_another(shared_data: Path, trace: str) -> None:
    errors = summary(predict_across_steps(read_trace([shared_data / "traces/hta/trace_diff" / trace])))
    median, _, worst = errors["inferred waits"]
    assert median <= 2
    assert worst <= 6
    # What the comparison is for: rules that reproduce a step as well, but do not carry over.
    assert errors["no inferred waits"][0] > 3 * median
    assert errors["wait on everything"][2] > 3 * worst
    assert errors[COPY][2] > worst


def test_a_time_shared_device_is_named_and_what_ifs_are_refused(shared_data: Path) -> None:
    rebuilt = rebuilt_from(shared_data / "traces/megatron-lm/tp2_v100")
    lateness = unexplained(rebuilt)
    assert lateness.nanoseconds[0] > 50_000_000
    assert any("a device that is shared" in note for note in describe_limits(rebuilt, lateness))
    with pytest.raises(ScenarioError, match="refused"):
        ask(rebuilt, ["scale=2"], lateness)


def test_ranks_that_are_missing_are_stated(shared_data: Path) -> None:
    rebuilt = rebuilt_from(shared_data / "traces/deepseek/train.json.gz")
    notes = describe_limits(rebuilt, unexplained(rebuilt))
    assert any(note.startswith("1 of 64 ranks are given and stand for the others") for note in notes)


def test_no_what_if_no_change_on_a_real_run(shared_data: Path) -> None:
    rebuilt = rebuilt_from(shared_data / "traces/torchrec/sst_long_a2a_optimizer_5")
    found = ask(rebuilt, ["scale=1"], unexplained(rebuilt))
    assert found.step == found.low == found.high == step_duration(step_times(replay(rebuilt)))


@pytest.mark.parametrize(
    ("trace", "what_if", "ratio"),
    [
        # Most of the step is one forward and one backward.
        ("hta/trace_diff/control", "microbatches=2", (1.8, 2.0)),
        # 615 slices are recomputed, and most of the time is communication.
        ("tracelens/mi300__resnet_act_checkpoint.json.gz", "recompute.off=.", (0.97, 0.99)),
        # Sending and computing after one another takes the sum of both.
        ("deepseek/train.json.gz", "overlap.collective=none", (1.75, 1.9)),
        # Four stages and microbatches: 11 instead of 7 times a forward and a backward, and what frames them.
        ("straggler/timeline-ST.json.gz", "microbatches=8", (1.55, 1.72)),
        ("straggler/timeline-ST.json.gz", "schedule=gpipe", (0.98, 1.05)),
    ],
)
def test_changes_of_the_program_of_a_real_run(
    shared_data: Path, trace: str, what_if: str, ratio: tuple[float, float]
) -> None:
    rebuilt = rebuilt_from(shared_data / "traces" / trace)
    found = ask(rebuilt, [what_if], unexplained(rebuilt))
    assert ratio[0] <= found.step / found.base_step <= ratio[1]


def test_a_pipeline_that_is_not_told_apart_is_named(shared_data: Path) -> None:
    rebuilt = rebuilt_from(shared_data / "traces/straggler/ideal-timeline-ST.json.gz")
    with pytest.raises(ScenarioError, match="nothing says which microbatch a slice is of; looked for"):
        ask(rebuilt, ["microbatches=8"], unexplained(rebuilt))


def test_a_run_on_cpu_is_replayed_by_its_threads(shared_data: Path) -> None:
    rebuilt = rebuilt_from(shared_data / "traces/hta/cpu_only")
    assert [abs(time.error) < 1e-4 for time in step_times(replay(rebuilt))] == [True] * 5
    notes = describe_limits(rebuilt, unexplained(rebuilt))
    assert any(note.startswith("1 of 300 ranks are given and stand for the others") for note in notes)
    # 83 % of its steps are all-reduces of gloo, most of that waiting for ranks that the trace does not hold.
    assert ask(rebuilt, ["communication=0"], unexplained(rebuilt)).change < -0.7


def test_the_benchmark_prints_json(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        str(shared_data / "traces" / name)
        for name in ("torchrec/resnet18", "odd/git-lfs-pointer_kineto_trace.json")
    ]
    assert main([*paths, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"path", "step", "ranks", "measured_ms", "replayed_ms", "error_pct"} <= set(result["traces"][0])
    assert result["mean_abs_error_pct"] == pytest.approx(
        sum(abs(row["error_pct"]) for row in result["traces"]) / len(result["traces"])
    )
    assert [refused["path"] for refused in result["refused"]] == [paths[1]]
