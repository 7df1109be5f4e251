"""The command line: what each command prints, and that bad input is one message, exit code 2, and nothing written."""

from __future__ import annotations

import importlib.abc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import tracesim.run_output
from tracesim.__main__ import main as start
from tracesim.cli import main

SMALL = """\
model: {base: llama3.2-1b, layers: 4}
hardware: h100-sxm
parallel: {tp: 2, sp: true, pp: 2, dp: 2}
training: {num_microbatches: 2, seq_len: 512}
"""
CSV = SMALL.replace("pp: 2", "pp: 2, vpp: 1") + "schedule: mine.csv\n"
RUNS = [["run", "small.yaml"], ["run", "llama3-8b-tp2-pp4-dp8"]]


def tracesim_cli(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="tracesim")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output_of(*arguments: str) -> str:
    result = tracesim_cli(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a small scenario, which commands run in."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a small run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.yaml").write_text(SMALL)
    output_of("run", str(folder / "small.yaml"), "-o", str(folder / "out"))
    return folder / "out" / "trace.pftrace"


# -- what commands do --------------------------------------------------------------------------------------------


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_command_explains_itself(path):
    said = output_of(*path, "--help")
    assert said.startswith(f"Usage: {' '.join(('tracesim', *path))} ")
    assert len(said.splitlines()) > 4


def test_a_run_prints_its_report_and_writes_nothing(folder):
    said = output_of("run", "small.yaml")
    assert said.startswith("small: llama3.2-1b-changed (0.51 B parameters) on 8 x h100-sxm\n")
    for figure in ("iteration time", "MFU", "peak memory reserved", "time of each pipeline stage"):
        assert figure in said
    assert os.listdir(folder) == ["small.yaml"]


def test_a_run_says_what_it_wrote(folder):
    said = output_of("run", "small.yaml", "-o", "a/b", "--format", "svg,perfetto,chrome,svg")
    written = [line.removeprefix("wrote ") for line in said.splitlines() if line.startswith("wrote ")]
    assert written == [
        "a/b/pipeline.svg",
        "a/b/trace.pftrace",
        "a/b/rank_000.json",
        "a/b/rank_004.json",
        "a/b/report.json",
    ]
    assert sorted(written) == sorted(str(path) for path in Path("a/b").iterdir())
    assert said.splitlines()[-1].endswith("or run: tracesim open a/b/trace.pftrace")


def test_the_report_as_json_has_the_documented_keys(folder):
    report = json.loads(output_of("run", "small.yaml", "-o", "out", "--json"))
    assert report == json.loads(Path("out/report.json").read_text())
    assert list(report) == [
        "schema", "name", "world_size", "hardware", "model",
        "iteration_time_ms", "tokens_per_second", "tokens_per_second_per_gpu", "model_tflops_per_gpu",
        "mfu", "mfu_full_attention", "hfu",
        "pipeline_bubble_fraction", "exposed_communication_fraction",
        "peak_allocated_gib", "peak_allocated_blocks_gib", "peak_reserved_gib", "memory_capacity_gib",
        "memory_margin_gib", "fits_in_memory",
        "out_of_memory_probability", "host_memory_gib", "host_memory_capacity_gib", "ranges", "duration_basis",
        "utilisation", "stages", "exposed_communication",
    ]  # fmt: skip
    assert (report["schema"], report["name"], report["world_size"]) == ("tracesim.report/1", "small", 8)
    assert list(report["model"]) == ["name", "parameters", "active_parameters", "trained_parameters"]
    assert [list(stage) for stage in report["stages"]] == [[
        "stage", "representative_rank", "ranks", "layers",
        "compute_ms", "exposed_communication_ms", "idle_ms", "optimizer_ms",
        "peak_allocated_gib", "peak_allocated_blocks_gib", "peak_reserved_gib", "peak_reserved_by_rank_gib",
        "outside_allocator_gib",
        "memory_at_peak_gib", "peak_time_ms",
        "offload", "alive_at_peak",
    ]] * 2  # fmt: skip
    assert list(report["ranges"]) == [
        "confidence",
        "iteration_time_ms",
        "peak_allocated_gib",
        "peak_reserved_gib",
    ]
    assert list(report["duration_basis"]) == [
        "modelled",
        "measured",
        "extrapolated",
        "extrapolated_operations",
    ]
    for row in report["utilisation"]:
        assert list(row) == ["definition", "tflops_per_gpu", "of_dense_peak", "of_sparse_peak"]
    for stage in report["stages"]:
        assert list(stage["exposed_communication_ms"]) == ["tp", "cp", "ep", "pp", "dp"]
        assert list(stage["memory_at_peak_gib"]) == [
            "weights", "gradients", "optimizer_states", "activations", "temporary", "communication",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "files"),
    [
        ("stages", ["rank_000.json", "rank_004.json"]),
        ("all", [f"rank_{rank:03}.json" for rank in range(8)]),
        ("3,0-1,1", ["rank_000.json", "rank_001.json", "rank_003.json"]),
        (" 7 , 6 ", ["rank_006.json", "rank_007.json"]),
    ],
)
def test_ranks_of_a_trace(folder, ranks, files):
    output_of("run", "small.yaml", "-o", "out", "--format", "chrome", "--ranks", ranks)
    assert sorted(path.name for path in Path("out").glob("rank_*")) == files


