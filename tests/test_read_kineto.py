"""What the reader of profiler JSON makes of events, one small file a question."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
from tracesim.errors import TraceError
from tracesim.readers import read_trace, sources

EPOCH_US = 1_740_461_679_470_000


def op(name, ts, dur, tid=1, cat="cpu_op", **arguments):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def launch(correlation, ts, dur=2, tid=1):
    return op("cudaLaunchKernel", ts, dur, tid, "cuda_runtime", correlation=correlation)


def kernel(name, ts, dur, stream=7, correlation=-1, cat="kernel", **arguments):
    arguments = {"device": 0, "stream": stream, "correlation": correlation, **arguments}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def write(folder: Path, events, name="rank0.json", **top) -> Path:
    path = folder / name
    document = events if top.pop("bare", False) else {"traceEvents": events, **top}
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def device_rows(timeline: Timeline) -> list[tuple[str, int, int]]:
    """(name, start, duration) of device slices in order of track and start."""
    rows = np.flatnonzero(timeline.on_device())
    slices = timeline.slices
    return [(timeline.strings[slices.name[i]], int(slices.start[i]), int(slices.duration[i])) for i in rows]


def quirks(timeline: Timeline) -> dict[str, int]:
    return {q.name: q.count for q in timeline.quirks}


@pytest.mark.parametrize(
    ("first", "second", "expected_ns"),
    [
        (10, 25, 15_000),
        (10.5, 25.001, 14_501),
        (EPOCH_US, EPOCH_US + 3, 3_000),
        ("10.5", "25.001", 14_501),
        # 16 + 3 digits do not fit a double of microseconds: read from the text
        (f"{EPOCH_US}.125", f"{EPOCH_US + 1}.126", 1_001),
        (4212936067250.865, 4212936067251.866, 1_001),
    ],
    ids=["int", "float", "epoch int", "string", "epoch string", "boot-time float"],
)
def test_times_become_nanoseconds_without_loss(tmp_path, first, second, expected_ns):
    timeline = read_trace(write(tmp_path, [kernel("a", first, 1), kernel("b", second, 1)]))
    assert [start for _, start, _ in device_rows(timeline)] == [0, expected_ns]


@pytest.mark.parametrize("bare", [False, True])
def test_epoch_floats_are_read_digit_by_digit(tmp_path, bare):
    events = json.dumps([kernel("a", 0, 1), kernel("b", 1, 1)])
    events = events.replace('"ts": 0', f'"ts": {EPOCH_US}.1').replace('"ts": 1,', f'"ts": {EPOCH_US}.4,')
    path = tmp_path / "rank0.json"
    path.write_text(events if bare else f'{{"traceEvents": {events}}}')
    timeline = read_trace(path)
    assert [start for _, start, _ in device_rows(timeline)] == [0, 300]
    assert timeline.time_base_ns == EPOCH_US * 1000 + 100


def test_base_time_is_added_to_the_time_base(tmp_path):
    timeline = read_trace(write(tmp_path, [kernel("a", 5, 1)], baseTimeNanoseconds="1719853884000000000"))
    assert timeline.time_base_ns == 1719853884000005000
    assert timeline.slices.start.tolist() == [0]


def test_streams_threads_and_annotations_are_tracks_of_their_own(tmp_path):
    events = [
        kernel("k7", 10, 5, stream=7),
        kernel("k9", 10, 5, stream=9),
        kernel("Optimizer.step", 10, 5, stream=7, cat="gpu_user_annotation"),
        op("aten::mm", 0, 5, tid=1),
        op("aten::add", 0, 5, tid="2"),
        op("ProfilerStep#3", 0, 20, tid=1, cat="user_annotation"),
    ]
    timeline = read_trace(write(tmp_path, events))
    tracks = [
        (TrackRole(int(role)).name, int(stream))
        for role, stream in zip(timeline.tracks.role, timeline.tracks.stream, strict=True)
    ]
    assert tracks == [
        ("DEVICE", 7),
        ("DEVICE", 9),
        ("ANNOTATION", 7),
        ("ANNOTATION", 1),
        ("HOST", 1),
        ("HOST", 2),
    ]
    assert timeline.steps.number.tolist() == [3]
    assert (timeline.steps.start.tolist(), timeline.steps.end.tolist()) == ([0], [20_000])


def test_a_launch_is_joined_to_its_kernels(tmp_path):
    events = [
        launch(5, 0),
        launch(6, 4),
        kernel("a", 10, 1, correlation=6),
        kernel("b", 12, 1, correlation=6),
    ]
    events += [kernel("c", 14, 1, correlation=99)]
    timeline = read_trace(write(tmp_path, events))
    flows = timeline.flows
    joined = [
        (int(timeline.slices.start[s]), timeline.strings[timeline.slices.name[t]])
        for s, t in zip(flows.source, flows.target, strict=True)
    ]
    assert joined == [(4_000, "a"), (4_000, "b")]
    assert set(flows.kind.tolist()) == {FlowKind.LAUNCH}
    assert quirks(timeline)["device slices without a launch"] == 1
    assert quirks(timeline)["launches with more than one kernel (graphs)"] == 1


def test_the_launching_operator_decides_what_a_generic_kernel_is(tmp_path):
    generic = "void at::native::reduce_kernel<512, 1>"
    events = [
        op("aten::native_layer_norm", 0, 10), launch(1, 2), kernel(generic, 20, 1, correlation=1),
        op("aten::sum", 30, 10), launch(2, 32), kernel(generic, 50, 1, correlation=2),
    ]  # fmt: skip
    timeline = read_trace(write(tmp_path, events))
    kinds = timeline.slices.kind[timeline.on_device()]
    assert [OpKind(int(k)).name for k in kinds] == ["NORM", "REDUCTION"]


def test_phases_follow_from_the_autograd_engine_and_annotations(tmp_path):
    events = [
        op("aten::mm", 0, 10), launch(1, 1), kernel("forward_gemm", 100, 1, correlation=1),
        op("autograd::engine::evaluate_function: MmBackward0", 20, 10, tid=2), op("aten::mm", 21, 5, tid=2),
        launch(2, 22, tid=2), kernel("backward_gemm", 110, 1, correlation=2),
        op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 40, 30, tid=2),
        op("aten::mm", 41, 5, tid=2), launch(3, 42, tid=2), kernel("recomputed_gemm", 120, 1, correlation=3),
        op("mlp(W)", 80, 10, cat="user_annotation"), op("aten::mm", 81, 5), launch(4, 82),
        kernel("weight_gemm", 130, 1, correlation=4),
        op("Optimizer.step#Adam.step", 91, 8, cat="user_annotation"), op("aten::add_", 92, 5), launch(5, 93),
        kernel("vectorized_elementwise_kernel", 140, 1, correlation=5),
    ]  # fmt: skip
    timeline = read_trace(write(tmp_path, events))
    device = timeline.on_device()
    phases = [Phase(int(p)).name for p in timeline.slices.phase[device]]
    assert phases == ["FORWARD", "BACKWARD_INPUT", "RECOMPUTE", "BACKWARD_WEIGHT", "OPTIMIZER"]
    assert timeline.slices.kind[device][-1] == OpKind.OPTIMIZER


@pytest.mark.parametrize(
    ("collective", "elements", "expected", "size", "kind"),
    [
        ("allreduce", (6144, 6144), Communication.ALL_REDUCE, 24576, OpKind.COLLECTIVE),
        ("_allgather_base", (100, 800), Communication.ALL_GATHER, 3200, OpKind.COLLECTIVE),
        ("_reduce_scatter_base", (800, 100), Communication.REDUCE_SCATTER, 3200, OpKind.COLLECTIVE),
        ("all_to_allv", (64, 64), Communication.ALL_TO_ALL, 256, OpKind.COLLECTIVE),
        ("send", (10, 10), Communication.SEND, 40, OpKind.P2P),
        ("recv", (10, 10), Communication.RECEIVE, 40, OpKind.P2P),
        ("broadcast", (10, 10), Communication.BROADCAST, 40, OpKind.COLLECTIVE),
    ],
)
def test_nccl_arguments_give_transfer_bytes_and_group(tmp_path, collective, elements, expected, size, kind):
    arguments = {
        "Collective name": collective, "In msg nelems": elements[0], "Out msg nelems": elements[1], "dtype": "Float",
        "Group size": 8, "Process Group Name": "13", "Process Group Description": "undefined",
        "Process Group Ranks": "[0, 1, ..., 7]",
    }  # fmt: skip
    config = [{"pg_name": "13", "pg_desc": "mesh_tp", "pg_size": 8, "ranks": list(range(8))}]
    events = [kernel("ncclDevKernel_Generic(...)", 0, 5, **arguments)]
    timeline = read_trace(
        write(tmp_path, events, distributedInfo={"rank": 3, "world_size": 8, "pg_config": config})
    )
    slices = timeline.slices
    assert (slices.communication[0], slices.communication_bytes[0], slices.kind[0]) == (expected, size, kind)
    group = timeline.groups[slices.group[0]]
    assert (group.name, group.ranks, group.size) == ("13", tuple(range(8)), 8)
    assert (timeline.ranks.rank.tolist(), timeline.world_size) == ([3], 8)


@pytest.mark.parametrize(("written", "expected"), [(17, 17), ("17", 17), (None, -1), (-5, -1), ("x", -1)])
def test_sequence_number_of_a_collective(tmp_path, written, expected):
    arguments = {
        "Collective name": "allreduce",
        "In msg nelems": 4,
        "Process Group Name": "0",
        "Seq": written,
    }
    timeline = read_trace(write(tmp_path, [kernel("ncclDevKernel_AllReduce(...)", 0, 5, **arguments)]))
    assert timeline.slices.sequence.tolist() == [expected]


@pytest.mark.parametrize(
    ("collective", "arguments", "expected"),
    [
        ("send", {"Dst Rank": 5}, (Communication.SEND, 5)),
        ("recv", {"Src Rank": "2"}, (Communication.RECEIVE, 2)),
        ("send", {"Src Rank": 5}, (Communication.SEND, -1)),
        ("send", {"Dst Rank": -7}, (Communication.SEND, -1)),
        ("send", {"Dst Rank": 1 << 40}, (Communication.SEND, -1)),
        ("allreduce", {"Dst Rank": 5}, (Communication.ALL_REDUCE, -1)),
    ],
)
def test_the_rank_at_the_other_end_of_a_send_or_receive(tmp_path, collective, arguments, expected):
    told = {"Collective name": collective, "In msg nelems": 4, "Process Group Name": "0", **arguments}
    timeline = read_trace(write(tmp_path, [kernel("ncclDevKernel_SendRecv(...)", 0, 5, **told)]))
    assert (timeline.slices.communication[0], timeline.slices.peer[0]) == expected


def test_an_annotation_tells_what_a_send_receive_kernel_is_for(tmp_path):
    name = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
    events = [
        op("nccl:all_to_all", 0, 10, cat="user_annotation"),
        launch(1, 2),
        kernel(name, 20, 5, correlation=1),
    ]
    events += [launch(2, 30), kernel(name, 40, 5, correlation=2)]
    slices = read_trace(write(tmp_path, events)).slices
    seen = [
        (OpKind(int(k)), Communication(int(c)))
        for k, c in zip(slices.kind, slices.communication, strict=True)
        if c
    ]
    assert seen == [(OpKind.COLLECTIVE, Communication.ALL_TO_ALL), (OpKind.P2P, Communication.SEND_RECEIVE)]


def test_memory_events_become_counters(tmp_path):
    def memory(ts, allocated, reserved, device_type=1):
        arguments = {
            "Total Allocated": allocated,
            "Total Reserved": reserved,
            "Device Type": device_type,
            "Device Id": 0,
        }
        return {
            "ph": "i",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "args": {"Bytes": 1, **arguments},
        }

    events = [kernel("k", 0, 5), memory(3, 900, 4096), memory(1, 500, 2048), memory(2, 7, 7, device_type=0)]
    timeline = read_trace(write(tmp_path, events))
    names = [timeline.strings[i] for i in timeline.counter_tracks.name]
    samples = timeline.counter_samples
    assert names == ["allocated", "reserved"]
    assert samples.time.tolist() == [1000, 3000, 1000, 3000]
    assert samples.value.tolist() == [500, 900, 2048, 4096]


def test_the_first_form_of_the_format_is_read(tmp_path):
    memory = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1}
    events = [
        {**op("aten::mm", 0, 5, tid="25"), "cat": "Operator"},
        {**launch(1, 2, tid="25"), "cat": "Runtime"},
        {**kernel("volta_sgemm_128x32_nn", 10, 5, correlation=1), "cat": "Kernel", "tid": "stream 7"},
        {**kernel("Memcpy HtoD", 20, 5), "cat": "Memcpy", "tid": "stream 7"},
        {**memory, "ts": 1, "args": {"Device Type": 1, "Device Id": 0, "Bytes": 64}},
        {**memory, "ts": 2, "args": {"Device Type": 1, "Device Id": 0, "Bytes": -24}},
    ]  # fmt: skip
    timeline = read_trace(write(tmp_path, events))
    kinds = timeline.slices.kind[timeline.on_device()]
    assert [OpKind(int(k)).name for k in kinds] == ["GEMM", "MEMCPY"]
    assert len(timeline.flows) == 1
    assert timeline.counter_samples.value.tolist() == [64, 40]


@pytest.mark.parametrize(
    ("events", "quirk", "count"),
    [
        ([kernel("a", 5, 1), kernel("b", 0, 1)], "events not sorted by time", 1),
        ([kernel("a", 0, -3)], "negative durations set to 0", 1),
        ([kernel("a", 0, 0)], "device slices of zero duration", 1),
        (
            [kernel("a", 0, 10), kernel("b", 4, 10), kernel("c", 30, 1)],
            "kernels that overlap on one stream",
            1,
        ),
        (
            [kernel("a", 0, 10, stream=1), kernel("b", 4, 10, stream=2)],
            "kernels that overlap on one stream",
            0,
        ),
        ([launch(1, 10), kernel("a", 5, 1, correlation=1)], "kernels that start before their launch", 1),
        ([kernel("a", "0", 1)], "times written as strings", 1),
        ([op("x", 0, 1, cat="some_new_thing")], "slices of an unknown category, kept as host slices", 1),
        ([op("x", 0, 1)], "no device slices", 1),
        ([kernel("a", 0, 1), {**kernel("a", 0, 1), "ts": None}], "slices without a time dropped", 1),
        ([kernel("a", 0, 1)], "device name missing", 1),
    ],
)
def test_what_is_odd_is_counted(tmp_path, events, quirk, count):
    assert quirks(read_trace(write(tmp_path, events))).get(quirk, 0) == count


GOOD = json.dumps({"traceEvents": [kernel("a", 0, 1)]}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (GOOD[:-20], "truncated"),
        (GOOD + GOOD[:-20], "truncated"),
        (b"hello", "not a trace of a known format"),
        (b"hello", "it begins with b'hello'. Export"),
        (b'{"a": 1}', "not a trace of a known format"),
        (b'{"traceEvents": [}', "not valid JSON"),
        (b'{"traceEvents": 3}', "not shaped as a profiler trace"),
        (b'{"traceEvents": []}', "nothing to show"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "not a time in microseconds"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e300}]}', "out of range"),
        (b'{"traceEvents": [{"ph": "X", "ts": 17404616794700000000}]}', "out of range"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:d7\nsize 5\n", "git lfs pull"),
        (gzip.compress(GOOD, mtime=0)[:-12], "truncated"),
        (gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 40, "damaged gzip"),
    ],
)
def test_a_bad_file_is_refused_with_one_message(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trace_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "cut.json"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(TraceError):
            read_trace(path)


def test_an_archive_that_unpacks_too_far_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DECOMPRESSION_LIMIT", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(TraceError, match="unpacks to more than"):
        read_trace(path)


def test_values_json_does_not_know_are_repaired(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(GOOD.replace(b'"correlation": -1', b'"memory bandwidth (GB/s)": inf, "x": -nan'))
    timeline = read_trace(path)
    assert device_rows(timeline) == [("a", 0, 1000)]
    assert quirks(timeline)["values that are not numbers (nan, inf)"] == 2
