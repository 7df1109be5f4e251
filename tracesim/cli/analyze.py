"""``tracesim analyze``."""

from __future__ import annotations

from pathlib import Path

import click

from exporters import write_perfetto

from ..analysis.analysis import analyze as analyze_timeline
from ..analysis.annotate import annotate
from ..analysis.describe import describe
from ..analysis.tables import render
from ..exposed_traces import describe_exposed, exposed_in, exposed_notes, render_exposed
from ..output import atomic_write
from ..readers import read_trace
from .printing import output_console, print_json, progress

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("traces", nargs=-1, required=True, type=_PATH)
@click.option(
    "--exposed",
    is_flag=True,
    help="Also say why communication is not overlapped: what each transfer waited for, what could have run, and "
    "what hiding it would save.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON (schema tracesim.analysis/1).")
@click.option(
    "-o",
    "--output",
    type=_PATH,
    metavar="FILE",
    help="Write the trace with the findings as tracks and counters, for ui.perfetto.dev.",
)
def analyze(traces: tuple[Path, ...], exposed: bool, as_json: bool, output: Path | None) -> None:
    """Say where the time of TRACES goes, who is late, and what the step waited for.

    TRACES are one file, several, or a folder of ranks; real or simulated.
    """
    with progress("reading"):
        timeline = read_trace(list(traces))
    with progress("analyzing"):
        analysis = analyze_timeline(timeline)
        result = describe(analysis)
        found = exposed_in(analysis) if exposed else None
        if found is not None:
            result["exposed"] = describe_exposed(found)
    if output is not None:
        with progress("writing"), atomic_write(output) as stream:
            write_perfetto(annotate(analysis, exposed_notes(found) if found else ()), stream)
    if as_json:
        print_json(result)
        return
    console = output_console()
    render(result, console)
    if exposed:
        render_exposed(result["exposed"]["classes"], console)
    if output is not None:
        click.echo(f"wrote {output}")