def test_an_override_changes_the_run(folder):
    one, two = (
        json.loads(output_of("run", "small.yaml", "--json", "--set", f"training.num_microbatches={n}"))
        for n in (2, 4)
    )
    assert one["iteration_time_ms"] < two["iteration_time_ms"]


def test_two_runs_write_the_same_bytes(folder):
    formats = ("--format", "perfetto,chrome,svg")
    for name in ("one", "two"):
        output_of("run", "small.yaml", "-o", name, *formats)
    for path in Path("one").iterdir():
        assert path.read_bytes() == (Path("two") / path.name).read_bytes(), path.name


def test_reading_back_gives_the_figures_of_the_report(trace):
    report = json.loads((trace.parent / "report.json").read_text())
    read = json.loads(output_of("read", "--json", str(trace)))
    assert read["schema"] == "tracesim.read/1"
    for stage, rank in zip(report["stages"], read["ranks"], strict=True):
        step = rank["a_step"]
        assert rank["rank"] == stage["representative_rank"]
        assert step["iteration_time_ms"] == pytest.approx(report["iteration_time_ms"])
        assert step["compute_ms"] == pytest.approx(stage["compute_ms"])
        assert step["optimizer_ms"] == pytest.approx(stage["optimizer_ms"])
        assert step["idle_ms"] == pytest.approx(stage["idle_ms"])
        for dimension, exposed in stage["exposed_communication_ms"].items():
            assert step[f"exposed_communication_{dimension}_ms"] == pytest.approx(exposed)
    assert "simulated on h100-sxm, 2 of 8 rank(s)" in output_of("read", str(trace))


def test_a_trace_differs_from_itself_in_nothing(trace):
    difference = json.loads(output_of("diff", "--json", str(trace), str(trace), "--fail-over", "0"))
    assert difference["schema"] == "tracesim.diff/1"
    assert {values["absolute"] for values in difference["averages"]["metrics"].values()} == {0}


def test_fail_over_judges_the_second_trace_by_the_first(folder, trace):
    slower = "hardware.network.domain.bandwidth_gb_per_s=100"
    output_of("run", "small.yaml", "-o", "slow", "--set", slower)
    for a, b, code in ((str(trace), "slow/trace.pftrace", 1), ("slow/trace.pftrace", str(trace), 0)):
        result = tracesim_cli("diff", a, b, "--fail-over", "1.5")
        assert result.exit_code == code
        assert ("failed: iteration time differs by +" in result.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models"], "llama3-8b"),
        (["models", "llama3-8b"], "hidden_size"),
        (["hardware"], "h100-sxm"),
        (["hardware", "show", "h100-sxm"], "capacity_gib"),
        (["scenarios"], "llama3-8b-tp2-pp4-dp8"),
        (["--version"], "tracesim"),
    ],
)
def test_lists(arguments, said):
    assert said in output_of(*arguments)


