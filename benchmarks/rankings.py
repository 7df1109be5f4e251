"""Ranking: whether simulated runs that differ only in their pipeline schedule come out in the order of the measured.

``python -m benchmarks.rankings FILE...``. Rows of one source with the same model, machine, plan and batch but for
schedule, model chunks and overlap are a cell; cells of one schedule are left out. Exits with 1 if a cell is out of
order, with 2 if there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import InputError, find_files, read_rows
from benchmarks.rows import RowFile, RowSkippedError, express
from benchmarks.rows.dispatch import source_name
from op_graphs.plan import OverlapPlan
from tracesim.scenario import Scenario
from tracesim.simulation import simulate


@dataclass(frozen=True)
class Run:
    """One schedule of a cell. Times in milliseconds."""

    schedule: str
    measured: float
    simulated: float


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their schedule only, the fastest measured first."""

    name: str
    runs: tuple[Run, ...]

    @property
    def in_order(self) -> bool:
        """Whether the simulated times rise as the measured ones do."""
        times = [run.simulated for run in self.runs]
        return times == sorted(times)

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs of runs in the right order, and all pairs."""
        times = [run.simulated for run in self.runs]
        right = [a < b for place, a in enumerate(times) for b in times[place + 1 :]]
        return sum(right), len(right)


def iteration_time_ms(scenario: Scenario) -> float:
    """Simulated time of a step in milliseconds."""
    return simulate(scenario).execution.iteration_ns / 1e6


def rank_cells(
    measured: Iterable[tuple[Scenario, float]], time_ms: Callable[[Scenario], float] = iteration_time_ms
) -> list[Cell]:
    """Cells of (scenario, measured milliseconds of a step)."""
    cells: dict[str, list[tuple[Scenario, float]]] = {}
    for scenario, time in measured:
        plan = replace(scenario.parallel, vpp=1, layout=None)
        # Where transfers are placed, and whether ranks meet between steps, comes with the runtime of a schedule.
        training = replace(scenario.training, post_validation=False)
        alike = replace(
            scenario, name="", schedule="", parallel=plan, overlap=OverlapPlan(), training=training
        )
        cells.setdefault(repr(alike), []).append((scenario, time))
    found = []
    for runs in cells.values():
        if len({scenario.schedule for scenario, _ in runs}) > 1:
            first = runs[0][0]
            name = f"{first.model.name} pp{first.parallel.pp} m{first.training.num_microbatches}"
            timed = [Run(scenario.schedule, time, time_ms(scenario)) for scenario, time in runs]
            found.append(Cell(name, tuple(sorted(timed, key=lambda run: run.measured))))
    return found


def measured_runs(path: Path) -> list[tuple[Scenario, float]]:
    """Scenario and measured milliseconds of a step of every row of a file that has them."""
    rows, header = read_rows(path)
    found = []
    for index, row in enumerate(rows):
        file = RowFile(path, header)
        try:
            measured = express(row, index, file)
        except RowSkippedError:
            continue
        if measured.time_ms is not None and source_name(row, file):
            found.append((measured.scenario, measured.time_ms))
    return found


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(paths: Sequence[Path]) -> None:
    """Say in which cells of measured rows schedules are simulated in the measured order."""
    try:
        cells = [cell for path in find_files(paths) for cell in rank_cells(measured_runs(path))]
        if not cells:
            raise InputError(
                f"no cell in {', '.join(map(str, paths))}: a cell needs two rows of one source with a measured time "
                "that differ in nothing but their schedule; benchmarks.accuracy says why rows are left out"
            )
    except InputError as error:
        click.echo(f"benchmarks.rankings: {error}", err=True)
        sys.exit(2)
    table = Table("cell", "schedules, the fastest measured first: measured / simulated ms", "in order")
    for cell in cells:
        shown = ", ".join(f"{run.schedule} {run.measured:.0f} / {run.simulated:.0f}" for run in cell.runs)
        table.add_row(cell.name, shown, "yes" if cell.in_order else "no")
    right, pairs = (sum(cell.pairs[side] for cell in cells) for side in (0, 1))
    console = Console()
    console.print(table)
    console.print(
        f"{sum(cell.in_order for cell in cells)} of {len(cells)} cells, {right} of {pairs} pairs in order"
    )
    sys.exit(0 if all(cell.in_order for cell in cells) else 1)


if __name__ == "__main__":
    main()
