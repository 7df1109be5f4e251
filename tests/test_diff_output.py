"""What a comparison is written as: a trace with both runs, a Markdown summary, tables; the options of the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from exporters import write_perfetto
from exporters.perfetto_tracks import rank_names
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, OpKind
from tests.layered_runs import Kernel, LayeredRun
from tests.timelines import two_stage_timeline
from tracesim.cli import main
from tracesim.diff import compare_timelines, markdown, merged_timeline, render_diff
from tracesim.diff.merged import DIFFERENCE_COUNTER
from tracesim.readers import read_trace

RUN = LayeredRun((tuple(Kernel(f"gemm_{c}", 10_000) for c in "abcd"),) * 2, steps=2)
SLOWER = replace(
    RUN.edited(1, [*RUN.layers[1][:2], Kernel("gemm_c", 14_000), RUN.layers[1][3]]), epoch=77_000_000
)
SCENARIO = """\
model: {base: llama3.2-1b, layers: 2}
hardware: h100-sxm
parallel: {tp: 2, dp: 2}
training: {num_microbatches: 2, seq_len: 512}
"""


@pytest.fixture(scope="module")
def merged() -> Timeline:
    return merged_timeline(compare_timelines(RUN.timeline(), SLOWER.timeline()))


def named(timeline: Timeline, name: str) -> np.ndarray:
    return np.flatnonzero(timeline.slices.name == timeline.strings.index(name))


# -- both runs in one trace --------------------------------------------------------------------------------------


def test_ranks_say_which_run_they_are_of(merged):
    assert rank_names(merged) == ["a rank 000", "a rank 001", "b rank 000", "b rank 001"]
    assert [name.split()[0] for name in rank_names(replace(merged, properties={}))] == ["rank"] * 4


def test_the_second_run_is_moved_beside_the_first(merged):
    starts = [int(merged.slices.start[merged.slice_ranks() == rank].min()) for rank in range(4)]
    assert starts == [0, 0, 0, 0]


def test_ranks_without_a_common_clock_are_moved_one_by_one():
    # No collective joins the ranks of b, and rank 1 was recorded an hour later.
    hour = 3_600_000_000_000
    a = replace(RUN.timeline(), groups=())
    alone = np.where(a.slices.kind == OpKind.COLLECTIVE, OpKind.MEMCPY, a.slices.kind).astype(np.int8)
    a = replace(a, slices=a.slices.with_columns(kind=alone, group=np.full(len(a.slices), -1, dtype=np.int32)))
    late = np.where(a.slice_ranks() == 1, hour, 0)
    of_step = np.where(a.steps.rank == 1, hour, 0)
    b = replace(
        a,
        slices=a.slices.with_columns(start=a.slices.start + late),
        steps=a.steps.with_columns(start=a.steps.start + of_step, end=a.steps.end + of_step),
    )
    found = merged_timeline(compare_timelines(a, b))
    starts = [int(found.slices.start[found.slice_ranks() == rank].min()) for rank in range(4)]
    assert starts == [0, 0, 0, 0]
    assert found.steps.start.tolist() == [*a.steps.start.tolist()] * 2


def test_all_slices_are_kept_and_matched_ones_joined(merged):
    count = len(RUN.timeline().slices)
    assert len(merged.slices) == 2 * count
    flows = merged.flows.take(np.flatnonzero(merged.flows.kind == FlowKind.MATCH))
    assert len(flows) == count
    assert (flows.source < count).all()
    assert (flows.target >= count).all()
    names = [
        [merged.string(int(n)) for n in merged.slices.name[rows]] for rows in (flows.source, flows.target)
    ]
    assert names[0] == names[1]


def test_slices_that_got_slower_carry_the_ratio(merged):
    assert merged.origins is not None
    arguments = [merged.origins.arguments(row) for row in range(len(merged.slices))]
    told = {row for row, text in enumerate(arguments) if text}
    slower = {
        row for row in range(len(merged.slices)) if merged.string(int(merged.slices.name[row])) == "gemm_c"
    }
    assert told < slower
    assert len(told) == 2 * 2 * 2
    assert {arguments[row] for row in told} == {b'{"ratio":1.4000,"difference_ns":4000}'}


def test_a_counter_runs_to_the_difference(merged):
    tracks = [
        row
        for row, name in enumerate(merged.counter_tracks.name)
        if merged.string(int(name)) == DIFFERENCE_COUNTER
    ]
    assert merged.counter_tracks.rank[tracks].tolist() == [2, 3]
    samples = merged.counter_samples
    for track in tracks:
        values = samples.value[samples.track == track]
        assert values[0] == 0
        assert values[-1] == pytest.approx(2 * 0.004)
        assert (np.diff(values) >= 0).all()
        assert (np.diff(samples.time[samples.track == track]) > 0).all()


def test_the_file_can_be_read_back_and_is_the_same_each_time(merged, tmp_path):
    files = [tmp_path / name for name in ("one.pftrace", "two.pftrace")]
    for file in files:
        write_perfetto(merged, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    found = read_trace(files[0])
    assert len(found.slices) == len(merged.slices)
    assert int((found.flows.kind == FlowKind.MATCH).sum()) == int((merged.flows.kind == FlowKind.MATCH).sum())
    assert b"b rank 001" in files[0].read_bytes()


def test_memory_curves_and_groups_of_both_are_kept():
    timeline = two_stage_timeline()
    found = merged_timeline(compare_timelines(timeline, timeline))
    names = [found.string(int(name)) for name in found.counter_tracks.name]
    assert names.count("allocated") == names.count("weights") == 2
    assert found.groups == timeline.groups * 2
    assert found.slices.group[named(found, "send")].tolist() == [1]
    assert sorted({int(g) for g in found.slices.group}) == [-1, 0, 1, 2, 3]


# -- text --------------------------------------------------------------------------------------------------------


def test_the_markdown_summary():
    text = markdown(compare_timelines(RUN.timeline(), SLOWER.timeline()).result)
    assert text.startswith("## Step time 0.090 ms -> 0.094 ms: +0.004 ms (+4.44 %)\n")
    assert "| kernels that both have | +0.004 |\n| **sum** | **+0.004** |" in text
    assert "| `gemm_c` | 4 -> 4 | 0.040 | 0.048 | +0.008 |" not in text
    assert "| `gemm_c` | 2 -> 2 | 0.020 | 0.024 | +0.004 |" in text


def test_names_do_not_break_the_table():
    kernel = Kernel("void f<a|b>(`x`)\n", 10_000)
    runs = [LayeredRun(((k,),)).timeline() for k in (kernel, replace(kernel, duration=20_000))]
    rows = [line for line in markdown(compare_timelines(*runs).result).splitlines() if line.startswith("| `")]
    assert rows == ["| `void f<a\\|b>('x') ` | 1 -> 1 | 0.010 | 0.020 | +0.010 |"]


def test_the_tables_say_why():
    out = io.StringIO()
    render_diff(compare_timelines(RUN.timeline(), SLOWER.timeline()).result, Console(file=out, width=120))
    text = out.getvalue()
    assert "kernels that both have" in text
    assert "100.0 % of device time is matched" in text
    line = next(line for line in text.splitlines() if line.startswith("│ gemm_c"))
    assert "+0.004" in line
    assert "1.20" in line


# -- the command -------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diff", *arguments], prog_name="tracesim")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs as traces, and a scenario with what it simulates to."""
    path = tmp_path_factory.mktemp("diff")
    write_perfetto(RUN.timeline(), path / "a.pftrace")
    write_perfetto(SLOWER.timeline(), path / "b.pftrace")
    (path / "small.yaml").write_text(SCENARIO)
    result = CliRunner().invoke(
        main, ["run", str(path / "small.yaml"), "-o", str(path / "out"), "--ranks", "0,3"]
    )
    assert result.exit_code == 0
    return path


