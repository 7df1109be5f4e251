"""A comparison as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tracesim.diff.words import PART_LABELS, operation_label, rank_label

_MOST_RANKS = 8
_MOST_OPERATIONS = 20
_MOST_HOST_ROWS = 6

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
    """Print what :func:`~tracesim.diff.diff_timelines` returned: sentences, averages, kinds, ranks, why they differ."""
    for key in ("a", "b"):
        console.print(describe_side(key, result[key]), highlight=False, markup=False, soft_wrap=True)
    console.print()
    for sentence in result["summary"]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    console.print()
    _averages(result["averages"], console)
    if len(result["ranks"]) > 1:
        ranks = _table("iteration time of each rank, ms")
        for entry in result["ranks"]:
            _row(ranks, f"rank {entry['rank']}", entry["metrics"]["iteration_time_ms"])
        console.print(ranks)
    if result["attribution"]["steps"]:
        _attribution(result, console)
    _memory(result["memory"], console)


def describe_side(key: str, side: Mapping[str, Any]) -> str:
    """One line on a run: name, origin, device, ranks and steps."""
    origin = "simulated" if side["simulated"] else "measured"
    return (
        f"{key}: {side['name']} ({origin}, {side['device'] or 'device unknown'}, {len(side['ranks'])} rank(s), "
        f"{side['steps'] or 'no'} step(s))"
    )


def _averages(averages: Mapping[str, Any], console: Console) -> None:
    table = _table("ms a step, mean over steps and ranks")
    for key, values in averages["metrics"].items():
        if key.endswith("_ms") and (key in _LABELS or values["a"] or values["b"]):
            _row(table, _LABELS.get(key) or "  of it " + key.split("_")[2], values)
    if averages["metrics"]:
        console.print(table)
    kinds = _table("ms a step by kind", ("count a", "count b"))
    ordered = sorted(
        averages["kinds"].items(), key=lambda i: -max(i[1]["total_ms"]["a"], i[1]["total_ms"]["b"])
    )
    for name, values in ordered:
        _row(kinds, name, values["total_ms"], [f"{values['count'][side]:g}" for side in ("a", "b")])
    if ordered:
        console.print(kinds)


def _attribution(result: Mapping[str, Any], console: Console) -> None:
    attribution = result["attribution"]
    ranks = attribution["ranks"]
    shown = ranks if 1 < len(ranks) <= _MOST_RANKS else []
    table = Table(title="b - a of a step, ms", title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right")
    for rank in shown:
        table.add_column(rank_label(rank), justify="right")
    for key, label in PART_LABELS.items():
        columns = [entry["parts_ns"][key] for entry in (attribution, *shown)]
        if any(columns):
            table.add_row(label, *(f"{value / 1e6:+.3f}" for value in columns))
    table.add_section()
    table.add_row("b - a", *(f"{entry['difference_ns'] / 1e6:+.3f}" for entry in (attribution, *shown)))
    console.print(table)
    _operations(result["operations"], console)
    _host(result["host_in_launch_gaps"], console)


def _operations(operations: Iterable[Mapping[str, Any]], console: Console) -> None:
    shown = [o for o in operations if o["difference_ns"]][:_MOST_OPERATIONS]
    if not shown:
        return
    table = Table(title="operations that contribute most, own time of a step", title_justify="left")
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=46)
    table.add_column("kind", no_wrap=True)
    for heading in ("count a", "count b", "a ms", "b ms", "b - a", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for o in shown:
        table.add_row(
            escape(operation_label(o)),
            o["kind"],
            f"{o['count_a']:.4g}",
            f"{o['count_b']:.4g}",
            f"{o['a_ns'] / 1e6:.3f}",
            f"{o['b_ns'] / 1e6:.3f}",
            f"{o['difference_ns'] / 1e6:+.3f}",
            "" if o["ratio"] is None else f"{o['ratio']:.2f}",
        )
    console.print(table)


def _host(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    shown = [row for row in rows if row["difference_ns"]][:_MOST_HOST_ROWS]
    if not shown:
        return
    table = Table(title="what the host was in during launch gaps, ms a step", title_justify="left")
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=72)
    for heading in ("a", "b", "b - a"):
        table.add_column(heading, justify="right")
    for row in shown:
        table.add_row(
            escape(row["name"]),
            f"{row['a_ns'] / 1e6:.3f}",
            f"{row['b_ns'] / 1e6:.3f}",
            f"{row['difference_ns'] / 1e6:+.3f}",
        )
    console.print(table)


def _memory(peaks: Iterable[Mapping[str, Any]], console: Console) -> None:
    rows = list(peaks)[:_MOST_RANKS]
    if not rows:
        return
    names = list(
        dict.fromkeys(name for row in rows for name in row["parts_bytes"] if row["parts_bytes"][name])
    )
    table = Table(title="peak memory, GiB", title_justify="left")
    table.add_column("")
    for heading in ("a", "b", "b - a", *names):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            rank_label(row),
            f"{row['a_bytes'] / 2**30:.3f}",
            f"{row['b_bytes'] / 2**30:.3f}",
            f"{row['difference_bytes'] / 2**30:+.3f}",
            *(f"{row['parts_bytes'].get(name, 0) / 2**30:+.3f}" for name in names),
        )
    console.print(table)


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
