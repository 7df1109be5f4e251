"""From an executed graph to a Timeline: tracks, slices, pipeline annotations, flows and memory counters.

The graph holds one rank a pipeline stage. Any other rank of the stage runs the same operations at the same times, so
it is a copy with process groups of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int32, Int64, StringTable
from op_graphs.graph import OpGraph
from op_graphs.plan import ParallelPlan
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import (
    STREAM_ROLES,
    Communication,
    Dimension,
    FlowKind,
    MemoryCategory,
    OpKind,
    Phase,
    Stream,
    TrackRole,
)

from .engine import Execution
from .errors import ScenarioError
from .memory.curves import MemoryCurve
from .memory.job import ReservedMemory
from .scenario import Scenario, scenario_to_yaml

_MAXIMUM_SLICES = 10_000_000
"""A slice takes close to 190 bytes of a Perfetto file, and a browser opens files up to about 2 GB."""
_ACTION_PHASES = {
    "F": Phase.FORWARD,
    "B": Phase.BACKWARD_INPUT,
    "I": Phase.BACKWARD_INPUT,
    "W": Phase.BACKWARD_WEIGHT,
}
_TRACK_NAMES = {
    Stream.COMPUTE: "compute",
    Stream.TP: "tp communication",
    Stream.CP: "cp communication",
    Stream.EP: "ep communication",
    Stream.PP_RECEIVE_PREVIOUS: "pp receive from previous",
    Stream.PP_SEND_NEXT: "pp send to next",
    Stream.PP_RECEIVE_NEXT: "pp receive from next",
    Stream.PP_SEND_PREVIOUS: "pp send to previous",
    Stream.DP: "dp communication",
    Stream.HOST: "host",
    Stream.COPY_TO_HOST: "copies to host",
    Stream.COPY_TO_DEVICE: "copies to device",
}


def build_timeline(
    scenario: Scenario,
    graph: OpGraph,
    execution: Execution,
    memory: Sequence[MemoryCurve],
    reserved: Sequence[Mapping[int, ReservedMemory]],
    ranks: Sequence[int] | None,
) -> Timeline:
    """The timeline of the given global ranks; of one rank a pipeline stage by default."""
    wanted = sorted({int(rank) for rank in (graph.ranks if ranks is None else ranks)})
    _check_ranks(scenario, graph, wanted)
    builder = _Builder(scenario, graph, execution)
    for rank in wanted:
        builder.add_rank(rank)
    for position, rank in enumerate(wanted):
        stage = builder.stage_of(rank)
        found = reserved[stage].get(rank) or reserved[stage][int(graph.ranks[stage])]
        builder.add_memory(position, stage, memory[stage], found)
    return builder.finish()


def _check_ranks(scenario: Scenario, graph: OpGraph, wanted: Sequence[int]) -> None:
    world = scenario.parallel.world_size
    outside = [rank for rank in wanted if not 0 <= rank < world]
    if outside or not wanted:
        raise ScenarioError(
            f"ranks {outside} do not exist: the world has ranks 0 to {world - 1}"
            if outside
            else f"no rank is selected; choose from 0 to {world - 1}, 'stages' or 'all'"
        )
    slices = len(graph.operations) // len(graph.ranks) * len(wanted)
    if slices > _MAXIMUM_SLICES:
        raise ScenarioError(
            f"{len(wanted)} ranks make about {slices:,} slices, more than the {_MAXIMUM_SLICES:,} a trace may hold: "
            "write fewer ranks (--ranks 0,8-15), or one a stage (--ranks stages)"
        )


@dataclass
class _StageRows:
    """Rows of a stage's operations and segments in the graph."""

    begin: int
    end: int
    segments: Int64