def test_files_are_written_where_asked_for(folder, tmp_path):
    trace, summary = tmp_path / "both.pftrace", tmp_path / "summary.md"
    result = command(
        str(folder / "a.pftrace"),
        str(folder / "b.pftrace"),
        "-o",
        str(trace),
        "--markdown",
        str(summary),
        "--json",
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["attribution"]["parts_ns"]["kernels"] == 4_000
    assert "gemm_c" in summary.read_text()
    assert len(read_trace(trace).ranks) == 4


@pytest.mark.parametrize(("limit", "code"), [("5", 0), ("4", 1)])
def test_a_check_fails_over_a_limit(folder, limit, code):
    assert (
        command(str(folder / "a.pftrace"), str(folder / "b.pftrace"), "--fail-over", limit).exit_code == code
    )


def test_a_scenario_is_simulated_with_the_ranks_of_the_trace(folder):
    result = command(str(folder / "small.yaml"), str(folder / "out"), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(r["rank"], r["rank_b"]) for r in found["attribution"]["ranks"]] == [(0, 0), (3, 3)]
    assert found["attribution"]["difference_ns"] == 0
    assert found["matched_fraction"] == 1
    assert {m["difference_bytes"] for m in found["memory"]} == {0}


def test_both_sides_can_be_scenarios(folder, tmp_path):
    (tmp_path / "wider.yaml").write_text(SCENARIO.replace("seq_len: 512", "seq_len: 1024"))
    result = command(str(folder / "small.yaml"), str(tmp_path / "wider.yaml"), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert all(found[side]["simulated"] for side in ("a", "b"))
    assert found["attribution"]["difference_ns"] > 0
    mirrored = json.loads(command(str(folder / "out"), str(folder / "small.yaml"), "--json").stdout)
    assert [r["rank_b"] for r in mirrored["attribution"]["ranks"]] == [0, 3]
    assert mirrored["attribution"]["difference_ns"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch.yaml", "a.pftrace"], "nosuch.yaml"),
        (["a.pftrace", "b.pftrace", "-o", "no/such/folder.pftrace"], "cannot write no/such/folder.pftrace"),
        (["a.pftrace", "b.pftrace", "--markdown", "no/such.md"], "cannot write no/such.md"),
    ],
)
def test_bad_input(folder, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    result = command(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_kernel_of_zero_length_has_no_ratio():
    layers = ((Kernel("a", 0), Kernel("b", 5_000, OpKind.NORM)),)
    other = ((Kernel("a", 700), Kernel("b", 5_000, OpKind.NORM)),)
    found = merged_timeline(compare_timelines(LayeredRun(layers).timeline(), LayeredRun(other).timeline()))
    assert found.origins is not None
    assert found.origins.text.startswith(b'{"difference_ns":700}')
