"""``tracesim overlap``: list the policies of overlap that a scenario can name."""

from __future__ import annotations

import click
from rich.table import Table

from op_graphs.overlap.registry import OVERLAP_POINTS, describe_policies

from .printing import output_console, print_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def overlap(as_json: bool) -> None:
    """List what a scenario can say under overlap, and which policy lets what run beside what."""
    rows = describe_policies()
    if as_json:
        print_json(rows)
        return
    table = Table("overlap.", "policy", "what runs beside what", "as in", box=None, pad_edge=False)
    table.columns[2].overflow = table.columns[3].overflow = "fold"
    for row in rows:
        shown = row["name"] + "".join(f" ({value})" for value in row["means"])
        table.add_row(row["point"], shown, row["beside"], row["follows"])
    output_console().print(table)
    click.echo("\n" + "\n".join(f"{key}: {point.decides}" for key, point in OVERLAP_POINTS.items()))
