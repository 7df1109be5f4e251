"""Timeline: what happened when, on which track of which rank.

A simulated and a measured run are the same type, so analyses, exporters and the diff work on both. The product
is columnar and immutable; a Python object for each slice exists nowhere. Times are int64 nanoseconds from the
start of the timeline (``time_base_ns`` holds what was subtracted from a measured trace), memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from .columns import Bool, Float64, Int8, Int32, Int64, Table
from .vocabulary import TrackRole

_AnyTable = TypeVar("_AnyTable", bound=Table)


@dataclass(frozen=True)
class Ranks(Table):
    """The ranks of a timeline; ``-1`` where a coordinate is unknown."""

    rank: Int32
    """Global rank."""
    tp: Int32
    cp: Int32
    ep: Int32
    pp: Int32
    dp: Int32


@dataclass(frozen=True)
class Tracks(Table):
    """Rows of slices; order is drawing order inside a rank."""

    rank: Int32
    """Row of :class:`Ranks` (not the global rank number)."""
    role: Int8
    """:class:`~op_graphs.vocabulary.TrackRole`."""
    stream: Int64
    """Device stream or thread id of a measured track, :class:`~op_graphs.vocabulary.Stream` of a simulated one."""
    name: Int32
    """String id."""


@dataclass(frozen=True)
class Slices(Table):
    """One row an operation, kernel, host call or annotation. ``-1`` stands for "not known" unless stated."""

    track: Int32
    start: Int64
    duration: Int64
    name: Int32
    """String id."""
    kind: Int8
    """:class:`~op_graphs.vocabulary.OpKind`."""
    phase: Int8
    """:class:`~op_graphs.vocabulary.Phase`."""
    layer: Int32
    module: Int32
    """String id of the module path."""
    chunk: Int32
    """Model chunk (virtual pipeline stage) on its rank."""
    microbatch: Int32
    flops: Float64
    """Floating-point operations; 0 where none or not known."""
    bytes: Float64
    """Device memory traffic, read + written; 0 where not known."""
    communication: Int8
    """:class:`~op_graphs.vocabulary.Communication`."""
    communication_bytes: Int64
    """Size of the full message: the unsharded buffer of a gather or scatter, the payload of a send; 0 if none."""
    group: Int32
    """Index into :attr:`Timeline.groups`."""
    sequence: Int64
    """Number that the process group gave a collective: the same on all its ranks, one up with each call."""
    peer: Int32
    """Global rank at the other end of a send or receive."""
    wait: Int64
    """Nanoseconds between the operation being ready itself and its start (waiting for peers); 0 where not known."""
    waited_for: Int32
    """Row of the slice whose end let this one start: its stream predecessor, a dependency or a peer's."""
    correlation: Int64
    """Profiler correlation id that joins a launch to its kernel."""


SLICE_DEFAULTS: Mapping[str, int] = {
    "kind": 0,
    "phase": 0,
    "layer": -1,
    "module": -1,
    "chunk": -1,
    "microbatch": -1,
    "flops": 0,
    "bytes": 0,
    "communication": 0,
    "communication_bytes": 0,
    "group": -1,
    "sequence": -1,
    "peer": -1,
    "wait": 0,
    "waited_for": -1,
    "correlation": -1,
}
"""Values of the columns of :class:`Slices` that mean "not known"."""


@dataclass(frozen=True)
class Flows(Table):
    """Arrows from one slice to another."""

    source: Int32
    target: Int32
    kind: Int8
    """:class:`~op_graphs.vocabulary.FlowKind`."""


@dataclass(frozen=True)
class CounterTracks(Table):
    """Curves over time; order is drawing order inside a rank."""

    rank: Int32
    """Row of :class:`Ranks`."""
    name: Int32
    """String id."""
    category: Int8
    """:class:`~op_graphs.vocabulary.MemoryCategory`, or -1 for a counter that is not one memory category."""
    is_bytes: Bool


@dataclass(frozen=True)
class CounterSamples(Table):
    """Values of counters, each valid until the next sample of its track; sorted by track, then time."""

    track: Int32
    time: Int64
    value: Float64


@dataclass(frozen=True)
class Steps(Table):
    """Training steps of each rank."""

    rank: Int32
    """Row of :class:`Ranks`."""
    number: Int64
    start: Int64
    end: Int64


