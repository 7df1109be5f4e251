"""What the reader concludes about a kernel from the host events around its launch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase
from tracesim.errors import TraceError
from tracesim.readers import kineto_json, read_trace
from tracesim.readers.nesting import Nesting

ENGINE = "autograd::engine::evaluate_function: "


def op(name, ts, dur, tid=1, cat="cpu_op", **arguments):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def annotation(name, ts, dur, tid=1):
    return op(name, ts, dur, tid, "user_annotation")


def launched(correlation, at, name="some_kernel", tid=1, start=None, dur=1, **arguments):
    """A launch at a time, and its kernel 1000 us later."""
    place = {"device": 0, "stream": 7, "correlation": correlation, **arguments}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "dur": dur, "args": place}
    kernel["ts"] = 1000 + at if start is None else start
    return [op("cudaLaunchKernel", at, 1, tid, "cuda_runtime", correlation=correlation), kernel]


def read(tmp_path, events, **top) -> Timeline:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events, **top}))
    return read_trace(path)


def device(timeline: Timeline, column: str) -> list:
    return getattr(timeline.slices, column)[timeline.on_device()].tolist()


def test_record_param_comms_describes_a_generic_kernel(tmp_path):
    """RCCL has one kernel name for all transfers and no arguments on it; the call around the launch has them."""
    call = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 80, "dtype": "BFloat16",
            "Process Group Name": "2", "Process Group Description": "tp", "Process Group Ranks": "[0, 1]",
            "Group size": 2}  # fmt: skip
    events = [op("record_param_comms", 0, 50, **call), *launched(1, 10, "ncclDevKernel_Generic(...)")]
    timeline = read(tmp_path, events)
    assert device(timeline, "communication") == [Communication.ALL_GATHER]
    assert device(timeline, "communication_bytes") == [160]
    assert timeline.groups[device(timeline, "group")[0]].ranks == (0, 1)


def test_shapes_of_the_call_give_bytes_where_no_counts_are_written(tmp_path):
    call = {"Collective name": "allreduce", "Input Dims": [[[2, 8], [4]], []], "Input type": ["float", ""]}
    events = [op("record_param_comms", 0, 50, **call), *launched(1, 10, "ncclDevKernel_Generic(...)")]
    assert device(read(tmp_path, events), "communication_bytes") == [(16 + 4) * 4]


def test_waiting_is_no_transfer(tmp_path):
    events = [
        op("record_param_comms", 0, 50, **{"Collective name": "wait"}),
        *launched(1, 10, "ncclKernel_AllReduce_RING(x)"),
    ]
    assert device(read(tmp_path, events), "communication") == [Communication.ALL_REDUCE]


@pytest.mark.parametrize(
    ("operator", "dims", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 2 * 2 * 3 * 5),
        ("aten::addmm", [[5], [2, 3], [3, 5]], 2 * 2 * 3 * 5),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 2 * 7 * 2 * 3 * 5),
        ("aten::mv", [[2, 3], [3]], 2 * 2 * 3),
        ("aten::mm", [[2, 3]], 0),
        ("aten::mm", "strange", 0),
        ("aten::add", [[2, 3], [3, 5]], 0),
    ],
)
def test_shapes_of_the_operator_give_flops_of_its_longest_product(tmp_path, operator, dims, expected):
    events = [
        op(operator, 0, 50, **{"Input Dims": dims}),
        *launched(1, 10, "a_gemm", dur=2),
        *launched(2, 20, "b_gemm", dur=9),
    ]
    assert device(read(tmp_path, events), "flops") == [0, expected]


def test_forward_backward_arrows_join_the_innermost_operators(tmp_path):
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 4, "pid": 9}
    events = [
        op("aten::linear", 0, 50), op("aten::addmm", 5, 10), {"ph": "s", **arrow, "tid": 1, "ts": 6},
        op(ENGINE + "AddmmBackward0", 100, 20, tid=2), {"ph": "f", "bp": "e", **arrow, "tid": 2, "ts": 100},
        {"ph": "s", **arrow, "id": 5, "tid": 3, "ts": 6},
    ]  # fmt: skip
    timeline = read(tmp_path, events)
    names = [timeline.strings[i] for i in timeline.slices.name]
    flows = timeline.flows
    joined = [
        (names[s], names[t], k)
        for s, t, k in zip(flows.source, flows.target, flows.kind.tolist(), strict=True)
    ]
    assert joined == [("aten::addmm", ENGINE + "AddmmBackward0", FlowKind.FORWARD_BACKWARD)]
    assert {q.name: q.count for q in timeline.quirks}[
        "forward-backward arrows that join nothing dropped"
    ] == 1


def test_the_external_id_stands_in_for_a_launch_that_was_not_recorded(tmp_path):
    generic = "void at::native::reduce_kernel<512, 1>"
    events = [
        op("aten::native_layer_norm", 0, 9, **{"External id": 31}),
        launched(7, 1, generic, **{"External id": 31})[1],
    ]
    timeline = read(tmp_path, events)
    assert device(timeline, "kind") == [OpKind.NORM]
    assert len(timeline.flows) == 0


def test_actions_of_pipeline_schedules_give_phase_microbatch_and_chunk(tmp_path):
    events = [
        annotation("PP:1F0", 0, 9), *launched(1, 1), annotation("PP:5F3", 10, 9), *launched(2, 11),
        annotation("PP:5I3", 20, 9), *launched(3, 21), annotation("PP:1W0", 30, 9), *launched(4, 31), *launched(5, 50),
    ]  # fmt: skip
    timeline = read(tmp_path, events)
    assert device(timeline, "microbatch") == [0, 3, 3, 0, -1]
    assert device(timeline, "chunk") == [0, 1, 1, 0, -1]
    phases = [Phase(p).name for p in device(timeline, "phase")]
    assert phases == ["FORWARD", "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "UNKNOWN"]


def test_forward_operators_inside_a_backward_pass_recompute(tmp_path):
    """Non-reentrant checkpointing runs the forward again in a hook of the engine; plain backward operators stay."""
    events = [
        op(ENGINE + "MulBackward0", 0, 100, tid=2), op("aten::linear", 1, 20, tid=2), op("aten::addmm", 2, 10, tid=2),
        *launched(1, 3, tid=2), op("aten::mul", 50, 10, tid=2), *launched(2, 51, tid=2),
    ]  # fmt: skip
    assert [Phase(p).name for p in device(read(tmp_path, events), "phase")] == ["RECOMPUTE", "BACKWARD_INPUT"]


def test_a_thread_that_only_runs_the_engine_is_backward_throughout(tmp_path):
    events = [
        op(ENGINE + "A", 0, 10, tid=2), op(ENGINE + "B", 20, 10, tid=2), op("hook", 40, 10, tid=2),
        *launched(1, 41, tid=2), op("aten::add", 5, 9, tid=1), *launched(2, 6, tid=1),
    ]  # fmt: skip
    assert [Phase(p).name for p in device(read(tmp_path, events), "phase")] == ["FORWARD", "BACKWARD_INPUT"]


def test_a_large_file_is_cut_between_events_only(tmp_path, monkeypatch):
    """Names and arguments that look like the end of an event do not mislead; the result is that of one piece."""
    tricky = '}, {"ph": "X", "name"'
    events = [op(tricky if i % 3 else "plain", i, 1, a=[{"ph": 1}, {"ph": 2}], b=tricky) for i in range(400)]
    whole = read(tmp_path, events)
    monkeypatch.setattr(kineto_json, "CHUNK", 1500)
    for bare in (False, True):
        (tmp_path / "cut.json").write_text(
            json.dumps(events if bare else {"traceEvents": events, "schemaVersion": 1})
        )
        cut = read_trace(tmp_path / "cut.json")
        assert cut.slices.start.tolist() == whole.slices.start.tolist()
        assert [cut.strings[i] for i in cut.slices.name] == [whole.strings[i] for i in whole.slices.name]


@pytest.mark.parametrize(
    ("before", "after"), [("[", "]"), ('{"traceEvents": [', "]}"), ("[", ""), ("[", "]}")]
)
def test_bytes_written_over_while_a_large_file_is_cut_come_back(monkeypatch, before, after):
    """Arguments are views of the file, so a byte left wrong would show in them; damaged files come back as well."""
    monkeypatch.setattr(kineto_json, "CHUNK", 1500)
    events = [op("plain", i, 1, number=i) for i in range(400)]
    text = (before + ",".join(map(json.dumps, events)) + after).encode()
    data, kept = bytearray(text), []
    complaint = pytest.raises(TraceError) if after == "" else contextlib.nullcontext()
    with complaint:
        kineto_json.decode(Path("t.json"), data, lambda chunk: kept.extend(chunk.events), kineto_json.Notes())
    assert data == text
    numbers = [json.loads(bytes(event.args))["number"] for event in kept]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) == 400 or after == ""


def test_an_event_at_the_beginning_of_time_does_not_break_the_nesting(tmp_path):
    """A span of decades on many threads does not fit 63 bits when threads are laid after one another."""
    epoch = 1_700_000_000_000_000
    events = [op("Iteration Start", 0, 1)]
    for thread in range(50):
        at = epoch + 100 * thread
        events += [op("aten::mm", at, 50, thread), *launched(thread, at + 10, tid=thread, start=at + 500)]
    timeline = read(tmp_path, events)
    assert device(timeline, "kind") == [OpKind.GEMM] * 50


def test_nesting_of_random_intervals_agrees_with_a_search_through_all():
    generator = np.random.default_rng(0)
    thread = generator.integers(0, 3, 200).astype(np.int32)
    start = generator.integers(0, 1000, 200)
    # Widths of powers of two at multiples of themselves nest.
    width = 1 << generator.integers(0, 9, 200)
    start = start // width * width
    nesting = Nesting.build(thread, start, start + width)
    at, on = generator.integers(0, 1000, 300), generator.integers(0, 3, 300).astype(np.int32)
    found = nesting.innermost(on, at)
    for place, time, where in zip(found.tolist(), at.tolist(), on.tolist(), strict=True):
        around = np.flatnonzero((thread == where) & (start <= time) & (start + width > time))
        expected = width[around].min() if len(around) else 0
        got = (
            width[nesting.order[place]]
            if place >= 0 and start[nesting.order[place]] + width[nesting.order[place]] > time
            else 0
        )
        assert got == expected or place >= 0
