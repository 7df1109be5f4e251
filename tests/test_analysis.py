"""Interval sets against a brute-force oracle, nesting, step windows, and the parts of a step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import Dimension, FlowKind, OpKind, Phase, TrackRole
from tracesim.analysis import DIMENSIONS, Window, breakdowns, group_dimension, step_windows, top_kernels
from tracesim.analysis.intervals import Intervals, clip, intersect, join, subtract, union
from tracesim.readers.nesting import Nesting

LIMIT = 40
PAIRS = st.lists(st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)), max_size=12)


def instants(pairs) -> set[int]:
    """The oracle: the integers a list of half-open intervals covers."""
    return {i for start, end in pairs for i in range(start, end)}


def intervals(pairs) -> Intervals:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


def pairs_of(found: Intervals) -> list[tuple[int, int]]:
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


@given(PAIRS, PAIRS)
def test_interval_sets_are_sets_of_instants(a, b):
    first, second = intervals(a), intervals(b)
    for found, expected in (
        (first, instants(a)),
        (join(first, second), instants(a) | instants(b)),
        (intersect(first, second), instants(a) & instants(b)),
        (subtract(first, second), instants(a) - instants(b)),
    ):
        pairs = pairs_of(found)
        assert instants(pairs) == expected
        assert found.total == len(expected)
        assert all(start < end for start, end in pairs)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))


@given(PAIRS, st.integers(0, LIMIT), st.integers(0, LIMIT))
def test_clipping_keeps_what_lies_inside(pairs, low, high):
    low, high = min(low, high), max(low, high)
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    start, end = clip(array[:, 0], array[:, 1], low, high)
    assert instants(zip(start.tolist(), end.tolist(), strict=True)) == instants(pairs) & set(range(low, high))


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=20),
    st.data(),
)
def test_the_innermost_slice_is_the_latest_begun_that_still_runs(rows, data):
    """Slices that nest: each is cut to its enclosing one, so the oracle is unique."""
    nested = []
    for thread, start, length in sorted(rows, key=lambda r: (r[0], r[1], -r[2])):
        end = start + length
        for other_thread, other_start, other_end in nested:
            if other_thread == thread and other_start <= start < other_end:
                end = min(end, other_end)
        nested.append((thread, start, end))
    thread, start, end = (np.array(c) for c in zip(*nested, strict=True))
    nesting = Nesting.build(thread.astype(np.int32), start.astype(np.int64), end.astype(np.int64))
    at_thread = data.draw(st.integers(0, 2))
    time = data.draw(st.integers(0, 45))
    found = int(nesting.innermost(np.array([at_thread], dtype=np.int32), np.array([time]))[0])
    around = [(s, -e) for t, s, e in nested if t == at_thread and s <= time <= e]
    if not around:
        assert found == -1
    else:
        row = nesting.order[found]
        assert (int(start[row]), -int(end[row])) == max(around)


def timeline_of(rows, *, tracks, steps=(), flows=(), groups=()) -> Timeline:
    """A timeline of one rank; ``tracks`` are roles, ``rows`` (track, start, end, kind) or dicts; times in ns."""
    listed = [
        row if isinstance(row, dict) else dict(zip(("track", "start", "duration", "kind"), row, strict=True))
        for row in rows
    ]
    listed = [{"name": 0, **row, "duration": row["duration"] - row["start"]} for row in listed]
    return Timeline(
        strings=("kernel", "other"),
        ranks=Ranks.from_rows([{"rank": 0}], tp=0, cp=0, ep=0, pp=0, dp=0),
        tracks=Tracks.from_rows(
            {"rank": 0, "role": role, "stream": i, "name": 0} for i, role in enumerate(tracks)
        ),
        slices=Slices.from_rows(listed, **SLICE_DEFAULTS),
        flows=Flows.from_rows([{"source": s, "target": t, "kind": FlowKind.LAUNCH} for s, t in flows]),
        counter_tracks=CounterTracks.empty(),
        counter_samples=CounterSamples.empty(),
        steps=Steps.from_rows([{"rank": 0, "number": n, "start": s, "end": e} for n, s, e in steps]),
        groups=groups,
    )


TRACKS = (TrackRole.COMPUTE, TrackRole.COMMUNICATION_TP, TrackRole.COMMUNICATION_DP, TrackRole.DEVICE)
G, C, M = OpKind.GEMM, OpKind.COLLECTIVE, OpKind.MEMCPY


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 0, 60, G)], {"compute": 60, "idle": 40}),
        ([(0, 0, 60, G), (1, 50, 90, C)], {"compute": 60, "tp": 30, "idle": 10}),
        # what two dimensions do at once is counted for tp
        ([(1, 0, 50, C), (2, 30, 80, C)], {"tp": 50, "dp": 30, "idle": 20}),
        ([(0, 0, 40, G), (3, 20, 60, M)], {"compute": 40, "memory": 20, "idle": 40}),
        ([(1, 0, 50, C), (3, 20, 60, M)], {"tp": 50, "memory": 10, "idle": 40}),
        # a simulated compute stream does its copies itself
        ([(1, 0, 50, C), (0, 20, 60, M)], {"compute": 40, "tp": 20, "idle": 40}),
        ([(0, 0, 40, OpKind.OPTIMIZER)], {"optimizer": 40, "idle": 60}),
        ([{"track": 0, "start": 0, "duration": 40, "kind": G, "phase": Phase.OPTIMIZER}],
         {"optimizer": 40, "idle": 60}),
        # outside the step nothing counts, and what crosses its edge counts inside
        ([(0, -20, 10, G), (0, 90, 130, G), (0, 200, 300, G)], {"compute": 20, "idle": 80}),
        ([], {"idle": 100}),
    ],
)  # fmt: skip
def test_each_instant_of_a_step_counts_once(rows, expected):
    timeline = timeline_of(rows, tracks=TRACKS, steps=[(1, 0, 100)])
    (step,) = breakdowns(timeline)
    found = {"compute": step.compute, "optimizer": step.optimizer, "memory": step.memory, "idle": step.idle}
    found |= dict(step.exposed_communication)
    assert {key: value for key, value in found.items() if value} == expected


KINDS = st.sampled_from([G, C, M, OpKind.OPTIMIZER, OpKind.P2P, OpKind.OTHER])
ROW = st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 60), KINDS).map(
    lambda r: (r[0], r[1], r[1] + r[2], r[3])
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, max_size=15), st.integers(1, 120))
def test_the_parts_add_up_to_the_step_exactly(rows, length):
    timeline = timeline_of(rows, tracks=TRACKS, steps=[(1, 0, length)])
    (step,) = breakdowns(timeline)
    assert step.compute + step.optimizer + step.exposed + step.memory + step.idle == length
    device = [(max(s, 0), min(e, length)) for _, s, e, _ in rows]
    assert step.busy == len(instants(device))
    communication = [(s, min(e, length)) for _, s, e, k in rows if k.is_communication]
    computing = [
        (s, min(e, length))
        for track, s, e, k in rows
        if not k.is_communication and (k is not M or track == 0)
    ]
    assert step.communication == len(instants(communication))
    assert step.exposed == len(instants(communication) - instants(computing))
    assert 0 <= step.overlap_fraction <= 1
    assert sum(total.total_ns for total in step.kinds.values()) == sum(max(e - s, 0) for s, e in device)


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("tp", Dimension.TP), ("dp", Dimension.DP), ("pp", Dimension.PP), ("ep", Dimension.EP), ("cp", Dimension.CP),
        ("TENSOR_MODEL_PARALLEL_GROUP", Dimension.TP), ("DATA_PARALLEL_GROUP_WITH_CP", Dimension.DP),
        ("PIPELINE_MODEL_PARALLEL_GROUP", Dimension.PP), ("EXPERT_MODEL_PARALLEL_GROUP", Dimension.EP),
        ("EXPERT_DATA_PARALLEL_GROUP", Dimension.DP), ("CONTEXT_PARALLEL_GROUP", Dimension.CP),
        ("mesh_tp", Dimension.TP), ("mesh_dp_shard", Dimension.DP), ("mesh_fsdp", Dimension.DP),
        ("mesh_pp", Dimension.PP),
        ("default_pg", Dimension.NONE), ("13", Dimension.NONE), ("", Dimension.NONE), ("step", Dimension.NONE),
    ],
)  # fmt: skip
def test_group_names_tell_the_dimension(name, dimension):
    assert group_dimension(name) == dimension


def test_on_a_device_stream_the_group_gives_the_dimension():
    rows = [
        {"track": 0, "start": 0, "duration": 10, "kind": C, "group": 0},
        {"track": 0, "start": 10, "duration": 30, "kind": C, "group": 1},
        {"track": 0, "start": 40, "duration": 45, "kind": C},
    ]
    groups = (CommunicationGroup("mesh_dp"), CommunicationGroup("EXPERT_MODEL_PARALLEL_GROUP"))
    (step,) = breakdowns(timeline_of(rows, tracks=[TrackRole.DEVICE], groups=groups))
    assert step.window == Window(0, -1, 0, 45)
    assert dict(step.exposed_communication) == dict.fromkeys(DIMENSIONS, 0) | {"dp": 10, "ep": 20, "other": 5}


def test_a_measured_step_is_the_device_time_of_its_launches():
    host, device = 1, 0
    rows = [
        (host, 10, 12, OpKind.HOST), (host, 50, 52, OpKind.HOST), (host, 110, 112, OpKind.HOST),
        (device, 30, 60, G), (device, 70, 125, G), (device, 130, 260, G),
    ]  # fmt: skip
    timeline = timeline_of(
        rows,
        tracks=[TrackRole.DEVICE, TrackRole.HOST],
        steps=[(7, 0, 100), (8, 100, 200)],
        flows=[(0, 3), (1, 4), (2, 5)],
    )
    assert step_windows(timeline) == [Window(0, 7, 30, 130), Window(0, 8, 130, 260)]


def test_a_copy_that_runs_ahead_does_not_begin_its_step():
    # The host launches step 8 at 110, when the compute stream is busy until 260 with step 7, and until 40 with what
    # was launched before the trace. The copy of the next batch has a stream of its own and runs at once.
    compute, copies, host = 0, 1, 2
    rows = [
        (host, 10, 12, OpKind.HOST), (host, 50, 52, OpKind.HOST), (host, 110, 112, OpKind.HOST), (host, 120, 122, G),
        (compute, 5, 40, G), (copies, 12, 20, OpKind.MEMCPY), (compute, 45, 260, G),
        (copies, 115, 130, OpKind.MEMCPY), (compute, 270, 400, G),
    ]  # fmt: skip
    timeline = timeline_of(
        rows,
        tracks=[TrackRole.DEVICE, TrackRole.DEVICE, TrackRole.HOST],
        steps=[(7, 0, 100), (8, 100, 200)],
        flows=[(0, 5), (1, 6), (2, 7), (3, 8)],
    )
    assert step_windows(timeline) == [Window(0, 7, 40, 260), Window(0, 8, 260, 400)]


def test_steps_the_profiler_paused_between_end_by_themselves():
    far = 10_000_000_000
    rows = [
        (1, 10, 12, OpKind.HOST),
        (1, far + 10, far + 12, OpKind.HOST),
        (0, 30, 60, G),
        (0, far + 30, far + 60, G),
    ]
    timeline = timeline_of(
        rows,
        tracks=[TrackRole.DEVICE, TrackRole.HOST],
        steps=[(1, 0, 100), (9, far, far + 100)],
        flows=[(0, 2), (1, 3)],
    )
    assert step_windows(timeline) == [Window(0, 1, 30, 100), Window(0, 9, far + 30, far + 100)]


def test_top_kernels_are_the_largest_sums():
    rows = [
        {"track": 0, "start": 0, "duration": 10_000_000, "kind": G, "name": 0},
        {"track": 0, "start": 10_000_000, "duration": 12_000_000, "kind": G, "name": 1},
        {"track": 0, "start": 12_000_000, "duration": 20_000_000, "kind": G, "name": 0},
    ]
    top = top_kernels(timeline_of(rows, tracks=[TrackRole.DEVICE]))
    assert [(t["name"], t["kind"], t["count"], t["total_ms"], t["mean_us"]) for t in top] == [
        ("kernel", "gemm", 2, 18.0, 9000.0),
        ("other", "gemm", 1, 2.0, 2000.0),
    ]
    assert [t["share"] for t in top] == pytest.approx([0.9, 0.1])
