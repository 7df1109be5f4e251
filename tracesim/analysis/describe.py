"""An analysis as plain data, ready for JSON. The fields are documented in ``docs/analysis.md``."""

from __future__ import annotations

from typing import Any

import numpy as np

from op_graphs.vocabulary import Communication, OpKind, Phase
from tracesim.analysis.analysis import Analysis, StepAnalysis
from tracesim.analysis.breakdown import DIMENSIONS, top_kernels
from tracesim.analysis.critical_path import COMMUNICATION, COMPUTE, MEMORY, CriticalPath
from tracesim.analysis.findings import find_findings
from tracesim.analysis.launches import LaunchStatistics
from tracesim.analysis.matching import METHODS, communication_rows
from tracesim.analysis.pipeline import longest_stage
from tracesim.analysis.transfers import bandwidths, stragglers

SCHEMA = "tracesim.analysis/1"

_LARGEST = 20


def describe(analysis: Analysis) -> dict[str, Any]:
    """The figures of an analysis; times are integer nanoseconds (``_ns``), rates GB/s with 10^9 bytes."""
    timeline = analysis.timeline
    rank = timeline.ranks.rank.tolist()
    return {
        "schema": SCHEMA,
        "name": timeline.name,
        "simulated": timeline.simulated,
        "device": timeline.device,
        "world_size": timeline.world_size,
        "findings": [{"what": f.what, "text": f.text} for f in find_findings(analysis)],
        "ranks": _ranks(analysis),
        "steps": [_step(analysis, step) for step in analysis.steps],
        "critical_paths": [_path(analysis, path) for path in analysis.paths],
        "kernels": top_kernels(timeline),
        "communication": _communication(analysis),
        "stragglers": [
            {
                "rank": rank[s.rank],
                "operations": s.operations,
                "last": s.last,
                "caused_wait_ns": s.caused_wait,
                "delay_ns": s.delay,
                "waited_ns": s.waited,
                "median_wait_ns": s.median_wait,
            }
            for s in stragglers(timeline, analysis.transfers)
        ],
        "bandwidth": [
            {
                "operation": b.communication.name.lower(),
                "group": _group(analysis, b.group),
                "members": b.members,
                "bytes": b.message,
                "count": b.count,
                "transfer_ns": b.transfer,
                "algorithm_gb_per_second": b.algorithm,
                "bus_gb_per_second": b.bus,
                "matched": b.matched,
            }
            for b in bandwidths(timeline, analysis.transfers)
        ],
        "pipeline": _pipeline(analysis),
    }


def _ranks(analysis: Analysis) -> list[dict[str, Any]]:
    timeline, clocks = analysis.timeline, analysis.clocks
    return [
        {
            "rank": int(timeline.ranks.rank[row]),
            "clock_offset_ns": int(clocks.offset[row]),
            "clock_spread_ns": int(clocks.spread[row]),
            "clock_operations": int(clocks.operations[row]),
            "clock_corrected": bool(clocks.corrected[row]),
        }
        for row in range(len(timeline.ranks))
    ]


def _step(analysis: Analysis, step: StepAnalysis) -> dict[str, Any]:
    timeline, found, window = analysis.timeline, step.breakdown, step.window
    return {
        "rank": int(timeline.ranks.rank[window.rank]),
        "step": window.step,
        "start_ns": window.start,
        "span_ns": window.length,
        "compute_ns": found.compute,
        "optimizer_ns": found.optimizer,
        "exposed_communication_ns": {key: found.exposed_communication[key] for key in DIMENSIONS},
        "memory_ns": found.memory,
        "idle_ns": step.idle.totals(),
        "communication_ns": found.communication,
        "exposed_wait_ns": step.exposed_wait,
        "overlap_percent": 100 * found.overlap_fraction,
        "stalls": {
            "count": step.stalls.count,
            "total_ns": step.stalls.total,
            "longest_ns": step.stalls.longest,
        },
        "kinds": {
            kind.name.lower(): {"count": total.count, "total_ns": total.total_ns}
            for kind, total in found.kinds.items()
        },
        "launches": _launches(step.launches),
        "streams": [
            {
                "name": timeline.string(int(timeline.tracks.name[stream.track])),
                "slices": stream.slices,
                "busy_ns": stream.busy,
                "idle_ns": dict(stream.idle),
            }
            for stream in step.streams
        ],
        "critical_path": _path(analysis, step.path),
    }


def _launches(found: LaunchStatistics) -> dict[str, Any]:
    quantiles = ("p5_ns", "p50_ns", "p95_ns")
    return {
        "kernels": found.kernels,
        "launched": found.launched,
        "tiny": found.tiny,
        "tiny_total_ns": found.tiny_total,
        "calls": found.launch_calls,
        "calls_total_ns": found.launch_total,
        "call": dict(zip(quantiles, found.launch_call, strict=True)),
        "graph_launches": found.graph_launches,
        "graph_kernels": found.graph_kernels,
        "delay": dict(zip(quantiles, found.delay, strict=True)),
        "before_launch": found.before_launch,
        "before_launch_worst_ns": found.before_launch_worst,
        "most_outstanding": found.most_outstanding,
    }


