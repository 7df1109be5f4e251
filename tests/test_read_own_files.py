"""Timeline -> Perfetto or Chrome file -> timeline: nothing the format holds is lost, and damage is named."""

from __future__ import annotations

import contextlib
import io
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.chrome import write_chrome
from exporters.perfetto import write_perfetto
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tracesim.errors import TraceError
from tracesim.readers import protobuf_columns, read_trace
from tracesim.readers.pftrace import read
from tracesim.readers.sources import Source

NAMES = (
    "gemm",
    "all_reduce",
    "F0",
    "B0",
    "",
    "größe 🚀",
    "compute",
    "tp",
    "pipeline",
    "allocated",
    "util",
    "layers.1",
)


def timeline_of(rows, *, flows=(), samples=()) -> Timeline:
    """Two ranks of three tracks each (compute, tp, pipeline); ``rows`` are dicts of slice columns."""
    slices = Slices.from_rows(rows, **SLICE_DEFAULTS)
    roles = [TrackRole.COMPUTE, TrackRole.COMMUNICATION_TP, TrackRole.PIPELINE]
    return Timeline(
        strings=NAMES,
        ranks=Ranks(*(np.array(v) for v in ([0, 8], [0, 1], [0, 0], [-1, -1], [0, 0], [0, 3]))),
        tracks=Tracks.from_rows(
            {"rank": r, "role": role, "stream": i, "name": 6 + i}
            for r in range(2)
            for i, role in enumerate(roles)
        ),
        slices=slices,
        flows=Flows.from_rows([{"source": s, "target": t, "kind": k} for s, t, k in flows]),
        counter_tracks=CounterTracks.from_rows(
            [
                {"rank": 0, "name": 9, "category": -1, "is_bytes": True},
                {"rank": 1, "name": 10, "category": -1, "is_bytes": False},
            ]
        ),
        counter_samples=CounterSamples.from_rows(
            [{"track": t, "time": w, "value": v} for t, w, v in samples]
        ),
        steps=Steps.from_rows([{"rank": r, "number": 7, "start": 0, "end": 900} for r in range(2)]),
        groups=(
            CommunicationGroup("tp", (0, 1), 2),
            CommunicationGroup("tp", (8, 9), 2),
            CommunicationGroup("ep"),
        ),
        name="a run",
        simulated=True,
        device="h100",
        world_size=16,
        time_base_ns=1_719_853_884_000_000_000,
        quirks=(Quirk("odd", 3, "an example"),),
        properties={"profile": "h100"},
    )


def written(timeline: Timeline) -> bytes:
    out = io.BytesIO()
    write_perfetto(timeline, out)
    return out.getvalue()


def round_trip(timeline: Timeline) -> Timeline:
    return read(Source(Path("t.pftrace"), written(timeline)))


def canonical(timeline: Timeline) -> dict[str, object]:
    """A timeline as plain values, independent of row order among slices and of string numbers."""
    slices = timeline.slices
    text = {c: [timeline.string(int(i)) for i in getattr(slices, c)] for c in ("name", "module")}
    columns = [f.name for f in fields(Slices) if f.name not in ("name", "module", "waited_for")]
    keys = [
        (*(getattr(slices, c)[i].item() for c in columns), text["name"][i], text["module"][i])
        for i in range(len(slices))
    ]
    waits = sorted((keys[i], keys[w]) for i, w in enumerate(slices.waited_for) if w >= 0)
    flows = timeline.flows
    joined = sorted(
        (keys[s], keys[t], int(k))
        for s, t, k in zip(flows.source, flows.target, flows.kind, strict=True)
        if s != t
    )
    tables = {
        name: [getattr(table, f.name).tolist() for f in fields(table) if f.name != "name"]
        for name in ("ranks", "tracks", "counter_tracks", "counter_samples", "steps")
        for table in [getattr(timeline, name)]
    }
    named = {
        name: [timeline.string(int(i)) for i in getattr(timeline, name).name]
        for name in ("tracks", "counter_tracks")
    }
    rest = (
        timeline.groups, timeline.name, timeline.simulated, timeline.device, timeline.world_size,
        timeline.time_base_ns, timeline.quirks, dict(timeline.properties),
    )  # fmt: skip
    return {"slices": sorted(keys), "waits": waits, "flows": joined, **tables, "names": named, "rest": rest}


