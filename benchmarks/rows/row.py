"""What a measured row becomes, and small readers of the fields rows have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracesim.errors import ScenarioError
from tracesim.scenario import Scenario, load_scenario

RunReport = Mapping[str, Any]
"""The report of a simulated scenario, as ``--json`` prints it."""

BYTES_PER_GIB = 2**30


class RowSkippedError(ValueError):
    """A row cannot be expressed as a scenario; the message is the reason."""


@dataclass(frozen=True)
class RowFile:
    """The file a row comes from."""

    path: Path
    source: Mapping[str, Any]
    """What the file says about its source: name, where, grade, note."""
    machine_folders: tuple[Path, ...] = ()
    """Folders that may hold machine files the rows refer to."""


@dataclass(frozen=True)
class MeasuredRow:
    """A scenario and what was measured of it; None for what the row does not say.

    With ``smaller`` given, the measured time is that of the layers in which the two scenarios differ: predicted is
    the difference of the two iteration times, each without its optimizer step, divided by ``layers_between``.
    """

    label: str
    scenario: Scenario
    time_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    bubble_pct: float | None = None
    """Bubble of the schedule as its paper calculates it from profiled passes (``schedule_bubble``), in percent."""
    activations: float | None = None
    """Activations of the first stage at its peak in GiB; with ``baseline``, in percent of that scenario's."""
    baseline: Scenario | None = None
    state_gib: float | None = None
    """Weights, gradients and optimizer state of the first stage."""
    smaller: Scenario | None = None
    layers_between: int = 1
    memory_stage: int | None = None
    """Pipeline stage whose memory was measured; None where it is the largest of all."""
    notes: tuple[str, ...] = field(default=())
    """What was taken from the source as a whole rather than from the row."""
    composed: bool = False
    """Whether the time is a sum of parts (``benchmarks/composed.py``)."""
    reserved_by_rank: Mapping[int, float] = field(default_factory=dict)
    """Reserved memory of single ranks in GiB, by global rank."""


def scenario_of(mapping: Mapping[str, Any]) -> Scenario:
    """The scenario of a mapping; raise RowSkippedError with its problems where it cannot be simulated."""
    try:
        return load_scenario(mapping)
    except ScenarioError as error:
        problems = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise RowSkippedError("; ".join(problems)) from None


def mapping_at(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping a row holds under ``key``, empty if absent. Raise RowSkippedError if it is something else."""
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowSkippedError(f"{key} is {value!r}, a mapping was expected")
    return value


def number_at(mapping: Mapping[str, Any], key: str) -> float | None:
    """A positive finite number, None if the key is absent. Raise RowSkippedError if the value is something else."""
    value = mapping.get(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise RowSkippedError(f"{key} is {value!r}, a positive number was expected")
    return float(value)


def count_at(mapping: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """A positive whole number under the first of ``keys`` that is there.

    Raise RowSkippedError if none is and there is no default, or the value is something else.
    """
    for key in keys:
        value = mapping.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RowSkippedError(f"{key} is {value!r}, a positive whole number was expected")
        return value
    if default is None:
        raise RowSkippedError(f"the row does not say {' or '.join(keys)}")
    return default


def text_at(mapping: Mapping[str, Any], key: str) -> str:
    """A text, empty if the key is absent. Raise RowSkippedError if the value is something else."""
    value = mapping.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowSkippedError(f"{key} is {value!r}, a text was expected")
    return value


def refuse_unknown(mapping: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise RowSkippedError if the mapping has a key that no reader here understands."""
    unknown = [key for key in mapping if key not in known]
    if unknown:
        raise RowSkippedError(
            f"{what} {', '.join(f'{key} = {mapping[key]!r}' for key in unknown)} is not expressed"
        )
