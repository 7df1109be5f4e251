"""Tables of an analysis for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MOST_ROWS = 24
_MOST_NAME = 60


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`tracesim.analysis.describe.describe` returned."""
    origin = "simulated" if result["simulated"] else "measured"
    console.print(
        f"{result['name']}: {origin} on {result['device'] or 'an unknown device'}, "
        f"{len(result['ranks'])} of {result['world_size'] or len(result['ranks'])} rank(s), "
        f"{len(result['steps'])} step(s) over all ranks",
        highlight=False,
        markup=False,
    )
    for finding in result["findings"]:
        console.print(f"- {finding['text']}", highlight=False, markup=False)
    if not result["steps"]:
        console.print("nothing ran on a device and no step is marked: there is nothing to analyze")
        return
    _steps(result["steps"], console)
    _idle(result["steps"], console)
    _launches(result["steps"], console)
    _paths(result, console)
    if result["kernels"]:
        _kernels(result["kernels"], console)
    if len(result["ranks"]) > 1:
        _stragglers(result, console)
    _bandwidth(result["bandwidth"], console)
    if result["pipeline"] is not None:
        _pipeline(result["pipeline"], console)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.1f}"


def _table(title: str, headings: Sequence[str], texts: int = 0) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", overflow="fold")
    return table


def _print(table: Table, left_out: int, console: Console) -> None:
    console.print(table)
    if left_out > 0:
        console.print(f"... and {left_out} more (--json has all)")


def _steps(steps: Sequence[Mapping[str, Any]], console: Console) -> None:
    used = [
        key
        for key in steps[0]["exposed_communication_ns"]
        if any(s["exposed_communication_ns"][key] for s in steps)
    ]
    headings = ["rank", "step", "span", "compute", "optimizer", *(f"exposed {k}" for k in used)]
    headings += ["of it wait", "copies", "idle", "comm. in all", "overlap %"]
    table = _table("where the time goes, ms", headings)
    for step in steps[:_MOST_ROWS]:
        table.add_row(
            str(step["rank"]),
            str(step["step"]) if step["step"] >= 0 else "-",
            _ms(step["span_ns"]),
            _ms(step["compute_ns"]),
            _ms(step["optimizer_ns"]),
            *(_ms(step["exposed_communication_ns"][key]) for key in used),
            _ms(step["exposed_wait_ns"]),
            _ms(step["memory_ns"]),
            _ms(sum(step["idle_ns"].values())),
            _ms(step["communication_ns"]),
            f"{step['overlap_percent']:.1f}" if step["communication_ns"] else "-",
        )
    _print(table, len(steps) - _MOST_ROWS, console)


def _idle(steps: Sequence[Mapping[str, Any]], console: Console) -> None:
    keys = list(steps[0]["idle_ns"])
    headings = ["rank", "step", "idle", *(k.replace("_", " ") for k in keys), "stalls", "longest stall"]
    table = _table("why the device is idle, ms", headings)
    for step in steps[:_MOST_ROWS]:
        table.add_row(
            str(step["rank"]),
            str(step["step"]) if step["step"] >= 0 else "-",
            _ms(sum(step["idle_ns"].values())),
            *(_ms(step["idle_ns"][key]) for key in keys),
            str(step["stalls"]["count"]),
            _ms(step["stalls"]["longest_ns"]),
        )
    _print(table, len(steps) - _MOST_ROWS, console)


