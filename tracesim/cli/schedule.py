"""``tracesim schedule``: draw, check, compare and export pipeline schedules."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exporters import write_perfetto
from exporters.pipeline_png import pipeline_png
from exporters.pipeline_svg import pipeline_svg
from op_graphs.timeline import Timeline
from schedules import (
    ActionKind,
    Schedule,
    ScheduleError,
    UnitTimes,
    add_communication,
    check_blocking_sends,
    check_schedule,
    format_csv,
    schedule_names,
    simulate_costs,
)
from schedules.grid import rank_labels, scaled_rows

from ..analysis import analyze
from ..output import atomic_write
from ..readers import read_trace
from ..recovered_report import describe_recovered, intended_beside, render_recovered
from ..recovered_schedule import recover_schedule
from ..schedule_workbench import (
    PlanSizes,
    compare_on_costs,
    compare_on_scenario,
    describe_schedule,
    load_schedule,
    scenario_times,
    schedule_rows,
    schedule_timeline,
)
from .errors import report_error
from .printing import output_console, print_json, progress
from .schedule_options import cost_options, costs_of, numbers, size_options

_STYLES = {
    ActionKind.FORWARD: "white on blue",
    ActionKind.FULL_BACKWARD: "black on green",
    ActionKind.BACKWARD_INPUT: "black on green",
    ActionKind.BACKWARD_WEIGHT: "black on yellow",
    ActionKind.OVERLAP_F_B: "black on cyan",
}
_LEAST_COLUMNS = 20
_TABLE_COLUMNS = 72
_RECOVERED_COLUMNS = 110


@click.group()
def schedule() -> None:
    """Draw, check, compare and export pipeline schedules.

    A schedule is a NAME (tracesim schedule names) or a FILE.csv as torch.distributed.pipelining writes it.
    """


@schedule.command()
def names() -> None:
    """List the schedules by name."""
    click.echo("\n".join(schedule_names()))


@schedule.command()
@click.argument("name", required=False)
@size_options
@cost_options
@click.option("--scenario", metavar="SCENARIO", help="Take the times of a simulated scenario.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field of the scenario."
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Recover the schedule of a trace instead: a file or a folder of ranks; may be repeated.",
)
@click.option("--step", type=int, metavar="N", help="Step of the trace [default: the first whole one].")
@click.option("--width", type=int, metavar="N", help="Characters a line may take [default: the terminal's].")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE.svg", help="Also draw into a picture.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also into a file: a picture if it ends in .svg or .png, else a Perfetto trace.",
)
@click.option("--json", "as_json", is_flag=True, help="Print figures and the times of all actions as JSON.")
def show(
    name: str | None,
    pp: int | None,
    vpp: int | None,
    microbatches: int | None,
    forward_cost: float,
    backward_cost: float,
    weight_cost: float | None,
    overlapped_cost: float | None,
    transfer_cost: float,
    stage_factors: str | None,
    scenario: str | None,
    overrides: tuple[str, ...],
    traces: tuple[Path, ...],
    step: int | None,
    width: int | None,
    svg: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Draw the schedule NAME (or FILE.csv) with real widths, and print bubble and activations of each rank.

    On given costs a transfer holds up who reads it, and nobody else. With --scenario the times are those of its
    simulation, in milliseconds, with NAME in the place of its schedule if given. F, B, I and W are forward, full
    backward, backward for the input and for the weight; small letters are odd model chunks; + is a forward beside a
    backward.

    With --trace it is the schedule that a run executed, checked, with what each bubble waited for, and the intended one
    beside it: NAME, or the schedule that has the same order.
    """
    if traces:
        _show_recovered(traces, name, step, _width(width), (svg, output), as_json)
        return
    costs = None
    if scenario is None:
        costs = costs_of(
            forward_cost, backward_cost, weight_cost, overlapped_cost, stage_factors, transfer_cost
        )
        times = simulate_costs(_named(name, PlanSizes(pp, vpp, microbatches)), costs)
    else:
        with progress("simulating"):
            changes = _with_sizes(overrides, pp, microbatches)
            times = scenario_times(scenario, changes, name)
    columns = _width(width)
    _write_files(times, svg, output)
    description = describe_schedule(times, costs)
    if as_json:
        print_json({**description, "actions": schedule_rows(times)})
        return
    _print_grid(times, columns, Console(width=columns, highlight=False))
    console = Console(width=max(columns, _TABLE_COLUMNS), highlight=False)
    _print_figures(description, console)
    _print_written(console, svg, output)


