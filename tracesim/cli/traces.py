"""``tracesim read``, ``tracesim diff`` and ``tracesim open``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from exporters import write_perfetto
from op_graphs.timeline import Timeline

from ..diff import compare_timelines, is_scenario, markdown, merged_timeline, render_diff, simulate_beside
from ..errors import TraceError
from ..open_trace import open_trace
from ..output import atomic_write
from ..readers import read_trace
from ..suggest_scenario import suggest_scenario
from ..trace_report import describe_trace, render_description
from .printing import output_console, print_json, progress

_TRACE = click.Path(path_type=Path)


@click.command()
@click.argument("traces", nargs=-1, required=True, type=_TRACE)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option(
    "--suggest-scenario", "suggest", is_flag=True, help="Print a scenario file that would simulate the trace."
)
def read(traces: tuple[Path, ...], as_json: bool, suggest: bool) -> None:
    """Say what TRACES hold: device, ranks, steps, streams, coverage of the classification, and what is odd.

    A trace is a torch.profiler file (.json, .json.gz), a .pftrace of tracesim, or a folder of ranks.
    """
    if suggest:
        with progress("reading"):
            suggestion = suggest_scenario(read_trace(list(traces), keep_origins=True))
        if as_json:
            print_json({"scenario": suggestion.text, "unknown": list(suggestion.unknown)})
        else:
            click.echo(suggestion.text, nl=False)
        return
    with progress("reading"):
        description = describe_trace(read_trace(list(traces)))
    if as_json:
        print_json(description)
    else:
        render_description(description, output_console())


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", nargs=-1, required=True, metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("-o", "--output", metavar="FILE", help="Write both runs, matched, into one Perfetto trace.")
@click.option("--markdown", "summary", metavar="FILE", help="Write a summary to paste into a pull request.")
@click.option(
    "--fail-over",
    type=float,
    metavar="PCT",
    help="Exit with 1 if B's iteration time exceeds A's by more than this many percent.",
)
def diff(
    a: str,
    b: tuple[str, ...],
    as_json: bool,
    output: str | None,
    summary: str | None,
    fail_over: float | None,
) -> None:
    """Compare two traces, simulated or real, and say what makes the difference.

    A and B are each a file, a folder of ranks, or a scenario (a YAML file or a bundled name), which is simulated. B may
    also be several files.
    """
    if fail_over is not None and not math.isfinite(fail_over):
        raise click.BadParameter(f"{fail_over} is no percentage", param_hint="--fail-over")
    with progress("comparing"):
        comparison = compare_timelines(*_sides(a, b))
    difference = comparison.result
    if output is not None:
        write_perfetto(merged_timeline(comparison), output)
    if summary is not None:
        with atomic_write(summary) as file:
            file.write(markdown(difference).encode())
    if as_json:
        print_json(difference)
    else:
        render_diff(difference, output_console())
        for path in (output, summary):
            if path is not None:
                click.echo(f"wrote {path}")
    if fail_over is not None:
        _fail_over(difference, fail_over)


def _sides(a: str, b: tuple[str, ...]) -> tuple[Timeline, Timeline]:
    """Both timelines; a scenario beside a trace is simulated with the ranks that the trace shows."""
    simulated_b = len(b) == 1 and is_scenario(b[0])
    if not is_scenario(a):
        first = read_trace(a)
        return first, simulate_beside(b[0], first) if simulated_b else read_trace(b)
    second = simulate_beside(b[0]) if simulated_b else read_trace(b)
    return simulate_beside(a, None if simulated_b else second), second


def _fail_over(difference: Mapping[str, Any], limit: float) -> None:
    """Exit with 1 if B's iterations take more than ``limit`` percent longer than A's."""
    relative = difference["averages"]["metrics"].get("iteration_time_ms", {}).get("relative")
    if relative is None:
        raise TraceError(f"--fail-over {limit:g}: the first trace holds no time to compare with")
    if 100 * relative > limit:
        click.echo(f"failed: iteration time differs by {100 * relative:+.2f} %, over {limit:g} %", err=True)
        raise click.exceptions.Exit(1)


@click.command("open")
@click.argument("trace", type=_TRACE)
def open_command(trace: Path) -> None:
    """Open TRACE in ui.perfetto.dev: serve it on 127.0.0.1:9001 to that page only, once."""
    fetched = open_trace(trace, announce=lambda page: click.echo(f"opening {page} (Ctrl-C stops)"))
    click.echo("fetched by the browser" if fetched else "stopped before the browser fetched it")