@dataclass(frozen=True)
class Origins:
    """What the file of a measured trace says of each slice beyond :class:`Slices`, row for row with them.

    Kept only where asked for (``Source.keep_origins`` of the readers), so that a conversion loses nothing.
    """

    category: Int32
    """String id of the event category (``cat``); -1 where the file gives none."""
    process: Int32
    """String id of the ``pid`` as written: a number or a text."""
    thread: Int32
    """String id of the ``tid`` as written."""
    offsets: Int64
    """Shape [slices + 1]: the arguments of slice ``i`` are ``text[offsets[i]:offsets[i + 1]]``."""
    text: bytes
    """Arguments as compact JSON objects after one another; an empty one where a slice has none."""
    headers: tuple[str, ...]
    """For each row of :class:`Ranks` the JSON object of what its file holds beside slices (top-level facts, and
    metadata events under ``metadata``); empty for a rank that did not come from such a file."""

    def __len__(self) -> int:
        return len(self.category)

    def arguments(self, row: int) -> bytes:
        """The arguments of a slice as a JSON object; empty where it has none."""
        return self.text[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: Int64, headers: tuple[str, ...] | None = None) -> Origins:
        """The rows of an index array, in that order; with other headers where given."""
        begins, lengths = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        view = memoryview(self.text)
        text = b"".join(
            view[begin : begin + length]
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
        )
        return Origins(
            self.category[rows],
            self.process[rows],
            self.thread[rows],
            offsets,
            text,
            self.headers if headers is None else headers,
        )


@dataclass(frozen=True)
class CommunicationGroup:
    """A process group: a short name such as ``tp`` and its global ranks (empty if the trace does not say)."""

    name: str
    ranks: tuple[int, ...] = ()
    size: int = 0
    """Number of members, also where the ranks are not known; 0 if unknown."""


@dataclass(frozen=True)
class Quirk:
    """Something odd found while reading a trace, with how often and one example."""

    name: str
    count: int
    example: str = ""


@dataclass(frozen=True)
class Timeline:
    """A run, simulated or measured."""

    strings: tuple[str, ...]
    ranks: Ranks
    tracks: Tracks
    slices: Slices
    flows: Flows
    counter_tracks: CounterTracks
    counter_samples: CounterSamples
    steps: Steps
    groups: tuple[CommunicationGroup, ...] = ()
    name: str = ""
    simulated: bool = False
    device: str = ""
    world_size: int = 0
    time_base_ns: int = 0
    quirks: tuple[Quirk, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    """Free facts worth keeping with the trace (framework, profile version, scenario text)."""
    origins: Origins | None = None
    """What the file says of each slice beyond the columns; None where it was not asked for, or simulated."""

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end over all slices; (0, 0) for an empty timeline."""
        if not len(self.slices):
            return 0, 0
        return int(self.slices.start.min()), int((self.slices.start + self.slices.duration).max())

    def string(self, identifier: int) -> str:
        """The string of an id, or '' for a negative id."""
        return self.strings[identifier] if identifier >= 0 else ""

    def slice_roles(self) -> Int8:
        """The :class:`TrackRole` of each slice's track."""
        return self.tracks.role[self.slices.track]

    def slice_ranks(self) -> Int32:
        """The row in :attr:`ranks` of each slice."""
        return self.tracks.rank[self.slices.track]

    def on_device(self) -> Bool:
        """Which slices occupy the device: those on compute, communication and device-stream tracks."""
        role = self.slice_roles()
        return (role >= TrackRole.COMPUTE) & (role <= TrackRole.DEVICE)

    def select_ranks(self, rows: Int32) -> Timeline:
        """The timeline of some rows of :attr:`ranks` only, renumbered; flows that lose an end are dropped."""
        rank_map = np.full(len(self.ranks), -1, dtype=np.int32)
        rank_map[rows] = np.arange(len(rows), dtype=np.int32)
        track_map, tracks = _keep(self.tracks, rank_map[self.tracks.rank] >= 0)
        kept = track_map[self.slices.track] >= 0
        slice_map, slices = _keep(self.slices, kept)
        _, flows = _keep(
            self.flows, (slice_map[self.flows.source] >= 0) & (slice_map[self.flows.target] >= 0)
        )
        counter_map, counter_tracks = _keep(self.counter_tracks, rank_map[self.counter_tracks.rank] >= 0)
        _, samples = _keep(self.counter_samples, counter_map[self.counter_samples.track] >= 0)
        _, steps = _keep(self.steps, rank_map[self.steps.rank] >= 0)
        waited_for = np.where(slices.waited_for >= 0, slice_map[slices.waited_for], -1)
        origins = self.origins
        if origins is not None:
            origins = origins.take(np.flatnonzero(kept), tuple(origins.headers[row] for row in rows.tolist()))
        return replace(
            self,
            origins=origins,
            ranks=self.ranks.take(rows),
            tracks=tracks.with_columns(rank=rank_map[tracks.rank]),
            slices=slices.with_columns(track=track_map[slices.track], waited_for=waited_for),
            flows=flows.with_columns(source=slice_map[flows.source], target=slice_map[flows.target]),
            counter_tracks=counter_tracks.with_columns(rank=rank_map[counter_tracks.rank]),
            counter_samples=samples.with_columns(track=counter_map[samples.track]),
            steps=steps.with_columns(rank=rank_map[steps.rank]),
        )


def _keep(table: _AnyTable, kept: Bool) -> tuple[Int32, _AnyTable]:
    """Map from old to new row numbers (-1 for dropped rows), and the kept rows."""
    mapping = np.full(len(table), -1, dtype=np.int32)
    mapping[kept] = np.arange(int(kept.sum()), dtype=np.int32)
    return mapping, table.take(kept)