def _show_recovered(
    traces: tuple[Path, ...],
    name: str | None,
    step: int | None,
    columns: int,
    files: tuple[Path | None, Path | None],
    as_json: bool,
) -> None:
    """Draw the schedule of a trace, and the intended one below it."""
    with progress("reading"):
        timeline = read_trace(list(traces))
    with progress("analyzing"):
        recovered = recover_schedule(analyze(timeline), step)
        intended = intended_beside(recovered, name)
    _write_files(recovered.times, *files)
    description = describe_recovered(recovered, intended)
    if as_json:
        print_json(description)
        return
    drawing = Console(width=columns, highlight=False)
    _print_grid(recovered.times, columns, drawing)
    if intended is not None:
        drawing.print(f"{intended.name}, as intended:", markup=False)
        # On the scale of what ran.
        share = intended.times.makespan / recovered.times.makespan if recovered.times.makespan else 1.0
        _print_grid(intended.times, max(_LEAST_COLUMNS, min(columns, round(columns * share))), drawing)
    console = Console(width=max(columns, _RECOVERED_COLUMNS), highlight=False)
    render_recovered(description, console)
    _print_written(console, *files)


@schedule.command()
@click.argument("name")
@size_options
@click.option(
    "--memory-limit",
    metavar="N",
    help="Most activations (microbatches times stages) a rank may hold: a number, or one a rank as 4,3,2,1.",
)
@click.option(
    "--weight-memory",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of an activation held from its backward for the input to the one for the weight, for the limit.",
)
@click.option("--blocking-sends", is_flag=True, help="Fail if it needs sends that do not block.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def check(
    name: str,
    pp: int | None,
    vpp: int | None,
    microbatches: int | None,
    memory_limit: str | None,
    weight_memory: float,
    blocking_sends: bool,
    as_json: bool,
) -> None:
    """Check the schedule NAME (or FILE.csv): order, completeness, deadlock, memory.

    Exits with 1 if it is broken; the message marks the failing step in the grid.
    """
    limit = numbers("--memory-limit", memory_limit, int) if memory_limit is not None else None
    checked = load_schedule(name, PlanSizes(pp, vpp, microbatches), check=False)
    blocks = ""
    try:
        limits = (limit[0] if len(limit) == 1 else limit) if limit is not None else None
        check_schedule(checked, limits, weight_memory=weight_memory)
        transfers = checked if checked.has_communication else add_communication(checked)
        try:
            check_blocking_sends(transfers)
        except ScheduleError as error:
            blocks = str(error)
            if blocking_sends:
                raise
    except ScheduleError as error:
        if as_json:
            print_json({"schedule": checked.name, "ok": False, "problem": str(error)})
        else:
            report_error(error)
        raise click.exceptions.Exit(1) from None
    if as_json:
        print_json(
            {"schedule": checked.name, "ok": True, "runs_with_blocking_sends": not blocks, "problem": None}
        )
        return
    click.echo(
        f"{checked.name}: ok; {checked.pp} ranks, {checked.model_stages} stages, {checked.microbatches} microbatches, "
        f"{sum(map(len, checked.actions))} actions"
    )
    click.echo(f"with sends that do not block: runs\nwith sends that block: {blocks or 'runs'}")