@pytest.mark.parametrize("arguments", [["models"], ["models", "llama3-8b"], ["hardware"], ["scenarios"]])
def test_lists_as_json(arguments):
    assert json.loads(output_of(*arguments, "--json"))


@pytest.mark.parametrize("name", ["[red]x", "[bold]", "名前", "a b", "[link=x]y"])
def test_names_are_printed_as_they_are(folder, name):
    """Brackets are no markup to a terminal, wherever a name is printed."""
    (folder / f"{name}.yaml").write_text(SMALL)
    said = output_of("run", f"{name}.yaml", "-o", f"out {name}")
    assert said.startswith(f"{name}: llama3.2-1b")
    assert f"wrote out {name}/trace.pftrace\n" in said
    assert f"'out {name}/trace.pftrace'" in said
    trace = f"out {name}/trace.pftrace"
    assert output_of("read", trace).startswith(f"{trace}: simulated")
    assert f"a: {trace} (simulated" in output_of("diff", trace, trace)


# -- bad input ---------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*{'a' if i == 0 else f'b{i - 1}'}]\n" for i in range(9))


def refused(*arguments: str) -> str:
    """The one message of a command that is refused; checks code, stream and that no file was left."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    result = tracesim_cli(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()} == before
    return result.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.tp=3", "parallel.tp: 3 (from --set) does not"),
        ("parallel.pp=64", "4 layers are fewer than the 64 stages"),
        ("training.global_batch_size=63", "is not a multiple of micro_batch_size * dp = 1 * 2 = 2"),
        ("training.seq_len=.nan", "must be a whole number"),
        ("training.seq_len=1e999", "must be a whole number"),
        ("training.seq_len=-1", "must be a whole number from 1"),
        ("training.seq_len=1000000000", "must be a whole number from 1 to 16777216"),
        ("training.seq_len=99999999999999999999999", "must be a whole number from 1 to 16777216"),
        ("training.num_microbatches=1000000", "more than the limit of 1048576"),
        ("training={a: {b: 1}}", "training.a: unknown key"),
        ("training=[1]", "training: [1] (from --set) is a list"),
        ("model.layers=0", "layers: must be a whole number from 1"),
        ("model.layers=-1", "layers: must be a whole number from 1"),
        ("model.hidden_size=.inf", "hidden_size: must be a whole number"),
        ("model.hidden_size=99999999999999999999999", "hidden_size: must be a whole number"),
        ("hardware.memory.capacity_gib=.nan", "nan is not a finite number"),
        ("hardware.memory.bandwidth_gb_per_s=0", "must be more than 0"),
        ("hardware.network.fabric.latency_us=-1", "network.fabric.latency_us"),
        ("hardware.network.domain.bandwidth_gb_per_s=1.0e-300", "a size or time is beyond 64 bits"),
        ("hardware.peak_tflops.bf16=1.0e-300", "a size or time is beyond 64 bits"),
        ("hardware.memory.kernel_gap_us=1.0e+300", "a size or time is beyond 64 bits"),
        ("model.hidden_size=2147483646", "would hold more than 128 TiB at once"),
        ("training.micro_batch_size=1048576", "would hold more than 128 TiB at once"),
        ("training.num_microbatches=250000", "more than the 20,000,000 of a step that can be simulated"),
        ("name=[/red]", "name: ['/red'] (from --set) is a list"),
        ("name=a/b", "must not hold /"),
        ("überall=1", "unknown field überall"),
        ("parallel.tp", "is not key.path=value"),
        ("=3", "is not key.path=value"),
        ("parallel.tp={a: &x 1, b: *x}", "alias *x is not allowed"),
        ("parallel.tp=" + "[" * 100, "nested deeper than"),
        ("training.recompute.modules=[core_attn, core_attn]", "names a module twice"),
        ("schedule=nosuch.csv", "is not a file in"),
        ("schedule=1f1", "did you mean 1f1b?"),
    ],
)
def test_an_impossible_override(folder, override, said):
    assert said in refused("run", "small.yaml", "-o", "out", "--set", override)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "Missing argument 'SCENARIO'; see tracesim run --help"),
        (["run", "small"], "'small' is neither a bundled scenario nor a file"),
        (["run", "llama3-8b-tp2-pp4-dp"], "did you mean llama3-8b-tp2-pp4-dp8?"),
        (["run", "nosuch.yaml"], "nosuch.yaml does not exist"),
        (["run", "[red]x[/red].yaml"], "[red]x[/red].yaml does not exist"),
        (["run", "."], ". is a folder"),
        (["run", "empty"], "empty holds nothing"),
        (["run", "/dev/null"], "/dev/null holds nothing"),
        (["run", "list.yaml"], "list.yaml holds a list"),
        (["run", "bomb.yaml"], "alias *a is not allowed"),
        (["run", "deep.yaml"], "nested deeper than"),
        (["run", "binary"], "binary is not a text file"),
        (["run", "small.yaml\0"], "small.yaml"),
        (["run", "x" * 5000], "is neither a bundled scenario nor a file"),
        (["run", "x" * 5000 + ".yaml"], "x"),
        (["run", "small.yaml", "--colour"], "No such option"),
        (["run", "small.yaml", "--format", "pdf"], "pdf is not one of perfetto, chrome, svg"),
        (["run", "small.yaml", "--format", ","], "names no format"),
        (["run", "small.yaml", "--ranks", "8"], "'8' is not within the ranks 0 to 7"),
        (["run", "small.yaml", "--ranks", "0-99999999999999999999"], "is not within the ranks 0 to 7"),
        (["run", "small.yaml", "--ranks", "3-1"], "'3-1' runs backwards; write 1-3"),
        (["run", "small.yaml", "--ranks", "-1"], "'-1' is no rank"),
        (["run", "small.yaml", "--ranks", "1-"], "'1-' is no rank"),
        (["run", "small.yaml", "--ranks", ""], "'' is no rank"),
        (["run", "small.yaml", "--ranks", "first"], "'first' is no rank; write stages, all, or e.g. 0,8-15"),
        (["run", "small.yaml", "--ranks", "²"], "'²' is no rank"),
        (["run", "small.yaml", "--ranks", "٣"], "'٣' is no rank"),
        (["run", "small.yaml", "-o", ""], "the output folder has an empty name"),
        (
            ["run", "small.yaml", "-o", "empty"],
            "cannot use empty as output folder: a file of this name exists",
        ),
        (["run", "small.yaml", "-o", "empty/out"], "cannot write empty/out: not a directory"),
        (["run", "small.yaml", "-o", "x" * 5000], "choose a shorter name"),
        (["run", "small.yaml", "-o", "/proc/nothing"], "cannot write /proc/nothing"),
        (["read"], "Missing argument 'TRACES...'; see tracesim read --help"),
        (["read", "nosuch"], "nosuch: no such file or folder"),
        (["read", "empty"], "empty: the file is empty"),
        (["read", "cut.pftrace"], "cut.pftrace: damaged or truncated Perfetto trace"),
        (["read", "small.yaml"], "small.yaml: not a trace of a known format"),
        (["diff", "nosuch", "nosuch"], "nosuch: no such file or folder"),
        (["diff", "nosuch"], "Missing argument 'B'"),
        (["diff", "a", "b", "--fail-over", "much"], "'much' is not a valid float"),
        (["diff", "a", "b", "--fail-over", "nan"], "nan is no percentage"),
        (["models", "nosuch"], "model 'nosuch': no preset and no file of this name"),
        (["models", "list.yaml"], "list.yaml"),
        (["hardware", "show", "nosuch"], "no hardware profile 'nosuch'"),
        (["hardware", "show", "list.yaml"], "list.yaml"),
        (["hardware", "import-simumax", "nosuch", "-o", "x.yaml"], "nosuch: no such file"),
        (["hardware", "import-simumax", "empty", "-o", "x.yaml"], "empty is not a SimuMax machine file"),
        (["open", "nosuch"], "cannot open nosuch"),
        (["rum"], "No such command 'rum'"),
        (["hardware", "rum"], "No such command 'rum'; see tracesim hardware --help"),
    ],
)
def test_bad_input(folder, trace, arguments, said):
    for name, content in {
        "empty": b"",
        "list.yaml": b"- 1\n",
        "bomb.yaml": BOMB.encode(),
        "deep.yaml": b"{a: " * 2000,
        "binary": b"\xff\xfe\x00bad",
        "cut.pftrace": trace.read_bytes()[:1000],
    }.items():
        (folder / name).write_bytes(content)
    assert said in refused(*arguments)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "secret.yaml"], "secret.yaml"),
        (["read", "secret.yaml"], "secret.yaml"),
        (["run", "small.yaml", "-o", "locked/out"], "choose a folder you may write to"),
    ],
)
def test_files_out_of_reach(folder, arguments, said):
    (folder / "secret.yaml").write_text(SMALL)
    (folder / "secret.yaml").chmod(0)
    (folder / "locked").mkdir(mode=0o500)
    assert said in refused(*arguments)


def test_more_slices_than_a_trace_may_hold(folder):
    said = refused("run", "small.yaml", "-o", "out", "--ranks", "all", "--set", "parallel.dp=32768")
    assert "131072 ranks make about" in said
    assert "write fewer ranks (--ranks 0,8-15), or one a stage (--ranks stages)" in said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0,0F1,0B0,0B1\n", "has 1 pp instead of 2"),
        ("0F0,0B0\n1F0,1B0\n", "1 microbatches instead of 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n", "rank 1 at step 2 (1B1) waits for 1F1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "lacks 1B1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,junk\n", "row 2 (rank 1), column 4: 'junk' is no action"),
        ("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1F1,1B0,1B1\n", "action 0REDUCE_GRAD of schedule"),
        ("\n\n", "holds no actions"),
    ],
)
def test_a_broken_schedule_file(folder, rows, said):
    (folder / "mine.csv").write_text(rows)
    assert said in refused("run", "small.yaml", "-o", "out", "--set", "schedule=mine.csv")


def test_a_schedule_file_runs(folder):
    (folder / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    from_file = json.loads(output_of("run", "small.yaml", "--json", "--set", "schedule=mine.csv"))
    named = json.loads(output_of("run", "small.yaml", "--json", "--set", "schedule=gpipe"))
    assert from_file == named


# -- interrupted, and through the installed script ---------------------------------------------------------------


@pytest.mark.parametrize("first", ["write_perfetto", "pipeline_svg"])
def test_an_interrupted_run_leaves_no_partial_file(folder, monkeypatch, first):
    def interrupted(timeline, stream=None):
        if stream is not None:
            stream.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(tracesim.run_output, first, interrupted)
    result = tracesim_cli("run", "small.yaml", "-o", "out", "--format", "perfetto,svg")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    left = ["trace.pftrace"] if first == "pipeline_svg" else []
    assert [path.name for path in Path("out").iterdir()] == left


def test_an_interrupt_while_the_command_is_imported_is_told_in_the_same_words(monkeypatch, capsys):
    class Interrupting(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):
            if fullname == "tracesim.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tracesim.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted; nothing was left half-written\n"


def test_the_package_has_all_that_it_names():
    assert all(getattr(tracesim, name) is not None for name in tracesim.__all__)
    assert set(tracesim.__all__) <= set(dir(tracesim))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = tracesim.simulat


def script(*arguments: str, **options) -> subprocess.Popen[str]:
    path = Path(sys.executable).with_name("tracesim")
    if not path.exists():
        pytest.skip(f"tracesim is not installed beside {sys.executable}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([str(path), *arguments], text=True, **pipes)


def test_the_installed_script_runs_from_anywhere(folder):
    process = script("run", "small.yaml", "-o", "out", cwd=folder, env={"COLUMNS": "20", "LC_ALL": "C"})
    said, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (0, "")
    assert said.startswith("small: llama3.2-1b-changed")
    assert sorted(path.name for path in Path("out").iterdir()) == ["report.json", "trace.pftrace"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(folder, options):
    process = script("run", "small.yaml", *options, cwd=folder)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written(folder):
    with open("/dev/full", "w") as full:
        process = script("scenarios", stdout=full)
        _, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (2, "error: standard output: no space left on device\n")
