"""Ranges and probabilities from the errors of past predictions, and the benchmark that makes them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from benchmarks import intervals
from tracesim.confidence import (
    ALLOCATED,
    FIGURES,
    ONE_DOMAIN,
    RESERVED,
    SEVERAL_DOMAINS,
    Residuals,
    residuals,
    time_figure,
)

EVEN = Residuals(
    rows=5, sources=2, percents=(0, 10, 50, 90, 100), ratios=(0.8, 0.9, 1.0, 1.2, 1.4), tail_percent=10
)


@pytest.mark.parametrize(
    ("tail", "expected"), [(10, (180.0, 240.0)), (5, (170.0, 260.0)), (0, (160.0, 280.0))]
)
def test_a_range_leaves_out_a_tail_on_both_sides(tail, expected):
    assert dataclasses.replace(EVEN, tail_percent=tail).range_of(200.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(80, 1.0), (79, 1.0), (90, 0.9), (95, 0.7), (100, 0.5), (120, 0.1), (130, 0.05), (140, 0.0), (200, 0.0)],
)
def test_probability_of_more_than_a_limit(limit, expected):
    assert EVEN.probability_above(100.0, limit) == pytest.approx(expected)


def test_nothing_predicted_is_above_nothing():
    assert EVEN.probability_above(0.0, 1.0) == 0


@pytest.mark.parametrize(("world", "expected"), [(1, ONE_DOMAIN), (8, ONE_DOMAIN), (9, SEVERAL_DOMAINS)])
def test_time_has_a_distribution_of_its_own_beyond_a_domain(world, expected):
    assert time_figure(world, 8) == expected


def test_the_distributions_of_the_package_are_distributions():
    assert tuple(residuals()) == FIGURES
    for figure in residuals().values():
        assert (figure.percents[0], figure.percents[-1]) == (0, 100)
        assert all(np.diff(figure.percents) > 0)
        assert all(np.diff(figure.ratios) >= 0)
        assert figure.ratios[0] > 0
        assert figure.rows >= figure.sources >= 1


def test_every_source_weighs_the_same():
    """A thousand rows at 2 and one row at 1 have their median between them."""
    by_source = {"large": np.full(1000, 2.0), "small": np.array([1.0])}
    assert intervals.quantiles(by_source, (0, 25, 75, 100)) == pytest.approx([1, 1, 2, 2], abs=0.01)


def test_quantiles_of_one_source_are_those_of_its_values():
    values = {"one": np.arange(101.0)}
    assert intervals.quantiles(values, (0, 10, 50, 90, 100)) == pytest.approx([0, 10, 50, 90, 100], abs=0.5)


def test_a_source_has_no_part_in_the_range_it_is_held_against():
    inner, outer = np.linspace(0.9, 1.1, 101), np.linspace(0.5, 1.5, 101)
    held = intervals.coverage({"inner": inner, "outer": outer}, 10)
    assert held["inner"] == 1
    assert held["outer"] == pytest.approx(0.16, abs=0.02)


def test_tails_are_cut_until_a_further_source_is_held():
    """Of twenty sources with a row each, nineteen hold the twentieth four times in five; of four, three do not."""
    many = {str(i): np.array([1.0 + i]) for i in range(20)}
    assert 5 <= intervals.tail_percent(many) <= 10
    assert np.mean(list(intervals.coverage(many, intervals.tail_percent(many)).values())) >= 0.8
    few = {str(i): np.array([1.0 + i]) for i in range(4)}
    assert intervals.tail_percent(few) == intervals.LEAST_TAIL
    assert intervals.tail_percent({"alone": np.arange(5.0)}) == intervals.LEAST_TAIL


def row(source: str, ratio: float, **changes):
    figure = {"measured": 100.0 * ratio, "predicted": 100.0}
    return {"source": source, "row": "r", "world_size": 8, "hardware": "h100-sxm", "time": figure, **changes}


def test_rows_are_sorted_by_what_they_measure():
    rows = [
        row("a", 1.1),
        row("a", 1.2, world_size=16),
        row("a", 1.3, world_size=16, hardware="gb200-nvl72"),
        row(
            "b",
            0.9,
            allocated={"measured": 3.0, "predicted": 2.0},
            reserved={"measured": 1.0, "predicted": 2.0},
        ),
        row("calculon-validation", 5.0),
        row("b", 5.0, undetermined="equal settings gave 1 and 2 GiB"),
        {
            "source": "e",
            "world_size": 8,
            "hardware": "h100-sxm",
            "allocated": {"measured": 0.8, "predicted": 1.0},
        },
        row("d", 1.4, world_size=9, hardware="a changed copy"),
    ]
    assert {
        figure: {s: v.tolist() for s, v in by.items()} for figure, by in intervals.ratios_of(rows).items()
    } == {
        ONE_DOMAIN: {"a": [1.1, 1.3], "b": [0.9]},
        SEVERAL_DOMAINS: {"a": [1.2], "d": [1.4]},
        ALLOCATED: {"b": [1.5], "e": [0.8]},
        # of a source without reserved memory, allocated stands for it
        RESERVED: {"b": [0.5], "e": [0.8]},
    }


def everything(source: str, ratio: float):
    figure = {"measured": ratio, "predicted": 1.0}
    return [
        row(source, ratio, allocated=figure, reserved=figure),
        row(source, ratio, world_size=64),
    ]


def test_what_is_written_is_what_the_package_reads(tmp_path, monkeypatch):
    board, target = tmp_path / "board.json", tmp_path / "residuals.yaml"
    board.write_text(json.dumps({"rows": everything("a", 0.9) + everything("b", 1.1)}))
    monkeypatch.setattr(intervals, "_TARGET", target)
    result = CliRunner().invoke(intervals.main, [str(board), "--write"])
    assert result.exit_code == 0, result.output
    assert "80% range 0.900 to 1.100" in result.output
    written = yaml.safe_load(target.read_text())["figures"]
    assert list(written) == list(FIGURES)
    assert written[RESERVED]["ratio_at_percent"][100] == 1.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "is no scoreboard"),
        ("{}", "is no scoreboard"),
        (json.dumps({"rows": [{"source": "a"}]}), "is no scoreboard"),
        (json.dumps({"rows": [row("a", 1.0)]}), "no rows of time over several domains, allocated memory"),
    ],
)
def test_what_is_no_scoreboard_is_one_message(tmp_path, text, message):
    (tmp_path / "board.json").write_text(text)
    result = CliRunner().invoke(intervals.main, [str(tmp_path / "board.json")])
    assert result.exit_code == 2
    assert message in result.output
