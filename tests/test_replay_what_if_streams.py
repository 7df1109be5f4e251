"""What-ifs of streams: slices moved between queues keep what they wait for, and moving them back changes nothing."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from op_graphs.vocabulary import Communication, OpKind, Phase
from tests.recordings import US, Recording, queued_kernels
from tracesim.cli import main
from tracesim.errors import ScenarioError
from tracesim.readers import read_trace
from tracesim.replay import EdgeKind, Outcome, Rebuilt, ask, parse_what_ifs, rebuild, unexplained
from tracesim.replay.run import replay, step_duration, step_times
from tracesim.replay.what_if.outcome import change

REDUCE = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE}


def one_stream() -> Recording:
    """A kernel, an all-reduce of its result, nine kernels that do not need it, the optimizer that does: one stream."""
    recording = Recording()
    recording.launch("first", 0, 7, 100)
    recording.launch("all_reduce", 6, 108, 400, columns=REDUCE)
    for number in range(9):
        recording.launch(f"kernel{number}", 12 + 6 * number, 509 + 101 * number, 100)
    recording.launch("optimizer", 80, 509 + 909, 50, columns={"phase": Phase.OPTIMIZER})
    return recording


BASE = 100 + 400 + 900 + 50 + 11
"""Device time of :func:`one_stream`: its kernels, with 1 us between them."""


def outcome(rebuilt: Rebuilt, *texts: str) -> Outcome:
    return ask(rebuilt, texts, unexplained(rebuilt))


def step_us(recording: Recording, *texts: str) -> float:
    return outcome(rebuild(recording.timeline()), *texts).step / US


def ends(rebuilt: Rebuilt) -> dict[str, int]:
    found = replay(rebuilt)
    rows = np.flatnonzero(rebuilt.on_device())
    names = [rebuilt.graph.strings[name] for name in rebuilt.graph.operations.name[rows]]
    return dict(zip(names, found.end[rows].tolist(), strict=True))


@pytest.mark.parametrize(
    "what_if", ["stream.all_reduce=new", "stream.collective=new", "stream.name=^all_red:new"]
)
def test_a_collective_on_a_stream_of_its_own_is_hidden(what_if: str) -> None:
    assert step_us(one_stream(), what_if) == pytest.approx(BASE - 400, abs=8)


def test_it_waits_for_its_input_and_the_optimizer_for_it() -> None:
    recording = one_stream()
    longer = ("set.name=all_reduce:5000", "stream.all_reduce=new")
    assert step_us(recording, *longer) == pytest.approx(100 + 5000 + 50 + 6, abs=8)


def test_the_range_ends_where_the_next_slice_waits() -> None:
    found = outcome(rebuild(one_stream().timeline()), "stream.all_reduce=new")
    assert found.high / US == pytest.approx(BASE, abs=8)
    assert found.low == found.step
    assert any(
        "what reads the result of the 1 moved slices is not in a trace" in note for note in found.notes
    )


def test_moved_to_where_it_is_nothing_changes() -> None:
    rebuilt = rebuild(one_stream().timeline())
    assert change(rebuilt, parse_what_ifs(["stream.collective=stream 7"])) is rebuilt


def two_streams() -> Recording:
    """As :func:`one_stream`, with the all-reduce on a stream of its own."""
    recording = Recording()
    recording.launch("first", 0, 7, 100)
    recording.call("cudaStreamWaitEvent", 5.2, 0.5)
    recording.launch("all_reduce", 6, 110, 400, "stream 20", columns=REDUCE)
    for number in range(9):
        recording.launch(f"kernel{number}", 12 + 6 * number, 108 + 101 * number, 100)
    recording.call("cudaStreamWaitEvent", 75, 0.5)
    recording.launch("optimizer", 80, 108 + 909, 50, columns={"phase": Phase.OPTIMIZER})
    return recording


@pytest.mark.parametrize(
    "what_if", ["overlap.all_reduce=none", "stream.collective=stream 7", "overlap.collective=none"]
)
def test_a_collective_in_the_queue_of_compute_is_exposed(what_if: str) -> None:
    assert step_us(two_streams(), what_if) == pytest.approx(BASE, abs=8)


def test_there_and_back_is_no_change() -> None:
    rebuilt = rebuild(one_stream().timeline())
    there = change(rebuilt, parse_what_ifs(["stream.all_reduce=new"]))
    back = change(there, parse_what_ifs(["overlap.all_reduce=none"]))
    assert ends(back) == ends(rebuilt)


def test_only_the_kind_that_is_named_is_freed() -> None:
    recording = Recording()
    gather = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_GATHER}
    recording.launch("gather", 0, 7, 300, "stream 20", columns=gather)
    recording.call("cudaStreamWaitEvent", 6, 1)
    recording.launch("forward", 8, 309, 100)
    recording.call("cudaStreamWaitEvent", 14, 1)
    recording.launch("reduce", 16, 411, 300, "stream 22", columns=REDUCE)
    recording.call("cudaStreamWaitEvent", 22, 1)
    recording.launch("optimizer", 24, 713, 100)
    base = step_us(recording, "scale=1")
    assert step_us(recording, "overlap.all_gather=full") == pytest.approx(base - 300, abs=12)
    assert step_us(recording, "overlap.all_reduce=full") == pytest.approx(base - 100, abs=8)
    assert step_us(recording, "overlap=full") == step_us(
        recording, "overlap.all_reduce=full", "overlap.all_gather=full"
    )


def test_moves_and_durations_commute() -> None:
    rebuilt = rebuild(one_stream().timeline())
    texts = ("stream.all_reduce=new", "scale.name=kernel:0.25", "scale.name=all_reduce:3", "host=0.5")
    assert len({outcome(rebuilt, *order).step for order in permutations(texts)}) == 1


@pytest.mark.parametrize("stream", ["new", "8"])
def test_twice_all_durations_is_still_twice_the_time(stream: str) -> None:
    recording = queued_kernels([50, 30, 70, 20, 90], gap=0)
    recording.kernel("beside", 200, 60, stream="stream 8", launch=recording.call("cudaLaunchKernel", 70, 5))
    rebuilt = change(rebuild(recording.timeline()), parse_what_ifs([f"stream.name=k[13]:{stream}"]))
    device = rebuilt.on_device()
    # Waits between streams cost a delay that does not scale: without it all is made of durations.
    rebuilt = rebuilt.with_edges(rebuilt.edges.with_columns(lag=np.minimum(rebuilt.edges.lag, 0)))
    once = step_duration(step_times(replay(rebuilt)))
    twice = change(rebuilt, parse_what_ifs(["scale=2", "host=0"]))
    assert device.any()
    assert step_duration(step_times(replay(twice))) == pytest.approx(2 * once, abs=20 * US)


def test_launches_are_no_order_where_a_slice_waits_for_one_launched_later() -> None:
    """Another thread launched the gather late, and the host of the first waited for it unseen."""
    recording = Recording()
    recording.launch("first", 0, 7, 100)
    recording.launch("late", 10, 330, 100)
    gather = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_GATHER}
    recording.launch("gather", 50, 110, 220, "stream 20", thread="thread 2", columns=gather)
    rebuilt = rebuild(recording.timeline())
    waiting = rebuilt.edges.kind == EdgeKind.EVENT
    assert waiting.any()
    assert measured_us(change(rebuilt, parse_what_ifs(["overlap.all_gather=none"]))) == pytest.approx(
        423, abs=5
    )


def measured_us(rebuilt: Rebuilt) -> float:
    return step_duration(step_times(replay(rebuilt))) / US


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stream.colective=new", "stream.colective: not one of other, gemm"),
        ("stream.all_to_all=new", "stream.all_to_all: no device slice of the trace is meant"),
        (
            "stream.gemm=21",
            "rank 0 has no stream 21; it has stream 7 (8). Write one of them, its number, or new",
        ),
        ("stream.name=absent:new", "no device slice"),
        ("overlap.all_reduce=some", "write overlap.all_reduce=none or overlap.all_reduce=full"),
        ("overlap.all_reduce=full", "take them out of it with stream.all_reduce=new"),
    ],
)
def test_what_cannot_be_moved_is_said(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        outcome(rebuild(one_stream().timeline()), text)
    assert message in str(error.value)


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shaped(tmp_path: Path) -> Path:
    """Three products of 100 us, two of them of one shape, as a profiler writes them with ``record_shapes=True``."""
    place = {"ph": "X", "pid": 1, "tid": 2}
    events = []
    for number, shape in enumerate(([[64, 32], [32, 16]], [[64, 32], [32, 16]], [[8, 32], [32, 16], []])):
        at, joined = 20 * number, {"correlation": number + 1}
        events += [
            {**place, "cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 15, "args": {"Input Dims": shape}},
            {**place, "cat": "cpu_op", "name": "aten::resolve", "ts": at + 1, "dur": 12},
            {**place, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 2, "dur": 5, "args": joined},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10 + 101 * number, "dur": 100,
             "args": {"stream": 7, "device": 0, **joined}},
        ]  # fmt: skip
    path = tmp_path / "shaped.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize(
    ("pattern", "microseconds"),
    [("64x32", 200), ("mm 8x32 32x16$", 250), ("aten::mm", 150), ("MM .*32x16", 150)],
)
def test_slices_are_selected_by_the_shapes_of_their_operators(
    shaped: Path, pattern: str, microseconds: float
) -> None:
    rebuilt = rebuild(read_trace([shaped], keep_origins=True))
    found = change(rebuilt, parse_what_ifs([f"scale.shape={pattern}:0.5"]))
    assert found.durations[found.on_device()].sum() / US == microseconds


def test_the_command_reads_shapes_where_they_are_asked_for(shaped: Path) -> None:
    arguments = ["replay", str(shaped), "--what-if", "scale.shape=64x32:0.5", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["what_if"]["step_ms"] == pytest.approx(0.202, abs=0.002)


def test_shapes_that_are_not_there_are_said(shaped: Path) -> None:
    with pytest.raises(ScenarioError, match=r"holds no shapes; looked for Input Dims .* record_shapes=True"):
        change(rebuild(read_trace([shaped])), parse_what_ifs(["scale.shape=64x32:0.5"]))
    rebuilt = rebuild(read_trace([shaped], keep_origins=True))
    with pytest.raises(ScenarioError, match=r"2 are there, as aten::mm 64x32 32x16; aten::mm 8x32 32x16"):
        change(rebuilt, parse_what_ifs(["scale.shape=7x7:0.5"]))
