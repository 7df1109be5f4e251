"""Rebuilding the graph of a measured run: what each slice and each host call waited for, and that the replay agrees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.vocabulary import OpKind
from tests.recordings import ALL_REDUCE, COPY, US, Recording, queued_kernels, two_ranks
from tracesim.engine import execute
from tracesim.errors import TraceError
from tracesim.replay import (
    EdgeKind,
    Rebuilt,
    RowRole,
    Rules,
    cut_step,
    describe_limits,
    limited_by,
    parse_what_ifs,
    rebuild,
    replay,
    step_times,
    stream_deviations,
    unexplained,
)
from tracesim.replay.what_if.outcome import change
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate


def waits(rebuilt: Rebuilt, kind: EdgeKind) -> set[tuple[str, str]]:
    """(who waits, for whom) of a kind of dependency, by name."""
    names, name = rebuilt.graph.strings, rebuilt.graph.operations.name
    chosen = rebuilt.edges.kind == kind
    return {
        (names[name[t]], names[name[s]])
        for s, t in zip(rebuilt.edges.source[chosen], rebuilt.edges.target[chosen], strict=True)
    }


def row_of(rebuilt: Rebuilt, name: str, role: RowRole = RowRole.DEVICE) -> int:
    named = rebuilt.graph.operations.name == rebuilt.graph.strings.index(name)
    return int(np.flatnonzero(named & (rebuilt.rows.role == role))[0])


def assert_same_times(rebuilt: Rebuilt, within_us: float = 0) -> None:
    replayed = replay(rebuilt)
    device = rebuilt.on_device()
    assert np.abs(replayed.start - rebuilt.rows.start)[device].max() <= within_us * US
    assert np.abs(replayed.end - rebuilt.rows.end)[device].max() <= within_us * US


def test_a_queue_of_kernels_is_replayed_to_the_nanosecond() -> None:
    rebuilt = rebuild(queued_kernels([50, 30, 20, 40, 60]).timeline())
    assert_same_times(rebuilt)
    assert rebuilt.unexplained.sum() == 0
    assert ("k1", "k0") in waits(rebuilt, EdgeKind.QUEUE)


@given(st.lists(st.integers(1, 500), min_size=3, max_size=30), st.integers(0, 2))
def test_any_queue_with_an_even_gap_is_replayed_to_the_nanosecond(durations: list[int], gap: int) -> None:
    rebuilt = rebuild(queued_kernels([float(d) for d in durations], float(gap)).timeline())
    assert_same_times(rebuilt)


def test_a_kernel_on_an_empty_stream_starts_the_usual_delay_after_its_call() -> None:
    recording = Recording()
    for number in range(5):
        recording.launch(f"k{number}", 100 * number, 100 * number + 7, 20)
    rebuilt = rebuild(recording.timeline())
    assert rebuilt.delays.launch == 2 * US
    assert ("k3", "cudaLaunchKernel") in waits(rebuilt, EdgeKind.LAUNCH)
    assert_same_times(rebuilt)


def _two_streams(event_wait: bool, start: float) -> Recording:
    recording = Recording()
    recording.launch("other", 0, 7, 400, stream="stream 20")
    if event_wait:
        recording.call("cudaStreamWaitEvent", 10, 1)
    recording.launch("late", 12, start, 50)
    return recording


@pytest.mark.parametrize(
    ("event_wait", "start", "kind"),
    [
        pytest.param(True, 410, EdgeKind.EVENT, id="behind an event wait, just after the end of the source"),
        pytest.param(True, 450, EdgeKind.EVENT, id="behind an event wait, within 60 us"),
        pytest.param(False, 415, EdgeKind.EVENT, id="no event wait seen, but a tight end"),
        pytest.param(False, 450, None, id="no event wait seen and no tight end"),
        pytest.param(False, 400, EdgeKind.ADMISSION, id="in the last tenth of a running kernel"),
        pytest.param(False, 200, None, id="in the middle of a running kernel"),
    ],
)
def test_a_late_kernel_waits_for_what_ended_on_another_stream(
    event_wait: bool, start: float, kind: EdgeKind | None
) -> None:
    rebuilt = rebuild(_two_streams(event_wait, start).timeline())
    for found in (EdgeKind.EVENT, EdgeKind.ADMISSION):
        assert (("late", "other") in waits(rebuilt, found)) == (found == kind)
    if kind is None:
        late = row_of(rebuilt, "late")
        assert rebuilt.unexplained[late] == (start - 19) * US
    assert_same_times(rebuilt, within_us=3)


def test_a_source_launched_after_the_event_wait_is_not_what_was_waited_for() -> None:
    recording = Recording()
    recording.launch("early", 0, 7, 380, stream="stream 20")
    recording.call("cudaStreamWaitEvent", 10, 1)
    recording.launch("later", 12, 19, 385, stream="stream 21", thread="thread 2")
    recording.launch("late", 20, 410, 50)
    assert waits(rebuild(recording.timeline()), EdgeKind.EVENT) == {("late", "early")}


def test_communication_waits_for_the_compute_launched_before_it() -> None:
    recording = Recording()
    recording.launch("compute", 0, 7, 100)
    recording.launch("all_reduce", 10, 108, 30, stream="stream 20", columns=ALL_REDUCE)
    assert ("all_reduce", "compute") in waits(rebuild(recording.timeline()), EdgeKind.EVENT)


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "hipDeviceSynchronize"])
def test_a_blocking_call_ends_when_the_kernel_does(name: str) -> None:
    recording = Recording()
    recording.launch("kernel", 0, 7, 500)
    recording.call(name, 10, 505)
    recording.launch("next", 520, 527, 10)
    rebuilt = rebuild(recording.timeline())
    assert waits(rebuilt, EdgeKind.RETURN) == {(name, "kernel")}
    assert_same_times(rebuilt)
    longer = rebuilt.durations.copy()
    longer[row_of(rebuilt, "kernel")] += 100 * US
    moved = execute(rebuilt.graph, longer, lags=rebuilt.lags())
    assert moved.start[row_of(rebuilt, "next")] == 627 * US


def test_a_copy_to_pageable_memory_holds_its_call_up() -> None:
    recording = Recording()
    recording.launch("kernel", 0, 7, 500)
    call = recording.call("cudaMemcpyAsync", 10, 520)
    recording.kernel("Memcpy DtoH", 508, 15, launch=call, **COPY)
    rebuilt = rebuild(recording.timeline())
    assert waits(rebuilt, EdgeKind.RETURN) == {("cudaMemcpyAsync", "Memcpy DtoH")}
    assert_same_times(rebuilt)


def test_a_copy_from_pageable_memory_happens_at_the_end_of_its_call() -> None:
    recording = Recording()
    recording.launch("kernel", 0, 7, 10)
    call = recording.call("cudaMemcpyAsync", 20, 1000)
    recording.kernel("Memcpy HtoD", 1000, 15, launch=call, **COPY)
    rebuilt = rebuild(recording.timeline())
    assert rebuilt.durations[row_of(rebuilt, "cudaMemcpyAsync", RowRole.CALL)] == 980 * US
    assert_same_times(rebuilt)


def _handover() -> Recording:
    recording = Recording()
    for number in range(10):
        recording.call("aten::mm", 100 * number, 90, "thread 1")
        recording.launch(f"forward{number}", 100 * number + 10, 100 * number + 17, 30)
    for number in range(10):
        at = 1100 + 100 * number
        recording.call("aten::mm_backward", at, 90, "thread 2")
        recording.launch(f"backward{number}", at + 10, at + 17, 30, thread="thread 2")
    recording.launch("optimizer", 2200, 2207, 50)
    return recording


def test_a_thread_that_slept_goes_on_when_another_hands_over() -> None:
    rebuilt = rebuild(_handover().timeline())
    assert (rebuilt.edges.kind == EdgeKind.HANDOVER).sum() == 2
    assert_same_times(rebuilt)
    slower = rebuilt.durations.copy()
    gaps = (rebuilt.rows.role == RowRole.GAP) & (rebuilt.rows.start < 900 * US) & (rebuilt.rows.track == 0)
    slower[np.flatnonzero(gaps)[1]] += 70 * US
    moved = execute(rebuilt.graph, slower, lags=rebuilt.lags())
    optimizer = row_of(rebuilt, "optimizer")
    assert moved.start[optimizer] - rebuilt.rows.start[optimizer] + rebuilt.origin == 70 * US


def test_a_host_that_polls_goes_on_when_the_communication_ends() -> None:
    recording = Recording()
    for number in range(3):
        at = 2000 * number
        recording.launch(f"notify{number}", at, at + 7, 1500, columns=ALL_REDUCE)
        recording.launch(f"expert{number}", at + 1520, at + 1527, 100)
    rebuilt = rebuild(recording.timeline())
    assert (rebuilt.edges.kind == EdgeKind.POLL).sum() == 3
    assert_same_times(rebuilt)


def test_a_collective_ends_a_transfer_after_its_last_member_arrives() -> None:
    rebuilt = rebuild(two_ranks(slow=200, transfer=50).timeline())
    reduction = [row for row in range(len(rebuilt.rows)) if rebuilt.graph.operations.rendezvous[row] >= 0]
    assert len(reduction) == 2
    assert rebuilt.durations[reduction].tolist() == [50 * US, 50 * US]
    assert_same_times(rebuilt)


def test_lateness_without_a_cause_is_kept_and_reported() -> None:
    recording = queued_kernels([50, 30, 20, 40])
    recording.launch("stalled", 60, 5000, 10)
    rebuilt = rebuild(recording.timeline())
    stalled = row_of(rebuilt, "stalled")
    before = rebuilt.rows.end[row_of(rebuilt, "k3")]
    assert rebuilt.unexplained[stalled] == 5000 * US - before - 1 * US
    assert_same_times(rebuilt)
    lateness = unexplained(rebuilt)
    assert lateness.slices == 1
    assert lateness.nanoseconds == {0: rebuilt.unexplained[stalled]}
    assert any("nothing explains" in note for note in describe_limits(rebuilt, lateness))
    earlier = replay(rebuilt, keep_unexplained=False)
    assert earlier.start[stalled] == before + 1 * US


def _steps(count: int = 3, length: float = 1000.0) -> Recording:
    recording = Recording()
    for number in range(count):
        at = length * number
        recording.step(number + 5, at, at + length - 10)
        recording.launch("forward", at + 20, at + 27, 300)
        recording.launch("backward", at + 30, at + 328, 500)
        recording.call("cudaDeviceSynchronize", at + 40, 796)
    return recording


def test_steps_run_from_their_first_kernel_to_that_of_the_next_and_the_last_to_its_last() -> None:
    times = step_times(replay(rebuild(_steps().timeline())))
    assert [(t.step, t.measured, t.host_measured) for t in times] == [
        (5, 1000 * US, 990 * US),
        (6, 1000 * US, 990 * US),
        (7, 801 * US, 990 * US),
    ]
    assert all(t.error == 0 and t.host_error == 0 for t in times)


def test_a_step_cut_out_of_a_run_begins_with_what_was_still_running() -> None:
    recording = _steps()
    recording.launch("overhang", 990, 1000, 200, stream="stream 20")
    whole = rebuild(recording.timeline())
    part = cut_step(whole, 1)
    assert part.origin == 1000 * US
    anchors = part.rows.role == RowRole.ANCHOR
    assert (part.durations[anchors] >= 0).all()
    replayed = replay(part)
    device = part.on_device()
    assert np.abs(replayed.end - part.rows.end)[device].max() == 0


def test_order_of_kernels_on_each_stream_is_the_measured_one() -> None:
    assert all(stream.same_order for stream in stream_deviations(replay(rebuild(_handover().timeline()))))


def test_slices_that_overlap_on_one_stream_keep_their_overlap() -> None:
    recording = Recording()
    call = recording.call("cudaGraphLaunch", 0, 20)
    recording.kernel("a", 22, 100, launch=call)
    recording.kernel("b", 50, 100, launch=call)
    recording.kernel("c", 151, 30, launch=call)
    rebuilt = rebuild(recording.timeline())
    assert_same_times(rebuilt, within_us=1)


def test_what_limits_a_run_is_the_longest_chain() -> None:
    parts = limited_by(replay(rebuild(queued_kernels([50, 30]).timeline())))
    assert parts["compute"] == (113 + 50 + 30) * US
    assert parts["delays"] == (2 + 2) * US
    assert parts["host"] == 5 * US


def test_without_launches_the_device_is_replayed_alone_and_that_is_said() -> None:
    recording = Recording()
    for number in range(5):
        recording.kernel(f"k{number}", 100 * number, 90)
    rebuilt = rebuild(recording.timeline())
    assert_same_times(rebuilt)
    notes = describe_limits(rebuilt, unexplained(rebuilt))
    assert any("no launches" in note for note in notes)
    assert any("no step marks" in note for note in notes)


def test_clocks_that_differ_between_host_and_device_are_said() -> None:
    recording = Recording()
    for number in range(5):
        recording.launch(f"k{number}", 100 * number + 20, 100 * number, 30)
    rebuilt = rebuild(recording.timeline())
    assert_same_times(rebuilt)
    assert any("clocks of host and device" in note for note in describe_limits(rebuilt, unexplained(rebuilt)))


def test_a_simulated_run_is_replayed_to_the_nanosecond() -> None:
    timeline = simulate(load_scenario("llama3-8b-tp2-pp4-dp8", ["training.global_batch_size=32"])).timeline()
    rebuilt = rebuild(timeline)
    begin, end = (int(bound) for bound in timeline.span_ns)
    assert int(replay(rebuilt).end.max()) - begin == pytest.approx(end - begin, abs=100)
    assert any(note.startswith("a simulated run") for note in describe_limits(rebuilt, unexplained(rebuilt)))


def test_a_trace_without_kernels_is_refused() -> None:
    recording = Recording()
    recording.call("aten::mm", 0, 10)
    with pytest.raises(TraceError, match=r"no kernels or copies in 1 slices.*Record with"):
        rebuild(recording.timeline())


@pytest.mark.parametrize(("rule", "edges"), [("none", 0), ("measured", 1), ("all", 1)])
def test_rule_sets_to_compare_with(rule: str, edges: int) -> None:
    rebuilt = rebuild(_two_streams(True, 410).timeline(), Rules(waits=rule))
    assert (rebuilt.edges.kind == EdgeKind.EVENT).sum() == edges


@pytest.mark.parametrize("lag", [-30, 0, 40])
def test_the_engine_starts_a_row_its_lag_after_the_dependency(lag: int) -> None:
    rebuilt = rebuild(_two_streams(True, 410).timeline())
    edges = rebuilt.edges
    only = rebuilt.with_edges(edges.take(np.flatnonzero(edges.kind == EdgeKind.EVENT)))
    lags = np.full(len(only.edges), lag * US)
    times = execute(only.graph, only.durations, lags=lags)
    assert times.start[row_of(only, "late")] == times.end[row_of(only, "other")] + lag * US


def test_the_engine_wants_a_lag_for_each_dependency() -> None:
    rebuilt = rebuild(_two_streams(True, 410).timeline())
    with pytest.raises(ValueError, match="1 lags for"):
        execute(rebuilt.graph, rebuilt.durations, lags=np.zeros(1, dtype=np.int64))


def test_kinds_of_device_rows_are_those_of_the_slices() -> None:
    rebuilt = rebuild(two_ranks().timeline())
    kinds = rebuilt.graph.operations.kind[rebuilt.on_device()]
    assert sorted(kinds.tolist()) == sorted([OpKind.GEMM, OpKind.GEMM, OpKind.COLLECTIVE, OpKind.COLLECTIVE])


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Any run: calls of two threads, kernels that start any time after their launch on one of three streams."""
    recording = Recording()
    free: dict[str, float] = {}
    clock = {"thread 1": 0.0, "thread 2": 50.0}
    for number in range(draw(st.integers(1, 25))):
        thread = draw(st.sampled_from(sorted(clock)))
        clock[thread] += draw(st.integers(0, 400))
        action = draw(st.sampled_from(["launch", "launch", "launch", "wait", "synchronise"]))
        if action == "launch":
            stream = draw(st.sampled_from(["stream 7", "stream 20", "stream 21"]))
            start = max(free.get(stream, 0.0), clock[thread]) + draw(st.integers(0, 300))
            duration = draw(st.integers(0, 500))
            columns = ALL_REDUCE if stream == "stream 21" else None
            recording.launch(f"k{number}", clock[thread], start, duration, stream, thread, columns=columns)
            free[stream] = start + duration
            clock[thread] += 5
        elif action == "wait":
            recording.call("cudaStreamWaitEvent", clock[thread], 1, thread)
            clock[thread] += 1
        else:
            until = max([clock[thread] + 2, *free.values()]) + draw(st.integers(0, 20))
            recording.call("cudaDeviceSynchronize", clock[thread], until - clock[thread], thread)
            clock[thread] = until
    if not free:
        recording.launch("k", clock["thread 1"], clock["thread 1"] + 7, 10)
    return recording


@given(recordings())
def test_any_run_is_replayed_in_its_order_and_never_later_than_its_delays_add_up(
    recording: Recording,
) -> None:
    rebuilt = rebuild(recording.timeline())
    replayed = replay(rebuilt)
    assert (rebuilt.durations >= 0).all()
    assert (replayed.end >= replayed.start).all()
    assert all(stream.same_order for stream in stream_deviations(replayed))
    without = replay(rebuilt, keep_unexplained=False)
    assert (without.end <= replayed.end).all()


@given(recordings(), st.sampled_from(["scale=2", "host=3", "communication=2"]))
def test_more_work_never_makes_any_run_end_earlier(recording: Recording, what_if: str) -> None:
    rebuilt = rebuild(recording.timeline())
    operations = rebuilt.graph.operations
    if what_if.startswith("communication") and not (operations.kind == OpKind.COLLECTIVE).any():
        return
    changed = replay(change(rebuilt, parse_what_ifs([what_if])))
    assert changed.end.max() >= replay(rebuilt).end.max()
