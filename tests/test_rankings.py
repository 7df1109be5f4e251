"""Ranking of schedules in cells of measured rows: which rows make a cell, what counts as in order, and real cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.rankings import iteration_time_ms, main, measured_runs, rank_cells
from tests.dense_scenarios import dense_mapping
from tracesim.scenario import Scenario, load_scenario


def run(schedule: str, microbatches: int = 8, vpp: int = 1) -> Scenario:
    return load_scenario(
        dense_mapping(
            schedule=schedule,
            parallel__pp=2,
            parallel__vpp=vpp,
            training__num_microbatches=microbatches,
        )
    )


def test_rows_that_differ_in_their_schedule_alone_are_a_cell() -> None:
    times = {"gpipe": 3.0, "1f1b": 2.0, "interleaved-1f1b": 1.0}
    rows = [
        (run("gpipe"), 30.0),
        (run("1f1b"), 20.0),
        (run("interleaved-1f1b", vpp=2), 25.0),
        (run("1f1b", 4), 9.0),
    ]
    (cell,) = rank_cells(rows, lambda scenario: times[scenario.schedule])
    assert [run.schedule for run in cell.runs] == ["1f1b", "interleaved-1f1b", "gpipe"]
    assert not cell.in_order
    assert cell.pairs == (2, 3)
    renamed = [(replace(scenario, name="x"), time) for scenario, time in rows[:2]]
    assert rank_cells(renamed, iteration_time_ms)[0].in_order
    # How a runtime places its transfers is a part of the schedule.
    placed = [
        (replace(scenario, overlap=replace(scenario.overlap, p2p="in-place")), 30.0)
        for scenario, _ in rows[:1]
    ]
    assert len(rank_cells([*placed, rows[1]], lambda scenario: times[scenario.schedule])) == 1
    # So is an optimizer that waits for no other stage.
    validated = [
        (replace(scenario, training=replace(scenario.training, post_validation=True)), 30.0)
        for scenario, _ in rows[:1]
    ]
    assert len(rank_cells([*validated, rows[1]], lambda scenario: times[scenario.schedule])) == 1


@pytest.mark.shared_data
def test_zero_bubble_schedules_come_out_in_the_order_measured(shared_data: Path) -> None:
    """A cell of the smallest model: the automatic schedules of Zero Bubble, by their memory."""
    rows = measured_runs(shared_data / "measured" / "zero-bubble.json")
    small = [row for row in rows if row[0].model.name == "GPT 1.5B"]
    (cell,) = rank_cells(row for row in small if row[0].training.num_microbatches == 24)
    assert [run.schedule.partition(",")[0] for run in cell.runs] == ["greedy:memory=16", "greedy:memory=8"]
    assert cell.in_order
    assert all(run.simulated == pytest.approx(run.measured, rel=0.06) for run in cell.runs)


@pytest.mark.shared_data
def test_interleaved_comes_out_between_the_automatic_schedule_and_1f1b(shared_data: Path) -> None:
    """As measured: a cell of 16 stages, which all three kinds of runtimes are in."""
    rows = measured_runs(shared_data / "measured" / "zero-bubble.json")
    large = [row for row in rows if row[0].model.name == "GPT 14.6B"]
    (cell,) = rank_cells(row for row in large if row[0].training.num_microbatches == 48)
    assert [run.schedule.partition(",")[0] for run in cell.runs] == [
        "greedy:memory=32",
        "interleaved-1f1b",
        "1f1b",
    ]
    assert cell.in_order


def test_a_file_without_cells_ranks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"source": {"name": "none"}, "rows": []}')
    result = CliRunner().invoke(main, [str(path)])
    assert result.exit_code == 2
    assert f"no cell in {path}: a cell needs two rows" in result.output
    assert "of 0 cells" not in result.output


def test_what_holds_no_rows_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("no JSON")
    result = CliRunner().invoke(main, [str(tmp_path / "rows.json")])
    assert result.exit_code == 2
    assert "cannot be read as JSON" in result.output
