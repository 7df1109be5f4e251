"""A comparison as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

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
