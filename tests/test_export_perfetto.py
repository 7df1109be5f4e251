"""What a Perfetto file of ours holds, as the official protobuf bindings read it."""

from __future__ import annotations

import io
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from exporters import ExportError, format_slices, write_perfetto
from exporters.lanes import MAX_DEPTH
from exporters.protobuf_rows import pack_varints, varint, varint_width
from op_graphs.vocabulary import FlowKind, OpKind
from tests.timelines import COMPUTE, timeline_of, two_stage_timeline


class Parsed:
    """A trace read with the official bindings; the checks of a strict reader are made while reading."""

    def __init__(self, data: bytes) -> None:
        self.trace = Trace.FromString(data)
        self.tracks = {}
        self.slices = []
        self.counters = defaultdict(list)
        self.facts = {}
        self.flows = defaultdict(list)
        names, annotation_names, strings = {}, {}, {}
        stacks = defaultdict(list)
        last_time = {}
        for number, packet in enumerate(self.trace.packet):
            assert packet.trusted_packet_sequence_id == 1
            assert packet.sequence_flags == (1 if number == 0 else 2)
            names |= {n.iid: n.name for n in packet.interned_data.event_names}
            annotation_names |= {n.iid: n.name for n in packet.interned_data.debug_annotation_names}
            strings |= {n.iid: n.str.decode() for n in packet.interned_data.debug_annotation_string_values}
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                assert not track.HasField("parent_uuid") or track.parent_uuid in self.tracks
                self.tracks[track.uuid] = track
            if not packet.HasField("track_event"):
                continue
            event = packet.track_event
            assert event.track_uuid in self.tracks
            assert packet.timestamp >= last_time.get(event.track_uuid, 0)
            last_time[event.track_uuid] = packet.timestamp
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                arguments = {}
                for annotation in event.debug_annotations:
                    field = annotation.WhichOneof("value")
                    value = getattr(annotation, field)
                    arguments[annotation_names[annotation.name_iid]] = (
                        strings[value] if field == "string_value_iid" else value
                    )
                entry = {"name": names[event.name_iid], "start": packet.timestamp, "track": event.track_uuid}
                entry["arguments"] = arguments
                stack = stacks[event.track_uuid]
                entry["parent"] = stack[-1] if stack else None
                for flow in event.flow_ids:
                    self.flows[flow].append(entry)
                self.slices.append(entry)
                stack.append(entry)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                entry = stacks[event.track_uuid].pop()
                entry["end"] = packet.timestamp
                assert entry["end"] >= entry["start"]
            elif event.type == TrackEvent.TYPE_COUNTER:
                field = event.WhichOneof("counter_value_field")
                self.counters[self.tracks[event.track_uuid].name].append(
                    (packet.timestamp, getattr(event, field))
                )
            else:
                self.facts = {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}
        assert not any(stacks.values())
        for entry in self.slices:
            if entry["parent"] is not None:
                assert entry["end"] <= entry["parent"]["end"]

    def track_name(self, entry: dict) -> str:
        return self.tracks[entry["track"]].name


def written(timeline):
    sink = io.BytesIO()
    counts = write_perfetto(timeline, sink)
    return counts, Parsed(sink.getvalue())


@pytest.fixture(scope="module")
def two_stages():
    return written(two_stage_timeline())


def test_counts_say_what_was_written(two_stages):
    counts, parsed = two_stages
    assert (counts.slices, counts.counter_samples, counts.flows, counts.extra_lanes) == (8, 6, 2, 0)
    assert len(parsed.slices) == 8
    assert sum(map(len, parsed.counters.values())) == 6


def test_processes_are_named_so_that_text_order_is_rank_order(two_stages):
    _, parsed = two_stages
    processes = [t.process for t in parsed.tracks.values() if t.HasField("process")]
    assert [(p.pid, p.process_name) for p in processes] == [
        (3, "rank 002 pp0 dp1 tp0"),
        (11, "rank 010 pp1 dp1 tp0"),
    ]


def test_threads_have_ascending_tids_in_drawing_order_and_none_is_a_pid(two_stages):
    _, parsed = two_stages
    threads = [t.thread for t in parsed.tracks.values() if t.HasField("thread")]
    assert [(t.pid, t.thread_name) for t in threads] == [
        (3, "pipeline"),
        (3, "compute"),
        (3, "tp"),
        (3, "pp send next"),
        (3, "host"),
        (11, "pipeline"),
        (11, "pp receive previous"),
    ]
    tids = [t.tid for t in threads]
    assert tids == sorted(set(tids))
    assert not set(tids) & {t.pid for t in threads}


