"""Buffers of a rebuilt run: from the curve of allocated memory to rows of the graph, and back to a curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.columns import StringTable
from op_graphs.timeline import CounterSamples, CounterTracks, Timeline
from tests.recordings import US, Recording
from tracesim.readers import read_trace
from tracesim.replay import RowRole, ask, describe_replay, rebuild, replay, unexplained
from tracesim.replay.buffers import peaks

TRACES = Path(__file__).with_name("data") / "cpu_traces"


def with_curve(recording: Recording, curve: list[tuple[float, int]]) -> Timeline:
    """The recording with allocated bytes of its first rank: (us, bytes)."""
    timeline = recording.timeline()
    strings = StringTable(timeline.strings)
    name = strings.intern("allocated")
    time = np.array([round(at * US) for at, _ in curve], dtype=np.int64)
    return replace(
        timeline,
        counter_tracks=CounterTracks.from_rows([{"rank": 0, "name": name, "category": -1, "is_bytes": True}]),
        counter_samples=CounterSamples(np.zeros(len(time)), time, np.array([float(b) for _, b in curve])),
        strings=strings.strings(),
    )


def three_launches() -> Recording:
    """Launches at 0, 100 and 200 us; kernels of 30 us that follow them."""
    recording = Recording()
    for number in range(3):
        recording.launch(f"k{number}", 100 * number, 100 * number + 7, 30)
    return recording


def test_a_buffer_lives_from_the_row_that_allocates_it_to_the_one_that_frees_it() -> None:
    # 100 were there before; 40 are allocated before the second launch and freed before the third, then 100 are freed.
    run = rebuild(with_curve(three_launches(), [(10, 100), (50, 140), (150, 100), (202, 0)]))
    buffers, rows = run.graph.buffers, run.rows
    assert buffers.size.tolist() == [100, 40]
    assert buffers.allocate[0] == -1
    assert rows.role[buffers.allocate[1]] == RowRole.GAP
    assert (rows.start[buffers.allocate[1]], rows.end[buffers.release[1]]) == (5 * US, 200 * US)
    assert rows.role[buffers.release[0]] == RowRole.CALL
    assert peaks(replay(run)) == {0: (140, 140)}


def test_of_equal_buffers_the_youngest_is_freed_and_what_nobody_allocated_was_there_before() -> None:
    run = rebuild(with_curve(three_launches(), [(10, 0), (20, 8), (120, 16), (130, 8), (140, 5)]))
    buffers = run.graph.buffers
    assert buffers.size.tolist() == [8, 8, 3]
    assert (buffers.release >= 0).tolist() == [False, True, True]
    assert (buffers.allocate >= 0).tolist() == [True, True, False]


def test_a_trace_without_a_curve_has_no_buffers() -> None:
    run = rebuild(three_launches().timeline())
    assert len(run.graph.buffers) == 0
    assert peaks(replay(run)) == {}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), min_size=1, max_size=40))
def test_buffers_add_up_to_any_curve(points: list[tuple[int, int]]) -> None:
    curve = sorted(points, key=lambda point: point[0])
    run = rebuild(with_curve(three_launches(), curve))
    buffers = run.graph.buffers
    held = buffers.size[buffers.release < 0].sum()
    freed_from_before = buffers.size[(buffers.allocate < 0) & (buffers.release >= 0)].sum()
    first = curve[0][1]
    # What is held at the end, less what was freed that the curve did not hold at its begin.
    known_before = first if first > 0 else 0
    released_first = first if first and buffers.release[0] >= 0 else 0
    assert held - (freed_from_before - released_first) == curve[-1][1]
    assert known_before in (0, *buffers.size.tolist())
    measured, replayed = peaks(replay(run)).get(0, (0, 0))
    assert replayed >= measured or not len(buffers)


def test_the_peak_of_a_recorded_run_is_replayed_and_reported() -> None:
    run = rebuild(read_trace(TRACES / "ddp"))
    replayed, lateness = replay(run), unexplained(run)
    for measured, again in peaks(replayed).values():
        assert measured > 8 * 2**20  # parameters and gradients of two layers of 512 x 2048, 4 bytes each
        assert measured <= again <= 1.1 * measured
    # A change of times moves no buffer.
    changed = ask(run, ["scale.kind.gemm=0.5"], lateness).replayed
    assert peaks(changed)[0][1] == pytest.approx(peaks(replayed)[0][1], rel=0.1)
    assert describe_replay(replayed, lateness)["memory"]["0"]["measured_peak_bytes"] == peaks(replayed)[0][0]


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "trace",
    ["hta/df_index_resolver", "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz"],
)
def test_peaks_of_training_runs_are_replayed_within_three_percent(shared_data: Path, trace: str) -> None:
    ((measured, replayed),) = peaks(replay(rebuild(read_trace(shared_data / "traces" / trace)))).values()
    assert measured <= replayed <= 1.03 * measured
