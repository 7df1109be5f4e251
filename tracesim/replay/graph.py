"""A measured run as a graph: an OpGraph with the delay of every dependency and what was measured of every row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from op_graphs.columns import Bool, Int8, Int64, Table
from op_graphs.graph import Buffers, OpGraph, Segments
from op_graphs.timeline import Timeline
from tracesim.replay.measured import Delays


class EdgeKind(IntEnum):
    """Why one row waits for another."""

    QUEUE = 0
    """The slice before on the same device stream."""
    LAUNCH = 1
    """The launching call."""
    EVENT = 2
    """A slice on another stream, through an event."""
    ADMISSION = 3
    """A running slice on another stream that left no room; the lag is a share of its duration."""
    RETURN = 4
    """The device slice that a blocking call waits for."""
    POLL = 5
    """The device slice whose result the host polls for."""
    HANDOVER = 6
    """Another thread."""
    BEFORE = 7
    """Work before the step the graph was cut to."""


class RowRole(IntEnum):
    """What a row of the graph stands for."""

    DEVICE = 0
    CALL = 1
    """A launch, or the part of a blocking call before it waits."""
    GAP = 2
    """Host work between two calls, or a pause that waits for something."""
    RETURN = 3
    """The end of a blocking call."""
    MARK = 4
    """Begin or end of a step on the host."""
    ANCHOR = 5
    """The begin of a stream or thread."""


@dataclass(frozen=True)
class Rows(Table):
    """What is known of each row beside the operation."""

    role: Int8
    """:class:`RowRole`."""
    slice_row: Int64
    """Row of the timeline's slices; -1 for rows that are not one."""
    track: Int64
    """Row of the timeline's tracks."""
    rank: Int64
    """Row of the timeline's ranks."""
    step: Int64
    """Position of the step among those of its rank, -1 before the first."""
    start: Int64
    """Measured, in nanoseconds of the timeline."""
    end: Int64


@dataclass(frozen=True)
class Edges(Table):
    """Dependencies, sorted by target."""

    source: Int64
    target: Int64
    lag: Int64
    """Nanoseconds from the end of the source to the start it allows."""
    kind: Int8
    """:class:`EdgeKind`."""


@dataclass(frozen=True)
class Rebuilt:
    """A rebuilt run. Every (rank, stream or thread) is one row of ``graph.ranks``, because it is one queue."""

    timeline: Timeline
    """The measured timeline, on one clock."""
    graph: OpGraph
    durations: Int64
    """Nanoseconds of each row; of communication matched across ranks the transfer after the last arrival."""
    edges: Edges
    rows: Rows
    unexplained: Int64
    """Nanoseconds each row started later than everything known lets it, kept as a constant."""
    origin: int
    """Time of the timeline at which the graph begins."""
    admission_share: float
    """Part of a slice after which one that waits for room starts."""
    delays: Delays
    notes: tuple[str, ...] = ()

    def with_edges(self, edges: Edges) -> Rebuilt:
        """The run with other dependencies."""
        edges = edges.take(np.argsort(edges.target, kind="stable"))
        offsets = np.zeros(len(self.rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(edges.target, minlength=len(self.rows)), out=offsets[1:])
        return replace(
            self,
            edges=edges,
            graph=replace(self.graph, dependency_offsets=offsets, dependencies=edges.source),
        )

    def on_device(self) -> Bool:
        """Which rows are device slices."""
        chosen: Bool = self.rows.role == RowRole.DEVICE
        return chosen

    def lags(self, *, keep_unexplained: bool = True) -> Int64:
        """The lag of every dependency, with what is unexplained of its target."""
        edges = self.edges
        early = np.rint((self.admission_share - 1) * self.durations[edges.source]).astype(np.int64)
        lag: Int64 = np.where(edges.kind == EdgeKind.ADMISSION, early, edges.lag)
        return lag + self.unexplained[edges.target] if keep_unexplained else lag

    def take(self, kept: Bool, edges: Edges) -> Rebuilt:
        """Some rows only; ``edges`` are those between them, in the old numbers."""
        number = np.cumsum(kept) - 1
        lanes, lane_of = np.unique(self.graph.operations.rank[kept], return_inverse=True)
        operations = self.graph.operations.take(np.flatnonzero(kept))
        graph = replace(
            self.graph,
            ranks=self.graph.ranks[lanes],
            operations=operations.with_columns(rank=lane_of.ravel()),
            dependency_offsets=np.zeros(int(kept.sum()) + 1, dtype=np.int64),
            dependencies=np.zeros(0, dtype=np.int64),
            segments=Segments.empty(),
            buffers=Buffers.empty(),
        )
        part = replace(
            self,
            graph=graph,
            durations=self.durations[kept],
            rows=self.rows.take(np.flatnonzero(kept)),
            unexplained=self.unexplained[kept],
        )
        return part.with_edges(edges.with_columns(source=number[edges.source], target=number[edges.target]))
