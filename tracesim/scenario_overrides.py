"""``--set key.path=value``: overrides of a scenario's raw mapping, before anything is checked.

An override is applied to the text of the scenario, so it is judged by the same rules as the file. Below a model or a
machine given by name, it changes one figure of the preset (``model.layers=12``,
``hardware.network.fabric.bandwidth_gb_per_s=100``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ScenarioError
from .imbalance_fields import LENGTH_KEYS, ROUTING_KEYS
from .scenario_fields import FIELDS, RECOMPUTE_KEYS, TOP_KEYS, Problems, nearest_key
from .yaml_reading import parse_yaml

BASE = "base"
"""Key of an inline model or machine that names what it starts from."""


_KEYS_BELOW = {
    "training.recompute": RECOMPUTE_KEYS,
    "training.routing": ROUTING_KEYS,
    "training.sequence_lengths": LENGTH_KEYS,
}


def apply_overrides(
    raw: Mapping[str, Any], overrides: Sequence[str], problems: Problems
) -> tuple[dict[str, Any], set[str]]:
    """A copy of ``raw`` with the overrides applied in order, and the dotted paths they set.

    An override that is no ``path=value`` or whose path does not exist is noted and left out. Giving one of
    ``num_microbatches`` and ``global_batch_size`` takes the other out of the file: the user means the one given.
    """
    mapping: dict[str, Any] = copy.deepcopy(dict(raw))
    paths: set[str] = set()
    for text in overrides:
        path, separator, written = text.partition("=")
        path = path.strip()
        if not separator or not path:
            problems.note(f"--set {text}", "is not key.path=value, such as parallel.pp=8")
            continue
        wrong = _unknown_part(path)
        if wrong:
            problems.note(f"--set {text}", wrong)
            continue
        try:
            value = parse_yaml(written, f"--set {path}")
        except ScenarioError as error:
            problems.note(f"--set {text}", str(error))
            continue
        _assign(mapping, path.split("."), value)
        paths.add(path)
    _keep_overridden_batch(mapping, paths)
    return mapping, paths


def _unknown_part(path: str) -> str | None:
    """Why a path names no field, with the nearest that does; None if it does."""
    top, *rest = path.split(".")
    if top not in TOP_KEYS:
        return f"unknown field {top}; {nearest_key(top, TOP_KEYS)}"
    if not rest or (top in ("model", "hardware") and all(rest)):
        return None
    if top not in FIELDS:
        return f"{top} has no fields below it"
    if rest[0] not in FIELDS[top]:
        return f"unknown field {top}.{rest[0]}; {nearest_key(rest[0], FIELDS[top])}"
    if len(rest) == 1:
        return None
    below = _KEYS_BELOW.get(f"{top}.{rest[0]}")
    if below and len(rest) == 2:
        return f"unknown field {path}; {nearest_key(rest[1], below)}" if rest[1] not in below else None
    return f"{top}.{rest[0]} has no fields below it"


def _assign(mapping: dict[str, Any], parts: list[str], value: object) -> None:
    for depth, part in enumerate(parts[:-1]):
        inner = mapping.get(part)
        if not isinstance(inner, dict):
            starts_from_preset = depth == 0 and part in ("model", "hardware") and isinstance(inner, str)
            inner = {BASE: inner} if starts_from_preset else {}
            mapping[part] = inner
        mapping = inner
    mapping[parts[-1]] = value


def _keep_overridden_batch(mapping: dict[str, Any], paths: set[str]) -> None:
    training = mapping.get("training")
    given = [name for name in ("num_microbatches", "global_batch_size") if f"training.{name}" in paths]
    if isinstance(training, dict) and len(given) == 1:
        dropped = "global_batch_size" if given == ["num_microbatches"] else "num_microbatches"
        training.pop(dropped, None)
