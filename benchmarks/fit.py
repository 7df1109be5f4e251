"""Refit the figures of hardware profiles that are fitted on measured training runs, and print the residual.

``python -m benchmarks.fit PATH... [--json]``. A PATH is a file of measured rows, as for ``benchmarks.accuracy``.

Fitted is ``training_clock_ratio``: how much slower matrix products and attention run in a sustained training step than
in back-to-back runs of one kernel. It is fitted on the *slope* of the iteration time over the number of microbatches,
so that fixed costs (optimizer, gradient reduction) cannot hide in it, and only on layouts without tensor parallelism,
whose kernels take milliseconds: neither communication nor kernel launches can explain a difference there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks.accuracy import InputError, find_files, read_rows
from benchmarks.rows import MeasuredRow, RowFile, RowSkippedError, express
from benchmarks.rows.dispatch import source_name
from tracesim.scenario import Scenario
from tracesim.simulate import simulate

_STEPS = 20


@dataclass(frozen=True)
class ClockFit:
    """The ratio one layout asks for."""

    source: str
    layout: str
    microbatches: tuple[int, int]
    measured_slope_ms: float
    slope_at_full_clock_ms: float
    ratio: float


def fit_training_clock(files: Sequence[Path]) -> list[ClockFit]:
    """One fit for each source and layout with tp = 1 and at least two counts of microbatches."""
    fits = []
    for path in files:
        rows, source = read_rows(path)
        file = RowFile(path, source)
        layouts: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
        for index, row in enumerate(rows):
            try:
                measured = express(row, index, file)
            except RowSkippedError:
                continue
            scenario = measured.scenario
            if measured.time_ms and scenario.parallel.tp == 1:
                fixed = replace(scenario.training, num_microbatches=1)
                layouts[source_name(row, file), repr((scenario.parallel, fixed))].append(measured)
        fits += [
            _fit(name, found) for (name, _), found in layouts.items() if _counts(found)[0] < _counts(found)[1]
        ]
    return fits


def _counts(rows: Sequence[MeasuredRow]) -> tuple[int, int]:
    counts = [row.scenario.training.num_microbatches for row in rows]
    return min(counts), max(counts)


def _fit(source: str, rows: Sequence[MeasuredRow]) -> ClockFit:
    ordered = sorted(rows, key=lambda row: row.scenario.training.num_microbatches)
    few, many = ordered[0], ordered[-1]
    counts = _counts(rows)
    span = counts[1] - counts[0]
    assert few.time_ms is not None
    assert many.time_ms is not None
    measured = (many.time_ms - few.time_ms) / span

    def slope(ratio: float) -> float:
        return (_time_ms(many.scenario, ratio) - _time_ms(few.scenario, ratio)) / span

    low, high = 0.5, 1.5
    for _ in range(_STEPS):
        middle = (low + high) / 2
        # A higher clock makes the slope smaller.
        low, high = (middle, high) if slope(middle) > measured else (low, middle)
    return ClockFit(source, few.label, counts, measured, slope(1.0), round((low + high) / 2, 3))


def _time_ms(scenario: Scenario, ratio: float) -> float:
    hardware = replace(scenario.hardware, training_clock_ratio=ratio)
    return float(simulate(replace(scenario, hardware=hardware)).report["iteration_time_ms"])


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def main(paths: tuple[Path, ...], as_json: bool) -> None:
    """Refit training_clock_ratio on the measured rows in PATHS."""
    try:
        fits = fit_training_clock(find_files(paths))
    except InputError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps([vars(fit) for fit in fits], indent=2))
        return
    for fit in fits:
        residual = 100 * (fit.slope_at_full_clock_ms / fit.measured_slope_ms - 1)
        click.echo(
            f"{fit.source}: {fit.layout}, {fit.microbatches[0]} to {fit.microbatches[1]} microbatches: "
            f"{fit.measured_slope_ms:.2f} ms a microbatch measured, {fit.slope_at_full_clock_ms:.2f} at full clock "
            f"({residual:+.1f} %), training_clock_ratio {fit.ratio}"
        )


if __name__ == "__main__":
    main()
