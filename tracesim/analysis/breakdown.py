"""Where the time of a step goes: compute, optimizer, exposed communication by dimension, memory operations, idle.

Each instant of a step counts once, for the first of these that runs then: compute, optimizer, communication (tp, cp,
ep, pp, dp, other, in that order), copies and fills. What is left is idle. So the parts add up to the step exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import ROLE_DIMENSIONS, Dimension, OpKind, Phase, TrackRole
from tracesim.analysis.intervals import Intervals, clip, join, subtract, union
from tracesim.analysis.windows import Window, step_windows

DIMENSIONS = ("tp", "cp", "ep", "pp", "dp", "other")
"""Keys of exposed communication; ``other`` is what no parallel dimension is known for."""

_ORDER = (Dimension.TP, Dimension.CP, Dimension.EP, Dimension.PP, Dimension.DP, Dimension.NONE)

_GROUP_NAMES: tuple[tuple[Dimension, re.Pattern[str]], ...] = tuple(
    (dimension, re.compile(pattern))
    for dimension, pattern in (
        (Dimension.DP, r"data_?parallel|(^|[^a-z])(dp|fsdp|ddp|hsdp)([^a-z]|$)|(^|_)dp_"),
        (Dimension.EP, r"expert|(^|[^a-z])(ep|etp|moe)([^a-z]|$)"),
        (Dimension.PP, r"pipeline|(^|[^a-z])(pp|p2p)([^a-z]|$)"),
        (Dimension.CP, r"context_?parallel|(^|[^a-z])cp([^a-z]|$)"),
        (Dimension.TP, r"tensor|(^|[^a-z])(tp|sp)([^a-z]|$)"),
    )
)


@dataclass(frozen=True)
class KindTotal:
    """Operations of one kind in a window, summed without regard to overlap."""

    count: int
    total_ns: int


@dataclass(frozen=True)
class Breakdown:
    """One step of one rank. Times in nanoseconds; see the module for what each part means."""

    window: Window
    compute: int
    """Compute but the optimizer."""
    optimizer: int
    exposed_communication: Mapping[str, int]
    """By key of :data:`DIMENSIONS`."""
    memory: int
    """Copies and fills of a measured device beside nothing else; on a simulated compute stream they are compute."""
    idle: int
    communication: int
    """Union of all communication, overlapped or not."""
    kinds: Mapping[OpKind, KindTotal]

    @property
    def exposed(self) -> int:
        """Communication beside which nothing is computed, over all dimensions."""
        return sum(self.exposed_communication.values())

    @property
    def busy(self) -> int:
        """Time in which anything runs on the device."""
        return self.window.length - self.idle

    @property
    def overlap_fraction(self) -> float:
        """Share of communication that runs beside compute; 0 without communication."""
        return 1 - self.exposed / self.communication if self.communication else 0.0


@dataclass(frozen=True)
class StepParts:
    """The instants of each part of a step."""

    compute: Intervals
    """Compute but the optimizer."""
    optimizer: Intervals
    exposed: Mapping[str, Intervals]
    """By key of :data:`DIMENSIONS`."""
    memory: Intervals
    idle: Intervals
    communication: Intervals
    """All communication, overlapped or not."""


def group_dimension(name: str) -> Dimension:
    """The parallel dimension a process group's name tells (``mesh_tp``, ``DATA_PARALLEL_GROUP``), NONE if none."""
    lowered = name.lower()
    return next((dimension for dimension, pattern in _GROUP_NAMES if pattern.search(lowered)), Dimension.NONE)


def slice_dimensions(timeline: Timeline) -> Int8:
    """The :class:`Dimension` of each slice, from its track's role, else from its group's name; shape [slices]."""
    by_role = np.zeros(32, dtype=np.int8)
    for role, dimension in ROLE_DIMENSIONS.items():
        by_role[role] = dimension
    by_group = np.array([group_dimension(g.name) for g in timeline.groups] + [Dimension.NONE], dtype=np.int8)
    of_role = by_role[timeline.slice_roles()]
    return np.where(of_role > 0, of_role, by_group[timeline.slices.group]).astype(np.int8)


def breakdowns(timeline: Timeline, windows: list[Window] | None = None) -> list[Breakdown]:
    """The breakdown of each window (by default :func:`step_windows`), in their order."""
    windows = step_windows(timeline) if windows is None else windows
    device = timeline.on_device()
    row_rank = timeline.slice_ranks()
    dimensions = slice_dimensions(timeline)
    found: list[Breakdown] = []
    rows: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    loaded = -1
    for window in windows:
        if window.rank != loaded:
            rows, loaded = np.nonzero(device & (row_rank == window.rank))[0], window.rank
        found.append(_breakdown(timeline, rows, dimensions, window))
    return found


