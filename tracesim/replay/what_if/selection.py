"""Reading the values of what-ifs, and selecting the rows that they change."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Float64
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt


def factor(text: str, what: str) -> float:
    """A factor from 0 on.

    Raises:
        ScenarioError: if it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ScenarioError(f"{what}={text}: a factor is a number from 0 on, as 0.5 for half")
    return value


def whole_number(text: str, what: str, least: int) -> int:
    """A whole number from ``least`` on.

    Raises:
        ScenarioError: if it is none.
    """
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise ScenarioError(f"{what}={text}: write a whole number from {least} on")
    return int(text)


def with_note(rebuilt: Rebuilt, note: str) -> Rebuilt:
    """The run with something to be said of it, once."""
    return rebuilt if note in rebuilt.notes else replace(rebuilt, notes=(*rebuilt.notes, note))


def regular_expression(pattern: str, what: str) -> re.Pattern[str]:
    """A pattern in which case does not count.

    Raises:
        ScenarioError: if it is no regular expression.
    """
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ScenarioError(f"{what}: no regular expression ({error})") from None


def device_names_matching(rebuilt: Rebuilt, pattern: str, what: str) -> Bool:
    """Device rows whose name a regular expression is found in; case does not count.

    Raises:
        ScenarioError: if it is no regular expression, or nothing matches.
    """
    compiled = regular_expression(pattern, f"{what}={pattern}")
    matching = np.array([bool(compiled.search(name)) for name in rebuilt.graph.strings], dtype=np.bool_)
    return some(matching[rebuilt.graph.operations.name] & rebuilt.on_device(), f"{what}={pattern}")


def some(rows: Bool, what: str) -> Bool:
    """The rows, if there are any.

    Raises:
        ScenarioError: if there are none.
    """
    if not rows.any():
        raise ScenarioError(
            f"{what}: no device slice of the trace is meant; `tracesim read` lists what it holds"
        )
    return rows


def scaled(rebuilt: Rebuilt, rows: Bool, by: float | Float64) -> Rebuilt:
    """The run with the durations of some rows multiplied."""
    changed = np.where(rows, np.rint(rebuilt.durations * by).astype(np.int64), rebuilt.durations)
    return replace(rebuilt, durations=changed)
