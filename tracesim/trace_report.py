"""What a trace holds, as ``tracesim read`` prints it: device, ranks, steps, streams, kinds, and what was odd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, TrackRole
from tracesim.analysis import breakdowns, top_kernels
from tracesim.analysis.intervals import union
from tracesim.diff import kind_figures, step_figures
from tracesim.kernel_kinds import coverage

SCHEMA = "tracesim.read/1"


def describe_trace(timeline: Timeline) -> dict[str, Any]:
    """What a timeline holds, ready for JSON.

    Returns:
        ``schema``, ``name``, ``format``, ``properties`` (free facts of the file), ``simulated``, ``device``,
        ``world_size``, ``span_ms``, ``slices`` (count by track role), ``ranks`` (rank, steps, figures a step
        in ms as in :func:`tracesim.diff.step_figures`), ``tracks`` (device tracks: rank, name, role, slices,
        busy_ms), ``kinds`` (mean total_ms and count a step over all ranks), ``communication`` (operations,
        count, gib, total_ms), ``groups``, ``counters`` (rank, name, is_bytes, samples, maximum),
        ``coverage``, ``top_kernels`` and ``quirks``.
    """
    start, end = timeline.span_ns
    found = breakdowns(timeline)
    roles, counts = np.unique(timeline.slice_roles(), return_counts=True)
    return {
        "schema": SCHEMA,
        "name": timeline.name,
        "format": timeline.properties.get("format", "tracesim" if timeline.simulated else "unknown"),
        "properties": dict(timeline.properties),
        "simulated": timeline.simulated,
        "device": timeline.device,
        "world_size": timeline.world_size,
        "span_ms": (end - start) / 1e6,
        "slices": {TrackRole(int(r)).name.lower(): int(c) for r, c in zip(roles, counts, strict=True)},
        "flows": len(timeline.flows),
        "ranks": [
            _rank(timeline, row, [b for b in found if b.window.rank == row])
            for row in range(len(timeline.ranks))
        ],
        "tracks": _tracks(timeline),
        "kinds": kind_figures(found),
        "communication": _communication(timeline),
        "groups": [{"name": g.name, "size": g.size, "ranks": list(g.ranks)} for g in timeline.groups],
        "counters": _counters(timeline),
        "coverage": coverage(timeline),
        "top_kernels": top_kernels(timeline),
        "quirks": [{"name": q.name, "count": q.count, "example": q.example} for q in timeline.quirks],
    }


def _rank(timeline: Timeline, row: int, found: list[Any]) -> dict[str, Any]:
    steps = timeline.steps.number[timeline.steps.rank == row]
    return {
        "rank": int(timeline.ranks.rank[row]),
        "steps": [int(n) for n in steps],
        "a_step": step_figures(found),
    }


def _tracks(timeline: Timeline) -> list[dict[str, Any]]:
    slices = timeline.slices
    order = np.argsort(slices.track, kind="stable")
    bounds = np.searchsorted(slices.track[order], np.arange(len(timeline.tracks) + 1))
    found = []
    for row in range(len(timeline.tracks)):
        role = TrackRole(int(timeline.tracks.role[row]))
        if not role.is_device:
            continue
        mine = order[bounds[row] : bounds[row + 1]]
        busy = union(slices.start[mine], slices.start[mine] + slices.duration[mine]).total
        found.append(
            {
                "rank": int(timeline.ranks.rank[timeline.tracks.rank[row]]),
                "name": timeline.string(int(timeline.tracks.name[row])),
                "role": role.name.lower(),
                "slices": len(mine),
                "busy_ms": busy / 1e6,
            }
        )
    return found


def _communication(timeline: Timeline) -> list[dict[str, Any]]:
    slices = timeline.slices
    found = []
    for value in np.unique(slices.communication[slices.communication > 0]).tolist():
        chosen = slices.communication == value
        found.append(
            {
                "operation": Communication(value).name.lower(),
                "count": int(chosen.sum()),
                "gib": int(slices.communication_bytes[chosen].sum()) / 2**30,
                "total_ms": int(slices.duration[chosen].sum()) / 1e6,
            }
        )
    return found


def _counters(timeline: Timeline) -> list[dict[str, Any]]:
    samples = timeline.counter_samples
    found = []
    for row in range(len(timeline.counter_tracks)):
        values = samples.value[samples.track == row]
        if len(values):
            found.append(
                {
                    "rank": int(timeline.ranks.rank[timeline.counter_tracks.rank[row]]),
                    "name": timeline.string(int(timeline.counter_tracks.name[row])),
                    "is_bytes": bool(timeline.counter_tracks.is_bytes[row]),
                    "samples": len(values),
                    "maximum": float(values.max()),
                }
            )
    return found


def render_description(result: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`describe_trace` returned as tables."""
    ranks = result["ranks"]
    console.print(
        f"{result['name']}: {'simulated' if result['simulated'] else result['format'] + ' trace'} on "
        f"{result['device'] or 'an unknown device'}, {len(ranks)} of {result['world_size'] or len(ranks)} rank(s), "
        f"{result['span_ms']:.3f} ms, {sum(result['slices'].values())} slices",
        highlight=False,
        markup=False,
    )
    _print_ranks(ranks, console)
    _print_tracks(result["tracks"], console)
    _print_kinds(result, console)
    if result["communication"]:
        table = _table("communication", "operation", "count", "GiB", "ms, summed")
        for c in result["communication"]:
            table.add_row(c["operation"], str(c["count"]), f"{c['gib']:.3f}", f"{c['total_ms']:.3f}")
        console.print(table)
    _print_counters(result["counters"], console)
    if result["quirks"]:
        table = _table("what was odd", "", "count", "example", numbers=(1,))
        for quirk in result["quirks"]:
            table.add_row(escape(quirk["name"]), str(quirk["count"]), escape(quirk["example"][:60]))
        console.print(table)