def _breakdown(timeline: Timeline, rows: Int64, dimensions: Int8, window: Window) -> Breakdown:
    parts = step_parts(timeline, rows, dimensions, window)
    slices = timeline.slices
    start, end = clip(
        slices.start[rows], slices.start[rows] + slices.duration[rows], window.start, window.end
    )
    inside = (slices.start[rows] < window.end) & (slices.start[rows] + slices.duration[rows] > window.start)
    kind = slices.kind[rows][inside]
    counts = np.bincount(kind, minlength=len(OpKind))
    sums = np.zeros(len(OpKind), dtype=np.int64)
    np.add.at(sums, kind, (end - start)[inside])
    return Breakdown(
        window=window,
        compute=parts.compute.total,
        optimizer=parts.optimizer.total,
        exposed_communication={key: part.total for key, part in parts.exposed.items()},
        memory=parts.memory.total,
        idle=parts.idle.total,
        communication=parts.communication.total,
        kinds={OpKind(k): KindTotal(int(counts[k]), int(sums[k])) for k in np.flatnonzero(counts).tolist()},
    )


def step_parts(timeline: Timeline, rows: Int64, dimensions: Int8, window: Window) -> StepParts:
    """When each part of a step runs; the parts but ``communication`` are disjoint and cover the window.

    Args:
        timeline: where the slices are.
        rows: device slices of the window's rank.
        dimensions: of every slice of the timeline, as :func:`slice_dimensions` gives them.
        window: the step.
    """
    slices = timeline.slices
    end = slices.start[rows] + slices.duration[rows]
    rows = rows[(slices.start[rows] < window.end) & (end > window.start)]
    start, end = clip(
        slices.start[rows], slices.start[rows] + slices.duration[rows], window.start, window.end
    )
    kind, phase, dimension = slices.kind[rows], slices.phase[rows], dimensions[rows]
    communicates: Bool = (kind == OpKind.COLLECTIVE) | (kind == OpKind.P2P)
    # A simulated compute stream holds only what its SMs do, fills and copies among it.
    on_stream = timeline.tracks.role[slices.track[rows]] != TrackRole.COMPUTE
    moves: Bool = ((kind == OpKind.MEMCPY) | (kind == OpKind.MEMSET)) & on_stream
    steps: Bool = ((kind == OpKind.OPTIMIZER) | (phase == Phase.OPTIMIZER)) & ~communicates & ~moves

    def cover(mask: Bool) -> Intervals:
        return union(start[mask], end[mask])

    compute = cover(~communicates & ~moves & ~steps)
    optimizer = subtract(cover(steps), compute)
    covered = join(compute, optimizer)
    exposed: dict[str, Intervals] = {}
    for key, value in zip(DIMENSIONS, _ORDER, strict=True):
        chosen = communicates & (dimension == value if value else ~np.isin(dimension, _ORDER[:-1]))
        exposed[key] = subtract(cover(chosen), covered)
        covered = join(covered, exposed[key])
    memory = subtract(cover(moves), covered)
    covered = join(covered, memory)
    whole = union(np.array([window.start]), np.array([window.end]))
    return StepParts(compute, optimizer, exposed, memory, subtract(whole, covered), cover(communicates))


def top_kernels(timeline: Timeline, largest: int = 20) -> list[dict[str, Any]]:
    """The names that take most device time, over all ranks.

    Returns:
        One dict a name and kind: ``name``, ``kind``, ``count``, ``total_ms``, ``mean_us``, ``share`` (of summed device
        time).
    """
    device = timeline.on_device()
    name = timeline.slices.name[device].astype(np.int64)
    key = name * len(OpKind) + timeline.slices.kind[device]
    distinct, row = np.unique(key, return_inverse=True)
    total = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(total, row, timeline.slices.duration[device])
    count = np.bincount(row, minlength=len(distinct))
    everything = int(total.sum())
    order = np.lexsort((distinct, -total))[:largest]
    return [
        {
            "name": timeline.strings[int(distinct[i]) // len(OpKind)],
            "kind": OpKind(int(distinct[i]) % len(OpKind)).name.lower(),
            "count": int(count[i]),
            "total_ms": int(total[i]) / 1e6,
            "mean_us": int(total[i]) / int(count[i]) / 1e3,
            "share": int(total[i]) / everything if everything else 0.0,
        }
        for i in order
    ]