def test_slices_carry_times_names_and_what_is_known(two_stages):
    _, parsed = two_stages
    attention = next(s for s in parsed.slices if s["name"] == "attention")
    assert (attention["start"], attention["end"], parsed.track_name(attention)) == (100, 600, "compute")
    assert attention["arguments"] == {
        "kind": "attention",
        "phase": "forward",
        "layer": 3,
        "module": "decoder.core_attention",
        "chunk": 0,
        "microbatch": 0,
        "flops": 2_500_000_000_000,
        "bytes": 1_000_000_000,
        "correlation": 7,
    }
    reduction = next(s for s in parsed.slices if s["name"] == "all_reduce")
    assert reduction["arguments"] == {
        "kind": "collective",
        "communication": "all_reduce",
        "communication_bytes": 1 << 33,
        "group": "tp 2,3",
        "wait_ns": 20,
        "waited_for": "attention on rank 002 pp0 dp1 tp0 compute",
        "waited_for_slice": 1,
    }
    assert [s["arguments"] for s in parsed.slices if s["name"] == "marker 😀"] == [{"kind": "memset"}]


def test_flows_join_two_slices_by_an_id_that_holds_the_kind(two_stages):
    _, parsed = two_stages
    ends = {(flow >> 1 & 7, flow & 1): [s["name"] for s in joined] for flow, joined in parsed.flows.items()}
    # The launch is written after its kernel (host tracks come last) but begins before it, so it is the source.
    assert ends[FlowKind.P2P, 0] == ["send", "receive"]
    assert ends[FlowKind.LAUNCH, 0] == ["attention", "cudaLaunchKernel"]


def test_a_flow_to_a_slice_that_begins_earlier_is_marked_as_reversed():
    timeline = timeline_of(
        [
            {"track": 0, "start": 50, "duration": 5, "name": "launch"},
            {"track": 1, "start": 40, "duration": 5, "name": "k"},
        ],
        tracks=[(0, COMPUTE, "a"), (0, COMPUTE, "b")],
        flows=[(0, 1, FlowKind.LAUNCH), (1, 0, FlowKind.MATCH), (0, 0, FlowKind.MATCH)],
    )
    counts, parsed = written(timeline)
    assert sorted(parsed.flows) == [1 << 4 | FlowKind.LAUNCH << 1 | 1, 2 << 4 | FlowKind.MATCH << 1]
    assert (counts.flows, counts.dropped_flows) == (2, 1)


def test_memory_counters_are_in_a_group_in_explicit_order(two_stages):
    _, parsed = two_stages
    group = next(t for t in parsed.tracks.values() if t.name == "memory")
    assert group.child_ordering == group.EXPLICIT
    assert parsed.tracks[group.parent_uuid].process.pid == 3
    children = [t for t in parsed.tracks.values() if t.parent_uuid == group.uuid]
    children.sort(key=lambda t: t.sibling_order_rank)
    assert [t.name for t in children] == ["weights", "activations", "allocated"]
    assert {t.counter.unit for t in children} == {children[0].counter.UNIT_SIZE_BYTES}
    assert len({t.counter.y_axis_share_key for t in children}) == 1
    assert max(value for _, value in parsed.counters["allocated"]) == 60_000_000_000
    other = next(t for t in parsed.tracks.values() if t.name == "SM utilisation")
    assert parsed.tracks[other.parent_uuid].HasField("process")


def test_facts_hold_all_that_is_no_slice_sample_or_flow(two_stages):
    _, parsed = two_stages
    timeline, facts = two_stage_timeline(), parsed.facts
    assert facts["format"] == "tracesim.trace/1"
    assert facts["simulated"] is True
    assert (facts["name"], facts["device"], facts["world_size"]) == ("two stages", "H100", 16)
    assert (facts["time_base_ns"], facts["time_shift_ns"]) == (1_700_000_000_000_000_000, 0)
    assert json.loads(facts["ranks"])["rank"] == [2, 10]
    assert json.loads(facts["ranks"])["pp"] == [0, 1]
    assert json.loads(facts["steps"]) == {
        "rank": [0, 1],
        "number": [5, 5],
        "start": [0, 0],
        "end": [1600, 1600],
    }
    assert json.loads(facts["groups"])[1] == {"label": "pp 2,10", "name": "pp", "size": 2, "ranks": [2, 10]}
    assert json.loads(facts["properties"]) == {"framework": "none"}
    assert json.loads(facts["quirks"])[0]["count"] == 3
    tracks = json.loads(facts["tracks"])
    assert tracks["role"] == timeline.tracks.role.tolist()
    for name, (uuid,) in zip(tracks["name"], tracks["uuids"], strict=True):
        assert parsed.tracks[uuid].thread.thread_name == name


