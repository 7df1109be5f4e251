"""``tracesim analyze``: what it prints and writes, and how it refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from exporters import write_perfetto
from op_graphs.vocabulary import OpKind, TrackRole
from tests.timelines import two_stage_timeline
from tracesim.analysis import analyze, annotate, describe
from tracesim.analysis.annotate import EXPOSED_COUNTER, EXPOSED_TRACK, IDLE_COUNTER, IDLE_TRACK, PATH_TRACK
from tracesim.cli import main
from tracesim.readers import read_trace


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["analyze", *arguments])
    return result.exit_code, result.stdout, result.stderr


def kernel(start: float, length: float, name: str, stream: int, **more) -> dict:
    arguments = {"stream": stream, "device": 0} | more
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length,
            "args": arguments}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two ranks: 100 us of GEMM, half of an all-reduce beside it on rank 0, all of it exposed on rank 1."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    nccl = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
            "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}  # fmt: skip
    for rank, start in ((0, 50), (1, 110)):
        events = [
            kernel(0, 100, "sm90_xmma_gemm_bf16", 7),
            kernel(start, 150 - start, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, **nccl),
        ]
        document = {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder


def test_json_has_the_documented_figures(trace):
    code, output, _ = run(str(trace), "--json")
    assert code == 0
    result = json.loads(output)
    assert result["schema"] == "tracesim.analysis/1"
    first, second = result["steps"]
    assert (first["span_ns"], first["compute_ns"], first["exposed_communication_ns"]["other"]) == (
        150_000, 100_000, 50_000,
    )  # fmt: skip
    assert first["overlap_percent"] == 50
    assert sum(second["idle_ns"].values()) == 10_000
    # rank 0 waits 60 us for rank 1, 10 of them exposed: from 100 to 110 us
    assert first["exposed_wait_ns"] == 10_000
    assert [s["waited_ns"] for s in result["stragglers"]] == [60_000, 0]
    (bandwidth,) = result["bandwidth"]
    assert bandwidth["bus_gb_per_second"] == pytest.approx(4000 / 40_000)
    assert result["critical_paths"][0]["pieces_ns"]["compute"] == 100_000


def test_tables_are_printed_and_the_file_written(trace, tmp_path):
    target = tmp_path / "found.pftrace"
    code, output, _ = run(str(trace), "-o", str(target))
    assert code == 0
    for part in (
        "where the time goes",
        "why the device is idle",
        "critical path",
        "who is late",
        "bandwidth",
    ):
        assert part in output
    found = read_trace(target)
    names = {found.string(int(name)) for name in found.tracks.name}
    assert {IDLE_TRACK, EXPOSED_TRACK, PATH_TRACK} <= names
    assert {found.string(int(name)) for name in found.counter_tracks.name} >= {EXPOSED_COUNTER, IDLE_COUNTER}


def test_the_findings_as_tracks_change_no_figure(trace, tmp_path):
    """An annotated file analyzes to what the original does."""
    target = tmp_path / "found.pftrace"
    run(str(trace), "-o", str(target))
    before, after = (json.loads(run(str(path), "--json")[1]) for path in (trace, target))
    assert after["steps"] == before["steps"]
    assert after["stragglers"] == before["stragglers"]


def test_annotations_tile_what_they_show():
    analysis = analyze(two_stage_timeline())
    found = annotate(analysis)
    added = found.slices.take(np.arange(len(analysis.timeline.slices), len(found.slices)))
    assert (added.kind == OpKind.ANNOTATION).all()
    assert (found.tracks.role[added.track] == TrackRole.ANNOTATION).all()
    names = [found.string(int(found.tracks.name[track])) for track in added.track]
    for row, rank_step in enumerate(analysis.steps):
        for track, expected in (
            (IDLE_TRACK, rank_step.breakdown.idle),
            (EXPOSED_TRACK, rank_step.breakdown.exposed),
        ):
            chosen = [
                n == track and found.tracks.rank[t] == row for n, t in zip(names, added.track, strict=True)
            ]
            assert int(added.duration[np.array(chosen)].sum()) == expected
    # the counters end at the totals
    for name, total in (
        (EXPOSED_COUNTER, [s.breakdown.exposed for s in analysis.steps]),
        (IDLE_COUNTER, [s.breakdown.idle for s in analysis.steps]),
    ):
        tracks = [i for i, n in enumerate(found.counter_tracks.name) if found.string(int(n)) == name]
        ends = [found.counter_samples.value[found.counter_samples.track == track][-1] for track in tracks]
        assert ends == pytest.approx([t / 1e6 for t in total])
    samples = found.counter_samples
    order = np.lexsort((samples.time, samples.track))
    assert np.array_equal(order, np.arange(len(order)))


def test_a_run_of_ours_is_analyzed_from_its_file(tmp_path):
    target = tmp_path / "run.pftrace"
    with open(target, "wb") as stream:
        write_perfetto(two_stage_timeline(), stream)
    code, output, _ = run(str(target), "--json")
    assert code == 0
    assert (
        json.loads(output)["steps"]
        == json.loads(json.dumps(describe(analyze(two_stage_timeline()))))["steps"]
    )


WEIRD = {
    "only the host": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    ],
    "one kernel of no duration": [kernel(5, 0, "k", 7)],
    "kernels at one instant": [kernel(5, 0, "k", 7), kernel(5, 0, "k", 7), kernel(5, 0, "k", 8)],
    "overlap on one stream": [kernel(0, 10, "k", 7), kernel(5, 10, "k", 7), kernel(6, 1, "k", 7)],
    "a name with markup": [kernel(0, 10, "[bold]k[/]", 7)],
    "a collective of one": [kernel(0, 10, "ncclDevKernel_AllReduce", 7)],
}


@pytest.mark.parametrize("events", WEIRD.values(), ids=WEIRD.keys())
@pytest.mark.parametrize("ranks", [1, 2])
def test_weird_traces_are_analyzed(tmp_path, events, ranks):
    for rank in range(ranks):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    code, output, errors = run(str(tmp_path), "-o", str(tmp_path / "out.pftrace"))
    assert (code, errors) == (0, "")
    assert output
    code, output, _ = run(str(tmp_path), "--json")
    for step in json.loads(output)["steps"]:
        parts = step["compute_ns"] + step["optimizer_ns"] + step["memory_ns"] + sum(step["idle_ns"].values())
        assert parts + sum(step["exposed_communication_ns"].values()) == step["span_ns"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [str(folder / "missing.json")], "no such file"),
        (lambda folder: [], "TRACES"),
        (lambda folder: [str(folder)], "no"),
        (
            lambda folder: [str(folder / "ranks"), "-o", str(folder / "none" / "x.pftrace")],
            "create its folder first",
        ),
        (lambda folder: [str(folder / "ranks"), "-o", str(folder)], "folder"),
        (lambda folder: [str(folder / "ranks"), "--wrong"], "--wrong"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(trace, tmp_path, make, message):
    (tmp_path / "empty").mkdir()
    arguments = make(tmp_path if make(tmp_path) != [str(tmp_path)] else tmp_path / "empty")
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("*.pftrace"))


def test_a_damaged_trace_is_refused(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text('{"traceEvents": [{"ph": "X", "na')
    code, output, errors = run(str(path))
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert str(path) in errors
