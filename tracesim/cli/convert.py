"""``tracesim convert``."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..convert import FORMATS, Conversion
from ..convert import convert as convert_traces
from .printing import output_console, print_json

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("inputs", nargs=-1, required=True, type=_PATH, metavar="IN...")
@click.argument("output", type=_PATH, metavar="OUT")
@click.option("--to", type=click.Choice(FORMATS), help="Format of OUT, where its ending does not say it.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def convert(inputs: tuple[Path, ...], output: Path, to: str | None, as_json: bool) -> None:
    """Convert traces IN into OUT, repair them, and say what was kept.

    IN is a profiler file (.json, .json.gz), a .pftrace of tracesim, or a folder of ranks; several become one trace, a
    rank each, on a common clock. OUT is a .pftrace, a .json or .json.gz of one rank, or a folder with one a rank.
    """
    conversion = convert_traces(inputs, output, to, _announce)
    if as_json:
        print_json(conversion.as_json())
    else:
        _render(conversion, output_console())


def _announce(text: str) -> None:
    """Show what is being done, on stderr and only in a terminal."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def _render(conversion: Conversion, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "category", "read", "written"):
        table.add_column(title, justify="right" if title in ("read", "written") else "left")
    for row in conversion.counts:
        style = "" if row.read == row.written else "yellow"
        table.add_row(row.what, escape(row.category), f"{row.read:,}", f"{row.written:,}", style=style)
    console.print(table)
    for title, found in (("repaired", conversion.repaired), ("not kept", conversion.not_kept)):
        if found:
            console.print(f"{title}:")
            for name, count in found.items():
                console.print(f"  {count:,} {escape(name)}")
    if not conversion.not_kept:
        console.print("everything was kept")
    for path in conversion.outputs:
        console.print(f"wrote {path}", soft_wrap=True, markup=False)
