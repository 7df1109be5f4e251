"""What a Chrome JSON file of ours holds, and that it has the shape of a torch.profiler file."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters import ExportError, write_chrome
from exporters.json_rows import (
    DigitColumn,
    MicrosecondColumn,
    NumberColumn,
    digits_width,
    number_slot,
)
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, FlowKind, OpKind
from tests.timelines import COMPUTE, HOST, PIPELINE, TP, timeline_of, two_stage_timeline


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chrome")
    counts = write_chrome(two_stage_timeline(), folder)
    return counts, {path.name: json.loads(path.read_bytes()) for path in sorted(folder.iterdir())}


def one_file(timeline, tmp_path):
    counts = write_chrome(timeline, tmp_path / "t.json")
    return counts, json.loads((tmp_path / "t.json").read_bytes())


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def event_of(trace, **wanted):
    (found,) = [e for e in trace["traceEvents"] if all(e.get(key) == value for key, value in wanted.items())]
    return found


def test_one_file_a_rank_and_counts_over_all(two_stages):
    counts, files = two_stages
    assert list(files) == ["rank_002.json", "rank_010.json"]
    # The send to the other rank has its ends in two files, which no file can join.
    assert (counts.slices, counts.counter_samples, counts.flows, counts.dropped_flows) == (8, 6, 1, 1)


def test_the_head_says_which_rank_of_which_groups_on_which_device(two_stages):
    trace = two_stages[1]["rank_010.json"]
    assert trace["deviceProperties"] == [{"id": 0, "name": "H100"}]
    assert trace["baseTimeNanoseconds"] == 1_700_000_000_000_000_000
    assert (trace["traceName"], trace["displayTimeUnit"]) == ("two stages", "ms")
    pipeline = {
        "pg_name": "1",
        "pg_desc": "pp",
        "backend_config": "cuda:nccl",
        "pg_size": 2,
        "ranks": [2, 10],
    }
    assert trace["distributedInfo"] == {
        "backend": "nccl",
        "rank": 10,
        "world_size": 16,
        "pg_count": 1,
        "pg_config": [pipeline],
    }
    assert trace["tracesim"]["simulated"] is True
    assert trace["tracesim"]["coordinates"]["pp"] == 1


def test_categories_are_those_of_a_profiler_file(two_stages):
    found = {(e["cat"], e["args"].get("name", e["name"])) for e in complete(two_stages[1]["rank_002.json"])}
    assert found == {
        ("user_annotation", "ProfilerStep#5"),
        ("user_annotation", "F0"),
        ("gpu_user_annotation", "F0"),
        ("kernel", "attention"),
        ("gpu_memset", "marker 😀"),
        ("kernel", "all_reduce"),
        ("kernel", "send"),
        ("cuda_runtime", "cudaLaunchKernel"),
    }


def test_a_kernel_has_the_arguments_of_a_profiler_and_ours(two_stages):
    event = event_of(two_stages[1]["rank_002.json"], name="attention")
    assert (event["ts"], event["dur"]) == (0.1, 0.5)
    assert event["tid"] == event["args"]["stream"]
    assert event["args"] == {
        "External id": 7,
        "correlation": 7,
        "device": 0,
        "stream": event["tid"],
        "role": "compute",
        "track": "compute",
        "kind": "attention",
        "phase": "forward",
        "module": "decoder.core_attention",
        "layer": 3,
        "chunk": 0,
        "microbatch": 0,
        "flops": 2_500_000_000_000,
        "bytes": 1_000_000_000,
    }


def test_a_collective_is_a_nccl_kernel_with_the_arguments_of_pytorch(two_stages):
    event = event_of(
        two_stages[1]["rank_002.json"],
        name="ncclDevKernel_AllReduce_Sum_u8_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    )
    wanted = {
        "name": "all_reduce",
        "Collective name": "allreduce",
        "In msg nelems": 1 << 33,
        "Out msg nelems": 1 << 33,
        "Group size": 2,
        "dtype": "Byte",
        "Process Group Name": "0",
        "Process Group Description": "tp",
        "Process Group Ranks": "[2, 3]",
        "wait_ns": 20,
    }
    assert wanted.items() <= event["args"].items()


@pytest.mark.parametrize(
    ("communication", "kernel", "name", "given", "got"),
    [
        (Communication.ALL_GATHER, "AllGather_RING_LL", "_allgather_base", 2, 8),
        (Communication.REDUCE_SCATTER, "ReduceScatter_Sum_u8_RING_LL", "_reduce_scatter_base", 8, 2),
        (Communication.ALL_TO_ALL, "SendRecv", "all_to_all", 8, 8),
        (Communication.RECEIVE, "SendRecv", "recv", 8, 8),
    ],
)
def test_message_sizes_follow_the_collective(communication, kernel, name, given, got, tmp_path):
    row = {"track": 0, "start": 0, "duration": 1, "name": "c", "kind": OpKind.COLLECTIVE, "group": 0}
    row |= {"communication": communication, "communication_bytes": 8}
    groups = (CommunicationGroup("tp", (0, 1, 2, 3)),)
    _, trace = one_file(timeline_of([row], tracks=[(0, TP, "tp")], groups=groups, simulated=True), tmp_path)
    (event,) = complete(trace)
    assert event["name"].startswith(f"ncclDevKernel_{kernel}(")
    arguments = event["args"]
    assert (arguments["Collective name"], arguments["In msg nelems"], arguments["Out msg nelems"]) == (
        name,
        given,
        got,
    )


def test_a_measured_kernel_keeps_its_name(tmp_path):
    row = {"track": 0, "start": 0, "duration": 1, "name": "rccl_main", "kind": OpKind.COLLECTIVE}
    row["communication"] = Communication.ALL_REDUCE
    _, trace = one_file(timeline_of([row]), tmp_path)
    assert complete(trace)[0]["name"] == "rccl_main"


def test_launches_are_joined_to_kernels_by_correlation_and_arrow(two_stages):
    trace = two_stages[1]["rank_002.json"]
    launch, kernel = event_of(trace, name="cudaLaunchKernel"), event_of(trace, name="attention")
    assert launch["args"]["correlation"] == kernel["args"]["correlation"] == 7
    start, finish = event_of(trace, ph="s"), event_of(trace, ph="f")
    assert {start["cat"], start["name"], finish["cat"], finish["name"]} == {"ac2g"}
    assert start["id"] == finish["id"]
    assert finish["bp"] == "e"
    for end, slice_ in ((start, launch), (finish, kernel)):
        assert (end["pid"], end["tid"], end["ts"]) == (slice_["pid"], slice_["tid"], slice_["ts"])


def test_kernels_without_a_launch_have_correlations_of_their_own(two_stages):
    events = complete(two_stages[1]["rank_002.json"])
    numbers = [e["args"]["correlation"] for e in events if e["cat"] in ("kernel", "gpu_memset")]
    assert len(set(numbers)) == len(numbers) == 4


def test_arrows_back_in_time_are_left_out(tmp_path):
    rows = [
        {"track": 0, "start": 50, "duration": 5, "name": "launch"},
        {"track": 1, "start": 40, "duration": 5, "name": "k"},
    ]
    timeline = timeline_of(rows, tracks=[(0, HOST, "h"), (0, COMPUTE, "c")], flows=[(0, 1, FlowKind.LAUNCH)])
    counts, trace = one_file(timeline, tmp_path)
    assert (counts.flows, counts.dropped_flows) == (0, 1)
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


def test_steps_and_memory(two_stages):
    trace = two_stages[1]["rank_002.json"]
    step = event_of(trace, name="ProfilerStep#5")
    assert (step["ts"], step["dur"]) == (0, 1.6)
    allocated = [(e["ts"], e["args"]["bytes"]) for e in trace["traceEvents"] if e["name"] == "allocated"]
    assert allocated == [(0, 10**9), (0.5, 6 * 10**10), (0.9, 2 * 10**9)]
    assert event_of(trace, name="SM utilisation")["args"] == {"value": 50}


def test_hostile_names_and_numbers_are_valid_json(tmp_path):
    names = ['quote " and \\', "new\nline", "emoji 😀", "lone \ud800 surrogate", ""]
    rows = [
        {"track": 0, "start": i, "duration": 1, "name": n, "flops": math.nan} for i, n in enumerate(names)
    ]
    timeline = timeline_of(rows, counters=[(0, "c", -1, False)], samples=[(0, 0, math.nan), (0, 1, -0.125)])
    counts, trace = one_file(timeline, tmp_path)
    assert [e["name"] for e in complete(trace)] == [*names[:3], "lone ? surrogate", ""]
    assert all("flops" not in e["args"] for e in complete(trace))
    assert event_of(trace, ph="C")["args"] == {"value": -0.125}
    assert counts.dropped_samples == 1
    raw = (tmp_path / "t.json").read_bytes()
    assert "😀".encode() in raw
    assert b"NaN" not in raw


def test_negative_times_move_the_base(tmp_path):
    rows = [
        {"track": 0, "start": -1500, "duration": 1, "name": "x"},
        {"track": 0, "start": 2, "duration": 1, "name": "y"},
    ]
    _, trace = one_file(timeline_of(rows, time_base_ns=10_000), tmp_path)
    assert [e["ts"] for e in complete(trace)] == [0, 1.502]
    assert trace["baseTimeNanoseconds"] == 8_500


_row = st.tuples(st.integers(0, 2), st.integers(0, 10**14), st.integers(0, 10**12), st.integers(-1, 70_000))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(_row, max_size=20), close=st.booleans())
def test_any_slices_survive_with_exact_times_and_proper_nesting(tmp_path_factory, rows, close):
    rows = [(t, s % 40, d % 20, layer) if close else (t, s, d, layer) for t, s, d, layer in rows]
    slices = [
        {"track": t, "start": s, "duration": d, "name": f"n{i}", "layer": n}
        for i, (t, s, d, n) in enumerate(rows)
    ]
    tracks = [(0, COMPUTE, "c"), (0, HOST, "h"), (0, PIPELINE, "p")]
    _, trace = one_file(timeline_of(slices, tracks=tracks), tmp_path_factory.mktemp("any"))
    seen, threads = [], defaultdict(list)
    for event in complete(trace):
        start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
        threads[event["pid"], event["tid"]].append((start, -duration))
        if event["cat"] != "gpu_user_annotation":
            seen.append((event["name"], start, duration, event["args"].get("layer", -1)))
    assert sorted(seen) == sorted((f"n{i}", s, d, layer) for i, (_, s, d, layer) in enumerate(rows))
    for members in threads.values():
        still_open = []
        for start, negative in sorted(members):
            while still_open and still_open[-1] <= start:
                still_open.pop()
            assert not still_open or start - negative <= still_open[-1]
            if negative:
                still_open.append(start - negative)


def test_one_file_holds_one_rank(tmp_path):
    with pytest.raises(ExportError, match=r"cannot write 2 ranks into .*t\.json: .*give a folder"):
        write_chrome(two_stage_timeline(), tmp_path / "t.json")


def test_compressed_files_hold_the_same(tmp_path):
    for compressed in (False, True):
        write_chrome(two_stage_timeline(), tmp_path, compressed=compressed)
    assert (
        gzip.decompress((tmp_path / "rank_002.json.gz").read_bytes())
        == (tmp_path / "rank_002.json").read_bytes()
    )


def filled(column, width):
    count = len(column.nanoseconds if isinstance(column, MicrosecondColumn) else column.values)
    return [bytes(row).decode() for row in number_slot("x", width).fill({"x": column}, slice(0, count))]


@pytest.mark.parametrize(
    ("column", "width", "text"),
    [
        (
            DigitColumn(np.array([0, 7, 9999, 10_000, 12_300_045])),
            8,
            ["       0", "       7", "    9999", "   10000", "12300045"],
        ),
        (
            MicrosecondColumn(np.array([0, 5, 1_000, 123_456_789])),
            12,
            ["       0.000", "       0.005", "       1.000", "  123456.789"],
        ),
    ],
)
def test_numbers_as_padded_digits(column, width, text):
    assert filled(column, width) == text


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=1))
def test_digits_read_back(values):
    width = digits_width(max(values))
    assert [int(text) for text in filled(DigitColumn(np.array(values)), width)] == values


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_any_numbers_read_back(values):
    column = NumberColumn.of(np.array(values))
    at = column.at(np.arange(len(values)))
    rows = number_slot("x", column.width).fill({"x": at}, slice(0, len(values)))
    assert [json.loads(bytes(row)) for row in rows] == values


@pytest.mark.shared_data
def test_a_real_file_and_ours_have_the_same_keys(shared_data, two_stages):
    """Every key and argument of a real NCCL kernel that does not describe the launch geometry is in ours."""
    with gzip.open(shared_data / "traces" / "megatron-lm" / "tp2_v100" / "rank0.pt.trace.json.gz") as file:
        real = json.load(file)
    ours = two_stages[1]["rank_002.json"]
    assert set(real) <= set(ours)
    assert set(real["distributedInfo"]) == set(ours["distributedInfo"])
    theirs = next(e for e in real["traceEvents"] if "AllReduce" in e["name"] and e.get("cat") == "kernel")
    kernel = next(e for e in ours["traceEvents"] if "AllReduce" in e["name"])
    assert set(theirs) == set(kernel)
    geometry = {
        "grid",
        "block",
        "registers per thread",
        "shared memory",
        "blocks per SM",
        "warps per SM",
        "queued",
    }
    geometry |= {"context", "est. achieved occupancy %", "In split size", "Out split size"}
    assert set(theirs["args"]) - geometry <= set(kernel["args"])
