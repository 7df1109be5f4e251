"""What a converted trace holds: every slice, exactly; what was odd is repaired and said, what is lost is counted."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters import write_perfetto
from op_graphs.vocabulary import OpKind, TrackRole
from tests.converted_files import Profile, Trace, slice_key
from tests.timelines import two_stage_timeline
from tracesim.convert import convert
from tracesim.readers import read_trace


def kernel(name="k", start=0.0, duration=1.0, **more):
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration}
    return event | {"args": {"device": 0, "stream": 7}} | more


def call(name, start, duration, **more):
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 50, "tid": 60, "ts": start, "dur": duration}
    return event | more


def saved(folder, events, name="in.json", **head):
    path = folder / name
    path.write_text(json.dumps({**head, "traceEvents": events}, ensure_ascii=False), "utf-8")
    return path


def both(folder, source):
    """The conversions of a file into both formats, and the files read back."""
    perfetto = convert([source], folder / "out.pftrace")
    chrome = convert([source], folder / "out.json")
    return perfetto, Trace(folder / "out.pftrace"), chrome, Profile(folder / "out.json")


def test_slices_arrows_and_arguments_of_a_small_file_in_both_formats(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 50, "tid": 0, "args": {"name": "python"}},
        call("aten::mm", 10, 5.5, args={"External id": 3, "Input Dims": [[8, 3], []]}),
        call("cudaLaunchKernel", 11, 2, cat="cuda_runtime", args={"correlation": 9}),
        kernel("sgemm", 14, 3.125, args={"device": 0, "stream": 7, "correlation": 9, "grid": [4, 1, 1]}),
    ]
    source = saved(tmp_path, events, schemaVersion=1, baseTimeNanoseconds=1_700_000_000_000_000_000)
    conversion, trace, _, profile = both(tmp_path, source)
    assert [(c.what, c.category, c.read, c.written) for c in conversion.counts] == [
        ("slices", "cpu_op", 1, 1),
        ("slices", "cuda_runtime", 1, 1),
        ("slices", "kernel", 1, 1),
        ("arrows", "launch", 0, 1),
        ("counter samples", "", 0, 0),
    ]
    assert conversion.not_kept == {}
    assert trace.categories == profile.categories == Counter(cpu_op=1, cuda_runtime=1, kernel=1)
    assert profile.slices == Profile(source).slices
    assert profile.start == 1_700_000_000_000_010_000
    assert (profile.head["schemaVersion"], profile.head["baseTimeNanoseconds"]) == (1, profile.start)
    assert profile.arrows == len(trace.flows) == 1
    assert [e["args"] for e in profile.events if e["ph"] == "M"] == [{"name": "python"}]
    sgemm = next(s for s in trace.slices if s["name"] == "sgemm")
    assert (sgemm["start"], sgemm["end"]) == (4_000, 7_125)
    given = {name: value for name, value in sgemm["arguments"].items() if name.startswith("args.")}
    assert given == {"args.device": 0, "args.stream": 7, "args.correlation": 9, "args.grid": "[4,1,1]"}
    assert (sgemm["arguments"]["kind"], sgemm["arguments"]["correlation"]) == ("gemm", 9)
    assert trace.facts["time_base_ns"] == profile.start


@pytest.mark.parametrize(
    ("what", "events", "slices", "repaired", "not_kept"),
    [
        (
            "crossing by 1 ns",
            [kernel("a", 0, 5), kernel("b", 4.999, 5)],
            [("a", 0, 5_000), ("b", 4_999, 5_000)],
            {"lanes added, because slices of one thread cross": 1},
            {},
        ),
        (
            "one in another, equal, and without duration at the end",
            [kernel("a", 0, 5), kernel("b", 0, 5), kernel("c", 5, 0), kernel("d", 1, 0)],
            [("a", 0, 5_000), ("b", 0, 5_000), ("c", 5_000, 0), ("d", 1_000, 0)],
            {},
            {},
        ),
        (
            "begin and end",
            [
                call("a", 0, 0, ph="B"),
                call("b", 1, 0, ph="B"),
                call("", 3, 0, ph="E"),
                call("", 7, 0, ph="E"),
            ],
            [("a", 0, 7_000), ("b", 1_000, 2_000)],
            {"begin and end events joined": 2},
            {},
        ),
        (
            "begin without end, end without begin",
            [call("", 0, 0, ph="E"), call("a", 1, 0, ph="B"), call("b", 2, 4)],
            [("a", 1_000, 5_000), ("b", 2_000, 4_000)],
            {"begin events without an end, ended with their thread": 1},
            {"end events without a begin dropped": 1},
        ),
        (
            "negative duration",
            [kernel("a", 3, -2)],
            [("a", 3_000, 0)],
            {"negative durations set to 0": 1},
            {},
        ),
        (
            "times as text",
            [kernel("a", "1700000000000000.125", "2.5"), kernel("b", "1700000000000003", "1")],
            [("a", 0, 2_500), ("b", 2_875, 1_000)],
            {},
            {},
        ),
        (
            "epoch times with a fraction, finer than a double holds",
            [
                kernel("a", Decimal("1700000000000000.001"), 1),
                kernel("b", Decimal("1700000000000001.002"), 1),
            ],
            [("a", 0, 1_000), ("b", 1_001, 1_000)],
            {"epoch times with a fraction": 2},
            {},
        ),
        (
            "no time, another phase, an instant",
            [
                kernel("a"),
                kernel("b", None),
                {"ph": "b", "ts": 1, "id": 1},
                {"ph": "i", "name": "n", "ts": 1},
            ],
            [("a", 0, 1_000)],
            {},
            {"slices without a time": 1, "events of phase b": 1, "instant events": 1},
        ),
        (
            "ids of processes and threads as texts and numbers",
            [
                kernel("a", pid="0"),
                kernel("b", 2),
                kernel("c", 4, pid="Spans", tid="PyTorch Profiler", cat="Trace"),
            ],
            [("a", 0, 1_000), ("b", 2_000, 1_000), ("c", 4_000, 1_000)],
            {},
            {},
        ),
    ],
)
def test_what_is_odd_is_repaired_or_counted(what, events, slices, repaired, not_kept, tmp_path):
    text = (
        json.dumps({"traceEvents": events}, default=lambda value: f"@{value}@")
        .replace('"@', "")
        .replace('@"', "")
    )
    source = tmp_path / "in.json"
    source.write_text(text)
    conversion, trace, chrome, profile = both(tmp_path, source)
    first = min(start for _, start, _ in slices)
    wanted = Counter((name, start - first, duration) for name, start, duration in slices)
    assert trace.times == wanted
    assert Counter((e["name"], *slice_key(e, 0)[2:4]) for e in profile.complete) == wanted
    for found in (conversion, chrome):
        assert repaired.items() <= found.repaired.items()
        assert {
            name: count for name, count in found.not_kept.items() if "slices without a time d" not in name
        } == not_kept


def test_a_crossing_slice_is_on_a_lane_of_its_thread_that_says_so(tmp_path):
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    source = saved(tmp_path, [name, kernel("a", 0, 5), kernel("b", 4, 5)])
    _, trace, _, profile = both(tmp_path, source)
    assert [trace.track_name(s) for s in trace.slices] == ["stream 7", "stream 7 (2)"]
    threads = {e["tid"]: e["args"]["name"] for e in profile.events if e.get("name") == "thread_name"}
    assert [threads[e["tid"]] for e in profile.complete] == ["stream 7", "stream 7 (2)"]


def test_arrows_that_share_an_id_get_one_each(tmp_path):
    launch = call("launch", 0, 1, cat="cuda_runtime", args={"correlation": 4})
    kernels = [kernel("k", i, 1, args={"device": 0, "stream": 7, "correlation": 4}) for i in (2, 3)]
    ends = [{"ph": "s", "pid": 50, "tid": 60, "ts": 0}] + [
        {"ph": "f", "pid": 0, "tid": 7, "ts": i} for i in (2, 3)
    ]
    arrows = [{"id": 4, "cat": "ac2g", "name": "ac2g", **end} for end in ends]
    conversion, trace, _, profile = both(tmp_path, saved(tmp_path, [launch, *kernels, *arrows]))
    assert conversion.repaired["arrows that share an id with another, given one of their own"] == 1
    assert profile.arrows == len(trace.flows) == 2


def test_counters_stay_and_values_that_are_not_finite_are_counted(tmp_path):
    counters = [
        {"ph": "C", "name": "load", "pid": 0, "ts": i, "args": {"value": v}} for i, v in ((0, 1.5), (2, -4))
    ]
    text = json.dumps({"traceEvents": [kernel(), *counters, counters[0] | {"ts": 3, "args": {"value": "@"}}]})
    source = tmp_path / "in.json"
    source.write_text(text.replace('"@"', "NaN"))
    conversion, trace, _, profile = both(tmp_path, source)
    assert trace.counters["load"] == [(0, 1.5), (2_000, -4)]
    assert [(e["ts"], e["args"]) for e in profile.events if e["ph"] == "C"] == [
        (0, {"value": Decimal("1.5")}),
        (2, {"value": Decimal("-4.0")}),
    ]
    assert conversion.repaired["values that are not numbers (nan, inf)"] == 1


ARGUMENTS = [
    {
        "whole": 1,
        "negative": -(2**63),
        "large": 2**63,
        "real": 0.1,
        "yes": True,
        "nothing": None,
        "text": "12",
    },
    {"nested": {"deep": {"er": 1, "list": [1, {"a": None}]}, "empty": {}}, "nested.deep": "no path"},
    {"list": [], "text": "[]", "emoji": "😀", "control": "\x00\x1f", 'key " with 😀': ""},
    {"kind": "mine", "correlation": "text", "flows": 1.5, "args": {"name": "x"}},
    {"": 0, "real": 1.0},
    {"real": 1},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: " ".join(arguments)[:20])
def test_arguments_stay_as_they_were_through_both_formats(arguments, tmp_path):
    source = saved(tmp_path, [call("a", 0, 1, args=arguments), call("b", 2, 1), call("c", 3, 1, args=[1])])
    convert([source], tmp_path / "out.pftrace")
    convert([tmp_path / "out.pftrace"], tmp_path / "out.json")
    convert([source], tmp_path / "direct.json")
    assert (tmp_path / "out.json").read_bytes() == (tmp_path / "direct.json").read_bytes()
    events = {
        e["name"]: e.get("args", {}) for e in json.loads((tmp_path / "out.json").read_bytes())["traceEvents"]
    }
    assert events == {"a": arguments, "b": {}, "c": {"args": [1]}}
    assert {k: type(v) for k, v in events["a"].items()} == {k: type(v) for k, v in arguments.items()}


def test_arguments_are_annotations_with_their_type_and_flat_names(tmp_path):
    source = saved(tmp_path, [call("a", 0, 1, args=ARGUMENTS[0]), call("b", 2, 1, args=ARGUMENTS[1])])
    convert([source], tmp_path / "out.pftrace")
    a, b = (s["arguments"] for s in Trace(tmp_path / "out.pftrace").slices)
    assert {k: v for k, v in a.items() if k.startswith("args.")} == {
        "args.whole": 1,
        "args.negative": -(2**63),
        "args.large": str(2**63),
        "args.real": 0.1,
        "args.yes": True,
        "args.nothing": "null",
        "args.text": "12",
    }
    assert b["args.nested.deep.er"] == 1
    assert b["args.nested.deep.list"] == '[1,{"a":null}]'
    assert b["args.nested.empty"] == "{}"


def test_more_structures_of_arguments_than_templates_are_worth(tmp_path):
    events = [call(f"n{i}", i, 1, args={f"key {i}": i, "x": 1}) for i in range(1_200)]
    source = saved(tmp_path, events)
    convert([source], tmp_path / "out.pftrace")
    convert([tmp_path / "out.pftrace"], tmp_path / "out.json")
    assert Profile(tmp_path / "out.json").slices == Profile(source).slices


@pytest.mark.parametrize(
    "name", ["x" * 100_000, "😀 é \u202e", "\x00\x01\x1f\x7f", "", ' " \\ </script>', "\n\t\r"]
)
def test_names_are_exact(name, tmp_path):
    source = saved(tmp_path, [kernel(name), call(name, 1, 1)])
    _, trace, _, profile = both(tmp_path, source)
    assert [s["name"] for s in trace.slices] == [name, name]
    assert [e["name"] for e in profile.complete] == [name, name]


def test_ranks_become_one_file_on_one_clock_and_files_again(tmp_path):
    bases, ranks = (5_000_000_000_000, 5_000_000_012_345), tmp_path / "ranks"
    ranks.mkdir()
    for rank, base in enumerate(bases):
        info = {"rank": rank, "world_size": 2, "backend": "nccl"}
        event = kernel(f"of {rank}", 100, 2)
        saved(ranks, [event], f"{rank}.json", distributedInfo=info, baseTimeNanoseconds=base)
    conversion = convert([ranks], tmp_path / "all.pftrace")
    trace = Trace(tmp_path / "all.pftrace")
    assert conversion.ranks == 2
    assert trace.times == Counter([("of 0", 0, 2_000), ("of 1", 12_345, 2_000)])
    assert trace.facts["time_base_ns"] == bases[0] + 100_000
    processes = [t.process.process_name for t in trace.tracks.values() if t.HasField("process")]
    assert processes == ["rank 000", "rank 001"]
    again = convert([tmp_path / "all.pftrace"], tmp_path / "again", "json.gz")
    assert [path.name for path in again.outputs] == ["rank_000.json.gz", "rank_001.json.gz"]
    for rank, base in enumerate(bases):
        profile = Profile(tmp_path / "again" / f"rank_00{rank}.json.gz")
        assert profile.slices == Profile(ranks / f"{rank}.json").slices
        assert profile.start == base + 100_000
        assert profile.head["distributedInfo"]["rank"] == rank
    assert convert([tmp_path / "again"], tmp_path / "twice.pftrace").not_kept == {}
    assert Trace(tmp_path / "twice.pftrace").times == trace.times


def test_a_trace_of_ours_keeps_what_a_profiler_file_can_hold(tmp_path):
    """Left out are what joins ranks, and what a slice waited for; pipeline actions stand there twice."""
    write_perfetto(two_stage_timeline(), tmp_path / "ours.pftrace")
    there = convert([tmp_path / "ours.pftrace"], tmp_path / "ranks")
    back = convert([tmp_path / "ranks"], tmp_path / "back.pftrace")
    assert there.not_kept == {"arrows that the format cannot draw (between ranks, or back in time)": 1}
    assert back.not_kept == {}

    def rows(path):
        timeline = read_trace(path)
        tracks, slices = timeline.tracks, timeline.slices
        return sorted(
            (
                int(timeline.ranks.rank[tracks.rank[track]]),
                TrackRole(int(tracks.role[track])).name,
                timeline.string(int(tracks.name[track])),
                *(
                    int(getattr(slices, c)[row])
                    for c in ("start", "duration", "layer", "microbatch", "flops")
                ),
                *(timeline.string(int(getattr(slices, c)[row])) for c in ("name", "module")),
                OpKind(int(slices.kind[row])).name,
                int(slices.communication_bytes[row]),
            )
            for row, track in enumerate(slices.track.tolist())
        )

    assert rows(tmp_path / "back.pftrace") == rows(tmp_path / "ours.pftrace")
    assert read_trace(tmp_path / "back.pftrace").simulated


_event = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(
            ["kernel", "cpu_op", "user_annotation", "gpu_user_annotation", "cuda_runtime", "odd"]
        ),
        "name": st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["k", "é😀"]),
        "pid": st.sampled_from([0, 1, "1", "Spans"]),
        "tid": st.sampled_from([7, 8, "stream 7"]),
        "ts": st.integers(0, 40).map(lambda ns: ns / 1000) | st.integers(0, 10**12).map(lambda ns: ns / 1000),
        "dur": st.integers(0, 25).map(lambda ns: ns / 1000),
    },
    optional={
        "args": st.dictionaries(
            st.sampled_from(["correlation", "stream", "device", "a", "a.b", "é"]),
            st.integers(-5, 5)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
            | st.booleans()
            | st.none()
            | st.lists(st.integers(0, 3), max_size=3)
            | st.dictionaries(st.sampled_from(["b", "c"]), st.integers(0, 2), max_size=2),
            max_size=4,
        )
    },
)


@settings(max_examples=120, deadline=None)
@given(st.lists(_event, min_size=1, max_size=14), st.booleans())
def test_any_slices_survive_in_both_formats_whichever_way_they_go(tmp_path_factory, events, twice):
    """Profile and Trace check nesting, arrows and order while they read; here: each slice is there once, exactly."""
    folder = tmp_path_factory.mktemp("any")
    source = saved(folder, events + events[: len(events) // 2] if twice else events)
    original = Profile(source, strict=False)
    conversion, trace, _, profile = both(folder, source)
    assert profile.slices == original.slices
    assert trace.categories == profile.categories == original.categories
    assert trace.times == Counter((e["name"], *slice_key(e, original.start)[2:4]) for e in original.complete)
    assert all(c.read == c.written for c in conversion.counts if c.what == "slices")
    through = {}
    for way in (
        ("out.pftrace", "a.json"),
        ("out.json", "b.json"),
        ("out.pftrace", "c.pftrace"),
        ("out.json", "d.json"),
    ):
        convert([folder / way[0]], folder / way[1])
        through[way[1]] = (folder / way[1]).read_bytes()
    assert through["a.json"] == through["b.json"] == (folder / "out.json").read_bytes()
    assert through["c.pftrace"] == (folder / "out.pftrace").read_bytes()


REAL = [
    "aorta/mi350.pt.trace.json.gz",
    "deepseek/train.json.gz",
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/timeline_analysis/sampled_rank-0.json.gz",
    "megatron-lm/tp2_v100/rank0.pt.trace.json.gz",
    "straggler/timeline-ST.json.gz",
    "torchao/amg_example_trace.json.gz",
    "torchao/trace.json.gz",
    "torchrec/sst_long_a2a_optimizer_5/p0.pt.trace.json.gz",
    "tracelens/inference__sglang_decode__sglang_Qwen3-8B_decode.json.gz",
    "tracelens/h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "triosim/profiler_vgg13-iter41.json.gz",
]


@pytest.mark.shared_data
@pytest.mark.parametrize("name", REAL)
def test_real_traces_keep_every_slice(shared_data, tmp_path, name):
    source = shared_data / "traces" / name
    original = Profile(source, strict=False)
    conversion, trace, _, profile = both(tmp_path, source)
    assert trace.categories == profile.categories == original.categories
    assert profile.slices == original.slices
    assert trace.times == Counter(
        (name, start, duration) for (_, name, start, duration, _) in original.slices.elements()
    )
    assert {c.category: c.written for c in conversion.counts if c.what == "slices"} == original.categories
    assert len(trace.flows) == next(c.written for c in conversion.counts if c.what == "arrows")
    convert([tmp_path / "out.pftrace"], tmp_path / "through.json")
    assert (tmp_path / "through.json").read_bytes() == (tmp_path / "out.json").read_bytes()


@pytest.mark.shared_data
def test_eight_real_ranks_in_one_file(shared_data, tmp_path):
    folder = shared_data / "traces" / "param" / "dlrm_8rank_v100" / "kineto"
    originals = [Profile(path, strict=False) for path in sorted(folder.glob("*.json.gz"))]
    conversion = convert([folder], tmp_path / "all.pftrace")
    trace = Trace(tmp_path / "all.pftrace")
    assert conversion.ranks == len(originals) == 8
    assert trace.categories == sum((p.categories for p in originals), Counter())
    first = min(p.start for p in originals)
    assert trace.times == Counter(
        (name, start + p.start - first, duration)
        for p in originals
        for (_, name, start, duration, _) in p.slices.elements()
    )
    convert([tmp_path / "all.pftrace"], tmp_path / "ranks")
    for original, path in zip(originals, sorted((tmp_path / "ranks").iterdir()), strict=True):
        profile = Profile(path)
        assert profile.slices == original.slices
        assert profile.start == original.start
