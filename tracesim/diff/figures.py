"""Mean times of a step by what the device did, and their comparison: the figures that need no alignment.

Figures are means over the steps of a rank, then over ranks, so runs of different length and size compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
from tracesim.analysis import DIMENSIONS, Breakdown, breakdowns

Figures = dict[str, float]


def step_figures(found: Iterable[Breakdown]) -> Figures:
    """Mean times a step in ms, by the keys of ``metrics``, and the share of communication that is overlapped."""
    steps = list(found)
    if not steps:
        return {}

    def average(values: Iterable[int]) -> float:
        return sum(values) / len(steps) / 1e6

    communication = sum(step.communication for step in steps)
    figures = {
        "iteration_time_ms": average(step.window.length for step in steps),
        "device_busy_ms": average(step.busy for step in steps),
        "compute_ms": average(step.compute for step in steps),
        "optimizer_ms": average(step.optimizer for step in steps),
        "communication_ms": average(step.communication for step in steps),
        "exposed_communication_ms": average(step.exposed for step in steps),
    }
    for key in DIMENSIONS:
        figures[f"exposed_communication_{key}_ms"] = average(
            step.exposed_communication[key] for step in steps
        )
    figures["memory_ms"] = average(step.memory for step in steps)
    figures["idle_ms"] = average(step.idle for step in steps)
    exposed = sum(step.exposed for step in steps)
    figures["communication_overlap_fraction"] = 1 - exposed / communication if communication else 0.0
    return figures


def kind_figures(found: Iterable[Breakdown]) -> dict[str, Figures]:
    """By kind in lower case: mean ``total_ms`` and ``count`` a step."""
    steps = list(found)
    return {
        kind.name.lower(): {
            "total_ms": sum(s.kinds[kind].total_ns for s in steps if kind in s.kinds) / len(steps) / 1e6,
            "count": sum(s.kinds[kind].count for s in steps if kind in s.kinds) / len(steps),
        }
        for kind in OpKind
        if any(kind in s.kinds for s in steps)
    }


def steps_by_rank(timeline: Timeline) -> dict[int, list[Breakdown]]:
    """The breakdowns of a timeline by global rank, steps in order of time."""
    found: dict[int, list[Breakdown]] = {}
    for step in breakdowns(timeline):
        found.setdefault(int(timeline.ranks.rank[step.window.rank]), []).append(step)
    return found


def mean(rows: Iterable[Figures]) -> Figures:
    """Mean of each figure; empty rows do not count."""
    listed = [row for row in rows if row]
    return {key: sum(row[key] for row in listed) / len(listed) for key in listed[0]} if listed else {}


def mean_kinds(rows: Iterable[dict[str, Figures]]) -> dict[str, Figures]:
    """Mean by kind; a kind that a row lacks counts as nothing."""
    listed = list(rows)
    names = [kind.name.lower() for kind in OpKind if any(kind.name.lower() in row for row in listed)]
    nothing = {"total_ms": 0.0, "count": 0.0}
    return {name: mean([row.get(name, nothing) for row in listed]) for name in names}


def compare_figures(a: Figures, b: Figures) -> dict[str, dict[str, float | None]]:
    """:func:`compare` of each figure; one that a side lacks is 0 there."""
    return {key: compare(a.get(key, 0.0), b.get(key, 0.0)) for key in (a if len(a) >= len(b) else b)}


def compare_kinds(a: dict[str, Figures], b: dict[str, Figures]) -> dict[str, Any]:
    """:func:`compare` of the figures of each kind that a side has."""
    names = [kind.name.lower() for kind in OpKind if kind.name.lower() in a or kind.name.lower() in b]
    return {
        name: {
            key: compare(a.get(name, {}).get(key, 0.0), b.get(name, {}).get(key, 0.0))
            for key in ("total_ms", "count")
        }
        for name in names
    }


def compare(a: float, b: float) -> dict[str, float | None]:
    """Both values, ``b - a`` and ``b / a - 1`` (None where ``a`` is 0)."""
    return {"a": a, "b": b, "absolute": b - a, "relative": b / a - 1 if a else None}