FULL = [
    {"track": 0, "start": 0, "duration": 100, "name": 0, "kind": OpKind.GEMM, "phase": Phase.FORWARD, "layer": 3,
     "module": 11, "chunk": 1, "microbatch": 2, "flops": 1.5e12, "bytes": 3e6, "correlation": 77},
    {"track": 1, "start": 100, "duration": 50, "name": 1, "kind": OpKind.COLLECTIVE, "group": 0, "wait": 20,
     "communication": Communication.ALL_REDUCE, "communication_bytes": 1 << 40, "waited_for": 0, "sequence": 12},
    {"track": 1, "start": 160, "duration": 5, "name": 1, "kind": OpKind.P2P, "group": 0, "peer": 3,
     "communication": Communication.SEND, "communication_bytes": 7},
    {"track": 4, "start": 90, "duration": 60, "name": 1, "kind": OpKind.COLLECTIVE, "group": 1, "waited_for": 0,
     "communication": Communication.ALL_REDUCE, "communication_bytes": 5},
    {"track": 2, "start": 0, "duration": 150, "name": 2},
    {"track": 2, "start": 10, "duration": 20, "name": 3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "flows", "samples"),
    [
        (FULL, [(0, 1, 1), (1, 2, 0), (2, 1, 2)], [(0, 0, 1.0), (0, 50, 2e9), (1, 3, -4.0)]),
        (FULL, [], [(0, 0, 0.25), (1, 1, 1e300)]),
        ([], [], []),
        ([{"track": 0, "start": 5, "duration": 0, "name": 4}], [], []),
        ([{"track": 0, "start": -50, "duration": 10, "name": 5}], [], [(0, -70, 1.0)]),
        ([{"track": 0, "start": 0, "duration": 1 << 60, "name": 5, "flops": 0.5}], [], []),
        # crossing slices are spread over lanes and come back to one track
        ([{"track": 0, "start": s, "duration": 10, "name": 0} for s in (0, 5, 8, 20)], [], []),
    ],
    ids=["all columns", "fractions", "empty", "instant", "before zero", "long", "crossing"],
)
def test_nothing_is_lost(rows, flows, samples):
    timeline = timeline_of(rows, flows=flows, samples=samples)
    assert canonical(round_trip(timeline)) == canonical(timeline)


SLICE = st.fixed_dictionaries(
    {
        "track": st.integers(0, 5), "start": st.integers(0, 300), "duration": st.integers(0, 60),
        "name": st.integers(0, 5), "kind": st.sampled_from(list(OpKind)), "phase": st.sampled_from(list(Phase)),
        "layer": st.integers(-1, 300), "flops": st.sampled_from([0.0, 1.0, 2.5e15]), "group": st.integers(-1, 2),
        "communication_bytes": st.sampled_from([0, 1, 1 << 45]), "correlation": st.integers(-1, 1 << 40),
        "sequence": st.integers(-1, 1 << 40),
    }
)  # fmt: skip


def through_chrome(timeline: Timeline, folder: Path) -> Timeline:
    write_chrome(timeline, folder)
    return read_trace(folder)


def held_by_chrome(timeline: Timeline) -> dict[str, object]:
    """What the Chrome files of a timeline hold: one row a slice, and the tables of ranks, steps and counters."""
    slices, tracks = timeline.slices, timeline.tracks
    columns = [
        f.name
        for f in fields(Slices)
        if f.name not in ("track", "name", "module", "group", "waited_for", "correlation")
    ]
    rows = [
        (
            int(tracks.rank[slices.track[i]]), int(tracks.role[slices.track[i]]),
            timeline.string(int(tracks.name[slices.track[i]])),
            timeline.string(int(slices.name[i])), timeline.string(int(slices.module[i])),
            *(getattr(slices, c)[i].item() for c in columns),
            timeline.groups[slices.group[i]] if slices.group[i] >= 0 else None,
        )
        for i in range(len(slices))
    ]  # fmt: skip
    counters = timeline.counter_tracks
    described = [
        (timeline.string(int(n)), int(r), bool(b))
        for n, r, b in zip(counters.name, counters.rank, counters.is_bytes, strict=True)
    ]
    samples = timeline.counter_samples
    return {
        "slices": sorted(rows, key=repr),
        "samples": [
            (*described[t], int(w), float(v))
            for t, w, v in zip(samples.track, samples.time, samples.value, strict=True)
        ],
        "ranks": [getattr(timeline.ranks, f.name).tolist() for f in fields(Ranks)],
        "steps": [getattr(timeline.steps, f.name).tolist() for f in fields(Steps)],
        "rest": (timeline.simulated, timeline.device, timeline.world_size, timeline.time_base_ns,
                 dict(timeline.properties)),
    }  # fmt: skip


