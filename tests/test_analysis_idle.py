"""Why a slice started when it did, and why a device was idle: small timelines with known answers, and properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, OpKind, TrackRole
from tests.executed import executed_graphs
from tests.timelines import timeline_of
from tracesim.analysis import analyze
from tracesim.analysis.causes import Cause
from tracesim.analysis.idle import IDLE_CAUSES
from tracesim.analysis.launches import launch_statistics
from tracesim.analysis.windows import Window

STREAM, SIDE, THREAD = 0, 1, 2
TRACKS = [
    (0, TrackRole.DEVICE, "stream 7"),
    (0, TrackRole.DEVICE, "stream 20"),
    (0, TrackRole.HOST, "thread"),
]
US = 1000


def kernel(track: int, start: float, end: float, **more) -> dict:
    """A kernel from ``start`` to ``end`` microseconds."""
    return {
        "track": track,
        "start": round(start * US),
        "duration": round((end - start) * US),
        "name": "kernel",
        "kind": OpKind.GEMM,
    } | more


def call(start: float, end: float, name: str = "cudaLaunchKernel") -> dict:
    return kernel(THREAD, start, end, name=name, kind=OpKind.HOST)


def launched(rows: list[dict], launches: dict[int, int], step_end: float) -> Timeline:
    """A timeline of one step; ``launches`` maps a kernel to the call that launched it."""
    return timeline_of(
        rows,
        TRACKS,
        flows=[(source, target, FlowKind.LAUNCH) for target, source in launches.items()],
        steps=[(0, 1, 0, round(step_end * US))],
    )


CAUSES = [
    # queued long before: follows the slice before it on its stream
    ([kernel(STREAM, 10, 20), kernel(STREAM, 21, 30), call(0, 2), call(3, 5)], {0: 2, 1: 3}, (Cause.STREAM, 0, 20)),
    # launched when the stream was empty: follows the end of the launching call
    ([kernel(STREAM, 10, 20), kernel(STREAM, 56, 60), call(0, 2), call(50, 55)], {0: 2, 1: 3}, (Cause.LAUNCH, 3, 55)),
    # the kernel starts inside the launching call
    ([kernel(STREAM, 10, 20), kernel(STREAM, 54, 60), call(0, 2), call(50, 55)], {0: 2, 1: 3}, (Cause.LAUNCH, 3, 54)),
    # without launches a slice follows its stream
    ([kernel(STREAM, 10, 20), kernel(STREAM, 50, 60)], {}, (Cause.STREAM, 0, 20)),
    # late, and another stream ended 5 us before
    ([kernel(SIDE, 10, 45), kernel(STREAM, 50, 60), call(0, 2), call(3, 5)], {0: 2, 1: 3},
     (Cause.OTHER_STREAM, 0, 45)),
    # the same 40 us before is too long without an event wait in sight ...
    ([kernel(SIDE, 10, 45), kernel(STREAM, 85, 95), call(0, 2), call(3, 5)], {0: 2, 1: 3}, (Cause.LAUNCH, 3, 5)),
    # ... and not with one between the launches of the stream
    ([kernel(SIDE, 10, 45), kernel(STREAM, 85, 95), call(0, 2), call(3, 5), call(2, 3, "cudaStreamWaitEvent")],
     {0: 2, 1: 3}, (Cause.OTHER_STREAM, 0, 45)),
    # admitted when the running kernel is in its last tenth
    ([kernel(SIDE, 10, 110), kernel(STREAM, 105, 120), call(0, 2), call(3, 5)], {0: 2, 1: 3},
     (Cause.OTHER_STREAM, 0, 105)),
    # of several kernels of one launch (a graph) only the first waits for the call to return
    ([kernel(STREAM, 30, 40), kernel(STREAM, 41, 50), call(0, 45, "cudaGraphLaunch")], {0: 2, 1: 2},
     (Cause.STREAM, 0, 40)),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "launches", "expected"), CAUSES)
def test_what_the_second_kernel_waited_for(rows, launches, expected):
    causes = analyze(launched(rows, launches, 200)).causes
    cause, row, moment = expected
    assert (Cause(int(causes.cause[1])), int(causes.row[1])) == (cause, row)
    assert int(causes.time[1]) == moment * US


IDLE = [
    # launched 40 us after the device ran dry, then the ordinary delay: all of it is the host's
    ([kernel(STREAM, 10, 20), kernel(STREAM, 66, 100), call(0, 2), call(60, 65)], {0: 2, 1: 3}, {"host": 46}),
    # queued: 1 us between two kernels is the queue
    ([kernel(STREAM, 2, 20), kernel(STREAM, 21, 100), call(0, 1), call(3, 5)], {0: 2, 1: 3}, {"queue": 1}),
    # launched long before and started 500 us late for no reason
    ([kernel(STREAM, 2, 20), kernel(STREAM, 520, 580), call(0, 1), call(3, 5)], {0: 2, 1: 3}, {"unknown": 500}),
    # the call returned 35 us after the first had ended, the kernel started 400 us later: the host's part and the rest
    ([kernel(STREAM, 2, 20), kernel(STREAM, 455, 580), call(0, 1), call(50, 55)], {0: 2, 1: 3},
     {"host": 35, "unknown": 400}),
    # the event of the other stream needs 5 us to arrive
    ([kernel(SIDE, 2, 45), kernel(STREAM, 50, 100), call(0, 1), call(3, 5)], {0: 2, 1: 3}, {"other_stream": 5}),
    # nothing more is launched until the step ends on the host
    ([kernel(STREAM, 2, 20), call(0, 1)], {0: 1}, {"host": 80}),
    # nothing is known of launches: before the first slice, and a distance that no queue explains
    ([kernel(STREAM, 10, 20), kernel(STREAM, 50, 100)], {}, {"unknown": 10 + 30}),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "launches", "expected"), IDLE)
def test_why_the_device_is_idle(rows, launches, expected):
    # With launches the window of the step begins with its first kernel.
    (step,) = analyze(launched(rows, launches, 100)).steps
    found = {key: value for key, value in step.idle.totals().items() if value}
    assert found == {key: value * US for key, value in expected.items()}


def test_stalls_are_launched_kernels_that_start_late_for_no_reason():
    rows = [kernel(STREAM, 2, 20), kernel(STREAM, 520, 580), kernel(STREAM, 581, 590)]
    rows += [call(0, 1), call(3, 5), call(6, 8)]
    (step,) = analyze(launched(rows, {0: 3, 1: 4, 2: 5}, 600)).steps
    assert (step.stalls.count, step.stalls.total, step.stalls.longest) == (1, 500 * US, 500 * US)


def test_a_stream_waits_for_another_while_that_one_runs():
    """Idle of a stream is not idle of the device: unknown beside a busy stream is waiting for it."""
    rows = [
        kernel(STREAM, 0, 20),
        kernel(SIDE, 20, 300),
        kernel(STREAM, 250, 400),
        call(0, 1),
        call(1, 2),
        call(3, 5),
    ]
    (step,) = analyze(launched(rows, {0: 3, 1: 4, 2: 5}, 400)).steps
    by_name = {stream.track: stream for stream in step.streams}
    assert by_name[STREAM].busy == 170 * US
    assert {k: v for k, v in by_name[STREAM].idle.items() if v} == {"other_stream": 230 * US}
    assert sum(step.idle.totals().values()) == 0
    # up to its launch, and after the last slice, the side stream waits for the host
    assert {k: v for k, v in by_name[SIDE].idle.items() if v} == {"host": 102 * US, "other_stream": 18 * US}


def test_a_simulated_rank_waits_for_its_peer():
    rows = [
        {"track": 0, "start": 0, "duration": 10, "name": "a", "kind": OpKind.GEMM},
        {
            "track": 1,
            "start": 30,
            "duration": 5,
            "name": "receive",
            "kind": OpKind.P2P,
            "wait": 30,
            "waited_for": 3,
        },
        {"track": 0, "start": 35, "duration": 15, "name": "b", "kind": OpKind.GEMM, "waited_for": 1},
        {"track": 2, "start": 0, "duration": 30, "name": "c", "kind": OpKind.GEMM},
    ]
    tracks = [(0, TrackRole.COMPUTE, "c"), (0, TrackRole.COMMUNICATION_PP, "pp"), (1, TrackRole.COMPUTE, "c")]
    timeline = timeline_of(
        rows, tracks, ranks=[{"rank": 0}, {"rank": 1}], steps=[(0, 0, 0, 60), (1, 0, 0, 60)], simulated=True
    )
    first, second = analyze(timeline).steps
    # 20 ns before the receive, 10 ns after the last slice until the others have ended
    assert {k: v for k, v in first.idle.totals().items() if v} == {"peer": 30}
    assert {k: v for k, v in second.idle.totals().items() if v} == {"peer": 30}


@pytest.mark.parametrize(
    ("rows", "launches", "expected"),
    [
        ([], {}, {"kernels": 0, "launched": 0, "launch_calls": 0, "delay": (0, 0, 0), "most_outstanding": 0}),
        ([kernel(STREAM, 10, 15), call(0, 4)], {0: 1},
         {"kernels": 1, "tiny": 1, "tiny_total": 5 * US, "launch_calls": 1, "launch_total": 4 * US,
          "delay": (10 * US, 10 * US, 10 * US), "most_outstanding": 1, "before_launch": 0}),
        ([kernel(STREAM, 10, 30), call(12, 14)], {0: 1},
         {"tiny": 0, "before_launch": 1, "before_launch_worst": 2 * US, "delay": (-2 * US,) * 3}),
        ([kernel(STREAM, 10, 30), kernel(STREAM, 30, 50), call(0, 4)], {0: 2, 1: 2},
         {"launched": 2, "launch_calls": 1, "graph_launches": 1, "graph_kernels": 2, "most_outstanding": 2}),
        # three launched before the first ends
        ([kernel(STREAM, 10, 30), kernel(STREAM, 30, 50), kernel(STREAM, 50, 60), call(0, 1), call(2, 3), call(29, 31)],
         {0: 3, 1: 4, 2: 5}, {"most_outstanding": 3, "launch_call": (1 * US, 1 * US, 1_900)}),
    ],
)  # fmt: skip
def test_launch_statistics(rows, launches, expected):
    found = launch_statistics(launched(rows, launches, 100), Window(0, 1, 0, 100 * US))
    assert {key: getattr(found, key) for key in expected} == expected


ROW = st.tuples(st.integers(0, 1), st.integers(0, 400), st.integers(0, 120), st.booleans())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(ROW, max_size=10), st.lists(st.integers(0, 400), min_size=10, max_size=10), st.integers(1, 500)
)
def test_the_parts_of_a_measured_step_add_up_exactly(rows, calls, step_end):
    slices = [
        kernel(track, start, start + length, kind=OpKind.COLLECTIVE if communicates else OpKind.GEMM)
        for track, start, length, communicates in rows
    ]
    slices += [call(moment, moment + 3) for moment in calls[: len(rows)]]
    # every second kernel has a launch, some of them after the kernel
    launches = {row: len(rows) + row for row in range(0, len(rows), 2)}
    for step in analyze(launched(slices, launches, step_end)).steps:
        parts = step.breakdown
        idle = step.idle.totals()
        assert set(idle) == set(IDLE_CAUSES)
        assert (step.idle.end > step.idle.start).all()
        assert (np.diff(np.stack([step.idle.start, step.idle.end], axis=1).ravel()) >= 0).all()
        assert (
            parts.compute + parts.optimizer + parts.exposed + parts.memory + sum(idle.values())
            == step.window.length
        )
        for stream in step.streams:
            assert stream.busy + sum(stream.idle.values()) == step.window.length
        assert 0 <= step.exposed_wait <= parts.exposed
        assert sum(step.path.totals().values()) == step.window.length


@settings(max_examples=60, deadline=None)
@given(executed_graphs(gap_ns=2))
def test_idle_of_a_simulated_step_is_never_the_host_and_adds_up(case):
    timeline, makespan = case
    for step in analyze(timeline).steps:
        idle = step.idle.totals()
        assert step.breakdown.busy + sum(idle.values()) == makespan
        assert idle["host"] == 0
