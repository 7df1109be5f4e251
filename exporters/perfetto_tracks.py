"""The tracks of a Perfetto file: which exist, how they are named and ordered, and the facts kept beside them.

How the viewer orders tracks decides the choices here: processes by name as text (so rank numbers are zero-padded),
threads by tid, and children of a named track by explicit rank. Protos: ``protos/perfetto/trace/track_event/`` of
https://github.com/google/perfetto; layout: ``docs/trace_layout.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import CommunicationGroup, Timeline

from .lanes import Placement
from .protobuf_rows import bytes_field, double_field, string_field, varint_field

FORMAT = "tracesim.trace/1"
FACTS_TRACK = "tracesim"
FACTS_EVENT = "trace facts"
MEMORY_GROUP = "memory"
RANK_PREFIXES = "rank_prefixes"
"""Property of a timeline that holds several runs: a word for each row of its ranks, separated by commas."""

_EXPLICIT_ORDER = 3
_SIZE_IN_BYTES = 3


@dataclass(frozen=True)
class TrackPlan:
    """The uuid of each track: uuid 1 for the facts, then ranks, memory groups, lanes and counters."""

    facts: int
    process: Int64
    memory_group: Int64
    lane: Int64
    """One for each lane of the placement."""
    counter: Int64
    """One for each row of :attr:`Timeline.counter_tracks`."""

    @classmethod
    def of(cls, timeline: Timeline, placement: Placement) -> TrackPlan:
        """Number all tracks of a timeline."""
        ranks, lanes = len(timeline.ranks), len(placement.lane_track)
        process = np.arange(ranks, dtype=np.int64) + 2
        lane = np.arange(lanes, dtype=np.int64) + 2 + 2 * ranks
        counter = np.arange(len(timeline.counter_tracks), dtype=np.int64) + 2 + 2 * ranks + lanes
        return cls(1, process, process + ranks, lane, counter)


def rank_names(timeline: Timeline) -> list[str]:
    """Names whose text order is rank order, such as ``rank 012 pp1 dp0 tp0``.

    Coordinates that are not known are left out, and so are ``cp`` and ``ep`` where they are 0 on every rank. Of several
    runs in one timeline (:data:`RANK_PREFIXES`), each name begins with the word of its run.
    """
    ranks = timeline.ranks
    largest = max([timeline.world_size - 1, *ranks.rank.tolist()])
    digits = max(3, len(str(largest)))
    shown = ["pp", "dp"] + [d for d in ("cp", "ep") if np.any(getattr(ranks, d) > 0)] + ["tp"]
    prefixes = timeline.properties.get(RANK_PREFIXES, "").split(",")
    names = []
    for row in range(len(ranks)):
        number = int(ranks.rank[row])
        known = [(d, int(getattr(ranks, d)[row])) for d in shown]
        parts = [f"rank {number:0{digits}d}" if number >= 0 else "rank unknown"]
        parts += [f"{d}{value}" for d, value in known if value >= 0]
        names.append(
            " ".join(([prefixes[row]] if len(prefixes) == len(ranks) and prefixes[row] else []) + parts)
        )
    return names


def process_ids(timeline: Timeline) -> Int64:
    """One pid a rank, from 1 on (0 is shown as "swapper"): the rank number plus 1 where ranks are distinct."""
    ranks = timeline.ranks.rank.astype(np.int64)
    if len(ranks) and ranks.min() >= 0 and len(np.unique(ranks)) == len(ranks):
        return ranks + 1
    return np.arange(len(ranks), dtype=np.int64) + 1


def group_labels(groups: tuple[CommunicationGroup, ...]) -> list[str]:
    """A distinct name for each process group, such as ``tp 0-7``: its name and ranks, numbered where both repeat."""
    labels: list[str] = []
    used: set[str] = set()
    for index, group in enumerate(groups):
        label = f"{group.name} {_ranges(group.ranks)}".strip() or "group"
        if label in used:
            label = f"{label} #{index}"
        used.add(label)
        labels.append(label)
    return labels


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks as text: ``0-7``, ``0,8,16`` or, with a constant step over more than four, ``0-56/8``."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            if step == 1:
                return f"{ranks[0]}-{ranks[-1]}"
            if len(ranks) > 4:
                return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def descriptors(timeline: Timeline, placement: Placement, plan: TrackPlan) -> list[bytes]:
    """TrackDescriptor messages of all tracks, parents before children."""
    pids = process_ids(timeline)
    found = [_descriptor(plan.facts, string_field(2, FACTS_TRACK))]
    for row, name in enumerate(rank_names(timeline)):
        process = varint_field(1, int(pids[row])) + string_field(6, name)
        found.append(_descriptor(int(plan.process[row]), string_field(2, name) + bytes_field(3, process)))
    found += _threads(timeline, placement, plan, pids)
    return found + _counters(timeline, plan)


def _descriptor(uuid: int, fields: bytes, parent: int = 0) -> bytes:
    return varint_field(1, uuid) + (varint_field(5, parent) if parent else b"") + fields


def _threads(timeline: Timeline, placement: Placement, plan: TrackPlan, pids: Int64) -> list[bytes]:
    # A tid that equals a pid would make its thread the main thread of that process, which is drawn first.
    next_tid = 10 ** len(str(int(pids.max(initial=0)))) + 1
    found = []
    for lane, (track, number) in enumerate(zip(placement.lane_track, placement.lane_number, strict=True)):
        rank = timeline.tracks.rank[track]
        name = timeline.string(int(timeline.tracks.name[track])) + (f" ({number + 1})" if number else "")
        thread = varint_field(1, int(pids[rank])) + varint_field(2, next_tid) + string_field(5, name)
        next_tid += 1
        fields = string_field(2, name) + bytes_field(4, thread)
        found.append(_descriptor(int(plan.lane[lane]), fields, int(plan.process[rank])))
    return found


def _counters(timeline: Timeline, plan: TrackPlan) -> list[bytes]:
    """Memory counters in a group of their own, categories first; others directly under the rank."""
    counters = timeline.counter_tracks
    groups, found = [], []
    in_memory: Bool = counters.is_bytes
    for rank in np.unique(counters.rank[in_memory]):
        fields = string_field(2, MEMORY_GROUP) + varint_field(11, _EXPLICIT_ORDER)
        groups.append(_descriptor(int(plan.memory_group[rank]), fields, int(plan.process[rank])))
    for row, rank in enumerate(counters.rank):
        name = string_field(2, timeline.string(int(counters.name[row])))
        if in_memory[row]:
            category = int(counters.category[row])
            order = category if category >= 0 else 128 + row
            unit = varint_field(3, _SIZE_IN_BYTES) + string_field(7, f"memory of rank row {rank}")
            fields = name + bytes_field(8, unit) + varint_field(12, order)
            found.append(_descriptor(int(plan.counter[row]), fields, int(plan.memory_group[rank])))
        else:
            found.append(
                _descriptor(int(plan.counter[row]), name + bytes_field(8, b""), int(plan.process[rank]))
            )
    return groups + found


def facts(
    timeline: Timeline, placement: Placement, plan: TrackPlan, time_shift: int, origins: str = ""
) -> list[bytes]:
    """Debug annotations that hold all of a timeline that is no slice, sample or flow."""
    lanes: list[list[int]] = [[] for _ in range(len(timeline.tracks))]
    for lane, track in enumerate(placement.lane_track):
        lanes[track].append(int(plan.lane[lane]))
    strings = timeline.strings
    tracks = {
        **_columns(timeline.tracks, ("rank", "role", "stream")),
        "name": [strings[i] if i >= 0 else None for i in timeline.tracks.name],
        "uuids": lanes,
    }
    counters = {
        **_columns(timeline.counter_tracks, ("rank", "category", "is_bytes")),
        "name": [strings[i] if i >= 0 else None for i in timeline.counter_tracks.name],
        "uuid": plan.counter.tolist(),
    }
    groups = [
        {"label": label, "name": g.name, "size": g.size, "ranks": list(g.ranks)}
        for label, g in zip(group_labels(timeline.groups), timeline.groups, strict=True)
    ]
    quirks = [{"name": q.name, "count": q.count, "example": q.example} for q in timeline.quirks]
    return [
        _annotation("format", FORMAT),
        _annotation("name", timeline.name),
        _annotation("simulated", timeline.simulated),
        _annotation("device", timeline.device),
        _annotation("world_size", timeline.world_size),
        _annotation("time_base_ns", timeline.time_base_ns),
        _annotation("time_shift_ns", time_shift),
        # So that a reader notices a file that was cut between two packets.
        _annotation("slices", len(timeline.slices)),
        _annotation("counter_samples", len(timeline.counter_samples)),
        _annotation("ranks", _json(_columns(timeline.ranks, ("rank", "tp", "cp", "ep", "pp", "dp")))),
        _annotation("tracks", _json(tracks)),
        _annotation("counters", _json(counters)),
        _annotation("steps", _json(_columns(timeline.steps, ("rank", "number", "start", "end")))),
        _annotation("groups", _json(groups)),
        _annotation("quirks", _json(quirks)),
        _annotation("properties", _json(dict(timeline.properties))),
        *([_annotation("origins", origins)] if origins else []),
    ]


def _columns(table: object, names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: getattr(table, name).tolist() for name in names}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _annotation(name: str, value: str | float | bool) -> bytes:
    if isinstance(value, bool):
        encoded = varint_field(2, int(value))
    elif isinstance(value, int):
        encoded = varint_field(4, value)
    elif isinstance(value, float):
        encoded = double_field(5, value)
    else:
        encoded = string_field(6, value)
    return string_field(10, name) + encoded
