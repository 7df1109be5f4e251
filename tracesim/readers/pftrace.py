"""Reader of the Perfetto traces that our own exporter writes (``exporters.perfetto``, ``docs/trace_layout.md``).

Everything the exporter wrote comes back. Perfetto traces of other programs are refused: they lack the facts event
that says which track is what.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int32, Int64, StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Origins,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import Communication, OpKind, Phase
from tracesim.errors import TraceError
from tracesim.readers import protobuf_columns as protobuf
from tracesim.readers.pftrace_origins import Begins, OriginReader
from tracesim.readers.sources import Source

FACTS_EVENT = b"trace facts"
_FORMAT = "tracesim.trace/1"

_TIME, _EVENT, _INTERNED, _DESCRIPTOR = (8,), (11,), (12,), (60,)
_TYPE, _TRACK, _NAME, _ANNOTATION, _FLOW = (11, 9), (11, 11), (11, 10), (11, 4), (11, 47)
_COUNT, _REAL_COUNT, _TEXT_NAME = (11, 30), (11, 44), (11, 23)
_ANNOTATION_NAME = (11, 4, 1)
_BEGIN, _END, _COUNTER = 1, 2, 4

_MESSAGES = frozenset({_EVENT, _ANNOTATION})
_FIXED = frozenset({_TYPE, _ANNOTATION_NAME, (10,), (13,)})
_CATEGORY = (11, 3)
_BOOL, _INTEGER, _DOUBLE, _STRING_IID = 2, 4, 5, 17
_VALUE_FIELDS = (_BOOL, _INTEGER, _DOUBLE, _STRING_IID)

_LARGEST_ID = 1 << 27

_COLUMN_OF_ANNOTATION = {"wait_ns": "wait", "waited_for_slice": "waited_for"}
_VOCABULARIES: dict[str, Any] = {"kind": OpKind, "phase": Phase, "communication": Communication}


def recognise(source: Source) -> bool:
    """Whether the file begins with a packet whose first field is one that trace packets have."""
    data = source.data
    return data[:1] == b"\x0a" and not data[:64].lstrip().startswith((b"{", b"["))


def read(source: Source) -> Timeline:
    """The timeline a file of ours holds.

    Raises:
        TraceError: if the file is truncated or damaged, or was not written by tracesim.
    """
    try:
        return _read(source)
    except protobuf.DamagedMessageError as error:
        raise TraceError(
            f"{source.path}: damaged or truncated Perfetto trace ({error}). Copy or write it again."
        ) from error
    except TraceError:
        raise
    # Damaged bytes can break any later step: a name that is no key, an id outside its table, text that is no JSON.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(
            f"{source.path}: damaged Perfetto trace ({type(error).__name__}: {error}). Write it again."
        ) from error


def _read(source: Source) -> Timeline:
    begins, lengths = protobuf.packet_bounds(source.data)
    if FACTS_EVENT not in source.data:
        raise TraceError(
            f"{source.path}: a Perfetto trace that tracesim did not write. Give the profiler's own JSON instead."
        )
    events = _Events()
    for shape in protobuf.shapes(source.data, begins, lengths, _MESSAGES, _FIXED):
        events.add(shape)
    return events.timeline(source)


@dataclass
class _Interned:
    """The three tables of interned strings, by iid."""

    categories: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    annotations: dict[int, str] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)

    def add(self, data: bytes) -> None:
        tables = {(1,): self.categories, (2,): self.names, (3,): self.annotations, (29,): self.values}
        for path, value in protobuf.message_values(data):
            if path in tables and isinstance(value, bytes):
                entry = dict(protobuf.message_values(value))
                text = entry.get((2,), b"")
                tables[path][int(entry[(1,)])] = text.decode() if isinstance(text, bytes) else ""


@dataclass
class _Begins:
    """Slice begins of one shape."""

    packets: Int64
    names: Int64
    annotations: list[tuple[int, int, npt.NDArray[np.uint64]]]
    """Interned name, field number of the value, values."""
    flows: list[npt.NDArray[np.uint64]]
    categories: npt.NDArray[np.uint64] | None = None


class _Events:
    """What the packets say, collected shape by shape."""

    def __init__(self) -> None:
        self.interned = _Interned()
        self.facts: dict[str, Any] = {}
        self.begins: list[_Begins] = []
        self.timed: list[tuple[Int64, Int64, Int64, Bool]] = []
        """Packets, times, tracks, and whether they begin a slice."""
        self.samples: list[tuple[Int64, Int64, Int64, npt.NDArray[np.float64]]] = []

    def add(self, shape: protobuf.Shape) -> None:
        paths = [f.path for f in shape.fields]
        if _TEXT_NAME in paths:
            for row in shape.rows:
                self._facts(row.tobytes())
        elif _TYPE in paths:
            self._track_events(shape)
        elif _INTERNED in paths:
            at = shape.fields[paths.index(_INTERNED)]
            for row in shape.rows:
                self.interned.add(row[at.begin : at.end].tobytes())

    def _facts(self, packet: bytes) -> None:
        values = protobuf.message_values(packet, frozenset({_EVENT}))
        if (_TEXT_NAME, FACTS_EVENT) not in values:
            return
        for path, value in values:
            if path == _ANNOTATION and isinstance(value, bytes):
                entry = dict(protobuf.message_values(value))
                name = entry[(10,)]
                found = next(v for (number, *_), v in entry.items() if number != 10)
                self.facts[name.decode() if isinstance(name, bytes) else ""] = (
                    found.decode() if isinstance(found, bytes) else _signed_int(found)
                )

    def _track_events(self, shape: protobuf.Shape) -> None:
        by_path = {f.path: f for f in shape.fields}
        kind = int(shape.column(by_path[_TYPE])[0])
        time = shape.column(by_path[_TIME]).astype(np.int64)
        track = shape.column(by_path[_TRACK]).astype(np.int64)
        if kind == _COUNTER:
            real = by_path.get(_REAL_COUNT)
            value = (
                shape.column(real).view(np.float64)
                if real is not None
                else shape.column(by_path[_COUNT]).view(np.int64).astype(np.float64)
            )
            self.samples.append((shape.packets, time, track, value))
        elif kind in (_BEGIN, _END):
            self.timed.append((shape.packets, time, track, np.full(len(time), kind == _BEGIN)))
        if kind == _BEGIN:
            flows = [shape.column(f) for f in shape.fields if f.path == _FLOW]
            names = shape.column(by_path[_NAME]).astype(np.int64)
            at = by_path.get(_CATEGORY)
            categories = None if at is None else shape.column(at)
            self.begins.append(_Begins(shape.packets, names, _annotations(shape), flows, categories))

    def timeline(self, source: Source) -> Timeline:
        facts = _Facts.parse(self.facts, source)
        strings = StringTable()
        packet, time, track, begin = _in_file_order(self.timed)
        time = time - facts.shift
        lane_track, begin_row, end_row = _pair(track, begin, facts.lanes, source)
        rows = packet[begin_row]
        facts.check_counts(len(rows), sum(len(s[0]) for s in self.samples), source)
        start, duration = time[begin_row], time[end_row] - time[begin_row]
        columns = self._columns(rows, facts, strings)
        flows = self._flows(rows, start)
        origins = self._origins(rows, lane_track, strings) if source.keep_origins else None
        tracks = Tracks(name=_ids(facts.track_names, strings), **facts.tracks)
        counter_tracks = CounterTracks(name=_ids(facts.counter_names, strings), **facts.counter_columns)
        return Timeline(
            strings=strings.strings(),
            ranks=Ranks(**facts.ranks),
            tracks=tracks,
            slices=Slices(track=lane_track, start=start, duration=duration, **columns),
            flows=flows,
            counter_tracks=counter_tracks,
            counter_samples=self._counters(facts),
            steps=Steps(**facts.steps),
            origins=origins,
            **facts.rest,
        )

    def _columns(self, rows: Int64, facts: _Facts, strings: StringTable) -> dict[str, npt.NDArray[Any]]:
        count = len(rows)
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.full(count, default, dtype=np.float64 if name in ("flops", "bytes") else np.int64)
            for name, default in SLICE_DEFAULTS.items()
        }
        columns["name"] = np.full(count, -1, dtype=np.int64)
        name_ids = _lookup(self.interned.names, strings.intern, -1)
        for begins in self.begins:
            at = np.searchsorted(rows, begins.packets)
            columns["name"][at] = name_ids[begins.names]
            for name_iid, number, words in begins.annotations:
                name = self.interned.annotations[name_iid]
                column = _COLUMN_OF_ANNOTATION.get(name, name)
                # ``waited_for`` itself is text for the reader of the picture; the number stands beside it.
                if column in columns and name != "waited_for":
                    columns[column][at] = self._values(name, number, words, facts, strings)
        return columns

    def _origins(self, rows: Int64, track: Int32, strings: StringTable) -> Origins | None:
        """What the trace was converted from says of its slices; None if it was not converted."""
        if "origins" not in self.facts:
            return None
        interned = self.interned
        reader = OriginReader(
            self.facts["origins"], interned.annotations, interned.values, interned.categories, strings
        )
        shapes = [Begins(np.searchsorted(rows, b.packets), b.categories, b.annotations) for b in self.begins]
        return reader.read(shapes, track)

    def _values(
        self, name: str, number: int, words: npt.NDArray[np.uint64], facts: _Facts, strings: StringTable
    ) -> npt.NDArray[Any]:
        if number == _DOUBLE:
            return words.view(np.float64)
        if number != _STRING_IID:
            return words.view(np.int64)
        if name in _VOCABULARIES:
            members = _VOCABULARIES[name].__members__
            table = _lookup(self.interned.values, lambda text: int(members.get(text.upper(), 0)), 0)
        elif name == "group":
            table = _lookup(self.interned.values, lambda text: facts.groups.get(text, -1), -1)
        else:
            used = set(np.unique(words).tolist())
            values = {iid: text for iid, text in self.interned.values.items() if iid in used}
            table = _lookup(values, strings.intern, -1)
        return table[words.astype(np.int64)]

    def _flows(self, rows: Int64, start: Int64) -> Flows:
        """Joins the two ends of each flow; see ``exporters.perfetto_slices`` for what a flow id holds."""
        at = [np.searchsorted(rows, b.packets) for b in self.begins for _ in b.flows]
        ids = [words for b in self.begins for words in b.flows]
        if not ids:
            return Flows.empty()
        slice_row, identifier = np.concatenate(at), np.concatenate(ids).astype(np.int64)
        order = np.lexsort((slice_row, start[slice_row], identifier))
        slice_row, identifier = slice_row[order], identifier[order]
        first = np.nonzero(identifier[1:] == identifier[:-1])[0]
        code = identifier[first]
        earlier, later = slice_row[first], slice_row[first + 1]
        backwards = (code & 1).astype(np.bool_)
        return Flows(
            source=np.where(backwards, later, earlier),
            target=np.where(backwards, earlier, later),
            kind=(code >> 1) & 7,
        )

    def _counters(self, facts: _Facts) -> CounterSamples:
        if not self.samples:
            return CounterSamples.empty()
        packet = np.concatenate([s[0] for s in self.samples])
        time = np.concatenate([s[1] for s in self.samples]) - facts.shift
        uuid = np.concatenate([s[2] for s in self.samples])
        value = np.concatenate([s[3] for s in self.samples])
        rows = _lookup({u: row for row, u in enumerate(facts.counter_uuids)}, lambda row: row, -1)[uuid]
        order = np.lexsort((packet, time, rows))
        return CounterSamples(track=rows[order], time=time[order], value=value[order])


def _annotations(shape: protobuf.Shape) -> list[tuple[int, int, npt.NDArray[np.uint64]]]:
    found = []
    name = 0
    for entry in shape.fields:
        if entry.path == _ANNOTATION_NAME:
            name = int(shape.column(entry)[0])
        elif entry.path[:2] == _ANNOTATION and entry.path[-1] in _VALUE_FIELDS:
            found.append((name, entry.path[-1], shape.column(entry)))
    return found


def _in_file_order(parts: list[tuple[Int64, Int64, Int64, Bool]]) -> tuple[Int64, Int64, Int64, Bool]:
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing, np.zeros(0, dtype=np.bool_)
    packet = np.concatenate([p[0] for p in parts])
    order = np.argsort(packet, kind="stable")
    return (
        packet[order],
        np.concatenate([p[1] for p in parts])[order],
        np.concatenate([p[2] for p in parts])[order],
        np.concatenate([p[3] for p in parts])[order],
    )


def _pair(uuid: Int64, begin: Bool, lanes: dict[int, int], source: Source) -> tuple[Int32, Int64, Int64]:
    """Track, begin row and end row of each slice, in the order of the begins.

    On one lane and at one depth, begins and ends alternate, so sorting events by lane and depth puts each end behind
    its begin.
    """
    level = np.where(begin, 1, -1)
    lane_values, lane = np.unique(uuid, return_inverse=True)
    by_lane = np.argsort(lane, kind="stable")
    running = np.cumsum(level[by_lane])
    opens = np.concatenate(
        ([0], np.cumsum(np.bincount(lane, weights=level, minlength=len(lane_values))))
    ).astype(np.int64)
    depth = running - opens[lane[by_lane]] + (~begin[by_lane])
    if len(begin) and (opens.any() or depth.min() < 1):
        raise TraceError(
            f"{source.path}: damaged Perfetto trace (slices that begin but never end). Write it again."
        )
    order = by_lane[np.lexsort((np.arange(len(depth)), depth, lane[by_lane]))]
    begins, ends = order[0::2], order[1::2]
    place = np.argsort(begins, kind="stable")
    begins, ends = begins[place], ends[place]
    track = _lookup(lanes, lambda row: row, -1)[uuid[begins]]
    if len(track) and track.min() < 0:
        raise TraceError(
            f"{source.path}: damaged Perfetto trace (slices on a track that is not declared). Write it again."
        )
    return track.astype(np.int32), begins, ends


def _lookup(table: dict[int, Any], convert: Any, missing: int) -> Int64:  # noqa: ANN401
    """An array that maps an id to the converted entry of a table."""
    largest = max(table, default=0)
    if largest > _LARGEST_ID:
        raise protobuf.DamagedMessageError(f"an id of {largest} where ids are counted from 1")
    found = np.full(largest + 1, missing, dtype=np.int64)
    for identifier, entry in table.items():
        found[identifier] = convert(entry)
    return found


def _ids(names: list[str | None], strings: StringTable) -> Int32:
    return np.array([-1 if name is None else strings.intern(name) for name in names], dtype=np.int32)


def _signed_int(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@dataclass(frozen=True)
class _Facts:
    """The facts event, as tables."""

    shift: int
    ranks: dict[str, Any]
    tracks: dict[str, Any]
    track_names: list[str | None]
    lanes: dict[int, int]
    """Row of the track by the uuid of each of its lanes."""
    counter_columns: dict[str, Any]
    counter_names: list[str | None]
    counter_uuids: list[int]
    steps: dict[str, Any]
    groups: dict[str, int]
    """Index of a group by its label."""
    rest: dict[str, Any]

    counts: tuple[int | None, int | None]
    """Slices and counter samples that were written, where the file says."""

    def check_counts(self, slices: int, samples: int, source: Source) -> None:
        """Refuse a file cut exactly between two packets, which no parser would notice."""
        for what, expected, found in zip(
            ("slices", "counter samples"), self.counts, (slices, samples), strict=True
        ):
            if expected is not None and expected != found:
                raise TraceError(
                    f"{source.path}: truncated Perfetto trace ({found} {what} of {expected}). Copy or write it again."
                )

    @classmethod
    def parse(cls, facts: dict[str, Any], source: Source) -> _Facts:
        if facts.get("format") != _FORMAT:
            raise TraceError(
                f"{source.path}: written in format {facts.get('format')!r}, this version reads {_FORMAT!r}. "
                "Write the trace again, or use the version that wrote it."
            )
        tracks, counters = json.loads(facts["tracks"]), json.loads(facts["counters"])
        groups = json.loads(facts["groups"])
        uuids = tracks.pop("uuids")
        return cls(
            shift=int(facts["time_shift_ns"]),
            ranks=json.loads(facts["ranks"]),
            track_names=tracks.pop("name"),
            tracks=tracks,
            lanes={uuid: row for row, lanes in enumerate(uuids) for uuid in lanes},
            counter_names=counters.pop("name"),
            counter_uuids=counters.pop("uuid"),
            counter_columns=counters,
            steps=json.loads(facts["steps"]),
            counts=(facts.get("slices"), facts.get("counter_samples")),
            groups={g["label"]: index for index, g in enumerate(groups)},
            rest={
                "groups": tuple(CommunicationGroup(g["name"], tuple(g["ranks"]), g["size"]) for g in groups),
                "name": str(facts["name"]),
                "simulated": bool(facts["simulated"]),
                "device": str(facts["device"]),
                "world_size": int(facts["world_size"]),
                "time_base_ns": int(facts["time_base_ns"]),
                "quirks": tuple(
                    Quirk(q["name"], q["count"], q["example"]) for q in json.loads(facts["quirks"])
                ),
                "properties": json.loads(facts["properties"]),
            },
        )
