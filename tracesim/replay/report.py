"""What is said of a replay: figures as JSON-ready data, and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from tracesim.replay.buffers import peaks
from tracesim.replay.graph import Rebuilt, RowRole
from tracesim.replay.limits import Unexplained, describe_limits
from tracesim.replay.run import Replayed, limited_by, step_times, stream_deviations
from tracesim.replay.what_if.memory import gibibytes
from tracesim.replay.what_if.outcome import Outcome

_MOST_DEVIATIONS = 10


def describe_replay(
    replayed: Replayed, lateness: Unexplained, outcome: Outcome | None = None
) -> dict[str, Any]:
    """Figures of a replay, with those of a what-if if one was asked (schema ``tracesim.replay/1``)."""
    rebuilt = replayed.rebuilt
    timeline = rebuilt.timeline
    ranks = timeline.ranks.rank.tolist()
    times = step_times(replayed)
    errors = [abs(100 * time.error) for time in times]
    result: dict[str, Any] = {
        "schema": "tracesim.replay/1",
        "trace": timeline.name,
        "device": timeline.device,
        "ranks": ranks,
        "steps": [
            {
                "rank": ranks[time.rank],
                "step": time.step,
                "measured_ms": time.measured / 1e6,
                "replayed_ms": time.replayed / 1e6,
                "error_pct": 100 * time.error,
                "host_measured_ms": time.host_measured / 1e6,
                "host_replayed_ms": time.host_replayed / 1e6,
                "host_error_pct": 100 * time.host_error,
            }
            for time in times
        ],
        "mean_abs_error_pct": sum(errors) / len(errors) if errors else None,
        "worst_abs_error_pct": max(errors, default=None),
        "streams": _streams(replayed),
        "largest_deviations": _largest_deviations(replayed),
        "unexplained_us": {str(ranks[rank]): ns / 1e3 for rank, ns in lateness.nanoseconds.items()},
        "unexplained_step_pct": 100 * lateness.step_share,
        "memory": {
            str(ranks[rank]): {"measured_peak_bytes": measured, "replayed_peak_bytes": again}
            for rank, (measured, again) in peaks(replayed).items()
        },
        "limited_by_ms": {what: ns / 1e6 for what, ns in limited_by(replayed).items()},
        "limits": describe_limits(rebuilt, lateness),
        "what_if": None if outcome is None else _outcome(outcome),
    }
    return result


def _outcome(outcome: Outcome) -> dict[str, Any]:
    ranks = outcome.replayed.rebuilt.timeline.ranks.rank.tolist()
    return {
        "what_ifs": list(outcome.what_ifs),
        "step_ms": None if outcome.as_range else outcome.step / 1e6,
        "base_step_ms": outcome.base_step / 1e6,
        "change_pct": None if outcome.as_range else 100 * outcome.change,
        "range_ms": [outcome.low / 1e6, outcome.high / 1e6],
        "limited_by_ms": {what: ns / 1e6 for what, ns in outcome.limits.items()},
        "memory": outcome.memory.says,
        "memory_peak_change_bytes": None
        if outcome.memory.peak_change is None
        else {str(ranks[rank]): change for rank, change in outcome.memory.peak_change.items()},
        "notes": list(outcome.notes),
    }


def _streams(replayed: Replayed) -> list[dict[str, Any]]:
    timeline = replayed.rebuilt.timeline
    return [
        {
            "rank": int(timeline.ranks.rank[timeline.tracks.rank[stream.track]]),
            "stream": timeline.string(int(timeline.tracks.name[stream.track])),
            "slices": stream.slices,
            "same_order": stream.same_order,
            "busy_measured_ms": stream.busy_measured / 1e6,
            "busy_replayed_ms": stream.busy_replayed / 1e6,
            "start_error_median_us": stream.start_error_median / 1e3,
            "start_error_worst_us": stream.start_error_worst / 1e3,
        }
        for stream in stream_deviations(replayed)
    ]


def _largest_deviations(replayed: Replayed) -> list[dict[str, Any]]:
    """The slices before which most time was gained or lost against the slice before on their stream."""
    rebuilt: Rebuilt = replayed.rebuilt
    rows, timeline = rebuilt.rows, rebuilt.timeline
    device = np.flatnonzero(rows.role == RowRole.DEVICE)
    error = replayed.start[device] - rows.start[device]
    before = np.concatenate(([0], error[:-1]))
    lane = rebuilt.graph.operations.rank[device]
    before[np.concatenate(([True], lane[1:] != lane[:-1]))] = 0
    gained = error - before
    worst = np.lexsort((device, -np.abs(gained)))[:_MOST_DEVIATIONS]
    return [
        {
            "rank": int(timeline.ranks.rank[rows.rank[row]]),
            "stream": timeline.string(int(timeline.tracks.name[rows.track[row]])),
            "name": rebuilt.graph.strings[rebuilt.graph.operations.name[row]],
            "start_ms": float(rows.start[row]) / 1e6,
            "deviation_us": float(gained[at]) / 1e3,
        }
        for at, row in zip(worst.tolist(), device[worst].tolist(), strict=True)
        if gained[at]
    ]


def render_replay(result: dict[str, Any], console: Console) -> None:
    """Print what :func:`describe_replay` found."""
    table = RichTable(title=f"step time, {result['trace']}", title_justify="left")
    times = ("measured ms", "replayed ms", "error %")
    # Runs on CPU and traces without marks have no steps of a host beside those of the device.
    sides = ("", "host_") if any(row["host_measured_ms"] for row in result["steps"]) else ("",)
    for column in ("rank", "step", *(f"{side.replace('_', ' ')}{name}" for side in sides for name in times)):
        table.add_column(column, justify="right")
    for row in result["steps"]:
        figures = [
            text
            for side in sides
            for text in (
                f"{row[side + 'measured_ms']:.3f}",
                f"{row[side + 'replayed_ms']:.3f}",
                f"{row[side + 'error_pct']:+.2f}",
            )
        ]
        table.add_row(str(row["rank"]), str(row["step"]), *figures)
    console.print(table)
    _render_streams(result, console)
    if result["largest_deviations"]:
        console.print("largest deviations (against the slice before on the stream):")
        for row in result["largest_deviations"]:
            name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
            console.print(
                f"  {row['deviation_us']:+10.1f} us  rank {row['rank']} {row['stream']} at {row['start_ms']:.3f} ms  "
                + name,
                markup=False,
            )
    late = ", ".join(f"rank {rank}: {us:.0f} us" for rank, us in result["unexplained_us"].items())
    console.print(f"unexplained lateness kept: {late}; {result['unexplained_step_pct']:.2f} % of the step")
    for rank, peak in result["memory"].items():
        console.print(
            f"peak allocated of rank {rank}: {gibibytes(peak['measured_peak_bytes'])} measured, "
            f"{gibibytes(peak['replayed_peak_bytes'])} replayed"
        )
    _render_chain("limited by", result["limited_by_ms"], console)
    for note in result["limits"]:
        console.print(f"note: {note}", markup=False)
    if result["what_if"] is not None:
        _render_what_if(result["what_if"], console)


def _render_streams(result: dict[str, Any], console: Console) -> None:
    table = RichTable(title="streams", title_justify="left")
    for column in (
        "rank",
        "stream",
        "slices",
        "order",
        "busy ms",
        "replayed ms",
        "start error us p50",
        "worst",
    ):
        table.add_column(column, justify="left" if column in ("stream", "order") else "right")
    for row in result["streams"]:
        table.add_row(
            str(row["rank"]),
            row["stream"],
            str(row["slices"]),
            "same" if row["same_order"] else "differs",
            f"{row['busy_measured_ms']:.3f}",
            f"{row['busy_replayed_ms']:.3f}",
            f"{row['start_error_median_us']:.1f}",
            f"{row['start_error_worst_us']:+.1f}",
        )
    console.print(table)


def _render_chain(title: str, parts: dict[str, float], console: Console) -> None:
    total = sum(parts.values()) or 1.0
    named = sorted(parts.items(), key=lambda part: -part[1])
    console.print(f"{title}: " + ", ".join(f"{what} {100 * ms / total:.0f} %" for what, ms in named if ms))


def _render_what_if(outcome: dict[str, Any], console: Console) -> None:
    console.print(f"what if {', '.join(outcome['what_ifs'])}:", markup=False)
    low, high = outcome["range_ms"]
    if outcome["step_ms"] is None:
        console.print(
            f"  step {outcome['base_step_ms']:.3f} ms -> between {low:.3f} and {high:.3f} ms (too much is unexplained "
            "for one figure)"
        )
    else:
        console.print(
            f"  step {outcome['base_step_ms']:.3f} ms -> {outcome['step_ms']:.3f} ms ({outcome['change_pct']:+.1f} %); "
            f"range {low:.3f} to {high:.3f} ms"
        )
    _render_chain("  then limited by", outcome["limited_by_ms"], console)
    console.print(f"  memory {outcome['memory']}", markup=False)
    for note in outcome["notes"]:
        console.print(f"  note: {note}", markup=False)