class _Builder:
    def __init__(self, scenario: Scenario, graph: OpGraph, execution: Execution) -> None:
        self.scenario = scenario
        self.graph = graph
        self.execution = execution
        self.strings = StringTable(graph.strings)
        self.groups: dict[CommunicationGroup, int] = {}
        self.ranks: list[int] = []
        self.tracks: list[dict[str, int]] = []
        self.slices: list[Slices] = []
        self.slice_count = 0
        self.counter_tracks: list[dict[str, int]] = []
        self.samples: list[CounterSamples] = []
        self.first_slice: dict[int, int] = {}
        """Global rank -> number of its first slice."""
        self.segment_start, self.segment_end = _segment_times(graph, execution)
        self.stages = [self._stage_rows(stage) for stage in range(len(graph.ranks))]

    def stage_of(self, rank: int) -> int:
        """Pipeline rank of a global rank."""
        return self.scenario.parallel.coordinates(rank)["pp"]

    def _stage_rows(self, stage: int) -> _StageRows:
        rows = np.flatnonzero(self.graph.operations.rank == stage)
        begin, end = int(rows[0]), int(rows[-1]) + 1
        assert end - begin == len(rows), "the rows of a rank are consecutive"
        return _StageRows(begin, end, np.flatnonzero(self.graph.segments.rank == stage))

    def add_rank(self, rank: int) -> None:
        """Append the tracks and slices of a global rank."""
        stage = self.stages[self.stage_of(rank)]
        position = len(self.ranks)
        self.ranks.append(rank)
        self.first_slice[rank] = self.slice_count
        rows = slice(stage.begin, stage.end)
        operations, execution = self.graph.operations, self.execution
        streams = operations.stream[rows]
        pipeline_track = self._add_track(position, TrackRole.PIPELINE, -1, "pipeline")
        track_of = np.full(len(Stream), -1, dtype=np.int32)
        for stream in np.unique(streams).tolist():
            track_of[stream] = self._add_track(
                position, STREAM_ROLES[Stream(stream)], stream, _TRACK_NAMES[Stream(stream)]
            )
        directed = np.isin(operations.communication[rows], (Communication.SEND, Communication.RECEIVE))
        size = stage.end - stage.begin
        none = np.full(size, -1, dtype=np.int32)
        self.slices.append(
            Slices(
                track=track_of[streams],
                start=execution.start[rows],
                duration=execution.end[rows] - execution.start[rows],
                name=operations.name[rows],
                kind=operations.kind[rows],
                phase=operations.phase[rows],
                layer=operations.layer[rows],
                module=operations.module[rows],
                chunk=operations.chunk[rows],
                microbatch=operations.microbatch[rows],
                flops=operations.flops[rows],
                bytes=operations.bytes_read[rows] + operations.bytes_written[rows],
                communication=operations.communication[rows],
                communication_bytes=operations.communication_bytes[rows],
                group=self._groups_of(rank)[operations.group[rows]],
                sequence=none.astype(np.int64),
                peer=self._peers_of(rank)[np.where(directed, operations.group[rows], -1)],
                wait=execution.wait[rows],
                waited_for=none,
                correlation=none.astype(np.int64),
            )
        )
        self.slices.append(self._pipeline_slices(stage.segments, pipeline_track))
        self.slice_count += size + len(stage.segments)

    def _add_track(self, rank: int, role: TrackRole, stream: int, name: str) -> int:
        self.tracks.append({"rank": rank, "role": role, "stream": stream, "name": self.strings.intern(name)})
        return len(self.tracks) - 1

    def _pipeline_slices(self, segments: Int64, track: int) -> Slices:
        chosen = self.graph.segments.take(segments)
        names = [self.graph.strings[name] for name in chosen.name.tolist()]
        phases = [
            _ACTION_PHASES[name[0]] if stage >= 0 else Phase.OPTIMIZER
            for name, stage in zip(names, chosen.stage.tolist(), strict=True)
        ]
        start = self.segment_start[segments]
        columns = {
            column: np.full(len(segments), value)
            for column, value in SLICE_DEFAULTS.items()
            if column not in ("kind", "phase", "chunk", "microbatch")
        }
        return Slices(
            track=np.full(len(segments), track),
            start=start,
            duration=self.segment_end[segments] - start,
            name=chosen.name,
            kind=np.full(len(segments), OpKind.ANNOTATION),
            phase=np.array(phases, dtype=np.int8),
            chunk=np.where(chosen.stage >= 0, self.graph.operations.chunk[chosen.begin], -1),
            microbatch=chosen.microbatch,
            **columns,
        )

    def _groups_of(self, rank: int) -> Int32:
        """For each group of the graph, the group of ``rank`` that corresponds to it; the last entry is "none"."""
        own = [
            self._intern_group(corresponding_group(self.scenario.parallel, group, rank))
            for group in self.graph.groups
        ]
        return np.array([*own, -1], dtype=np.int32)

    def _peers_of(self, rank: int) -> Int32:
        """For each group of the graph, the other rank of the pair that it is for ``rank``; -1 last, and for others."""
        own = [corresponding_group(self.scenario.parallel, group, rank).ranks for group in self.graph.groups]
        others = [[r for r in ranks if r != rank] if len(ranks) == 2 else [] for ranks in own]
        return np.array([*(other[0] if other else -1 for other in others), -1], dtype=np.int32)

    def _intern_group(self, group: CommunicationGroup) -> int:
        return self.groups.setdefault(group, len(self.groups))

    def add_memory(self, position: int, stage: int, curve: MemoryCurve, reserved: ReservedMemory) -> None:
        """Append the memory counters of the rank at ``position``."""
        for category in MemoryCategory:
            self._add_counter(
                position, category.name.lower(), int(category), curve.time, curve.by_category[category]
            )
        self._add_counter(position, "allocated", -1, curve.time, curve.allocated)
        # Program order gives which operation made the allocator reserve more; its start gives the moment.
        row = reserved.row
        moments = np.where(row >= 0, self.execution.start[row], 0)
        order = np.argsort(moments, kind="stable")
        last = np.flatnonzero(np.concatenate([np.diff(moments[order]) != 0, [True]]))
        self._add_counter(position, "reserved", -1, moments[order][last], reserved.reserved[order][last])

    def _add_counter(self, position: int, name: str, category: int, time: Int64, value: Int64) -> None:
        track = len(self.counter_tracks)
        changed = np.concatenate([[True], value[1:] != value[:-1]])
        self.counter_tracks.append(
            {"rank": position, "name": self.strings.intern(name), "category": category, "is_bytes": 1}
        )
        self.samples.append(
            CounterSamples(
                np.full(int(changed.sum()), track), time[changed], value[changed].astype(np.float64)
            )
        )

    def finish(self) -> Timeline:
        """The timeline of what was added."""
        parallel = self.scenario.parallel
        slices = Slices.concatenate(self.slices)
        at = [parallel.coordinates(rank) for rank in self.ranks]
        end = int(self.execution.end.max())
        return Timeline(
            strings=self.strings.strings(),
            ranks=Ranks(
                rank=np.array(self.ranks),
                **{name: np.array([c[name] for c in at]) for name in ("tp", "cp", "ep", "pp", "dp")},
            ),
            tracks=Tracks.from_rows(self.tracks),
            slices=slices.with_columns(waited_for=self._waited_for(len(slices))),
            flows=self._flows(),
            counter_tracks=CounterTracks.from_rows(self.counter_tracks),
            counter_samples=CounterSamples.concatenate(self.samples),
            steps=Steps(
                np.arange(len(self.ranks), dtype=np.int32),
                np.zeros(len(self.ranks), dtype=np.int64),
                np.zeros(len(self.ranks), dtype=np.int64),
                np.full(len(self.ranks), end, dtype=np.int64),
            ),
            groups=tuple(self.groups),
            name=self.scenario.name,
            simulated=True,
            device=self.scenario.hardware.name,
            world_size=parallel.world_size,
            properties={"scenario": scenario_to_yaml(self.scenario)},
        )

    def _peers(self, rank: int) -> Int64:
        """For each stage, the first slice of the rank that differs from ``rank`` in its stage only; -1 if not there."""
        parallel, at = self.scenario.parallel, self.scenario.parallel.coordinates(rank)
        peers = [
            parallel.rank_of(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=stage) for stage in range(parallel.pp)
        ]
        return np.array([self.first_slice.get(peer, -1) for peer in peers], dtype=np.int64)

    def _slice_numbers(self, rows: Int64, first_slices: Int64) -> Int32:
        """Slice numbers of graph rows (-1 stays -1) among the ranks whose first slices are given by stage."""
        stage = self.graph.operations.rank[rows]
        begins = np.array([rows_.begin for rows_ in self.stages], dtype=np.int64)
        first = first_slices[stage]
        return np.where((rows >= 0) & (first >= 0), first + rows - begins[stage], -1).astype(np.int32)

    def _waited_for(self, count: int) -> Int32:
        waited = np.full(count, -1, dtype=np.int32)
        for rank, first in self.first_slice.items():
            stage = self.stages[self.stage_of(rank)]
            causes = self.execution.waited_for[stage.begin : stage.end]
            waited[first : first + stage.end - stage.begin] = self._slice_numbers(causes, self._peers(rank))
        return waited

    def _flows(self) -> Flows:
        """Sends to their receives, and the members of a collective that several ranks of the trace enter."""
        operations = self.graph.operations
        joined = np.flatnonzero(operations.rendezvous >= 0)
        order = joined[np.lexsort((joined, operations.rendezvous[joined]))]
        same = operations.rendezvous[order][1:] == operations.rendezvous[order][:-1]
        left, right = order[:-1][same], order[1:][same]
        swapped = operations.communication[left] == Communication.RECEIVE
        source, target = np.where(swapped, right, left), np.where(swapped, left, right)
        is_transfer = operations.kind[source] == OpKind.P2P
        kind = np.where(is_transfer, FlowKind.P2P, FlowKind.COLLECTIVE)
        tables = []
        for rank in self.ranks:
            # Each flow once: from the copy of its source rank.
            mine = operations.rank[source] == self.stage_of(rank)
            peers = self._peers(rank)
            ends = self._slice_numbers(source[mine], peers), self._slice_numbers(target[mine], peers)
            both = (ends[0] >= 0) & (ends[1] >= 0)
            tables.append(Flows(ends[0][both], ends[1][both], kind[mine][both]))
        return Flows.concatenate(tables)


