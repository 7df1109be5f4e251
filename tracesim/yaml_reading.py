"""Small YAML files read with limits: no aliases, no repeated keys, no more than 1 MiB, nothing but plain data.

A scenario is a page of text. Aliases are refused because a few lines of them can stand for gigabytes; repeated keys
because YAML would silently keep the last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import ScenarioError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class _PlainLoader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"alias *{event.anchor} is not allowed; write the value out", event.start_mark
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {MAX_DEPTH} levels", event.start_mark
            )
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice; keep one", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raise ScenarioError if the file is missing, a folder, unreadable, larger than 1 MiB, not text, not YAML, or not a
    mapping with text keys.
    """
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ScenarioError(f"{path} is not a text file; a scenario is a YAML file in UTF-8") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        held = "nothing" if value is None else f"a {describe_type(value)}"
        raise ScenarioError(
            f"{path} holds {held}; a scenario is a YAML mapping with at least model and hardware"
        )
    return value


def parse_yaml(text: str, origin: str) -> object:
    """The value of a YAML text; ``origin`` names it in messages.

    Raise ScenarioError if it is not YAML, or uses aliases, repeated keys or tags of other languages.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ScenarioError(f"{origin}{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{origin}: not YAML text ({str(error).splitlines()[0]})") from None
    except (ValueError, RecursionError, TypeError) as error:
        raise ScenarioError(f"{origin}: a value cannot be read ({str(error).splitlines()[0]})") from None


def describe_type(value: object) -> str:
    """The type of a YAML value as a user would call it."""
    names = {
        bool: "true/false",
        int: "whole number",
        float: "number",
        str: "text",
        list: "list",
        dict: "mapping",
    }
    return "empty value" if value is None else names.get(type(value), type(value).__name__)


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise ScenarioError(f"{path} is a folder; give a scenario YAML file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ScenarioError(
            f"{path} does not exist; give a scenario YAML file or a bundled scenario"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError(f"{path} cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise ScenarioError(
            f"{path} is larger than 1 MiB ({MAX_BYTES} bytes); a scenario is a short YAML file"
        )
    return data
