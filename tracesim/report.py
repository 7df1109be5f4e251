"""The report of a simulated step: plain data with stable keys (``docs/report.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from op_graphs.columns import Int8
from op_graphs.graph import OpGraph
from op_graphs.parameters import count_active_parameters, count_parameters, count_trained_parameters
from op_graphs.stage_layout import layers_per_stage
from op_graphs.vocabulary import ROLE_DIMENSIONS, STREAM_ROLES, MemoryCategory, Phase, Stream

from .analysis.intervals import Intervals, clip, join, subtract, union
from .confidence import ALLOCATED, CONFIDENCE, RESERVED, residuals, time_figure
from .cost import Provenance
from .engine import Execution
from .memory.curves import MemoryCurve
from .memory.job import ReservedMemory
from .memory.outside import outside_allocator
from .offload_report import OFFLOAD_STREAMS, offload_figures
from .scenario import Scenario
from .utilisation import flops_per_token, utilisation

SCHEMA = "tracesim.report/1"
_GIB = 2**30
_DIMENSIONS = ("tp", "cp", "ep", "pp", "dp")
_LISTED_TENSORS = 12


@dataclass(frozen=True)
class RankSpread:
    """Figures of the ranks of each stage by ``min``, ``mean`` and ``max`` of their load, where it is uneven."""

    compute_ns: tuple[dict[str, int], ...]
    peak_allocated: tuple[dict[str, int], ...]
    mean_flops: float
    """FLOPs that one rank of mean load executes, averaged over the stages."""
    attended_length: int
    """Length of equal documents with as much attention as those of a mean sequence."""


def build_report(
    scenario: Scenario,
    graph: OpGraph,
    execution: Execution,
    memory: Sequence[MemoryCurve],
    reserved: Sequence[Mapping[int, ReservedMemory]],
    provenances: Int8,
    spread: RankSpread | None = None,
) -> dict[str, Any]:
    """Everything a run prints, as JSON-ready data. Times in ms, memory in GiB (2**30 bytes).

    ``provenances`` says of each operation where its duration comes from (:class:`tracesim.cost.Provenance`).
    """
    iteration_ns = execution.iteration_ns
    stages = [
        _stage(scenario, graph, execution, rank, iteration_ns, memory[rank], reserved[rank])
        for rank in range(len(graph.ranks))
    ]
    if spread is not None:
        for number, stage in enumerate(stages):
            stage["spread"] = _spread(spread, number)
    exposed = [sum(stage["exposed_communication_ms"].values()) for stage in stages]
    return {
        "schema": SCHEMA,
        "name": scenario.name,
        "world_size": scenario.parallel.world_size,
        "hardware": scenario.hardware.name,
        "model": {
            "name": scenario.model.name,
            "parameters": count_parameters(scenario.model, seq_len=scenario.training.seq_len),
            "active_parameters": count_active_parameters(scenario.model, seq_len=scenario.training.seq_len),
            "trained_parameters": count_trained_parameters(
                scenario.model, scenario.training.lora, seq_len=scenario.training.seq_len
            ),
        },
        "iteration_time_ms": iteration_ns / 1e6,
        **_throughput(scenario, graph, iteration_ns, spread),
        "pipeline_bubble_fraction": bubble_fraction(graph, execution),
        "exposed_communication_fraction": float(np.mean(exposed)) * 1e6 / iteration_ns,
        **_memory(scenario, stages),
        "host_memory_gib": max(stage["offload"]["host_memory_gib"] for stage in stages),
        "host_memory_capacity_gib": scenario.hardware.host.memory_gib or None,
        "ranges": _ranges(scenario, stages, iteration_ns),
        "duration_basis": _duration_basis(graph, execution, provenances),
        "utilisation": utilisation(
            scenario, iteration_ns / 1e9, _attended_length(scenario, spread), _executed_flops(graph, spread)
        ),
        "stages": stages,
    }


def _memory(scenario: Scenario, stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Peaks over the stages, and whether all of them fit; the stage with the least room decides."""
    capacity = scenario.hardware.memory.capacity_gib
    fullest = max(stages, key=_taken)
    taken = _taken(fullest)
    outside = sum(fullest["outside_allocator_gib"].values())
    probability = residuals()[RESERVED].probability_above(fullest["peak_reserved_gib"], capacity - outside)
    return {
        "peak_allocated_gib": max(stage["peak_allocated_gib"] for stage in stages),
        "peak_allocated_blocks_gib": max(stage["peak_allocated_blocks_gib"] for stage in stages),
        "peak_reserved_gib": max(stage["peak_reserved_gib"] for stage in stages),
        "memory_capacity_gib": capacity,
        "memory_margin_gib": capacity - taken,
        "fits_in_memory": taken <= capacity,
        "out_of_memory_probability": probability if capacity > outside else 1.0,
    }


