"""``tracesim models``."""

from __future__ import annotations

import dataclasses

import click
from rich.markup import escape
from rich.table import Table

from op_graphs.parameters import count_parameters
from op_graphs.presets import list_models, load_model

from .printing import output_console, print_json


@click.command()
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def models(model: str | None, as_json: bool) -> None:
    """List the model presets, or show MODEL (a preset, a YAML file or a Hugging Face config.json)."""
    if model is not None:
        _show(model, as_json)
        return
    described = [load_model(name) for name in list_models()]
    rows = [{"name": m.name, "parameters": count_parameters(m), "layers": m.layers, "hidden_size": m.hidden_size,
             "heads": m.heads, "kv_heads": m.kv_heads, "ffn_size": m.ffn_size, "vocab_size": m.vocab_size}
            for m in described]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    table = Table("model", *(key.replace("_", " ") for key in list(rows[0])[1:]))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(str(row["name"]), *(f"{value:,}" for key, value in row.items() if key != "name"))
    output_console().print(table)


def _show(name: str, as_json: bool) -> None:
    model = load_model(name)
    facts = {
        **dataclasses.asdict(model),
        "parameters": count_parameters(model, seq_len=model.max_positions or 1),
    }
    if as_json:
        print_json(facts)
        return
    table = Table("field", "value", title=escape(model.name))
    for key, value in facts.items():
        table.add_row(key, f"{value:,}" if type(value) is int else escape(str(value)))
    output_console().print(table)
