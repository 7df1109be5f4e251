"""Scoreboard: simulate measured runs and print predicted against measured, row by row and source by source.

``python -m benchmarks.accuracy PATH... [--json]``. A PATH is a file ``{"source": {...}, "rows": [...]}`` or a folder
of such files. Every row is either simulated or listed with the reason why not; none is left out silently.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.rows import MeasuredRow, RowFile, RowSkippedError, RunReport, express
from benchmarks.rows.dispatch import row_label, source_name
from benchmarks.scores import Score, error_pct, score
from tracesim.scenario import Scenario

Runner = Callable[[Scenario], RunReport]
MAX_FILE_BYTES = 1 << 28
FIGURES = ("time", "allocated", "reserved", "activations", "state", "bubble")


class InputError(ValueError):
    """A PATH does not exist or holds no file of measured rows."""


@dataclass(frozen=True)
class RowResult:
    """One simulated row: for each figure that was measured, (measured, predicted); time in ms, memory in GiB."""

    source: str
    row: str
    world_size: int
    hardware: str
    figures: Mapping[str, tuple[float, float]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SkippedRow:
    """One row that was not simulated, and why."""

    source: str
    row: str
    reason: str


def run(scenario: Scenario) -> RunReport:
    """The report of a simulated scenario."""
    # The simulator takes its time to import, and reading rows does not need it.
    from tracesim.simulation import simulate

    report: RunReport = simulate(scenario).report
    return report


def evaluate(
    files: Iterable[Path], runner: Runner | None = None, machine_folders: Sequence[Path] = ()
) -> tuple[list[RowResult], list[SkippedRow]]:
    """Simulate every row of the files that can be expressed, in the order of the files."""
    runner = runner or run
    results: list[RowResult] = []
    skipped: list[SkippedRow] = []
    for path in files:
        try:
            rows, source = read_rows(path)
        except InputError as error:
            skipped.append(SkippedRow(path.stem, path.name, str(error)))
            continue
        file = RowFile(path, source, tuple(machine_folders))
        for index, row in enumerate(rows):
            name = source_name(row, file)
            try:
                results.append(_simulated(express(row, index, file), name, runner))
            except RowSkippedError as error:
                skipped.append(SkippedRow(name, row_label(row, index), str(error)))
    return results, skipped


def read_rows(path: Path) -> tuple[list[Any], Mapping[str, Any]]:
    """Rows and source description of a file; raise InputError if it is not such a file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {' '.join(str(error).split())[:200]}") from None
    rows = document.get("rows") if isinstance(document, Mapping) else None
    if not isinstance(rows, list):
        raise InputError(f"{path} holds no list of rows under the key 'rows'")
    source = document.get("source")
    return rows, source if isinstance(source, Mapping) else {}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files of the given paths, those of a folder sorted; raise InputError if one is missing or empty."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise InputError(f"{path} holds no .json file; give a folder of measured rows")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path} does not exist; give a .json file of measured rows or a folder of them")
    return files


def scores_by_source(results: Iterable[RowResult]) -> dict[str, dict[str, Score]]:
    """For each source, in order of appearance, the score of each figure."""
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        of_source = pairs.setdefault(result.source, {figure: [] for figure in FIGURES})
        for figure, pair in result.figures.items():
            of_source[figure].append(pair)
    return {source: {figure: score(found) for figure, found in by.items()} for source, by in pairs.items()}


def as_document(results: Sequence[RowResult], skipped: Sequence[SkippedRow]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "sources": {
            source: {figure: dataclasses.asdict(found) for figure, found in by.items()}
            for source, by in scores_by_source(results).items()
        },
        "rows": [_row_document(result) for result in results],
        "skipped": [{"row": f"{row.source}: {row.row}", "reason": row.reason} for row in skipped],
    }