def _taken(stage: dict[str, Any]) -> float:
    """GiB that a rank of a stage takes of its device, with what its allocator does not know of."""
    return float(stage["peak_reserved_gib"] + sum(stage["outside_allocator_gib"].values()))


def _ranges(scenario: Scenario, stages: Sequence[dict[str, Any]], iteration_ns: int) -> dict[str, Any]:
    """Where the measured figures will lie, by the errors of past predictions."""
    time = time_figure(scenario.parallel.world_size, scenario.hardware.network.gpus_per_domain)
    figures = {
        "iteration_time_ms": (time, iteration_ns / 1e6),
        "peak_allocated_gib": (ALLOCATED, max(stage["peak_allocated_gib"] for stage in stages)),
        "peak_reserved_gib": (RESERVED, max(stage["peak_reserved_gib"] for stage in stages)),
    }
    ranges: dict[str, Any] = {"confidence": CONFIDENCE}
    for key, (figure, predicted) in figures.items():
        low, high = residuals()[figure].range_of(predicted)
        ranges[key] = {"low": low, "high": high, "basis": f"{figure}: {residuals()[figure].basis}"}
    return ranges


def _duration_basis(graph: OpGraph, execution: Execution, provenances: Int8) -> dict[str, Any]:
    """Shares of the compute time by where its durations come from, and the longest that are extrapolated."""
    rows = np.flatnonzero(~graph.is_communication())
    lengths = (execution.end - execution.start)[rows]
    total = max(1, int(lengths.sum()))
    known = provenances[rows]
    shares = {p.name.lower(): int(lengths[known == p].sum()) / total for p in Provenance}
    name = graph.operations.name[rows[known == Provenance.EXTRAPOLATED]]
    time = np.bincount(name, lengths[known == Provenance.EXTRAPOLATED], minlength=1)
    longest = [n for n in np.argsort(-time, kind="stable")[:_LISTED_TENSORS].tolist() if time[n] > 0]
    return {
        **shares,
        "extrapolated_operations": [
            {"name": graph.strings[n], "share": float(time[n]) / total} for n in longest
        ],
    }


def _spread(spread: RankSpread, stage: int) -> dict[str, dict[str, float]]:
    """Least loaded, mean and most loaded rank of a stage."""
    return {
        "compute_ms": {key: value / 1e6 for key, value in spread.compute_ns[stage].items()},
        "peak_allocated_gib": {key: value / _GIB for key, value in spread.peak_allocated[stage].items()},
    }


def _throughput(
    scenario: Scenario, graph: OpGraph, iteration_ns: int, spread: RankSpread | None
) -> dict[str, float]:
    """Tokens and FLOPs per second. ``mfu`` counts causal attention as half, ``mfu_full_attention`` as whole."""
    seconds = iteration_ns / 1e9
    world = scenario.parallel.world_size
    peak = scenario.hardware.peak_tflops[scenario.training.dtype.name.lower()]
    length = _attended_length(scenario, spread)
    tokens_per_gpu = scenario.tokens / seconds / world
    causal, full = (
        tokens_per_gpu * flops_per_token(scenario, length, causal=half) / 1e12 for half in (True, False)
    )
    executed = _executed_flops(graph, spread) / seconds / 1e12
    return {
        "tokens_per_second": scenario.tokens / seconds,
        "tokens_per_second_per_gpu": tokens_per_gpu,
        "model_tflops_per_gpu": causal,
        "mfu": causal / peak,
        "mfu_full_attention": full / peak,
        "hfu": executed / peak,
    }


def _attended_length(scenario: Scenario, spread: RankSpread | None) -> int:
    return spread.attended_length if spread else scenario.training.seq_len


def _executed_flops(graph: OpGraph, spread: RankSpread | None) -> float:
    """FLOPs that a rank executes, on average."""
    return spread.mean_flops if spread else float(graph.operations.flops.sum()) / len(graph.ranks)


