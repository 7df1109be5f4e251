"""Launch files of Megatron-LM: a YAML or JSON of arguments, or a shell script or text with ``--flags``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ScenarioError
from ..yaml_reading import describe_type, parse_yaml

_MAX_BYTES = 1 << 20
_ARGUMENT_KEYS = ("MODEL_ARGS", "megatron_args_full", "megatron_args")
_ENVIRONMENT_KEYS = ("ENV_VARS", "env")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


@dataclass(frozen=True)
class LaunchFile:
    """Arguments of a run by flag, and the environment variables it sets."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def read_launch_file(path: Path) -> LaunchFile:
    """Arguments and environment of a launch file.

    A YAML or JSON file holds arguments by name, alone or under ``MODEL_ARGS`` beside ``ENV_VARS``, as Megatron-LM's
    functional tests do. Anything else is read as shell text: flags with their values, ``NAME=value`` assignments,
    whose variables are put in where flags use them.

    Raises:
        ScenarioError: if there is no such file, or it holds no argument.
    """
    text = _text(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _of_mapping(_mapping(parse_yaml(text, str(path)), path), path)
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{path}: cannot be read as JSON: {str(error)[:100]}") from None
        return _of_mapping(_mapping(document, path), path)
    return _of_shell(text, path)


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


def _of_mapping(document: Mapping[Any, Any], path: Path) -> LaunchFile:
    held = next((document[key] for key in _ARGUMENT_KEYS if key in document), document)
    environment: object = next((document[key] for key in _ENVIRONMENT_KEYS if key in document), {})
    if not isinstance(held, Mapping) or not held:
        raise ScenarioError(f"{path}: holds no arguments; a mapping such as {{num-layers: 12}} is expected")
    if not isinstance(environment, Mapping):
        environment = {}
    arguments = {str(key): value for key, value in held.items() if key not in _ENVIRONMENT_KEYS}
    return LaunchFile(arguments, {str(key): str(value) for key, value in environment.items()})


def _of_shell(text: str, path: Path) -> LaunchFile:
    environment: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for line in _joined_lines(text):
        assignment = _ASSIGNMENT.match(line)
        if assignment is not None and not assignment.group(2).lstrip("(\"' \t").startswith("--"):
            words = _split(assignment.group(2), path)
            environment[assignment.group(1)] = _substituted(words[0] if words else "", environment)
        # A variable may hold flags itself.
        flags = line if assignment is None else assignment.group(2)
        _collect([_substituted(word, environment) for word in _split(flags, path)], arguments)
    if not arguments:
        raise ScenarioError(f"{path}: holds no argument such as --num-layers 12")
    return LaunchFile(arguments, environment)


def _joined_lines(text: str) -> list[str]:
    """Lines, those that end in a backslash joined with the next."""
    return re.sub(r"\\\r?\n", " ", text).splitlines()


def _split(line: str, path: Path) -> list[str]:
    # The parentheses of an array of flags stand alone or at the ends; those of a quoted pattern are kept.
    cleaned = re.sub(r"^\s*\(|\)\s*$", " ", line) if "$(" not in line else line
    try:
        return shlex.split(cleaned, comments=True)
    except ValueError:
        # Quotes over several lines: what is between them is read line by line.
        try:
            return shlex.split(cleaned.replace('"', " ").replace("'", " "), comments=True)
        except ValueError as error:
            raise ScenarioError(f"{path}: {line.strip()[:60]!r} cannot be read: {error}") from None


def _substituted(word: str, environment: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return environment.get(match.group(1)) or match.group(2) or match.group(0)

    return _VARIABLE.sub(value, word)


def _collect(words: list[str], arguments: dict[str, Any]) -> None:
    """Flags among words; what follows a flag up to the next is its value or values."""
    flat = [piece for word in words for piece in (word.split() if word.lstrip().startswith("--") else [word])]
    flag: str | None = None
    for word in flat:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            arguments[flag] = _value(value) if equals else True
            flag = None if equals else flag
        elif flag is not None and word and not word.startswith(("$", "&", "|", ">", ";")):
            held = arguments[flag]
            new = _value(word)
            arguments[flag] = new if held is True else [*(held if isinstance(held, list) else [held]), new]
        else:
            flag = None


def _value(text: str) -> Any:  # noqa: ANN401 - a value of an argument list
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)
