"""Scoreboard: simulate measured runs and print predicted against measured, row by row and source by source.

``python -m benchmarks.accuracy PATH... [--json] [--jobs N]``. A PATH is a file ``{"source": {...}, "rows": [...]}`` or
a folder of such files. Every row is either simulated or counted with the reason why not; none is left out silently.
Rows whose memory contradicts that of another row with the same settings are shown, but count in no score.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.microbatch_slopes import slopes, verdict
from benchmarks.rows import MeasuredRow, RowFile, RowSkippedError, RunReport, express
from benchmarks.rows.dispatch import row_label, source_name
from benchmarks.scores import Score, error_pct, score
from benchmarks.setting_deltas import deltas
from benchmarks.step_figures import Figures, Wanted, figures_of, scenario_key
from tracesim.scenario import Scenario

Runner = Callable[[Scenario], RunReport]
MAX_FILE_BYTES = 1 << 28
PER_RANK = "reserved per rank"
"""Not the largest of a row, as ``reserved``, but each of its ranks."""
FIGURES = ("time", "allocated", "reserved", PER_RANK, "activations", "state", "bubble")
_JOBS = 2
_CONTRADICTION = 1.1
"""Peaks of one run repeat to a percent or two; where rows that say the same differ by more than this, something that
they do not say was different."""


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
    undetermined: str = ""
    """Why the settings that the row states do not determine its memory; it counts in no score then."""
    microbatches: int = 0
    layout: str = ""
    """Equal for rows that differ in nothing but their microbatches."""
    reserved_by_rank: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Measured and predicted reserved memory of single ranks, where a row has them."""


@dataclass(frozen=True)
class SkippedRow:
    """One row that was not simulated, and why."""

    source: str
    row: str
    reason: str


@dataclass(frozen=True)
class _Expressed:
    """A row of a source, and what it became."""

    source: str
    label: str
    measured: MeasuredRow | None
    reason: str = ""


def evaluate(
    files: Iterable[Path],
    runner: Runner | None = None,
    machine_folders: Sequence[Path] = (),
    jobs: int = 1,
) -> tuple[list[RowResult], list[SkippedRow]]:
    """Simulate every row of the files that can be expressed, in the order of the files.

    Scenarios are simulated by ``runner``, or on ``jobs`` processes; the results are the same with any number.
    """
    entries = [entry for path in files for entry in _expressed_rows(path, machine_folders)]
    wanted = [item for entry in entries if entry.measured is not None for item in _wanted(entry.measured)]
    figures = figures_of(wanted, jobs, runner)
    contradictions = _contradictions([entry.measured for entry in entries if entry.measured is not None])
    results: list[RowResult] = []
    skipped: list[SkippedRow] = []
    for entry in entries:
        reason = entry.reason
        if entry.measured is not None:
            reason = _refusal(entry.measured, figures)
            if not reason:
                results.append(_result(entry.measured, entry.source, figures, contradictions))
        if reason:
            skipped.append(SkippedRow(entry.source, entry.label, reason))
    return results, skipped


def _refusal(row: MeasuredRow, figures: Figures) -> str:
    """Why the simulator refuses a scenario of a row; empty if it takes all of them."""
    reports = (figures[scenario_key(item.scenario)] for item in _wanted(row))
    return next((report for report in reports if isinstance(report, str)), "")


def _expressed_rows(path: Path, machine_folders: Sequence[Path]) -> list[_Expressed]:
    try:
        rows, source = read_rows(path)
    except InputError as error:
        return [_Expressed(path.stem, path.name, None, str(error))]
    file = RowFile(path, source, tuple(machine_folders))
    entries = []
    for index, row in enumerate(rows):
        name, label = source_name(row, file), row_label(row, index)
        try:
            entries.append(_Expressed(name, label, express(row, index, file)))
        except RowSkippedError as error:
            entries.append(_Expressed(name, label, None, str(error)))
    return entries


def _wanted(row: MeasuredRow) -> list[Wanted]:
    """Scenarios a row needs simulated."""
    by_layer = row.smaller is not None
    allocator = not (row.allocated_gib is row.reserved_gib is None)
    of_layers = not (row.activations is row.state_gib is None)
    bubble, composed = row.bubble_pct is not None, row.composed
    wanted = [Wanted(row.scenario, allocator, by_layer, bubble, of_layers, composed)]
    wanted += [
        Wanted(other, optimizer=by_layer, layers=of_layers)
        for other in (row.smaller, row.baseline)
        if other is not None
    ]
    return wanted