def _simulated(row: MeasuredRow, source: str, runner: Runner) -> RowResult:
    report = _report_of(row.scenario, runner)
    measured_on = report if row.memory_stage is None else report["stages"][row.memory_stage]
    predicted = {
        "time": report["iteration_time_ms"],
        "allocated": measured_on["peak_allocated_gib"],
        "reserved": measured_on["peak_reserved_gib"],
        "activations": None,
        "state": None,
        "bubble": 100 * report.get("pipeline_bubble_fraction", 0.0),
    }
    if row.activations is not None or row.state_gib is not None:
        held = report["stages"][0]["memory_at_peak_gib"]
        predicted["state"] = held["weights"] + held["gradients"] + held["optimizer_states"]
        predicted["activations"] = held["activations"]
        if row.baseline is not None:
            baseline = _report_of(row.baseline, runner)["stages"][0]["memory_at_peak_gib"]
            predicted["activations"] *= 100 / baseline["activations"]
    if row.smaller is not None:
        difference = _without_optimizer(report) - _without_optimizer(_report_of(row.smaller, runner))
        predicted["time"] = difference / row.layers_between
    measured = {
        "time": row.time_ms,
        "allocated": row.allocated_gib,
        "reserved": row.reserved_gib,
        "activations": row.activations,
        "state": row.state_gib,
        "bubble": row.bubble_pct,
    }
    figures = {
        name: (value, float(predicted[name]))
        for name, value in measured.items()
        if value is not None and predicted[name] is not None
    }
    scenario = row.scenario
    return RowResult(
        source, row.label, scenario.parallel.world_size, scenario.hardware.name, figures, row.notes
    )


def _report_of(scenario: Scenario, runner: Runner) -> RunReport:
    try:
        return runner(scenario)
    except ValueError as error:
        raise RowSkippedError(f"the simulator refuses it: {' '.join(str(error).split())}") from None


def _without_optimizer(report: RunReport) -> float:
    return float(report["iteration_time_ms"]) - max(
        float(stage["optimizer_ms"]) for stage in report["stages"]
    )


def _row_document(result: RowResult) -> dict[str, Any]:
    figures = {
        name: {"measured": measured, "predicted": predicted, "error_pct": error_pct(measured, predicted)}
        for name, (measured, predicted) in result.figures.items()
    }
    return {
        "source": result.source,
        "row": result.row,
        "world_size": result.world_size,
        "hardware": result.hardware,
        **figures,
        "notes": list(result.notes),
    }


def print_tables(results: Sequence[RowResult], skipped: Sequence[SkippedRow], console: Console) -> None:
    """Every row, then the scores by source, then the rows left out with their reasons."""
    rows = Table("source", "row", "figure", title="Measured and predicted (time in ms, memory in GiB)")
    for heading in ("measured", "predicted", "error %"):
        rows.add_column(heading, justify="right")
    for result in results:
        for figure, (measured, predicted) in result.figures.items():
            error = f"{error_pct(measured, predicted):+.2f}"
            rows.add_row(result.source, result.row, figure, f"{measured:.2f}", f"{predicted:.2f}", error)
    console.print(rows)
    console.print(_score_table(results))
    notes = sorted({f"{result.source}: {note}" for result in results for note in result.notes})
    for note in notes:
        console.print(f"Taken from the source as a whole - {note}", markup=False)
    if skipped:
        left_out = Table("source", "row", "reason", title=f"{len(skipped)} rows not expressed")
        for row in skipped:
            left_out.add_row(row.source, row.row, row.reason)
        console.print(left_out)


def _score_table(results: Sequence[RowResult]) -> Table:
    table = Table("source", "figure", title="By source")
    for heading in ("rows", "mean |error| %", "mean error %", "max |error| %", "Spearman"):
        table.add_column(heading, justify="right")
    for source, by in scores_by_source(results).items():
        for figure, found in by.items():
            if found.n:
                errors = (found.mean_abs_pct, found.mean_signed_pct, found.max_abs_pct)
                rank = "-" if found.spearman is None else f"{found.spearman:.3f}"
                table.add_row(source, figure, str(found.n), *(f"{value:.2f}" for value in errors), rank)
    return table


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.option(
    "--machines",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with machine files that rows refer to; looked in first. By default ../simumax_system beside PATH.",
)
def main(paths: tuple[Path, ...], as_json: bool, machines: tuple[Path, ...]) -> None:
    """Compare simulated with measured runs. PATH is a file of measured rows or a folder of such files."""
    try:
        files = find_files(paths)
    except InputError as error:
        click.echo(f"benchmarks.accuracy: {error}", err=True)
        sys.exit(2)
    results, skipped = evaluate(files, machine_folders=machines)
    if as_json:
        click.echo(json.dumps(as_document(results, skipped), indent=1, allow_nan=False))
    else:
        print_tables(results, skipped, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
