"""``tracesim hardware``: list and show machine profiles, and import SimuMax machine files."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from hardware_profiles import import_simumax, list_profiles, load_profile, profile_to_yaml

from ..output import atomic_write
from .printing import output_console, print_json


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def hardware(context: click.Context, as_json: bool) -> None:
    """List the hardware profiles, show one, or import one."""
    if context.invoked_subcommand is not None:
        return
    rows = []
    for name in list_profiles():
        profile = load_profile(name)
        rows.append(
            {
                "name": name,
                "bf16_tflops": profile.peak_tflops.get("bf16"),
                "memory_gib": profile.memory.capacity_gib,
                "memory_gb_per_s": profile.memory.bandwidth_gb_per_s,
                "gpus_per_domain": profile.network.gpus_per_domain,
                "domain_gb_per_s": profile.network.domain.bandwidth_gb_per_s,
                "fabric_gb_per_s": profile.network.fabric.bandwidth_gb_per_s,
            }
        )
    if as_json:
        print_json(rows)
        return
    table = Table("hardware", *(key.replace("_", " ") for key in list(rows[0])[1:]))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(str(row["name"]), *(f"{value:,}" for key, value in row.items() if key != "name"))
    output_console().print(table)


@hardware.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the profile NAME (a preset or a YAML file) as YAML, with the source of every figure."""
    click.echo(profile_to_yaml(load_profile(name)), nl=False)


@hardware.command("import-simumax")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FILE.yaml")
@click.option("--base", help="Profile that supplies what the file does not say (default: the nearest one).")
def import_simumax_command(file: Path, output: Path, base: str | None) -> None:
    """Convert a SimuMax machine FILE (JSON) to a hardware profile with its measured shapes."""
    profile = import_simumax(file, load_profile(base) if base else None)
    text = profile_to_yaml(profile)
    with atomic_write(output) as stream:
        stream.write(text.encode())
    click.echo(
        f"wrote {output}: {len(profile.measured_gemms)} measured GEMMs, "
        f"{len(profile.measured_attentions)} attentions, {len(profile.measured_collectives)} collectives"
    )
