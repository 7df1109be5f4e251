"""``tracesim convert``: what it prints, what it refuses, and that a refused conversion leaves no file."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tracesim.cli import main

KERNEL = {"ph": "X", "cat": "kernel", "name": "[red]k[/red]", "pid": 0, "tid": 7, "ts": 3, "dur": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_text(json.dumps({"traceEvents": [KERNEL, {**KERNEL, "ts": 4}]}))
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        head = {"distributedInfo": {"rank": rank, "world_size": 2}}
        (ranks / f"{rank}.json").write_text(json.dumps(head | {"traceEvents": [KERNEL]}))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["convert", *arguments])


def test_a_table_of_what_was_read_and_written_and_what_was_repaired(folder):
    result = run("in.json", "out.pftrace")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["category", "read", "written"] in lines
    assert ["slices", "kernel", "2", "2"] in lines
    assert "  1 lanes added, because slices of one thread cross" in result.output
    assert "everything was kept" in result.output
    assert "wrote out.pftrace" in result.output
    assert (folder / "out.pftrace").stat().st_size > 100


def test_the_counts_as_json(folder):
    found = json.loads(run("in.json", "out.json.gz", "--json").output)
    assert (found["format"], found["ranks"], found["outputs"]) == ("json.gz", 1, ["out.json.gz"])
    assert found["counts"][0] == {"what": "slices", "category": "kernel", "read": 2, "written": 2}
    assert found["not_kept"] == {}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["in.json", "a.pftrace"], ["a.pftrace"]),
        (["in.json", "a.pftrace.gz"], ["a.pftrace.gz"]),
        (["in.json", "a.trace", "--to", "pftrace"], ["a.trace"]),
        (["in.json", "a.json"], ["a.json"]),
        (["ranks", "a.pftrace"], ["a.pftrace"]),
        (["ranks/1.json", "ranks/0.json", "a.pftrace"], ["a.pftrace"]),
        (["ranks", "a"], ["a/rank_000.json", "a/rank_001.json"]),
        (["ranks", "a", "--to", "json.gz"], ["a/rank_000.json.gz", "a/rank_001.json.gz"]),
    ],
)
def test_the_ending_or_to_says_the_format(folder, arguments, written):
    assert json.loads(run(*arguments, "--json").output)["outputs"] == written
    assert all((folder / name).is_file() for name in written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.json", "in.json"], "cannot write in.json: it is the input; choose another name"),
        (["in.json", "./ranks/../in.json"], "it is the input"),
        (["ranks", "ranks"], "cannot write the ranks into ranks: it holds other files (0.json, 1.json)"),
        (["ranks", "full"], "cannot write the ranks into full: it holds other files (notes.txt)"),
        (
            ["ranks", "one.json"],
            "cannot write 2 ranks into one.json: a profiler file holds one rank; give a folder",
        ),
        (["in.json", "full", "--to", "pftrace"], "cannot write full: it is a folder"),
        (["in.json", "out.html"], "cannot tell the format of out.html by its ending '.html'"),
        (["in.json", "out.json", "--to", "pftrace"], "the ending of out.json says json, --to says pftrace"),
        (["in.json", "none/out.pftrace"], "cannot write none/out.pftrace"),
        (["none.json", "out.pftrace"], "none.json: no such file or folder"),
        (["cut.json", "out.pftrace"], "cut.json: the JSON ends early"),
        (["text.json", "out.pftrace"], "text.json: not a trace of a known format"),
    ],
)
def test_what_cannot_be_converted_is_one_message_and_no_file(folder, arguments, message):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_same_conversion_again_replaces_its_own_files(folder):
    assert run("ranks", "a").exit_code == 0
    first = {path.name: path.read_bytes() for path in (folder / "a").iterdir()}
    assert run("ranks", "a").exit_code == 0
    assert {path.name: path.read_bytes() for path in (folder / "a").iterdir()} == first
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
