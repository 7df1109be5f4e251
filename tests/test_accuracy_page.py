"""The accuracy page and the lines over microbatches, from results of the scoreboard."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import accuracy_page
from benchmarks.accuracy import main
from benchmarks.golden_memory import golden_memory
from benchmarks.microbatch_slopes import slopes, verdict
from benchmarks.setting_deltas import deltas
from benchmarks.source_notes import NOTES


def row(
    microbatches: int, measured: float, predicted: float, source: str = "simumax-b200", layout: str = "a"
):
    error = 100 * (predicted / measured - 1)
    return {
        "source": source,
        "row": f"run of {microbatches}",
        "world_size": 8,
        "hardware": "b200-sxm",
        "microbatches": microbatches,
        "layout": layout,
        "time": {"measured": measured, "predicted": predicted, "error_pct": error},
    }


LINE = [row(count, 100.0 + 50 * count, 80.0 + 51.5 * count) for count in (4, 8, 32)]
DOCUMENT = {
    "sources": {
        "simumax-b200": {
            "time": {
                "n": 3,
                "mean_abs_pct": 1.5,
                "mean_signed_pct": -1.25,
                "max_abs_pct": 4.0,
                "spearman": None,
            }
        }
    },
    "rows": LINE,
    "skipped": [{"row": "x", "reason": "no | profile"}] * 2,
    "skip_reasons": {"x": {"no | profile": 2}},
}


def test_slope_and_fixed_cost_of_a_layout_are_told_apart():
    (found,) = slopes(LINE)
    assert found.counts == (4, 8, 32)
    assert (found.measured_slope, found.measured_fixed) == (pytest.approx(50), pytest.approx(100))
    assert found.slope_error_pct == pytest.approx(3)
    assert found.fixed_error_pct == pytest.approx(-20)


def scattered(deviations: tuple[float, float, float], source: str = "simumax-b200", layout: str = "a"):
    """A layout whose runs are off the line 100 ms + 50 ms a microbatch by so many percent; predicted is 150 + 50."""
    return [
        row(count, (100.0 + 50 * count) * (1 + off / 100), 150.0 + 50 * count, source, layout)
        for count, off in zip((4, 8, 32), deviations, strict=True)
    ]


def test_times_on_a_line_have_no_standard_error_and_are_sums_of_parts():
    (found,) = slopes(LINE)
    assert found.fixed_error == pytest.approx(0, abs=1e-9)
    assert found.composed
    assert not slopes(scattered((1.0, -1.0, 0.5)))[0].composed


def test_standard_errors_are_those_of_repeated_draws():
    # Deviations of 1 % drawn anew: the fixed costs of their lines spread by what one draw of the pooled scatter says.
    draws = np.random.default_rng(0).normal(0, 1.0, (400, 3))
    rows = [one for place, off in enumerate(draws) for one in scattered(tuple(off), layout=str(place))]
    found = slopes(rows)
    assert found[0].scatter_pct == pytest.approx(1.0, rel=0.1)
    assert found[0].fixed_error == pytest.approx(np.std([one.measured_fixed for one in found]), rel=0.1)
    assert found[0].slope_error == pytest.approx(np.std([one.measured_slope for one in found]), rel=0.1)


def test_scatter_is_pooled_over_the_layouts_of_a_source_alone():
    exact, noisy = scattered((0.0, 0.0, 0.0)), scattered((2.0, -2.0, 2.0), layout="b")
    other = scattered((0.0, 0.0, 0.0), source="other")
    by_layout = slopes([*exact, *noisy, *other])
    assert by_layout[0].scatter_pct == by_layout[1].scatter_pct > 1
    assert by_layout[2].composed


def test_what_the_measured_line_is_uncertain_by_is_counted_apart():
    (loose,) = slopes(scattered((4.0, -8.0, 4.0)))
    (tight,) = slopes(scattered((0.04, -0.08, 0.04)))
    for one, within in ((loose, True), (tight, False)):
        assert one.slope_right()
        assert not one.fixed_right()
        assert one.fixed_right(with_scatter=True) is within
    words = verdict([loose, tight])
    assert "within 4 % in 2 of 2 layouts, the fixed cost within 20 % in 0;" in words
    assert "standard errors of the measured line, 2 and 1." in words
    assert "Of the 1 layouts whose times scatter" in verdict([loose, *slopes(LINE)])


def test_two_counts_are_no_line_and_layouts_are_not_mixed():
    assert slopes(LINE[:2]) == []
    assert slopes([*LINE[:2], row(32, 1.0, 1.0, layout="b")]) == []
    assert slopes([*LINE[:2], row(32, 1.0, 1.0, source="other")]) == []


def test_the_page_has_every_table_of_its_template(tmp_path):
    results = tmp_path / "results.json"
    results.write_text(json.dumps(DOCUMENT))
    result = CliRunner().invoke(main, ["--markdown", "--results", str(results)])
    assert result.exit_code == 0
    page = result.output
    assert "{{" not in page
    assert "3 of 5 rows could be expressed and are simulated; 2 are left out." in page
    assert "| no \\| profile | 2 |" in page
    assert f"| `simumax-b200` | time | 3 | 1.50 | -1.25 | 4.00 | - | {NOTES['simumax-b200'].in_fit} |" in page
    assert "| `simumax-b200` | run of 4 | 4, 8, 32 | 50.00 | +3.0 | 100.0 | 0.0 | -20 | 0.00 |" in page
    assert "The slope is within 4 % in 1 of 1 layouts" in page
    assert "| run of 4 | 300.00 | 286.00 | -4.67 |" in page
    assert page == accuracy_page.page(DOCUMENT)


@pytest.mark.parametrize(
    "arguments", [[], ["--json", "--markdown", "x"], ["--results", __file__], ["x", "--results", __file__]]
)
def test_options_that_exclude_each_other_are_refused(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "give PATHs" in result.output


def test_a_table_that_is_not_known_is_refused(tmp_path, monkeypatch):
    template = tmp_path / "page.md"
    template.write_text("{{weather}}\n")
    monkeypatch.setattr(accuracy_page, "TEMPLATE", template)
    with pytest.raises(ValueError, match="asks for 'weather'; known are counts"):
        accuracy_page.page(DOCUMENT)


@pytest.mark.parametrize("text", ["no JSON", "{}", "[1]"])
def test_results_of_something_else_are_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    result = CliRunner().invoke(main, ["--markdown", "--results", str(tmp_path / "results.json")])
    assert result.exit_code == 2
    assert "is not what --json prints" in result.output


def memory_row(name: str, measured: float, predicted: float, undetermined: str = ""):
    error = 100 * (predicted / measured - 1)
    allocated = {"measured": measured, "predicted": predicted, "error_pct": error}
    return {"source": "megatron-golden", "row": name, "allocated": allocated, "undetermined": undetermined}


def test_golden_memory_counts_what_rows_determine_and_says_why_the_others_are_far_off():
    found = golden_memory(
        [
            memory_row("gpt/near/golden_values_dev_dgx_h100.json", 4.0, 4.02),
            memory_row("gpt/exact/golden_values_dev_dgx_h100.json", 4.0, 4.0),
            memory_row("moe/ep8_muon/golden_values_dev_dgx_gb200.json", 4.0, 3.8),
            memory_row("gpt/odd/golden_values_dev_dgx_h100.json", 4.0, 5.0),
            memory_row("gpt/open/golden_values_dev_dgx_h100.json", 4.0, 8.0, "differs among equal settings"),
        ]
    )
    assert (found.expressed, found.undetermined, len(found.errors)) == (5, 1, 4)
    assert (found.within(1.0), found.within(3.0)) == (2, 2)
    assert found.median_error == pytest.approx(2.75)
    assert found.median_signed_error == pytest.approx(0.25)
    (muon, errors), (unexplained, others) = found.far
    assert "distributed Muon" in muon
    assert errors == (pytest.approx(-5.0),)
    assert (unexplained, others) == ("not explained", (pytest.approx(25.0),))


def test_golden_memory_of_other_sources_is_none():
    assert golden_memory(LINE) is None


def ablation(number: int, heading: str, measured: float, predicted: float):
    return {
        **row(number, measured, predicted, "megatron-bridge-ablations"),
        "row": f"row {number}: {heading}",
    }


def test_changes_are_held_against_the_first_row_of_a_heading():
    rows = [
        ablation(0, "recompute", 450.0, 300.0),
        ablation(1, "recompute", 470.0, 325.0),
        ablation(2, "recompute", 440.0, 310.0),
        ablation(3, "parallel", 500.0, 400.0),
    ]
    first, second = deltas(rows)
    assert (first.baseline, first.row) == ("row 0: recompute", "row 1: recompute")
    assert (first.measured, first.predicted, first.size_error_pct) == (20.0, 25.0, pytest.approx(25.0))
    assert (first.has_right_sign, first.has_right_size) == (True, True)
    assert (second.measured, second.predicted) == (-10.0, 10.0)
    assert (second.has_right_sign, second.has_right_size) == (False, False)
    assert deltas(LINE) == []