def _contradictions(rows: Iterable[MeasuredRow]) -> dict[str, str]:
    """By scenario: that rows with its settings measured memory too different for one run."""
    measured: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.allocated_gib is not None:
            measured[scenario_key(row.scenario)].append(row.allocated_gib)
    return {
        key: f"the same settings measured {min(found):.2f} to {max(found):.2f} GiB: what differed is not stated"
        for key, found in measured.items()
        if max(found) > _CONTRADICTION * min(found)
    }


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
        for figure, pair in () if result.undetermined else result.figures.items():
            of_source[figure].append(pair)
        if not result.undetermined:
            of_source[PER_RANK] += result.reserved_by_rank.values()
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
        "skip_reasons": skip_reasons(skipped),
    }


def skip_reasons(skipped: Iterable[SkippedRow]) -> dict[str, dict[str, int]]:
    """For each source, in order of appearance, how many rows were left out for each reason, the commonest first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in skipped:
        counts[row.source][row.reason] += 1
    return {source: dict(reasons.most_common()) for source, reasons in counts.items()}


def _result(row: MeasuredRow, source: str, figures: Figures, contradictions: Mapping[str, str]) -> RowResult:
    scenario = row.scenario
    predicted = _predicted(row, figures)
    measured = {
        "time": row.time_ms,
        "allocated": row.allocated_gib,
        "reserved": row.reserved_gib,
        "activations": row.activations,
        "state": row.state_gib,
        "bubble": row.bubble_pct,
    }
    pairs = {
        name: (value, float(found))
        for name, value in measured.items()
        if value is not None and (found := predicted[name]) is not None
    }
    undetermined = contradictions.get(scenario_key(scenario), "") if row.allocated_gib is not None else ""
    return RowResult(
        source,
        row.label,
        scenario.parallel.world_size,
        scenario.hardware.name,
        pairs,
        row.notes,
        undetermined,
        scenario.training.num_microbatches,
        _layout(scenario),
        _reserved_by_rank(row, figures),
    )


def _reserved_by_rank(row: MeasuredRow, figures: Figures) -> dict[int, tuple[float, float]]:
    """Measured and predicted reserved memory by rank; tensor-parallel ranks hold the same."""
    report, parallel = _report_of(row.scenario, figures), row.scenario.parallel
    found = {}
    for rank, measured in row.reserved_by_rank.items():
        at = parallel.coordinates(rank)
        by_rank = report["stages"][at["pp"]].get("peak_reserved_by_rank_gib") or {}
        alike = parallel.rank_of(cp=at["cp"], dp=at["dp"], pp=at["pp"])
        if str(alike) in by_rank:
            found[rank] = (measured, by_rank[str(alike)])
    return found


def _layout(scenario: Scenario) -> str:
    """A short name of everything but the number of microbatches."""
    one = dataclasses.replace(scenario.training, num_microbatches=1)
    key = scenario_key(dataclasses.replace(scenario, training=one))
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _predicted(row: MeasuredRow, figures: Figures) -> dict[str, float | None]:
    report = _report_of(row.scenario, figures)
    measured_on = report if row.memory_stage is None else report["stages"][row.memory_stage]
    predicted = {
        "time": report.get("composed_time_ms" if row.composed else "", report["iteration_time_ms"]),
        "allocated": measured_on["peak_allocated_blocks_gib"],
        "reserved": measured_on["peak_reserved_gib"],
        "activations": None,
        "state": None,
        "bubble": None,
    }
    if row.bubble_pct is not None:
        predicted["bubble"] = 100 * report["calculated_bubble_fraction"]
    if row.activations is not None or row.state_gib is not None:
        of_layers = report["stages"][0]
        predicted["state"] = of_layers["layer_state_gib"]
        predicted["activations"] = of_layers["layer_activations_gib"]
        if row.baseline is not None:
            baseline = _report_of(row.baseline, figures)["stages"][0]["layer_activations_gib"]
            predicted["activations"] *= 100 / baseline
    if row.smaller is not None:
        difference = _without_optimizer(report) - _without_optimizer(_report_of(row.smaller, figures))
        predicted["time"] = difference / row.layers_between
    return predicted


def _report_of(scenario: Scenario, figures: Figures) -> RunReport:
    found = figures[scenario_key(scenario)]
    assert not isinstance(found, str), "rows the simulator refuses have been left out"
    return found


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
        "microbatches": result.microbatches,
        "layout": result.layout,
        "notes": list(result.notes),
        "undetermined": result.undetermined,
        "reserved_by_rank": {
            str(rank): {"measured": measured, "predicted": predicted}
            for rank, (measured, predicted) in result.reserved_by_rank.items()
        },
    }


def print_tables(results: Sequence[RowResult], skipped: Sequence[SkippedRow], console: Console) -> None:
    """Every row, then the scores by source, then how many rows were left out for which reason."""
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
    undetermined = Counter((row.source, row.undetermined) for row in results if row.undetermined)
    if undetermined:
        table = Table(
            "source", "why its settings do not determine the memory", title="Shown, but in no score"
        )
        table.add_column("rows", justify="right")
        for (source, why), count in undetermined.items():
            table.add_row(source, why, str(count))
        console.print(table)
    if skipped:
        total = len(results) + len(skipped)
        left_out = Table("source", "reason", title=f"{len(skipped)} of {total} rows not expressed")
        left_out.add_column("rows", justify="right")
        for source, reasons in skip_reasons(skipped).items():
            for reason, count in reasons.items():
                left_out.add_row(source, reason, str(count))
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
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.option("--markdown", is_flag=True, help="Print the accuracy page of the documentation.")
@click.option(
    "--results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --markdown: what --json printed earlier, instead of simulating PATHS.",
)
@click.option(
    "--machines",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with machine files that rows refer to; looked in first. By default ../simumax_system beside PATH.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=min(_JOBS, os.cpu_count() or 1),
    show_default=True,
    help="Processes that simulate; the results are the same with any number.",
)
def main(
    paths: tuple[Path, ...],
    as_json: bool,
    markdown: bool,
    results: Path | None,
    machines: tuple[Path, ...],
    jobs: int,
) -> None:
    """Compare simulated with measured runs. PATH is a file of measured rows or a folder of such files."""
    if bool(paths) == bool(results) or (results and not markdown) or (as_json and markdown):
        raise click.UsageError(
            "give PATHs, with --json or --markdown or neither, or --markdown --results FILE"
        )
    if results is not None:
        try:
            page = _page(json.loads(results.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            click.echo(f"benchmarks.accuracy: {results} is not what --json prints ({reason})", err=True)
            sys.exit(2)
        click.echo(page, nl=False)
        return
    try:
        files = find_files(paths)
    except InputError as error:
        click.echo(f"benchmarks.accuracy: {error}", err=True)
        sys.exit(2)
    found, skipped = evaluate(files, machine_folders=machines, jobs=jobs)
    document = as_document(found, skipped)
    if as_json:
        click.echo(json.dumps(document, indent=1, allow_nan=False))
    elif markdown:
        click.echo(_page(document), nl=False)
    else:
        print_tables(found, skipped, Console(width=None if sys.stdout.isatty() else 160))
        print_slopes(document["rows"], Console(width=None if sys.stdout.isatty() else 160))
        print_deltas(document["rows"], Console(width=None if sys.stdout.isatty() else 160))


def print_slopes(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Fixed cost and cost of a microbatch apart, where a layout ran with three counts."""
    table = Table("source", "layout", "microbatches", title="Fixed cost and cost of a microbatch")
    for heading in ("ms each", "error %", "fixed, ms", "+-", "error %"):
        table.add_column(heading, justify="right")
    found = slopes(rows)
    for one in found:
        fixed = one.fixed_error_pct
        table.add_row(
            one.source,
            one.layout,
            ", ".join(map(str, one.counts)),
            f"{one.measured_slope:.2f}",
            f"{one.slope_error_pct:+.1f}",
            f"{one.measured_fixed:.1f}",
            f"{one.fixed_error:.1f}",
            "-" if fixed is None else f"{fixed:+.0f}",
        )
    if table.row_count:
        console.print(table)
        console.print(verdict(found))


def print_deltas(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """What changing a setting did, in sources that are meant for that."""
    table = Table("row", "figure", title="Change against the first row of a heading")
    for heading in ("measured", "predicted", "error %"):
        table.add_column(heading, justify="right")
    for one in deltas(rows):
        error = one.size_error_pct
        table.add_row(
            one.row,
            one.figure,
            f"{one.measured:+.2f}",
            f"{one.predicted:+.2f}",
            "-" if error is None else f"{error:+.0f}",
        )
    if table.row_count:
        console.print(table)


def _page(document: dict[str, Any]) -> str:
    from benchmarks.accuracy_page import page  # it reads what this module makes

    return page(document)


if __name__ == "__main__":
    main()