@schedule.command()
@click.argument("schedules", nargs=-1, required=True, metavar="NAME...")
@size_options
@cost_options
@click.option("--scenario", metavar="SCENARIO", help="Simulate them on a scenario instead of given costs.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field of the scenario."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(
    schedules: tuple[str, ...],
    pp: int | None,
    vpp: int | None,
    microbatches: int | None,
    forward_cost: float,
    backward_cost: float,
    weight_cost: float | None,
    overlapped_cost: float | None,
    transfer_cost: float,
    stage_factors: str | None,
    scenario: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare schedules: time, bubble, memory of the first and last rank, and which wins.

    On given costs, these are those of a rank's whole share of the model, so that schedules with different numbers of
    chunks compare. With --scenario, each is simulated; --pp and --microbatches then override the scenario's.
    """
    if scenario is None:
        costs = costs_of(
            forward_cost, backward_cost, weight_cost, overlapped_cost, stage_factors, transfer_cost
        )
        comparison = compare_on_costs(schedules, PlanSizes(pp, vpp, microbatches), costs)
    else:
        changes = _with_sizes(overrides, pp, microbatches)
        with progress("simulating"):
            comparison = compare_on_scenario(schedules, scenario, changes, vpp)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison, output_console())
    if all("refused" in row for row in comparison["rows"]):
        raise click.exceptions.Exit(1)


@schedule.command()
@click.argument("name")
@size_options
@click.option("--with-communication", is_flag=True, help="Write sends and receives out.")
@click.option("-o", "--output", required=True, metavar="FILE.csv", help="Where to; - is standard output.")
def export(
    name: str,
    pp: int | None,
    vpp: int | None,
    microbatches: int | None,
    with_communication: bool,
    output: str,
) -> None:
    """Write the schedule NAME (or FILE.csv) as CSV, which torch.distributed.pipelining loads."""
    exported = load_schedule(name, PlanSizes(pp, vpp, microbatches))
    if with_communication and not exported.has_communication:
        exported = add_communication(exported)
    text = format_csv(exported)
    if output == "-":
        click.echo(text, nl=False)
        return
    with atomic_write(output) as stream:
        stream.write(text.encode())
    click.echo(f"wrote {output}: {sum(map(len, exported.actions))} actions of {exported.pp} ranks")


# -- reading options -----------------------------------------------------------------------------------------


def _named(name: str | None, sizes: PlanSizes) -> Schedule:
    if name is None:
        raise ScheduleError("give the NAME of a schedule or a FILE.csv, or a --scenario")
    return load_schedule(name, sizes)


def _with_sizes(overrides: tuple[str, ...], pp: int | None, microbatches: int | None) -> tuple[str, ...]:
    """Overrides of a scenario, with what --pp and --microbatches say."""
    return (
        *overrides,
        *((f"parallel.pp={pp}",) if pp is not None else ()),
        *((f"training.num_microbatches={microbatches}",) if microbatches is not None else ()),
    )


def _width(given: int | None) -> int:
    if given is not None and given < _LEAST_COLUMNS:
        raise ScheduleError(f"--width {given} must be at least {_LEAST_COLUMNS}")
    return given or max(_LEAST_COLUMNS, shutil.get_terminal_size().columns)


# -- printing and writing ------------------------------------------------------------------------------------


def _print_grid(times: UnitTimes, width: int, console: Console) -> None:
    labels = rank_labels(times.schedule.pp)
    colours = sys.stdout.isatty() and not console.no_color
    for label, cells in zip(
        labels, scaled_rows(times.schedule, times.starts, times.ends, width - len(labels[0]) - 2), strict=True
    ):
        line = Text(f"{label}  ", no_wrap=True, overflow="crop")
        for cell in cells:
            if cell.kind is None:
                line.append(cell.text, "dim")
            else:
                text = cell.text.replace("-", " ") if colours else cell.text
                line.append(text, f"{_STYLES[cell.kind]}{' dim' if cell.chunk % 2 else ''}")
        console.print(line)


def _print_figures(description: dict[str, Any], console: Console) -> None:
    unit = " ms" if description["costs"] is None else ""
    console.print(
        f"{description['name']}: time {description['time']:.6g}{unit}, bubble {description['bubble_fraction']:.1%}, "
        f"{description['microbatches']} microbatches"
    )
    table = Table("rank", "stages", "busy", "idle", "bubble", "peak activations", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in description["ranks"]:
        table.add_row(
            str(row["rank"]),
            ", ".join(map(str, row["stages"])),
            f"{row['busy']:.6g}",
            f"{row['idle']:.6g}",
            f"{row['bubble_fraction']:.1%}",
            str(row["peak_activations"]),
        )
    console.print(table)


def _print_comparison(comparison: dict[str, Any], console: Console) -> None:
    rows = [row for row in comparison["rows"] if "refused" not in row]
    on_scenario = "scenario" in comparison
    headers = (
        ("schedule", "vpp", "step ms", "bubble", "exposed comm.", "GiB first", "GiB last", "GiB peak", "fits")
        if on_scenario
        else ("schedule", "vpp", "time", "bubble", "act. first", "act. last", "act. peak")
    )
    table = Table(*headers, "", box=None, pad_edge=False)
    for column in table.columns[1 : len(headers)]:
        column.justify = "right"
    for row in rows:
        wins = [
            word
            for word, key in (("fastest", "fastest"), ("least memory", "least_memory"))
            if row["schedule"] in comparison[key]
        ]
        figures = _scenario_figures(row) if on_scenario else _cost_figures(row)
        table.add_row(row["schedule"], str(row["vpp"] or ""), *figures, ", ".join(wins))
    if rows:
        console.print(table)
    for row in comparison["rows"]:
        if "refused" in row:
            console.print(f"{row['schedule']}: not compared: {row['refused']}", soft_wrap=True, markup=False)


def _scenario_figures(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['iteration_time_ms']:,.1f}",
        f"{row['bubble_fraction']:.1%}",
        f"{row['exposed_communication_fraction']:.1%}",
        f"{row['peak_allocated_gib_first_rank']:.1f}",
        f"{row['peak_allocated_gib_last_rank']:.1f}",
        f"{row['peak_allocated_gib']:.1f}",
        "yes" if row["fits_in_memory"] else "no",
    ]


def _cost_figures(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['time']:g}",
        f"{row['bubble_fraction']:.1%}",
        *(f"{row[f'peak_activations{which}']:g}" for which in ("_first_rank", "_last_rank", "")),
    ]


def _write_files(times: UnitTimes, svg: Path | None, output: Path | None) -> None:
    asked: list[tuple[Path, Callable[[Timeline], bytes]]] = [(svg, _svg)] if svg else []
    asked += [(output, _writer_of(output))] if output else []
    # All are drawn before the first file is opened, so that what cannot be drawn leaves none.
    drawn = [(path, write(schedule_timeline(times))) for path, write in asked]
    for path, content in drawn:
        with atomic_write(path) as stream:
            stream.write(content)


def _writer_of(path: Path) -> Callable[[Timeline], bytes]:
    """What writes a file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix in _OTHER_PICTURES:
        raise click.UsageError(f"{path}: pictures are drawn as .svg or .png, not {suffix}")
    return _WRITERS.get(suffix, _trace)


def _print_written(console: Console, *paths: Path | None) -> None:
    for path in filter(None, paths):
        console.print(f"wrote {path}", soft_wrap=True)


def _svg(timeline: Timeline) -> bytes:
    return pipeline_svg(timeline).encode()


def _trace(timeline: Timeline) -> bytes:
    packed = io.BytesIO()
    write_perfetto(timeline, packed)
    return packed.getvalue()


_WRITERS = {".svg": _svg, ".png": pipeline_png}
"""By the suffix of a file; any other is a Perfetto trace."""
_OTHER_PICTURES = frozenset({".gif", ".jpg", ".jpeg", ".pdf", ".webp", ".bmp", ".tif", ".tiff", ".eps"})