def _launches(steps: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not any(step["launches"]["launched"] for step in steps):
        return
    headings = [
        "rank",
        "step",
        "kernels",
        "tiny",
        "calls",
        "call p50 us",
        "delay p50 us",
        "p95",
        "early",
        "queue",
    ]
    table = _table("launches (early: kernels before their launch; queue: most outstanding)", headings)
    for step in steps[:_MOST_ROWS]:
        found = step["launches"]
        table.add_row(
            str(step["rank"]),
            str(step["step"]) if step["step"] >= 0 else "-",
            str(found["kernels"]),
            str(found["tiny"]),
            str(found["calls"]),
            _us(found["call"]["p50_ns"]),
            _us(found["delay"]["p50_ns"]),
            _us(found["delay"]["p95_ns"]),
            str(found["before_launch"]),
            str(found["most_outstanding"]),
        )
    _print(table, len(steps) - _MOST_ROWS, console)


def _paths(result: Mapping[str, Any], console: Console) -> None:
    across = result["critical_paths"]
    paths = [("all", path) for path in across]
    paths += [(str(step["rank"]), step["critical_path"]) for step in result["steps"]]
    keys = [key for key in paths[0][1]["pieces_ns"] if any(path["pieces_ns"][key] for _, path in paths)]
    table = _table("critical path, ms", ["rank", "step", "span", *(key.replace("_", " ") for key in keys)])
    for rank, path in paths[:_MOST_ROWS]:
        table.add_row(
            rank,
            str(path["step"]) if path["step"] >= 0 else "-",
            _ms(path["span_ns"]),
            *(_ms(path["pieces_ns"][key]) for key in keys),
        )
    _print(table, len(paths) - _MOST_ROWS, console)


def _kernels(kernels: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = _table("kernels", ["name", "kind", "count", "ms", "mean us", "share %"], texts=2)
    for kernel in kernels[:10]:
        table.add_row(
            escape(kernel["name"][:_MOST_NAME]),
            kernel["kind"],
            str(kernel["count"]),
            f"{kernel['total_ms']:.3f}",
            f"{kernel['mean_us']:.1f}",
            f"{100 * kernel['share']:.1f}",
        )
    console.print(table)


def _stragglers(result: Mapping[str, Any], console: Console) -> None:
    found = result["communication"]
    console.print(
        f"communication: {found['matched_slices']} of {found['slices']} slices matched to {found['operations']} "
        f"operations ({', '.join(f'{n} by {m}' for m, n in found['matched_by'].items()) or 'none'}); "
        f"{_ms(found['wait_ns'])} ms waiting, {_ms(found['transfer_ns'])} ms transfer, summed over ranks",
        highlight=False,
    )
    headings = [
        "rank",
        "operations",
        "last",
        "others waited",
        "by it alone",
        "waited itself",
        "median wait us",
    ]
    table = _table("who is late, ms", headings)
    for rank in result["stragglers"][:_MOST_ROWS]:
        table.add_row(
            str(rank["rank"]),
            str(rank["operations"]),
            str(rank["last"]),
            _ms(rank["caused_wait_ns"]),
            _ms(rank["delay_ns"]),
            _ms(rank["waited_ns"]),
            _us(rank["median_wait_ns"]),
        )
    _print(table, len(result["stragglers"]) - _MOST_ROWS, console)


def _bandwidth(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not rows:
        return
    headings = ["operation", "group", "ranks", "MB", "count", "us", "algorithm GB/s", "bus GB/s", ""]
    table = _table("bandwidth (medians)", headings, texts=2)
    ordered = sorted(rows, key=lambda row: -row["bytes"] * row["count"])
    for row in ordered[:_MOST_ROWS]:
        table.add_row(
            row["operation"],
            escape(row["group"]),
            str(row["members"] or "?"),
            f"{row['bytes'] / 1e6:.3f}",
            str(row["count"]),
            _us(row["transfer_ns"]),
            f"{row['algorithm_gb_per_second']:.2f}",
            f"{row['bus_gb_per_second']:.2f}",
            "" if row["matched"] else "with waiting",
        )
    _print(table, len(rows) - _MOST_ROWS, console)


def _pipeline(pipeline: Mapping[str, Any], console: Console) -> None:
    headings = [
        "rank",
        "step",
        "span",
        "bubble",
        "%",
        "forwards",
        "forward",
        "backwards",
        "backward",
        "active",
    ]
    table = _table("pipeline, ms", headings)
    for stage in pipeline["stages"][:_MOST_ROWS]:
        table.add_row(
            str(stage["rank"]),
            str(stage["step"]),
            _ms(stage["span_ns"]),
            _ms(stage["bubble_ns"]),
            f"{100 * stage['bubble_fraction']:.1f}",
            str(stage["forwards"]),
            _ms(stage["forward_ns"]),
            str(stage["backwards"]),
            _ms(stage["backward_ns"]),
            _ms(stage["active_ns"]),
        )
    _print(table, len(pipeline["stages"]) - _MOST_ROWS, console)