def _stage(
    scenario: Scenario,
    graph: OpGraph,
    execution: Execution,
    rank: int,
    iteration_ns: int,
    curve: MemoryCurve,
    reserved: Mapping[int, ReservedMemory],
) -> dict[str, Any]:
    parallel = scenario.parallel
    compute, optimizer, exposed = breakdown(graph, execution, rank)
    layers = layers_per_stage(scenario.model.layers, parallel)
    held = sum(layers[rank :: parallel.pp])
    idle = iteration_ns - compute - optimizer - sum(exposed.values())
    at_peak = curve.by_category[:, curve.peak_moment]
    outside = outside_allocator(graph, rank, scenario.hardware)
    by_rank = {str(number): found.usage.peak_reserved / _GIB for number, found in sorted(reserved.items())}
    return {
        "stage": rank,
        "representative_rank": int(graph.ranks[rank]),
        "ranks": parallel.world_size // parallel.pp,
        "layers": held,
        "compute_ms": compute / 1e6,
        "exposed_communication_ms": {name: exposed[name] / 1e6 for name in _DIMENSIONS},
        "idle_ms": idle / 1e6,
        "optimizer_ms": optimizer / 1e6,
        "peak_allocated_gib": curve.peak / _GIB,
        "peak_allocated_blocks_gib": reserved[int(graph.ranks[rank])].usage.peak_allocated / _GIB,
        "peak_reserved_gib": max(by_rank.values()),
        "peak_reserved_by_rank_gib": by_rank,
        "outside_allocator_gib": {
            "context": outside.context / _GIB,
            "communicators": outside.communicators / _GIB,
        },
        "memory_at_peak_gib": {
            category.name.lower(): float(at_peak[category]) / _GIB for category in MemoryCategory
        },
        "peak_time_ms": float(curve.time[curve.peak_moment]) / 1e6,
        "offload": offload_figures(graph, execution, rank),
        "alive_at_peak": [
            {
                "name": tensor.name,
                "category": tensor.category.name.lower(),
                "count": tensor.count,
                "gib": tensor.size / _GIB,
            }
            for tensor in curve.alive_at_peak[:_LISTED_TENSORS]
        ],
    }


def breakdown(graph: OpGraph, execution: Execution, rank: int) -> tuple[int, int, dict[str, int]]:
    """Nanoseconds a rank computes, runs the optimizer, and waits for each dimension's exposed communication.

    Where communication of several dimensions overlaps, the time counts for the first of tp, cp, ep, pp, dp.
    """
    operations = graph.operations
    own = operations.rank == rank
    computing = own & (operations.stream == Stream.COMPUTE)
    is_optimizer = operations.phase == Phase.OPTIMIZER
    lengths = execution.end - execution.start
    optimizer = int(lengths[computing & is_optimizer].sum())
    compute = int(lengths[computing & ~is_optimizer].sum())
    covered = union(execution.start[computing], execution.end[computing])
    exposed = dict.fromkeys(_DIMENSIONS, 0)
    for name in _DIMENSIONS:
        rows = own & np.isin(operations.stream, _streams_of(name))
        alone = subtract(union(execution.start[rows], execution.end[rows]), covered)
        exposed[name] = int((alone.end - alone.start).sum())
        covered = join(covered, alone)
    return compute, optimizer, exposed


def _streams_of(dimension: str) -> list[int]:
    return [
        int(stream)
        for stream, role in STREAM_ROLES.items()
        if role in ROLE_DIMENSIONS and ROLE_DIMENSIONS[role].name.lower() == dimension
    ]


def bubble_fraction(graph: OpGraph, execution: Execution) -> float:
    """Share of the pipeline's time in which a rank neither computes nor communicates, averaged over the ranks.

    The pipeline's time runs from the first start to the last end of any forward or backward; of the rank itself, where
    ranks do not meet between steps.
    """
    staged = graph.segments.stage >= 0
    if not staged.any():
        return 0.0
    low = int(execution.start[graph.segments.begin[staged]].min())
    high = 0
    rows = np.zeros(len(graph.operations) + 1, dtype=np.int64)
    np.add.at(rows, graph.segments.begin[staged], 1)
    np.add.at(rows, graph.segments.end[staged], -1)
    in_pipeline = np.cumsum(rows)[:-1] > 0
    computing = in_pipeline & (graph.operations.stream == Stream.COMPUTE)
    high = int(execution.end[computing].max())
    if high <= low:
        return 0.0
    idle = []
    for rank in range(len(graph.ranks)):
        if execution.period_ns is not None:
            staged_own = staged & (graph.segments.rank == rank)
            low = int(execution.start[graph.segments.begin[staged_own]].min())
            high = int(execution.end[computing & (graph.operations.rank == rank)].max())
        own = (graph.operations.rank == rank) & ~np.isin(graph.operations.stream, OFFLOAD_STREAMS)
        busy = _busy(execution, np.flatnonzero(own), low, high)
        idle.append(1 - int((busy.end - busy.start).sum()) / (high - low))
    return float(np.mean(idle))


def _busy(execution: Execution, rows: np.ndarray[Any, np.dtype[np.int64]], low: int, high: int) -> Intervals:
    return union(*clip(execution.start[rows], execution.end[rows], low, high))
