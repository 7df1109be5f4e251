"""The Chrome JSON that our own exporter writes (``exporters.chrome``), read back by the arguments it adds.

Every slice says its track and role, so nothing is guessed from names. The format does not hold what joins ranks (flows
between them, what a slice waited for), lanes of crossing slices come back as one track, and slices that had no
correlation have one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from op_graphs.columns import Int32, Int64, StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterTracks,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import FlowKind, MemoryCategory, TrackRole
from tracesim.readers import kineto_arguments as arguments
from tracesim.readers.kineto_columns import KinetoDocument
from tracesim.readers.kineto_json import integer
from tracesim.readers.launches import launch_rows
from tracesim.readers.memory_events import memory_counters

_STEP_ROLE = "step"
_FIRST_STREAM = 7
_COORDINATES = ("rank", "tp", "cp", "ep", "pp", "dp")


class OwnArguments(arguments.DeviceArguments, gc=False):
    """Arguments of every slice that our exporter wrote."""

    role: Any = None
    track: Any = None
    shown_as: Any = msgspec.field(default=None, name="name")


def is_own(document: KinetoDocument) -> bool:
    """Whether our exporter wrote the file."""
    return str(document.extra.get("format", "")).startswith("tracesim.")


def build(document: KinetoDocument) -> Timeline:
    """The timeline of one rank out of a file of ours."""
    columns = document.complete
    decoded = arguments.decode_arguments(columns.arguments, OwnArguments)
    strings = StringTable(columns.strings)
    mirrored = {i for i, name in enumerate(columns.strings) if name == "gpu_user_annotation"}
    # Pipeline actions are drawn twice, on the host and the device side; the host's stands for both.
    mirror = np.isin(columns.category, list(mirrored)) & np.array([a.role == "pipeline" for a in decoded])
    is_step = np.array([a.role == _STEP_ROLE for a in decoded], dtype=np.bool_)
    kept = np.flatnonzero(~is_step & ~mirror)
    base = document.base_ns
    rows = [decoded[i] for i in kept]
    track_of_slice, tracks = _tracks(document, kept, rows, strings)
    order = np.lexsort((-columns.duration[kept], columns.time[kept], track_of_slice))
    kept, rows, track_of_slice = kept[order], [rows[i] for i in order], track_of_slice[order]
    slices, groups = _slices(document, kept, rows, track_of_slice, strings)
    counter_tracks, samples = memory_counters(document, strings, 0)
    extra = document.extra
    coordinates = extra.get("coordinates") or {}
    properties = document.device_properties
    return Timeline(
        ranks=Ranks.from_rows([{c: integer(coordinates.get(c), -1) for c in _COORDINATES}]),
        tracks=tracks,
        slices=slices,
        flows=_launches(slices, tracks),
        counter_tracks=_with_categories(counter_tracks, strings),
        counter_samples=samples,
        steps=_steps(document, np.flatnonzero(is_step)),
        groups=groups,
        name=str(extra.get("name", document.path.name)),
        simulated=bool(extra.get("simulated")),
        device=str(properties[0].get("name", "")) if properties else "",
        world_size=integer(document.distributed.get("world_size"), 0),
        time_base_ns=base,
        quirks=tuple(
            Quirk(n, count, example) for n, (count, example) in sorted(document.notes.found.items())
        ),
        properties={str(k): str(v) for k, v in (extra.get("properties") or {}).items()},
        strings=strings.strings(),
    )


def _slices(
    document: KinetoDocument, kept: Int64, rows: list[OwnArguments], track: Int32, strings: StringTable
) -> tuple[Slices, tuple[CommunicationGroup, ...]]:
    columns = document.complete
    facts = arguments.read_facts(rows, arguments.configured_groups(document.distributed))
    name = [
        columns.name[i] if a.shown_as is None else strings.intern(str(a.shown_as))
        for i, a in zip(kept, rows, strict=True)
    ]
    slices = Slices(
        track=track,
        start=columns.time[kept],
        duration=columns.duration[kept],
        name=np.array(name, dtype=np.int32),
        kind=facts.kind,
        phase=facts.phase,
        layer=facts.layer,
        module=np.array([strings.intern(m) if m else -1 for m in facts.module], dtype=np.int32),
        chunk=facts.chunk,
        microbatch=facts.microbatch,
        flops=facts.flops,
        bytes=facts.bytes,
        communication=facts.transfers.communication,
        communication_bytes=facts.transfers.bytes,
        group=facts.transfers.group,
        sequence=facts.transfers.sequence,
        peer=facts.transfers.peer,
        wait=facts.wait,
        waited_for=np.full(len(kept), SLICE_DEFAULTS["waited_for"]),
        correlation=arguments.integers([a.correlation for a in rows]),
    )
    return slices, facts.transfers.groups


def _tracks(
    document: KinetoDocument, kept: Int64, rows: list[OwnArguments], strings: StringTable
) -> tuple[Int32, Tracks]:
    """The track of each slice, and the tracks in the order of role and stream."""
    columns = document.complete
    threads = np.array([integer(s, -1) for s in columns.strings], dtype=np.int64)[
        columns.thread[kept]
    ].tolist()
    streams: dict[tuple[int, str], int] = {}
    keys = []
    offset = _FIRST_STREAM if document.extra.get("simulated") else 0
    for row, thread in zip(rows, threads, strict=True):
        role = TrackRole.__members__.get(str(row.role).upper(), TrackRole.HOST)
        key = (int(role), str(row.track or ""))
        keys.append(key)
        # Extra lanes have higher numbers than the track itself.
        streams[key] = min(streams.get(key, thread - offset), thread - offset)
    ordered = sorted(streams, key=lambda key: (key[0], streams[key], key[1]))
    number = {key: row for row, key in enumerate(ordered)}
    tracks = Tracks.from_rows(
        {"rank": 0, "role": role, "stream": streams[role, name], "name": strings.intern(name)}
        for role, name in ordered
    )
    return np.array([number[key] for key in keys], dtype=np.int32), tracks


def _launches(slices: Slices, tracks: Tracks) -> Flows:
    role = tracks.role[slices.track] if len(slices) else np.zeros(0, dtype=np.int8)
    device = np.flatnonzero((role >= TrackRole.COMPUTE) & (role <= TrackRole.DEVICE))
    correlation = slices.correlation
    source = launch_rows(np.where(role == TrackRole.HOST, correlation, -1), correlation[device])
    joined = source >= 0
    return Flows(
        source=source[joined].astype(np.int32),
        target=device[joined].astype(np.int32),
        kind=np.full(int(joined.sum()), FlowKind.LAUNCH, dtype=np.int8),
    )


def _steps(document: KinetoDocument, rows: Int64) -> Steps:
    columns = document.complete
    rows = rows[np.argsort(columns.time[rows], kind="stable")]
    return Steps(
        rank=np.zeros(len(rows), dtype=np.int32),
        number=np.array([integer(columns.strings[i], -1) for i in columns.name[rows]], dtype=np.int64),
        start=columns.time[rows],
        end=columns.time[rows] + columns.duration[rows],
    )


def _with_categories(counters: CounterTracks, strings: StringTable) -> CounterTracks:
    """Counters named as a memory category are that category."""
    names = strings.strings()
    found = [
        MemoryCategory.__members__.get(names[i].upper().replace(" ", "_")) for i in counters.name.tolist()
    ]
    return counters.with_columns(
        category=np.array([-1 if c is None else int(c) for c in found], dtype=np.int8)
    )
