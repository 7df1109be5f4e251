"""The critical path: small timelines with known paths, and the engine's graphs, whose makespan it must explain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Stream, TrackRole
from tests.executed import executed_graphs, executed_timeline
from tests.graphs import graph_of
from tests.timelines import timeline_of
from tracesim.analysis import analyze
from tracesim.analysis.critical_path import COMMUNICATION, COMPUTE, PIECES, CriticalPath

US = 1000


def steps_of(path: CriticalPath, timeline: Timeline) -> list[tuple[str, str, int]]:
    """(piece, slice, nanoseconds) in order of time."""
    names = [timeline.string(int(timeline.slices.name[row])) if row >= 0 else "" for row in path.row]
    return [
        (PIECES[piece], name, int(end - start))
        for piece, name, start, end in zip(path.piece.tolist(), names, path.start, path.end, strict=True)
    ]


def check_tiles(path: CriticalPath) -> None:
    """The pieces follow one another from the start of the window to its end."""
    assert path.start.tolist() == [path.window.start, *path.end[:-1].tolist()] or path.window.length == 0
    if len(path.end):
        assert path.end[-1] == path.window.end
    assert sum(path.totals().values()) == path.window.length


def test_the_path_of_two_streams_goes_through_the_longer_one():
    rows = [
        {"name": "a", "kind": OpKind.GEMM},
        {"name": "b", "kind": OpKind.GEMM, "after": [0]},
        {"name": "r", "kind": OpKind.COLLECTIVE, "stream": Stream.DP, "after": [0]},
        {"name": "c", "kind": OpKind.OPTIMIZER, "after": [1, 2]},
    ]
    timeline = executed_timeline(graph_of(rows), [10, 5, 30, 7])
    (step,) = analyze(timeline).steps
    assert steps_of(step.path, timeline) == [
        ("compute", "a", 10),
        ("communication", "r", 30),
        ("compute", "c", 7),
    ]


def test_across_ranks_the_path_is_that_of_the_rank_that_arrives_last():
    rows = [
        {"rank": 0, "name": "quick", "kind": OpKind.GEMM},
        {"rank": 1, "name": "slow", "kind": OpKind.GEMM},
        *(
            {"rank": rank, "name": "reduce", "kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE,
             "stream": Stream.TP, "after": [rank], "rendezvous": 0}
            for rank in (0, 1)
        ),
        {"rank": 0, "name": "last", "kind": OpKind.GEMM, "after": [2]},
    ]  # fmt: skip
    timeline = executed_timeline(graph_of(rows), [10, 50, 8, 8, 5])
    analysis = analyze(timeline)
    assert steps_of(analysis.paths[0], timeline) == [
        ("compute", "slow", 50),
        ("communication", "reduce", 8),
        ("compute", "last", 5),
    ]
    assert steps_of(analysis.steps[0].path, timeline) == [
        ("compute", "quick", 10),
        ("communication_wait", "reduce", 40),
        ("communication", "reduce", 8),
        ("compute", "last", 5),
    ]


def measured(rows: list[dict], tracks, launches=(), ranks=1, step_end: int = 0) -> Timeline:
    return timeline_of(
        [{"kind": OpKind.GEMM} | row for row in rows],
        tracks,
        ranks=[{"rank": r} for r in range(ranks)],
        flows=[(s, t, FlowKind.LAUNCH) for s, t in launches],
        steps=[(r, 1, 0, step_end * US) for r in range(ranks)] if step_end else (),
    )


def span(track: int, start: int, end: int, name: str, **more) -> dict:
    return {"track": track, "start": start * US, "duration": (end - start) * US, "name": name} | more


def host(track: int, start: int, end: int, name: str) -> dict:
    return span(track, start, end, name, kind=OpKind.HOST)


def test_a_measured_path_runs_over_the_host_and_back_through_a_blocking_call():
    device, thread = 0, 1
    rows = [
        span(device, 10, 200, "first"),
        host(thread, 4, 8, "cudaLaunchKernel"),
        host(thread, 20, 210, "cudaStreamSynchronize"),
        host(thread, 300, 305, "cudaLaunchKernel"),
        span(device, 307, 400, "second"),
    ]
    timeline = measured(
        rows, [(0, TrackRole.DEVICE, "stream"), (0, TrackRole.HOST, "thread")], [(1, 0), (3, 4)], step_end=400
    )
    (step,) = analyze(timeline).steps
    assert steps_of(step.path, timeline) == [
        ("compute", "first", 190 * US),
        # the call returns 10 us later, and the host launches again 90 us after that
        ("host", "cudaLaunchKernel", 10 * US),
        ("host", "cudaLaunchKernel", 90 * US),
        ("host", "cudaLaunchKernel", 5 * US),
        ("launch_delay", "second", 2 * US),
        ("compute", "second", 93 * US),
    ]


def test_a_measured_collective_hands_the_path_to_the_late_rank():
    reduce = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE, "communication_bytes": 8}
    rows = [
        span(0, 0, 10, "quick"),
        span(1, 10, 60, "nccl", **reduce),
        span(2, 0, 50, "slow"),
        span(3, 50, 61, "nccl", **reduce),
    ]
    tracks = [(rank, TrackRole.DEVICE, f"stream {s}") for rank in (0, 1) for s in (7, 20)]
    timeline = measured(rows, tracks, ranks=2)
    analysis = analyze(timeline)
    assert analysis.paths[0].totals() == {
        **dict.fromkeys(PIECES, 0),
        "compute": 50 * US,
        "communication": 11 * US,
    }
    assert analysis.steps[0].path.totals()["communication_wait"] == 40 * US
    check_tiles(analysis.paths[0])


def test_a_stall_on_the_path_is_unknown():
    device, thread = 0, 1
    rows = [span(device, 10, 20, "a"), span(device, 900, 910, "b")]
    rows += [host(thread, 0, 5, "cudaLaunchKernel"), host(thread, 6, 9, "cudaLaunchKernel")]
    timeline = measured(
        rows, [(0, TrackRole.DEVICE, "stream"), (0, TrackRole.HOST, "thread")], [(2, 0), (3, 1)], step_end=900
    )
    (step,) = analyze(timeline).steps
    assert step.path.totals() == {**dict.fromkeys(PIECES, 0), "compute": 20 * US, "unknown": 880 * US}


@settings(max_examples=150, deadline=None)
@given(executed_graphs())
def test_the_path_explains_the_makespan_of_the_engine_completely(case):
    """Without gaps an executed graph is the longest path: work, end to start, from 0 to the makespan."""
    timeline, makespan = case
    analysis = analyze(timeline)
    path = analysis.paths[0] if analysis.paths else analysis.steps[0].path
    assert (path.window.start, path.window.end) == (0, makespan)
    check_tiles(path)
    assert set(path.piece.tolist()) <= {COMPUTE, COMMUNICATION}
    slices = timeline.slices
    assert (path.end - path.start).tolist() == slices.duration[path.row].tolist()
    for before, after in itertools.pairwise(path.row.tolist()):
        assert slices.start[before] + slices.duration[before] == slices.start[after]
    for step in analysis.steps:
        check_tiles(step.path)
        ranks = timeline.slice_ranks()[step.path.row[step.path.row >= 0]]
        assert set(ranks.tolist()) <= {step.window.rank}


@settings(max_examples=60, deadline=None)
@given(executed_graphs(gap_ns=3))
def test_gaps_of_the_queue_are_on_the_path_and_nothing_is_unknown(case):
    timeline, makespan = case
    analysis = analyze(timeline)
    path = analysis.paths[0] if analysis.paths else analysis.steps[0].path
    totals = path.totals()
    assert sum(totals.values()) == makespan
    assert totals["unknown"] == totals["host"] == 0
    # each gap is 3 ns, between two slices of a compute stream
    queue = path.end[path.piece == PIECES.index("queue")] - path.start[path.piece == PIECES.index("queue")]
    assert set(queue.tolist()) <= {3}


@pytest.mark.parametrize("rows", [[], [span(0, 5, 5, "nothing")], [span(0, 5, 5, "x"), span(0, 5, 5, "y")]])
def test_paths_of_next_to_nothing(rows):
    timeline = measured(rows, [(0, TrackRole.DEVICE, "stream")])
    for step in analyze(timeline).steps:
        check_tiles(step.path)


def test_slices_that_wait_for_each_other_in_a_circle_end_the_path():
    """A damaged file may say so; the rest of the step is then not known."""
    rows = [
        span(0, 0, 0, "a", waited_for=1),
        span(0, 0, 0, "b", waited_for=0),
        span(0, 0, 9, "c", waited_for=1),
    ]
    timeline = measured(rows, [(0, TrackRole.DEVICE, "stream")])
    (step,) = analyze(timeline).steps
    check_tiles(step.path)
    assert np.array_equal(step.path.row, [2])
