"""``tracesim replay``."""

from __future__ import annotations

from pathlib import Path

import click

from exporters import write_perfetto

from ..output import atomic_write
from ..readers import read_trace
from ..replay.comparison import side_by_side
from ..replay.limits import unexplained
from ..replay.rebuild import rebuild
from ..replay.report import describe_replay, render_replay
from ..replay.run import replay as run_replay
from ..replay.what_if.outcome import ask
from ..replay.what_if.registry import WHAT_IFS, parse_what_ifs
from .printing import output_console, print_json, progress

_PATH = click.Path(path_type=Path)
_WIDTH = max(len(f"{w.key}{'NAME' if w.prefix else ''}={w.value}") for w in WHAT_IFS)
_EPILOG = "\b\nWhat-ifs:\n" + "\n".join(
    f"  {w.key}{'NAME' if w.prefix else ''}={w.value}".ljust(_WIDTH + 4) + w.says for w in WHAT_IFS
)


@click.command(epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, type=_PATH)
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change the run before it is replayed; several are made in the order given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON (schema tracesim.replay/1).")
@click.option(
    "-o",
    "--output",
    type=_PATH,
    metavar="FILE",
    help="Write measured and replayed side by side as one trace for ui.perfetto.dev.",
)
def replay(traces: tuple[Path, ...], what_ifs: tuple[str, ...], as_json: bool, output: Path | None) -> None:
    """Rebuild the graph of measured TRACES, replay it, and compare; with --what-if change something first.

    TRACES are one file, several, or a folder of ranks.
    """
    origins = any(applied.what_if.needs_origins for applied in parse_what_ifs(what_ifs))
    with progress("reading"):
        timeline = read_trace(list(traces), keep_origins=origins)
    with progress("replaying"):
        rebuilt = rebuild(timeline)
        replayed = run_replay(rebuilt)
        lateness = unexplained(rebuilt)
        outcome = ask(rebuilt, what_ifs, lateness) if what_ifs else None
        result = describe_replay(replayed, lateness, outcome)
    if output is not None:
        shown = replayed if outcome is None else outcome.replayed
        with progress("writing"), atomic_write(output) as stream:
            write_perfetto(side_by_side(shown), stream)
    if as_json:
        print_json(result)
        return
    render_replay(result, output_console())
    if output is not None:
        click.echo(f"wrote {output}")