def tree(parsed):
    """``track: name(children...)`` of each top slice, for reading by eye."""

    def draw(entry):
        inside = [draw(s) for s in parsed.slices if s["parent"] is entry]
        return f"{entry['name']}({' '.join(inside)})" if inside else entry["name"]

    return [f"{parsed.track_name(s)}: {draw(s)}" for s in parsed.slices if s["parent"] is None]


@pytest.mark.parametrize(
    ("what", "slices", "drawn"),
    [
        ("abutting", [("a", 0, 5), ("b", 5, 9)], ["t: a", "t: b"]),
        ("nested", [("a", 0, 9), ("b", 0, 4), ("c", 4, 9)], ["t: a(b c)"]),
        ("inner written first", [("b", 2, 4), ("a", 0, 9)], ["t: a(b)"]),
        ("crossing", [("a", 0, 5), ("b", 4, 9)], ["t: a", "t (2): b"]),
        ("crossing by 1 ns thrice", [("a", 0, 5), ("b", 4, 9), ("c", 8, 12)], ["t: a", "t: c", "t (2): b"]),
        ("no duration between two", [("a", 0, 5), ("z", 5, 5), ("b", 5, 9)], ["t: a", "t: z", "t: b"]),
        ("no duration, alone", [("y", 5, 5), ("z", 5, 5)], ["t: y", "t: z"]),
        ("no duration inside", [("a", 0, 5), ("z", 3, 3)], ["t: a(z)"]),
        ("no duration at both ends", [("y", 0, 0), ("a", 0, 5), ("z", 5, 5)], ["t: y", "t: a", "t: z"]),
        ("equal", [("a", 0, 5), ("b", 0, 5)], ["t: a(b)"]),
    ],
)
def test_slices_on_a_track_follow_nest_or_move_to_a_lane(what, slices, drawn):
    rows = [{"track": 0, "name": n, "start": s, "duration": e - s} for n, s, e in slices]
    _, parsed = written(timeline_of(rows, tracks=[(0, COMPUTE, "t")]))
    assert tree(parsed) == drawn


def test_nesting_deeper_than_viewers_show_goes_to_a_lane():
    depth = MAX_DEPTH + 3
    rows = [{"track": 0, "name": "x", "start": i, "duration": 3 * depth - 2 * i} for i in range(depth)]
    counts, parsed = written(timeline_of(rows))
    assert counts.extra_lanes == 1
    assert len(parsed.slices) == depth


_slice = st.tuples(
    st.integers(0, 2), st.integers(-5, 30), st.integers(0, 12), st.integers(-1, 300), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_slice, max_size=25), st.randoms(use_true_random=False))
def test_any_slices_survive_with_exact_times_and_proper_nesting(rows, random):
    """Parsed checks nesting and order while it reads; here: each slice is there once, on a lane of its track."""
    slices = [
        {
            "track": t,
            "start": s,
            "duration": d,
            "name": f"n{i}",
            "layer": layer,
            "kind": OpKind.GEMM if gemm else 0,
        }
        for i, (t, s, d, layer, gemm) in enumerate(rows)
    ]
    pairs = [(i, random.randrange(len(rows)), FlowKind.P2P) for i in range(0, len(rows), 2)]
    tracks = [(0, COMPUTE, f"track{i}") for i in range(3)]
    timeline = timeline_of(slices, tracks=tracks, flows=pairs)
    counts, parsed = written(timeline)
    shift = parsed.facts["time_shift_ns"]
    assert shift == -min([0, *(row[1] for row in rows)])
    lanes = json.loads(parsed.facts["tracks"])["uuids"]
    seen = sorted(
        (
            s["name"],
            next(t for t, uuids in enumerate(lanes) if s["track"] in uuids),
            s["start"] - shift,
            s["end"] - s["start"],
            s["arguments"].get("layer", -1),
            s["arguments"].get("kind", "other"),
        )
        for s in parsed.slices
    )
    assert seen == sorted(
        (f"n{i}", t, s, d, layer, "gemm" if gemm else "other")
        for i, (t, s, d, layer, gemm) in enumerate(rows)
    )
    assert counts.flows == len(parsed.flows) == sum(a != b for a, b, _ in pairs)
    for flow, joined in parsed.flows.items():
        source, target, _ = pairs[(flow >> 4) - 1]
        first, last = sorted(joined, key=lambda s: s["start"])
        names = [first["name"], last["name"]]
        assert names[:: -1 if flow & 1 else 1] == [f"n{source}", f"n{target}"]


