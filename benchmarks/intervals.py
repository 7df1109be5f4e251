"""How far predictions are off, as the ranges that reports print: ``python -m benchmarks.intervals SCOREBOARD``.

SCOREBOARD is what ``python -m benchmarks.accuracy ROWS --json`` printed. For each figure (step time in one domain and
over several, allocated and reserved memory) the ratio of measured to predicted is taken over all rows, every source
with the same weight. Printed is, for each source, how many of its rows lie in the 80 % range that the *other* sources
give, which is the test of the ranges: a source had no part in the range it is held against. The tails are cut so that
this is 80 % on average, or as near as tails of 2.5 % come. ``--write`` puts the quantiles into
``tracesim/residuals.yaml``.

Left out are sources that are no runs of their own (:data:`NOT_RUNS`) or ran under a profiler (:data:`PROFILED`), and
rows that their settings do not determine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from hardware_profiles import ProfileError, load_profile
from op_graphs.columns import Float64
from tracesim.confidence import ALLOCATED, CONFIDENCE, FIGURES, RESERVED, time_figure

NOT_RUNS = frozenset({"calculon-validation", "megatron-bridge-ablations"})
"""Sources whose rows are computed, or given for the difference between two settings and not for themselves."""
PROFILED = frozenset({"ccl-bench"})
"""Sources whose steps were taken from traces, so that the profiler's own work is in their times."""
LEAST_TAIL = 2.5
PERCENTS = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 100)
_TARGET = Path(__file__).resolve().parent.parent / "tracesim" / "residuals.yaml"

Ratios = dict[str, dict[str, Float64]]
"""Figure -> source -> measured over predicted of its rows."""


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> Ratios:
    """Measured over predicted by figure and source, from the rows of a scoreboard."""
    found: dict[str, dict[str, list[float]]] = {figure: {} for figure in FIGURES}
    for row in rows:
        if row["source"] in NOT_RUNS | PROFILED or row.get("undetermined"):
            continue
        figures = {"allocated": ALLOCATED, "reserved": RESERVED}
        figures["time"] = time_figure(row["world_size"], _gpus_per_domain(row["hardware"]))
        for key, figure in figures.items():
            if key in row:
                ratio = row[key]["measured"] / row[key]["predicted"]
                found[figure].setdefault(row["source"], []).append(ratio)
    for source, ratios in found[ALLOCATED].items():
        # Where only allocated memory was measured, reserved memory is off by that much at least.
        found[RESERVED].setdefault(source, ratios)
    return {figure: {s: np.array(v) for s, v in by.items()} for figure, by in found.items()}


def _gpus_per_domain(hardware: str) -> int:
    """Of a bundled profile; 8 of others, which are changed copies of 8-GPU servers."""
    try:
        return load_profile(hardware).network.gpus_per_domain
    except ProfileError:
        return 8


def quantiles(by_source: Mapping[str, Float64], percents: Sequence[float]) -> Float64:
    """Quantiles of all ratios, every source with the same weight."""
    values = np.concatenate(list(by_source.values()))
    weights = np.concatenate([np.full(len(v), 1 / len(v)) for v in by_source.values()])
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    # Each value stands in the middle of its weight; the smallest and the largest are the ends.
    place = 100 * (cumulative - weights[order] / 2) / cumulative[-1]
    ends = [0, *range(len(order)), -1]
    found: Float64 = np.interp(percents, np.concatenate(([0.0], place, [100.0])), values[order][ends])
    return found


def tail_percent(by_source: Mapping[str, Float64]) -> float:
    """The largest tail with which ranges of the other sources hold :data:`CONFIDENCE` of a source, on average.

    At least :data:`LEAST_TAIL`: further out stand single rows, of which nobody knows what was run.
    """
    for tail in np.arange(50 * (1 - CONFIDENCE), LEAST_TAIL, -0.5).tolist():
        held = coverage(by_source, tail)
        if held and np.mean(list(held.values())) >= CONFIDENCE:
            return float(tail)
    return LEAST_TAIL


def coverage(by_source: Mapping[str, Float64], tail: float) -> dict[str, float]:
    """For each source, the share of its rows in the range that the others give."""
    found = {}
    for source, values in by_source.items():
        others = {name: v for name, v in by_source.items() if name != source}
        if others:
            low, high = quantiles(others, (tail, 100 - tail))
            found[source] = float(((values >= low) & (values <= high)).mean())
    return found


def as_document(ratios: Ratios) -> dict[str, Any]:
    """What ``residuals.yaml`` holds."""
    return {
        "figures": {
            figure: {
                "rows": sum(map(len, by.values())),
                "sources": len(by),
                "tail_percent": tail_percent(by),
                "ratio_at_percent": {
                    percent: round(float(ratio), 4)
                    for percent, ratio in zip(PERCENTS, quantiles(by, PERCENTS), strict=True)
                },
            }
            for figure, by in ratios.items()
        }
    }


def print_tables(ratios: Ratios, console: Console) -> None:
    """The range of each figure, and for each source how many of its rows the other sources' range holds."""
    for figure, by in ratios.items():
        tail = tail_percent(by)
        low, high = quantiles(by, (tail, 100 - tail))
        held = coverage(by, tail)
        table = Table(
            "source", title=f"{figure}: {CONFIDENCE:.0%} range {low:.3f} to {high:.3f} of the prediction"
        )
        table.add_column("rows", justify="right")
        table.add_column("in the range of the others", justify="right")
        for source, values in by.items():
            table.add_row(source, str(len(values)), f"{held[source]:.0%}" if source in held else "-")
        table.add_section()
        rows = sum(len(by[source]) * share for source, share in held.items()) / max(
            1, sum(map(len, by.values()))
        )
        mean = float(np.mean(list(held.values()))) if held else 0.0
        table.add_row("all", str(sum(map(len, by.values()))), f"{mean:.0%} by source, {rows:.0%} of rows")
        console.print(table)


@click.command()
@click.argument("scoreboard", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help=f"Write {_TARGET.name}.")
def main(scoreboard: Path, write: bool) -> None:
    """Ranges of predictions from a scoreboard (the output of benchmarks.accuracy --json)."""
    try:
        rows = json.loads(scoreboard.read_text("utf-8"))["rows"]
        ratios = ratios_of(rows)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        click.echo(
            f"benchmarks.intervals: {scoreboard} is no scoreboard ({type(error).__name__}: {error})", err=True
        )
        sys.exit(2)
    empty = [figure for figure, by in ratios.items() if not by]
    if empty:
        click.echo(f"benchmarks.intervals: no rows of {', '.join(empty)}", err=True)
        sys.exit(2)
    print_tables(ratios, Console())
    if write:
        head = "# Measured over predicted, by `python -m benchmarks.intervals SCOREBOARD --write`; see confidence.py.\n"
        _TARGET.write_text(head + yaml.safe_dump(as_document(ratios), sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()