def _path(analysis: Analysis, path: CriticalPath) -> dict[str, Any]:
    timeline, slices = analysis.timeline, analysis.timeline.slices
    length = path.end - path.start
    work = np.isin(path.piece, (COMPUTE, COMMUNICATION, MEMORY)) & (path.row >= 0)
    rows, lengths = path.row[work], length[work]
    names, name = np.unique(slices.name[rows], return_inverse=True)
    total = np.zeros(len(names), dtype=np.int64)
    np.add.at(total, name, lengths)
    largest = np.lexsort((names, -total))[:_LARGEST]
    ranks = np.unique(path.rank[path.rank >= 0])
    phase = np.where(path.row >= 0, slices.phase[path.row], Phase.UNKNOWN) if len(slices) else path.piece
    return {
        "step": path.window.step,
        "start_ns": path.window.start,
        "span_ns": path.window.length,
        "pieces_ns": path.totals(),
        "kinds_ns": _sum_by(slices.kind[rows], lengths, OpKind),
        "phases_ns": _sum_by(phase, length, Phase),
        "ranks_ns": {
            str(int(timeline.ranks.rank[row])): int(length[path.rank == row].sum()) for row in ranks.tolist()
        },
        "longest": [
            {
                "name": timeline.string(int(names[i])),
                "count": int((name == i).sum()),
                "total_ns": int(total[i]),
            }
            for i in largest.tolist()
        ],
    }


def _sum_by(
    values: np.ndarray[Any, np.dtype[Any]],
    lengths: np.ndarray[Any, np.dtype[np.int64]],
    enum: type[OpKind | Phase],
) -> dict[str, int]:
    return {
        enum(value).name.lower(): int(lengths[values == value].sum()) for value in np.unique(values).tolist()
    }


def _communication(analysis: Analysis) -> dict[str, Any]:
    transfers, timeline = analysis.transfers, analysis.timeline
    matches, slices = transfers.matches, timeline.slices
    rank = timeline.ranks.rank[timeline.slice_ranks()[matches.row]]
    waited = np.zeros(len(matches.method), dtype=np.int64)
    np.add.at(waited, matches.operation, transfers.wait)
    first = np.append(matches.first, len(matches.row)) if len(matches.row) else np.zeros(1, dtype=np.int64)
    costliest = np.lexsort((np.arange(len(waited)), -waited))[:_LARGEST]
    listed = []
    for number in costliest.tolist():
        members = slice(int(first[number]), int(first[number + 1]))
        row = int(matches.row[members][0])
        listed.append(
            {
                "operation": Communication(int(slices.communication[row])).name.lower(),
                "number": number,
                "group": _group(analysis, int(slices.group[row])),
                "bytes": int(slices.communication_bytes[row]),
                "matched_by": METHODS[int(matches.method[number])],
                "last_rank": int(rank[transfers.last_member[number]]),
                "delay_ns": int(transfers.delay[number]),
                "end_spread_ns": int(transfers.end_spread[number]),
                "transfer_ns": int(transfers.transfer_time[number]),
                "waits_ns": {
                    str(r): w
                    for r, w in zip(rank[members].tolist(), transfers.wait[members].tolist(), strict=True)
                },
            }
        )
    return {
        "slices": len(communication_rows(timeline)),
        "matched_slices": len(matches.row),
        "operations": len(matches.method),
        "matched_by": {
            name: int((matches.method == number).sum())
            for number, name in enumerate(METHODS)
            if (matches.method == number).any()
        },
        "unmatched": dict(matches.unmatched),
        "wait_ns": int(transfers.wait.sum()),
        "transfer_ns": int(transfers.transfer.sum()),
        "largest_end_spread_ns": int(transfers.end_spread.max()) if len(transfers.end_spread) else 0,
        "costliest": listed,
    }


def _group(analysis: Analysis, group: int) -> str:
    return analysis.timeline.groups[group].name if group >= 0 else ""


def _pipeline(analysis: Analysis) -> dict[str, Any] | None:
    if not analysis.pipeline:
        return None
    rank = analysis.timeline.ranks.rank
    longest = longest_stage(analysis.pipeline)
    return {
        "bubble_fraction": float(np.mean([stage.bubble_fraction for stage in analysis.pipeline])),
        "longest_rank": None if longest is None else int(rank[longest[0]]),
        "longest_over_median": None if longest is None else longest[1],
        "stages": [
            {
                "rank": int(rank[stage.rank]),
                "step": stage.step,
                "span_ns": stage.span,
                "bubble_ns": stage.bubble,
                "bubble_fraction": stage.bubble_fraction,
                "forwards": stage.forwards,
                "forward_ns": stage.forward,
                "backwards": stage.backwards,
                "backward_ns": stage.backward,
                "active_ns": stage.active,
            }
            for stage in analysis.pipeline
        ],
    }
