"""``tracesim schedule``: what it prints, writes and refuses, and with which exit code."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedules import (
    build_schedule,
    check_schedule,
    read_schedule_csv,
    schedule_names,
    simulate_unit_times,
    write_schedule_csv,
)
from tracesim.cli.schedule import schedule as command
from tracesim.readers import read_trace
from tracesim.schedule_workbench import PlanSizes, load_schedule, schedule_timeline


def run(*arguments: object, width: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(command, [str(argument) for argument in arguments])


def printed(*arguments: object, width: int = 80) -> list[str]:
    result = run(*arguments, width=width)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


SMALL = ("--pp", 2, "--microbatches", 2)


# --- show ---


def test_show_draws_the_grid_to_scale_with_bubble_and_activations_of_each_rank():
    assert printed("show", "1f1b", *SMALL, "--width", 60) == [
        "rank 0  0F0- 0F1- ..........0B0------ .....0B1------ ",
        "rank 1  .....1F0- 1B0------ 1F1- 1B1------ ..........",
        "1f1b: time 9, bubble 33.3%, 2 microbatches",
        "rank  stages  busy  idle  bubble  peak activations",
        "0     0          6     3   33.3%                 2",
        "1     1          6     3   33.3%                 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        # Narrower than the text of the actions: kind and microbatch; odd chunks in small letters.
        (
            ("zb-v", "--pp", 2, "--microbatches", 3, "--width", 46),
            [
                "rank 0  F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..",
                "rank 1  ..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2",
            ],
        ),
        # Narrower still: kinds only.
        (
            ("1f1b", "--pp", 2, "--microbatches", 4, "--width", 24),
            ["rank 0  FF..B0FB1FB2.B3", "rank 1  .FB0FB1FB2FB3.."],
        ),
        # Too narrow for that: the beginning and the end.
        (
            ("1f1b", "--pp", 2, "--microbatches", 40, "--width", 31),
            ["rank 0  FF..B0FB1F ~ BFB-FB-.B-", "rank 1  .FB0FB1FB2 ~ B-FB-FB-.."],
        ),
        # A forward beside a backward.
        (
            ("1f1b-overlap", "--pp", 1, "--microbatches", 3, "--width", 60),
            ["rank 0  F0---F1+B0----------F2+B1----------B2--------"],
        ),
    ],
)
def test_the_grid_is_fitted_to_the_width(arguments, lines):
    assert printed("show", *arguments)[: len(lines)] == lines


@pytest.mark.parametrize("name", [None, "zb-h1", "interleaved-1f1b", "dualpipe"])
def test_show_takes_the_times_of_a_simulated_scenario(name):
    result = run("show", *filter(None, [name]), "--scenario", "llama3-8b-tp2-pp4-dp8", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["name"] == (name or "1f1b")
    assert data["costs"] is None
    for rank, row in zip(data["ranks"], data["actions"], strict=True):
        spans = [(action["start"], action["end"]) for action in row]
        assert all(end <= later for (_, end), (later, _) in pairwise(spans))
        assert rank["busy"] == pytest.approx(sum(end - start for start, end in spans))
    simulated = run("compare", data["name"], "--scenario", "llama3-8b-tp2-pp4-dp8", "--json")
    # The rest of the step gathers and reduces weights, and updates them.
    assert 0.8 < data["time"] / json.loads(simulated.output)["rows"][0]["iteration_time_ms"] <= 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "greedy", "dualpipe"])
@pytest.mark.parametrize("microbatches", [8, 64])
def test_no_line_is_wider_than_the_terminal(name, microbatches):
    lines = printed("show", name, "--pp", 4, "--microbatches", microbatches)
    assert max(map(len, lines)) <= 80
    grid = [line for line in lines if line.startswith("rank ") and "stages" not in line]
    assert len(grid) == 4
    assert len({len(line) for line in grid}) == 1


def test_given_costs_and_uneven_stages_change_the_times():
    def time(*arguments: object) -> float:
        result = run("show", "zb-h1", "--pp", 2, "--microbatches", 4, "--json", *arguments)
        return json.loads(result.output)["time"]

    assert time() == 13
    assert time("--forward-cost", 2, "--backward-cost", 4) == 26
    # The bubble is F + I - W, the work F + B.
    assert time("--weight-cost", 0.5) == (1 + 1.5 - 0.5) + 4 * 3
    assert time("--stage-factors", "1,2") == 1 + 2 * 12
    pair = run("show", "1f1b-overlap", "--pp", 1, "--microbatches", 3, "--json", "--overlapped-cost", 2)
    assert json.loads(pair.output)["time"] == 1 + 2 + 2 + 2


def test_json_holds_the_figures_and_every_action():
    data = json.loads(run("show", "dualpipe", "--pp", 2, "--microbatches", 4, "--json").output)
    assert data["schema"] == "tracesim.schedule/1"
    assert (data["pp"], data["stages"], data["copies"], data["microbatches"]) == (2, 2, 2, 4)
    assert [rank["peak_activations"] for rank in data["ranks"]] == [3, 3]
    assert [rank["stages"] for rank in data["ranks"]] == [[0, 3], [1, 2]]
    assert data["actions"][0][0] == {"action": "0F0", "start": 0.0, "end": 1.0}
    assert data["time"] == max(action["end"] for row in data["actions"] for action in row)


def test_show_writes_picture_and_trace(tmp_path):
    svg, trace = tmp_path / "grid.svg", tmp_path / "grid.pftrace"
    lines = printed("show", "dualpipe", "--pp", 2, "--microbatches", 4, "--svg", svg, "-o", trace)
    assert [line for line in lines if line.startswith("wrote")] == [f"wrote {svg}", f"wrote {trace}"]
    picture = svg.read_text()
    assert picture.startswith("<svg")
    assert "forward beside backward" in picture
    assert "exposed communication" not in picture
    timeline = read_trace([trace])
    names = [timeline.string(name) for name in timeline.slices.name.tolist()]
    assert {"F0", "B2", "W1", "F3+B0"} <= set(names)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["grid.pftrace", "grid.svg"]


def test_the_timeline_of_a_schedule_has_its_times_and_the_activations_held():
    times = simulate_unit_times(build_schedule("1f1b", 2, 1, 2))
    timeline = schedule_timeline(times)
    first = timeline.slices.track == 0
    assert timeline.slices.start[first].tolist() == [0, 1_000_000, 4_000_000, 7_000_000]
    assert timeline.slices.duration[first].tolist() == [1_000_000, 1_000_000, 2_000_000, 2_000_000]
    held = timeline.counter_samples.value[timeline.counter_samples.track == 0]
    assert held.tolist() == [1, 2, 2, 1, 0]


# --- check ---


def test_check_says_what_was_checked():
    assert printed("check", "1f1b", *SMALL) == [
        "1f1b: ok; 2 ranks, 2 stages, 2 microbatches, 8 actions",
        "with sends that do not block: runs",
        "with sends that block: runs",
    ]


BROKEN = {
    "0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0": ("deadlock, 3 of 8 actions can run", ">1B1<"),
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1": ("rank 1 lacks 1B1", ">end<"),
    "0F0,0F1,0B0,0B1,0B0\n1F0,1B0,1F1,1B1": ("0B0 is there twice", ">0B0<"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_schedule_fails_the_check_with_the_step_marked(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    result = run("check", path)
    assert result.exit_code == 1
    assert all(part in result.stderr for part in BROKEN[text])
    as_json = run("check", path, "--json")
    assert as_json.exit_code == 1
    assert BROKEN[text][0] in json.loads(as_json.output)["problem"]


def test_a_schedule_that_needs_sends_that_do_not_block(tmp_path):
    path = tmp_path / "crossed.csv"
    # Each rank computes between its send and the receive that the other one's send waits for.
    path.write_text(
        "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    assert run("check", path, "--blocking-sends").exit_code == 0
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
        "1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2"
    )
    passed = run("check", path)
    assert passed.exit_code == 0
    assert "with sends that do not block: runs" in passed.output
    assert "with sends that block: schedule" in passed.output
    assert "rank 0 at step 3 (0SEND_F1) waits for 1RECV_F1, which is step 5 of rank 1" in passed.output
    failed = run("check", path, "--blocking-sends")
    assert failed.exit_code == 1
    assert "deadlock if sends block until their receive is posted" in failed.stderr
    assert ">0SEND_F1<" in failed.stderr


def test_the_memory_limit_is_checked():
    assert run("check", "1f1b", "--pp", 4, "--microbatches", 8, "--memory-limit", "4,3,2,1").exit_code == 0
    result = run("check", "1f1b", "--pp", 4, "--microbatches", 8, "--memory-limit", 3)
    assert result.exit_code == 1
    assert "0F3 makes 4 activations held, the limit is 3" in result.stderr


# --- compare ---


def test_compare_lays_schedules_of_one_model_side_by_side():
    data = json.loads(
        run("compare", "1f1b", "zb-v", "v-min", "--pp", 4, "--microbatches", 16, "--json").output
    )
    by_name = {row["schedule"]: row for row in data["rows"]}
    # A rank has work of 3 * 16 in each, whatever its chunks.
    assert by_name["1f1b"]["time"] == 3 * (16 + 3)
    assert by_name["zb-v"]["time"] == 48 + 3 / 2
    assert by_name["v-min"]["time"] == 48 + (4 * 4 - 5) / 2
    assert by_name["1f1b"]["peak_activations_first_rank"] == 4
    assert by_name["1f1b"]["peak_activations_last_rank"] == 1
    assert by_name["v-min"]["peak_activations"] == 2
    assert data["fastest"] == ["zb-v"]
    assert data["least_memory"] == ["v-min"]


def test_compare_lists_what_cannot_be_compared_with_the_reason():
    result = run("compare", "1f1b", "dualpipe", "zb-h9", "--pp", 4, "--microbatches", 6)
    assert result.exit_code == 0
    assert "dualpipe: not compared: dualpipe needs an even pp" in result.output
    assert "zb-h9: not compared: unknown schedule" in result.output
    assert run("compare", "zb-h9", "--pp", 4, "--microbatches", 6).exit_code == 1


def test_compare_simulates_on_a_scenario():
    arguments = (
        "compare",
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "--scenario",
        "llama3-8b-tp2-pp4-dp8",
        "--json",
    )
    result = run(*arguments, "--microbatches", 8)
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    by_name = {row["schedule"]: row for row in data["rows"]}
    assert data["fastest"] == ["interleaved-1f1b"]
    assert data["least_memory"] == ["1f1b"]
    assert [row["vpp"] for row in data["rows"]] == [1, 1, 2]
    assert (
        by_name["gpipe"]["peak_allocated_gib_first_rank"] > by_name["1f1b"]["peak_allocated_gib_first_rank"]
    )
    assert by_name["interleaved-1f1b"]["bubble_fraction"] < by_name["1f1b"]["bubble_fraction"]
    table = run(*arguments[:-1], "--microbatches", 8).output
    assert "step ms" in table
    assert "fastest" in table


def test_compare_takes_a_file_on_a_scenario(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule_csv(build_schedule("1f1b", 4, 1, 8), path)
    arguments = ("--scenario", "llama3-8b-tp2-pp4-dp8", "--microbatches", 8, "--json")
    rows = json.loads(run("compare", "1f1b", path, *arguments).output)["rows"]
    assert rows[0]["iteration_time_ms"] == rows[1]["iteration_time_ms"]


# --- export ---


@pytest.mark.parametrize("communication", [(), ("--with-communication",)])
def test_what_is_exported_reads_back(tmp_path, communication):
    path = tmp_path / "zb.csv"
    printed("export", "zb-v", "--pp", 3, "--microbatches", 6, "-o", path, *communication)
    back = read_schedule_csv(path)
    check_schedule(back)
    assert back.has_communication == bool(communication)
    assert back.stage_ranks == (0, 1, 2, 2, 1, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["zb.csv"]
    shown = load_schedule(str(path), PlanSizes())
    assert (shown.pp, shown.microbatches) == (3, 6)


def test_a_dash_exports_to_standard_output():
    assert printed("export", "1f1b", "--pp", 2, "--microbatches", 1, "-o", "-") == ["0F0,0B0", "1F0,1B0"]


# --- bad input: one message, exit code 2 where it is raised through the program ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("show",), "give the NAME of a schedule or a FILE.csv, or a --scenario"),
        (("show", "1f1b"), "schedule 1f1b: give --pp and --microbatches; only a .csv file says it itself"),
        (("show", "1f1c", "--pp", 4), "unknown schedule '1f1c'"),
        (("show", "1f1b", *SMALL, "--weight-cost", 3), "--weight-cost 3.0 is more than the whole backward"),
        (("show", "1f1b", *SMALL, "--forward-cost", "nan"), "cost forward=nan must be a number"),
        (("show", "1f1b", *SMALL, "--stage-factors", "1,x"), "--stage-factors '1,x' must be numbers"),
        (("show", "1f1b", *SMALL, "--stage-factors", "1"), "1 stage factors are given for 2 stages"),
        (("show", "1f1b", *SMALL, "--width", 5), "--width 5 must be at least 20"),
        (("show", "nowhere.csv"), "cannot read schedule nowhere.csv"),
        (("show", "1f1b", *SMALL, "--svg", "/nowhere/x.svg"), "cannot write /nowhere/x.svg"),
        (("check", "1f1b", *SMALL, "--memory-limit", "a"), "--memory-limit 'a' must be whole numbers"),
        (("export", "1f1b", *SMALL, "-o", "/nowhere/x.csv"), "cannot write /nowhere/x.csv"),
        (("compare", "1f1b", "--scenario", "no-such-scenario"), "neither a bundled scenario nor a file"),
    ],
)
def test_bad_input_raises_one_message_of_the_users_kind(arguments, complaint):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert complaint in str(result.exception)


def test_a_file_that_does_not_fit_the_sizes_given(tmp_path):
    path = Path(tmp_path / "mine.csv")
    write_schedule_csv(build_schedule("1f1b", 2, 1, 2), path)
    result = run("show", path, "--pp", 4)
    assert "does not fit --pp 4 (it has 2)" in str(result.exception)


def test_names_lists_them_all():
    names = printed("names")
    assert {"1f1b", "zb-h2", "v-min", "dualpipev", "greedy"} <= set(names)
    assert list(names) == list(schedule_names())
