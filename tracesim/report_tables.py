"""The report of a run as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "temporary", "communication")
_DIMENSIONS = ("tp", "cp", "ep", "pp", "dp")
_WORTH_SAYING = 0.01
"""Share of the compute time from which extrapolated durations are named."""


def render_report(report: dict[str, Any], console: Console) -> None:
    """Print a report (:func:`tracesim.report.build_report`): summary, time of each stage, memory of each stage."""
    model = report["model"]
    console.print(
        f"{report['name']}: {model['name']} ({model['parameters'] / 1e9:.2f} B parameters) on "
        f"{report['world_size']} x {report['hardware']}",
        soft_wrap=True,
        markup=False,
    )
    console.print(_summary(report))
    console.print(_time(report))
    console.print(_memory(report))
    if any(stage["offload"]["to_host_gib"] for stage in report["stages"]):
        console.print(_offload(report))
    if any("spread" in stage for stage in report["stages"]):
        console.print(_spread(report))
    console.print(_utilisation(report))
    console.print(
        "limits: stragglers and the lead of the host over the device are not modelled; contention between "
        "streams is with overlap.contention=true",
        style="dim",
    )


def _summary(report: dict[str, Any]) -> Table:
    table = Table("figure", "value", show_header=False)
    table.columns[1].justify = "right"
    ranges = report["ranges"]
    time, reserved = ranges["iteration_time_ms"], ranges["peak_reserved_gib"]
    within = f"{ranges['confidence']:.0%} range"
    fits = "fits" if report["fits_in_memory"] else "DOES NOT FIT"
    extrapolated = report["duration_basis"]["extrapolated"]
    rows = {
        "iteration time": f"{report['iteration_time_ms']:,.1f} ms",
        f"iteration time, {within}": f"{time['low']:,.1f} to {time['high']:,.1f} ms",
        "tokens per second": f"{report['tokens_per_second']:,.0f}",
        "tokens per second per GPU": f"{report['tokens_per_second_per_gpu']:,.0f}",
        "model TFLOP/s per GPU": f"{report['model_tflops_per_gpu']:,.1f}",
        "MFU (causal attention)": f"{report['mfu']:.1%}",
        "pipeline bubble": f"{report['pipeline_bubble_fraction']:.1%}",
        "exposed communication": f"{report['exposed_communication_fraction']:.1%}",
        "peak memory allocated": f"{report['peak_allocated_gib']:.2f} GiB",
        "peak memory reserved": f"{report['peak_reserved_gib']:.2f} of {report['memory_capacity_gib']:.1f} GiB, {fits}",
        f"peak reserved, {within}": f"{reserved['low']:.2f} to {reserved['high']:.2f} GiB",
        "memory margin": f"{report['memory_margin_gib']:.2f} GiB",
        "out-of-memory probability": _probability(report["out_of_memory_probability"]),
    }
    if extrapolated >= _WORTH_SAYING:
        rows["compute time extrapolated"] = f"{extrapolated:.0%}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _probability(share: float) -> str:
    """A probability from some dozens of rows, which tell nothing below a percent or above 99."""
    return "below 1 %" if share < 0.01 else "above 99 %" if share > 0.99 else f"{share:.0%}"


def _utilisation(report: dict[str, Any]) -> Table:
    table = Table(
        "definition", "TFLOP/s per GPU", "of dense peak", "of sparse peak",
        title="model FLOPs utilisation, by definition",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report["utilisation"]:
        shares = (f"{row[key]:.1%}" for key in ("of_dense_peak", "of_sparse_peak"))
        table.add_row(row["definition"], f"{row['tflops_per_gpu']:,.1f}", *shares)
    return table


def _time(report: dict[str, Any]) -> Table:
    stages = report["stages"]
    shown = [d for d in _DIMENSIONS if any(stage["exposed_communication_ms"][d] for stage in stages)]
    table = Table(
        "stage", "layers", "ranks", "compute", *(f"exposed {d}" for d in shown), "idle", "optimizer",
        title="time of each pipeline stage, ms",
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for stage in stages:
        figures = [
            stage["compute_ms"],
            *(stage["exposed_communication_ms"][d] for d in shown),
            stage["idle_ms"],
            stage["optimizer_ms"],
        ]
        table.add_row(
            str(stage["stage"]),
            str(stage["layers"]),
            str(stage["ranks"]),
            *(f"{figure:,.1f}" for figure in figures),
        )
    return table


def _memory(report: dict[str, Any]) -> Table:
    stages = report["stages"]
    shown = [c for c in _CATEGORIES if any(stage["memory_at_peak_gib"][c] for stage in stages)]
    table = Table(
        "stage", "reserved", "allocated", *(c.replace("_", " ") for c in shown), "largest at peak",
        title="memory of each pipeline stage at its peak, GiB",
    )  # fmt: skip
    for column in table.columns[:-1]:
        column.justify = "right"
    for stage in stages:
        largest = next((t for t in stage["alive_at_peak"] if t["category"] == "activations"), None)
        table.add_row(
            str(stage["stage"]),
            f"{stage['peak_reserved_gib']:.2f}",
            f"{stage['peak_allocated_gib']:.2f}",
            *(f"{stage['memory_at_peak_gib'][c]:.2f}" for c in shown),
            escape(f"{largest['count']} x {largest['name']}: {largest['gib']:.2f}") if largest else "",
        )
    return table


def _offload(report: dict[str, Any]) -> Table:
    """What each stage moves between its devices and their hosts in a step."""
    capacity = report["host_memory_capacity_gib"]
    table = Table(
        "stage", "to host, GiB", "to device, GiB", "exposed, ms", "host memory, GiB",
        title="offload of each pipeline stage" + (f", of {capacity:,.0f} GiB a GPU" if capacity else ""),
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for stage in report["stages"]:
        figures = stage["offload"]
        table.add_row(
            str(stage["stage"]),
            f"{figures['to_host_gib']:,.2f}",
            f"{figures['to_device_gib']:,.2f}",
            f"{figures['exposed_ms']:,.1f}",
            f"{figures['host_memory_gib']:,.2f}",
        )
    return table


def _spread(report: dict[str, Any]) -> Table:
    """Least loaded, mean and most loaded rank of each stage, where ranks are unevenly loaded."""
    levels = ("min", "mean", "max")
    table = Table(
        "stage", *(f"compute {level}" for level in levels), *(f"allocated {level}" for level in levels),
        title="spread over the ranks of each stage, ms and GiB",
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for stage in report["stages"]:
        spread = stage["spread"]
        table.add_row(
            str(stage["stage"]),
            *(f"{spread['compute_ms'][level]:,.1f}" for level in levels),
            *(f"{spread['peak_allocated_gib'][level]:.2f}" for level in levels),
        )
    return table