def _segment_times(graph: OpGraph, execution: Execution) -> tuple[Int64, Int64]:
    """First start and last end of each segment on its compute and tensor-parallel streams.

    Data-parallel communication that a segment starts runs on under the following ones and does not count.
    """
    segments, operations = graph.segments, graph.operations
    if not len(segments):
        return segments.begin, segments.end
    inner = np.isin(operations.stream, (Stream.COMPUTE, Stream.TP))
    start = np.where(inner, execution.start, np.iinfo(np.int64).max)
    end = np.where(inner, execution.end, 0)
    bounds = np.stack([segments.begin, segments.end], axis=1).ravel()
    last = bounds[-1] == len(operations)
    bounds = bounds[:-1] if last else bounds
    return np.minimum.reduceat(start, bounds)[::2], np.maximum.reduceat(end, bounds)[::2]


def corresponding_group(parallel: ParallelPlan, group: CommunicationGroup, rank: int) -> CommunicationGroup:
    """The process group of ``rank`` that corresponds to a representative's group.

    A group is named after its dimension (``tp``, ``dp_shard``) and holds all ranks of a group along it, or every n-th
    of a block of them. Others (``pp`` neighbours, ``embedding``) join stages.
    """
    dimension = Dimension.__members__.get(group.name.split("_")[0].upper(), Dimension.PP)
    if dimension is Dimension.PP:
        at = parallel.coordinates(rank)
        ranks = tuple(
            parallel.rank_of(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=parallel.coordinates(member)["pp"])
            for member in group.ranks
        )
        return CommunicationGroup(group.name, ranks, len(ranks))
    ranks = parallel.group_ranks(dimension, rank)
    if len(ranks) > len(group.ranks) > 1:
        whole = parallel.group_ranks(dimension, group.ranks[0])
        stride = whole.index(group.ranks[1]) - whole.index(group.ranks[0])
        block = stride * len(group.ranks)
        position = ranks.index(rank)
        begin = position // block * block + position % stride
        ranks = ranks[begin : begin + block : stride]
    elif len(group.ranks) == 1:
        ranks = (rank,)
    return CommunicationGroup(group.name, ranks, len(ranks))