@pytest.mark.parametrize("simulated", [True, False])
def test_chrome_files_keep_all_that_the_format_holds(tmp_path, simulated):
    timeline = replace(
        timeline_of(FULL, samples=[(0, 0, 1.0), (0, 50, 2e9), (1, 3, -4.5)]), simulated=simulated
    )
    read_back = through_chrome(timeline, tmp_path)
    assert held_by_chrome(read_back) == held_by_chrome(timeline)
    streams = {
        int(s): TrackRole(int(r)).name
        for s, r in zip(read_back.tracks.stream, read_back.tracks.role, strict=True)
    }
    assert simulated is False or streams == {0: "COMPUTE", 1: "COMMUNICATION_TP", 2: "PIPELINE"}


@settings(max_examples=60, deadline=None)
@given(st.lists(SLICE, max_size=25), st.data())
def test_any_timeline_survives(rows, data):
    ends = st.integers(0, len(rows) - 1)
    flows = data.draw(st.lists(st.tuples(ends, ends, st.integers(0, 4)), max_size=8)) if rows else []
    timeline = timeline_of(rows, flows=flows)
    assert canonical(round_trip(timeline)) == canonical(timeline)


def test_a_folder_that_run_wrote_is_read_from_its_perfetto_file(tmp_path):
    timeline = timeline_of(FULL)
    write_perfetto(timeline, tmp_path / "trace.pftrace")
    (tmp_path / "rank_000.json").write_text("not looked at")
    (tmp_path / "report.json").write_text("{}")
    read_back = read_trace(tmp_path)
    assert read_back.slices.start.size == len(FULL)
    assert (read_back.simulated, read_back.world_size) == (True, 16)


def test_a_file_cut_or_changed_is_an_error_not_a_crash(tmp_path):
    data = written(timeline_of(FULL))
    path = tmp_path / "t.pftrace"
    begins, lengths = protobuf_columns.packet_bounds(data)
    # A file cut exactly between two packets is a shorter trace, unless slices are left open.
    for length in sorted(set(range(1, len(data), 7)) - set((begins + lengths).tolist())):
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"t\.pftrace"):
            read_trace(path)


WRITTEN = written(timeline_of(FULL, flows=[(0, 1, 1)], samples=[(0, 0, 1.0)]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_damage_is_an_error_or_a_timeline(data):
    damaged = bytearray(WRITTEN)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TraceError):
        read(Source(Path("t.pftrace"), bytes(damaged)))


def test_a_file_cut_between_two_packets_is_refused(tmp_path):
    """Such a file is a whole protobuf message, so only the counts that it says of itself tell."""
    begins, lengths = protobuf_columns.packet_bounds(WRITTEN)
    path = tmp_path / "t.pftrace"
    for end in (begins + lengths).tolist()[-6:-1]:
        path.write_bytes(WRITTEN[:end])
        with pytest.raises(TraceError, match=r"(truncated|damaged) Perfetto trace"):
            read_trace(path)


def test_packets_agree_with_the_official_bindings():
    """The columnar parser and Perfetto's own bindings see the same events."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace()
    trace.ParseFromString(WRITTEN)
    expected = [
        (p.timestamp, p.track_event.track_uuid, p.track_event.type)
        for p in trace.packet
        if p.HasField("track_event") and p.track_event.type in (1, 2, 4)
    ]
    begins, lengths = protobuf_columns.packet_bounds(WRITTEN)
    found = []
    messages, fixed = frozenset({(11,), (11, 4)}), frozenset({(11, 9), (11, 4, 1)})
    for shape in protobuf_columns.shapes(WRITTEN, begins, lengths, messages, fixed):
        by_path = {f.path: f for f in shape.fields}
        if (11, 9) in by_path and (11, 23) not in by_path:
            columns = [shape.column(by_path[p]).tolist() for p in ((8,), (11, 11), (11, 9))]
            found += list(zip(shape.packets.tolist(), *columns, strict=True))
    assert [row[1:] for row in sorted(found)] == expected
