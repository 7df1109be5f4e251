"""``tracesim import-megatron``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import yaml

from ..errors import ScenarioError
from ..megatron import ImportedScenario, import_megatron, read_launch_file
from ..output import atomic_write
from ..scenario import load_scenario
from .printing import print_json


@click.command("import-megatron")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--hardware", required=True, metavar="NAME", help="Machine: a preset or a YAML file.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of the run (default: one data-parallel rank).")
@click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Words of the tokenizer, where its vocabulary is a file."
)
@click.option("--bert", is_flag=True, help="The arguments are those of pretrain_bert.py.")
@click.option(
    "--attention",
    type=click.Choice(["flash", "unfused"]),
    default="flash",
    show_default=True,
    help="Kernels where no backend is named.",
)
@click.option(
    "--leave-out",
    "leave_out",
    multiple=True,
    metavar="ARGUMENT",
    help="Import without an argument that is not known or not simulated; may be repeated.",
)
@click.option(
    "--variable",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable that FILE uses and does not set (1 is a script's first argument); may be repeated.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.yaml")
@click.option(
    "--json", "as_json", is_flag=True, help="Print scenario, assumptions and ignored arguments as JSON."
)
def import_megatron_command(
    file: Path,
    hardware: str,
    gpus: int | None,
    vocab_size: int | None,
    bert: bool,
    attention: str,
    leave_out: tuple[str, ...],
    variables: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Turn the arguments of a Megatron-LM run into a scenario.

    FILE is a YAML or JSON of arguments, or a launch script with --flags. Without -o the scenario is printed.
    """
    launch = read_launch_file(file, _given(variables))
    imported = import_megatron(
        launch.arguments,
        hardware,
        world_size=gpus,
        launched=launch.gpus,
        vocab_size=vocab_size,
        environment=launch.environment,
        is_bert=bert or launch.script == "pretrain_bert.py",
        default_backend=attention,
        leave_out=leave_out,
        name=file.stem,
    )
    # What cannot be simulated is said now, not when the file is used.
    load_scenario(imported.mapping)
    imported = replace(imported, assumed=(*launch.assumed, *imported.assumed))
    text = _yaml(imported, file)
    if output is not None:
        with atomic_write(output) as stream:
            stream.write(text.encode())
    if as_json:
        print_json(
            {
                "scenario": imported.mapping,
                "assumed": list(imported.assumed),
                "without_effect": list(imported.without_effect),
                "left_out": list(imported.left_out),
            }
        )
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {output}")
        for line in imported.assumed:
            click.echo(f"assumed: {line}")


def _given(variables: tuple[str, ...]) -> dict[str, str]:
    """Variables by name.

    Raises:
        ScenarioError: if one is not NAME=VALUE.
    """
    pairs = [text.partition("=") for text in variables]
    for name, equals, _ in pairs:
        if not equals or not (name.isidentifier() or name.isdecimal()):
            raise ScenarioError(f"--variable {name}: must be NAME=VALUE, such as TP=8")
    return {name: value for name, _, value in pairs}


def _yaml(imported: ImportedScenario, file: Path) -> str:
    """The scenario file, with what was assumed in front."""
    lines = [f"# Imported from {file.name}, an argument list of Megatron-LM."]
    lines += [f"# Assumed: {line}" for line in imported.assumed]
    lines += [f"# Left out: --{name}" for name in imported.left_out]
    return "\n".join(lines) + "\n" + yaml.safe_dump(imported.mapping, sort_keys=False, allow_unicode=True)
