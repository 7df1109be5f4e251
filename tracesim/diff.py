"""Two timelines side by side, simulated or measured: where do they spend a step differently?

Figures are means over the steps of a rank, then over ranks, so runs of different length and size compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
from tracesim.analysis import DIMENSIONS, Breakdown, breakdowns

Figures = dict[str, float]

SCHEMA = "tracesim.diff/1"

_LABELS = {
    "iteration_time_ms": "iteration time",
    "device_busy_ms": "device busy",
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "communication_ms": "communication, all",
    "exposed_communication_ms": "exposed communication",
    "memory_ms": "copies and fills",
    "idle_ms": "idle",
}


def diff_timelines(a: Timeline, b: Timeline) -> dict[str, Any]:
    """Compare two timelines.

    Returns:
        A dict ready for JSON: ``schema``; ``a`` and ``b`` (name, simulated, device, ranks, steps); ``averages`` and
        ``ranks[i]`` (matched by rank number, ranks of both sides only) with ``metrics`` and ``kinds``. Each figure is
        ``{"a", "b", "absolute", "relative"}``, times in ms a step, ``absolute = b - a``, ``relative = b / a - 1``
        (None where ``a`` is 0). ``kinds`` hold ``total_ms`` (summed, without regard to overlap) and ``count``.
    """
    sides = [_by_rank(timeline) for timeline in (a, b)]
    metrics = [{rank: step_figures(found) for rank, found in side.items()} for side in sides]
    kinds = [{rank: kind_figures(found) for rank, found in side.items()} for side in sides]
    common = sorted(set(sides[0]) & set(sides[1]))
    return {
        "schema": SCHEMA,
        "a": _side(a, sides[0]),
        "b": _side(b, sides[1]),
        "averages": {
            "metrics": _compare(_mean(metrics[0].values()), _mean(metrics[1].values())),
            "kinds": _compare_kinds(_mean_kinds(kinds[0].values()), _mean_kinds(kinds[1].values())),
        },
        "ranks": [
            {
                "rank": rank,
                "metrics": _compare(metrics[0][rank], metrics[1][rank]),
                "kinds": _compare_kinds(kinds[0][rank], kinds[1][rank]),
            }
            for rank in common
        ],
    }


def step_figures(found: Iterable[Breakdown]) -> Figures:
    """Mean times a step in ms, by the keys of ``metrics``, and the share of communication that is overlapped."""
    steps = list(found)
    if not steps:
        return {}

    def mean(values: Iterable[int]) -> float:
        return sum(values) / len(steps) / 1e6

    communication = sum(step.communication for step in steps)
    figures = {
        "iteration_time_ms": mean(step.window.length for step in steps),
        "device_busy_ms": mean(step.busy for step in steps),
        "compute_ms": mean(step.compute for step in steps),
        "optimizer_ms": mean(step.optimizer for step in steps),
        "communication_ms": mean(step.communication for step in steps),
        "exposed_communication_ms": mean(step.exposed for step in steps),
    }
    for key in DIMENSIONS:
        figures[f"exposed_communication_{key}_ms"] = mean(step.exposed_communication[key] for step in steps)
    figures["memory_ms"] = mean(step.memory for step in steps)
    figures["idle_ms"] = mean(step.idle for step in steps)
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


def _by_rank(timeline: Timeline) -> dict[int, list[Breakdown]]:
    found: dict[int, list[Breakdown]] = {}
    for step in breakdowns(timeline):
        found.setdefault(int(timeline.ranks.rank[step.window.rank]), []).append(step)
    return found


def _side(timeline: Timeline, by_rank: Mapping[int, list[Breakdown]]) -> dict[str, Any]:
    return {
        "name": timeline.name,
        "simulated": timeline.simulated,
        "device": timeline.device,
        "world_size": timeline.world_size,
        "ranks": sorted(by_rank),
        "steps": max((len(steps) for steps in by_rank.values()), default=0),
    }


def _mean(rows: Iterable[Figures]) -> Figures:
    listed = [row for row in rows if row]
    return {key: sum(row[key] for row in listed) / len(listed) for key in listed[0]} if listed else {}


def _mean_kinds(rows: Iterable[dict[str, Figures]]) -> dict[str, Figures]:
    listed = list(rows)
    names = [kind.name.lower() for kind in OpKind if any(kind.name.lower() in row for row in listed)]
    nothing = {"total_ms": 0.0, "count": 0.0}
    return {name: _mean([row.get(name, nothing) for row in listed]) for name in names}


def _compare(a: Figures, b: Figures) -> dict[str, dict[str, float | None]]:
    return {key: compare(a.get(key, 0.0), b.get(key, 0.0)) for key in (a if len(a) >= len(b) else b)}


def _compare_kinds(a: dict[str, Figures], b: dict[str, Figures]) -> dict[str, Any]:
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


def render_diff(result: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`diff_timelines` returned as tables: averages, kinds, and the time of each common rank."""
    for key in ("a", "b"):
        side = result[key]
        origin = "simulated" if side["simulated"] else "measured"
        console.print(
            f"{key}: {side['name']} ({origin}, {side['device'] or 'device unknown'}, {len(side['ranks'])} rank(s), "
            f"{side['steps'] or 'no'} step(s))",
            highlight=False,
            markup=False,
        )
    averages = result["averages"]
    table = _table("ms a step, mean over steps and ranks")
    for key, values in averages["metrics"].items():
        if key.endswith("_ms") and (key in _LABELS or values["a"] or values["b"]):
            _row(table, _LABELS.get(key) or "  of it " + key.split("_")[2], values)
    console.print(table)
    kinds = _table("ms a step by kind, summed without regard to overlap", ("count a", "count b"))
    ordered = sorted(
        averages["kinds"].items(), key=lambda i: -max(i[1]["total_ms"]["a"], i[1]["total_ms"]["b"])
    )
    for name, values in ordered:
        _row(kinds, name, values["total_ms"], [f"{values['count'][side]:g}" for side in ("a", "b")])
    console.print(kinds)
    if len(result["ranks"]) > 1:
        ranks = _table("iteration time of each rank, ms")
        for entry in result["ranks"]:
            _row(ranks, f"rank {entry['rank']}", entry["metrics"]["iteration_time_ms"])
        console.print(ranks)


def _table(title: str, more: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("a", "b", "b - a", "%", *more):
        table.add_column(heading, justify="right")
    return table


def _row(table: Table, label: str, values: Mapping[str, float | None], more: Iterable[str] = ()) -> None:
    relative = values["relative"]
    table.add_row(
        label,
        f"{values['a']:.3f}",
        f"{values['b']:.3f}",
        f"{values['absolute']:+.3f}",
        "" if relative is None else f"{100 * relative:+.1f}",
        *more,
    )