def test_rows_larger_than_a_chunk_are_the_same_as_small_ones():
    count = 20_000
    rows = [
        {"track": 0, "start": 3 * i, "duration": 3, "name": f"n{i % 7}", "layer": i if i % 3 else -1}
        for i in range(count)
    ]
    _, parsed = written(timeline_of(rows))
    assert [(s["name"], s["start"], s["arguments"].get("layer", -1)) for s in parsed.slices] == [
        (f"n{i % 7}", 3 * i, i if i % 3 else -1) for i in range(count)
    ]


def test_fractional_work_is_a_double_and_counters_that_are_not_finite_are_left_out():
    timeline = timeline_of(
        [{"track": 0, "start": 0, "duration": 1, "name": "x", "flops": 0.5}],
        counters=[(0, "load", -1, False)],
        samples=[(0, 0, 0.25), (0, 1, math.nan), (0, 2, math.inf), (0, 3, -1.5)],
    )
    counts, parsed = written(timeline)
    assert parsed.slices[0]["arguments"]["flops"] == 0.5
    assert parsed.counters["load"] == [(0, 0.25), (3, -1.5)]
    assert (counts.counter_samples, counts.dropped_samples) == (2, 2)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (
            [{"start": 5, "duration": -1}],
            r"slice 0 \('x'\) starts at 5 ns and lasts -1 ns; a duration must be 0 or more",
        ),
        ([{"start": 1 << 62, "duration": 1 << 62}], r"the end below 2\*\*63 ns"),
    ],
)
def test_what_no_trace_can_express_is_refused(slices, message, tmp_path):
    timeline = timeline_of([{"track": 0, "name": "x"} | row for row in slices])
    with pytest.raises(ExportError, match=message):
        write_perfetto(timeline, tmp_path / "t.pftrace")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_error_and_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(ExportError, match=r"cannot write .*missing/t.pftrace: No such file"):
        write_perfetto(two_stage_timeline(), tmp_path / "missing" / "t.pftrace")
    target = tmp_path / "t.pftrace"
    target.write_bytes(b"before")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("exporters.perfetto._counter_packets", fail)
    with pytest.raises(KeyboardInterrupt):
        write_perfetto(two_stage_timeline(), target)
    assert [p.name for p in tmp_path.iterdir()] == ["t.pftrace"]
    assert target.read_bytes() == b"before"


def test_equal_timelines_are_equal_files(tmp_path):
    for name in ("a.pftrace.gz", "b.pftrace.gz"):
        write_perfetto(two_stage_timeline(), tmp_path / name)
    assert (tmp_path / "a.pftrace.gz").read_bytes() == (tmp_path / "b.pftrace.gz").read_bytes()


def test_an_empty_timeline_is_a_valid_file():
    counts, parsed = written(timeline_of([], tracks=[], ranks=[]))
    assert counts.slices == 0
    assert parsed.facts["format"] == "tracesim.trace/1"


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_padded_varints_hold_the_value_and_fill_their_width(value):
    width = varint_width(min(value, 0), max(value, 0))
    packed = pack_varints(np.array([value]), width)
    data = packed.low.tobytes()[:width] if width <= 8 else packed.low.tobytes() + packed.high.tobytes()[:2]
    assert all(byte & 0x80 for byte in data[:-1])
    assert data[-1] < 0x80
    assert sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data)) == value & (1 << 64) - 1
    assert len(varint(value)) <= width


def test_slices_as_text():
    assert format_slices(two_stage_timeline()).splitlines()[:3] == [
        "rank2 pipeline 100..1000 F0",
        "rank2 compute 100..600 attention",
        "rank2 compute 600..600 marker 😀",
    ]
