"""``tracesim run`` and ``tracesim scenarios``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..errors import ScenarioError
from ..output import output_folder
from ..report_tables import render_report
from ..run_output import FORMATS, check_formats, write_outputs
from ..scenario import list_scenarios, load_scenario
from ..simulation import simulate
from .printing import output_console, print_json, progress


@click.command()
@click.argument("scenario")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field, e.g. parallel.pp=8."
)
@click.option("-o", "--output", metavar="DIR", help="Folder for trace and report.")
@click.option(
    "--format",
    "formats",
    default="perfetto",
    show_default=True,
    metavar="LIST",
    help=f"Comma-separated: {', '.join(FORMATS)}.",
)
@click.option(
    "--ranks",
    default="stages",
    show_default=True,
    help="Ranks in the trace: stages (one a pipeline stage), all, or a list such as 0,8-15.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(
    scenario: str, overrides: tuple[str, ...], output: str | None, formats: str, ranks: str, as_json: bool
) -> None:
    """Simulate SCENARIO (a bundled name or a YAML file) and print its report.

    With -o, also write the trace and the report into a folder; without it nothing is written.
    """
    chosen = _formats(formats)
    loaded = load_scenario(scenario, overrides)
    selection = _ranks(ranks, loaded.parallel.world_size)
    if output is not None:
        check_formats(chosen)
    folder = output_folder(output) if output is not None else None
    with progress("simulating"):
        simulation = simulate(loaded)
        report = simulation.report
    written: list[Path] = []
    if folder is not None:
        with progress(f"writing {folder}"):
            written = write_outputs(simulation, folder, chosen, selection)
    if as_json:
        print_json(report)
        return
    console = output_console()
    render_report(report, console)
    for path in written:
        click.echo(f"wrote {path}")
    traces = [path for path in written if path.suffix == ".pftrace"]
    if traces:
        click.echo(f"open it in https://ui.perfetto.dev, or run: tracesim open {shlex.quote(str(traces[0]))}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def scenarios(as_json: bool) -> None:
    """List the bundled scenarios."""
    names = list_scenarios()
    if as_json:
        print_json(list(names))
    else:
        click.echo("\n".join(names))


def _formats(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not chosen:
        raise ScenarioError(f"--format {text!r} names no format; choose from {', '.join(FORMATS)}")
    unknown = [name for name in chosen if name not in FORMATS]
    if unknown:
        raise ScenarioError(f"--format {text!r}: {', '.join(unknown)} is not one of {', '.join(FORMATS)}")
    return chosen


def _ranks(text: str, world_size: int) -> list[int] | None:
    """Global ranks of ``stages`` (None), ``all`` or a list such as ``0,8-15``."""
    if text == "stages":
        return None
    if text == "all":
        return list(range(world_size))
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ScenarioError(
                f"--ranks {text!r}: {part.strip()!r} is no rank; write stages, all, or e.g. 0,8-15"
            )
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise ScenarioError(f"--ranks {text!r}: {part.strip()!r} runs backwards; write {high}-{low}")
        if high >= world_size:
            raise ScenarioError(
                f"--ranks {text!r}: {part.strip()!r} is not within the ranks 0 to {world_size - 1} of this scenario"
            )
        chosen += range(low, high + 1)
    return chosen


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
