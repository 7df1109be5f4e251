"""Launch files of Megatron-LM: a YAML or JSON of arguments, or a shell script or text with ``--flags``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ScenarioError
from ..yaml_reading import describe_type, parse_yaml
from .launch_command import argument_value, chosen_command
from .shell import walk_script
from .shell_words import ShellSyntaxError

_MAX_BYTES = 1 << 20
_ARGUMENT_KEYS = ("MODEL_ARGS", "megatron_args_full", "megatron_args")
_ENVIRONMENT_KEYS = ("ENV_VARS", "env")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+[\"']?([^\s\"';&|]+)", re.MULTILINE)
_MOST_FILES = 20
_PARTS = {"language_model", "model_parallel"}
"""Sections of a ``--yaml-cfg`` file."""


@dataclass(frozen=True)
class LaunchFile:
    """Arguments of a run by flag, and the environment variables it sets."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    script: str = ""
    """The training script that is run, where the file says it."""
    gpus: int | None = None
    """GPUs that the launcher starts, where the file says it."""
    assumed: tuple[str, ...] = ()
    """Choices that the file alone does not settle, and what was taken."""


def read_launch_file(path: Path, variables: Mapping[str, str] | None = None) -> LaunchFile:
    """Arguments and environment of a launch file.

    A YAML or JSON file holds arguments by name, alone or under ``MODEL_ARGS`` beside ``ENV_VARS``, as Megatron-LM's
    functional tests do. Anything else is a shell script, whose branches are followed up to the command that trains
    (``shell``). ``variables`` are set before the file is read; ``1`` is the first argument of a script.

    Raises:
        ScenarioError: if there is no such file, or it holds no argument.
    """
    text, known = _text(path), dict(variables or {})
    if path.suffix.lower() in (".yaml", ".yml"):
        return _of_mapping(_mapping(parse_yaml(text, str(path)), path), path, known)
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{path}: cannot be read as JSON: {str(error)[:100]}") from None
        return _of_mapping(_mapping(document, path), path, known)
    return _of_shell(text, path, known)


def _mapping(document: object, path: Path) -> Mapping[Any, Any]:
    if not isinstance(document, Mapping):
        raise ScenarioError(f"{path}: holds a {describe_type(document)}; a mapping of arguments is expected")
    return document


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(content) > _MAX_BYTES:
        raise ScenarioError(f"{path}: is larger than 1 MiB, which no launch file is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ScenarioError(f"{path}: is not a text file") from None


def _of_mapping(document: Mapping[Any, Any], path: Path, variables: Mapping[str, str]) -> LaunchFile:
    held = next((document[key] for key in _ARGUMENT_KEYS if key in document), document)
    environment: object = next((document[key] for key in _ENVIRONMENT_KEYS if key in document), {})
    if not isinstance(held, Mapping) or not held:
        raise ScenarioError(f"{path}: holds no arguments; a mapping such as {{num-layers: 12}} is expected")
    if set(held) >= _PARTS:
        raise ScenarioError(
            f"{path}: is a --yaml-cfg file of Megatron-LM, whose keys are not the arguments of its command line; "
            "write those in a mapping such as {num-layers: 12}"
        )
    if not isinstance(environment, Mapping):
        environment = {}
    known = {str(key): str(value) for key, value in environment.items()} | dict(variables)
    arguments = {
        str(key): _substituted(value, known) for key, value in held.items() if key not in _ENVIRONMENT_KEYS
    }
    return LaunchFile(arguments, {key: str(_substituted(value, known)) for key, value in known.items()})


def _substituted(value: object, variables: Mapping[str, str]) -> object:
    """A value with variables put in, where they are known; a number where that is all it then is."""
    if not isinstance(value, str) or "$" not in value:
        return value

    def replacement(match: re.Match[str]) -> str:
        return variables.get(match.group(1)) or match.group(2) or match.group(0)

    return argument_value(_VARIABLE.sub(replacement, value))


def _sourced(text: str, path: Path) -> dict[str, str]:
    """Texts of files that a script names behind ``source`` or a dot, those that lie beside it."""
    names = {match.group(1).rpartition("/")[2] for match in _SOURCED.finditer(text)}
    found = {}
    for name in sorted(names - {path.name})[:_MOST_FILES]:
        beside = path.parent / name
        if name and beside.is_file():
            found[name] = _text(beside)
    return found


def _of_shell(text: str, path: Path, variables: Mapping[str, str]) -> LaunchFile:
    try:
        run = walk_script(text, variables, _sourced(text, path))
    except ShellSyntaxError as error:
        raise ScenarioError(f"{path}: cannot be read as a shell script: {error}") from None
    environment = {name: value for name, value in run.variables.items() if isinstance(value, str)}
    command = chosen_command(run)
    if not command.arguments:
        raise ScenarioError(f"{path}: holds no argument such as --num-layers 12")
    return LaunchFile(command.arguments, environment, command.script, command.gpus, tuple(run.assumed))