def _print_ranks(ranks: list[dict[str, Any]], console: Console) -> None:
    headings = (
        "rank",
        "steps",
        "step ms",
        "compute",
        "optimizer",
        "exposed comm",
        "copies",
        "idle",
        "overlap %",
    )
    table = _table("ms a step", *headings)
    for entry in ranks[:_MOST_RANKS]:
        figures = entry["a_step"]
        if not figures:
            table.add_row(str(entry["rank"]), str(len(entry["steps"])), *["-"] * 7)
            continue
        keys = (
            "iteration_time_ms",
            "compute_ms",
            "optimizer_ms",
            "exposed_communication_ms",
            "memory_ms",
            "idle_ms",
        )
        table.add_row(
            str(entry["rank"]),
            str(len(entry["steps"])),
            *(f"{figures[key]:.3f}" for key in keys),
            f"{100 * figures['communication_overlap_fraction']:.1f}",
        )
    console.print(table)
    if len(ranks) > _MOST_RANKS:
        console.print(f"... and {len(ranks) - _MOST_RANKS} more ranks; --json lists all")


def _print_tracks(tracks: list[dict[str, Any]], console: Console) -> None:
    table = _table("device tracks", "rank", "track", "slices", "busy ms", numbers=(0, 2, 3))
    for track in tracks[:_MOST_TRACKS]:
        table.add_row(
            str(track["rank"]), escape(track["name"]), str(track["slices"]), f"{track['busy_ms']:.3f}"
        )
    if tracks:
        console.print(table)
    if len(tracks) > _MOST_TRACKS:
        console.print(f"... and {len(tracks) - _MOST_TRACKS} more tracks; --json lists all")


def _print_counters(counters: list[dict[str, Any]], console: Console) -> None:
    table = _table("counters", "rank", "name", "samples", "maximum", numbers=(0, 2, 3))
    for counter in counters[:_MOST_TRACKS]:
        highest = counter["maximum"]
        shown = f"{highest / 2**20:,.1f} MiB" if counter["is_bytes"] else f"{highest:g}"
        table.add_row(str(counter["rank"]), escape(counter["name"]), str(counter["samples"]), shown)
    if counters:
        console.print(table)


def _print_kinds(result: Mapping[str, Any], console: Console) -> None:
    if not result["kinds"]:
        return
    covered = result["coverage"]
    title = (
        f"kinds, a step of a rank ({100 * covered['classified_fraction']:.2f} % of device time has a kind)"
    )
    table = _table(title, "kind", "count", "ms, summed")
    for name, figures in sorted(result["kinds"].items(), key=lambda item: -item[1]["total_ms"]):
        table.add_row(name, f"{figures['count']:g}", f"{figures['total_ms']:.3f}")
    console.print(table)
    if covered["unclassified"]:
        table = _table("largest names without a kind", "name", "count", "ms")
        for entry in covered["unclassified"][:5]:
            table.add_row(escape(entry["name"][:90]), str(entry["count"]), f"{entry['total_ms']:.3f}")
        console.print(table)


def _table(title: str, *headings: str, numbers: tuple[int, ...] | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        right = index > 0 if numbers is None else index in numbers
        table.add_column(heading, justify="right" if right else "left")
    return table


_MOST_RANKS = 32
_MOST_TRACKS = 24
