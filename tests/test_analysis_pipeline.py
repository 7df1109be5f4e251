"""Pipeline stages and bubbles: hand-made pipelines, ``PP:`` annotations, and the report of simulated runs."""

from __future__ import annotations

import pytest

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
from tests.dense_scenarios import dense_mapping
from tests.timelines import timeline_of
from tracesim import load_scenario, simulate
from tracesim.analysis import analyze, describe
from tracesim.analysis.pipeline import longest_stage

F, B = Phase.FORWARD, Phase.BACKWARD_INPUT


def two_stages(rows: list[dict], *, simulated: bool, steps: int = 1, annotations=()) -> Timeline:
    """Two ranks with a compute track (0, 1) and a receive track (2, 3) each; annotations on tracks 4 (rank 0), 5, 6."""
    tracks = [(0, TrackRole.COMPUTE, "c"), (1, TrackRole.COMPUTE, "c")]
    tracks += [(0, TrackRole.COMMUNICATION_PP, "p"), (1, TrackRole.COMMUNICATION_PP, "p")]
    tracks += [(0, TrackRole.PIPELINE, "pipeline"), (1, TrackRole.PIPELINE, "pipeline")]
    return timeline_of(
        [*rows, *annotations],
        tracks,
        ranks=[{"rank": 0, "pp": 0}, {"rank": 1, "pp": 1}],
        steps=[(rank, step, 100 * step, 100 * step + 100) for rank in (0, 1) for step in range(steps)],
        simulated=simulated,
    )


def work(track: int, start: int, end: int, phase: Phase, microbatch: int = 0) -> dict:
    return {"track": track, "start": start, "duration": end - start, "name": "work", "kind": OpKind.GEMM,
            "phase": phase, "microbatch": microbatch}  # fmt: skip


def message(track: int, start: int, end: int, what: Communication) -> dict:
    return {"track": track, "start": start, "duration": end - start, "name": "message", "kind": OpKind.P2P,
            "communication": what, "communication_bytes": 8}  # fmt: skip


SEND, RECEIVE = Communication.SEND, Communication.RECEIVE
# Stage 0: F 0-20, B 60-100; stage 1: F 20-35 and B 35-58. Messages 20-22 are hidden on neither side.
ROWS = [work(0, 0, 20, F), work(1, 22, 35, F), work(1, 35, 58, B), work(0, 60, 100, B)]
MESSAGES = [
    message(2, 20, 22, SEND),
    message(3, 20, 22, RECEIVE),
    message(2, 58, 60, RECEIVE),
    message(3, 58, 60, SEND),
]


def pipeline_track(rows: list[dict]) -> list[dict]:
    return [row | {"track": row["track"] + 4, "kind": OpKind.ANNOTATION, "name": "F0"} for row in rows]


@pytest.mark.parametrize("annotations", [[], pipeline_track(ROWS)])
def test_the_bubble_is_the_time_without_work_or_transfer(annotations):
    stages = analyze(two_stages(ROWS + MESSAGES, simulated=True, annotations=annotations)).pipeline
    assert [(s.rank, s.span, s.bubble) for s in stages] == [(0, 100, 36), (1, 100, 60)]
    assert [(s.forwards, s.forward, s.backwards, s.backward, s.active) for s in stages] == [
        (1, 20, 1, 40, 60),
        (1, 13, 1, 23, 36),
    ]
    assert longest_stage(stages) == (0, 60 / 48)


def test_waiting_inside_a_measured_receive_is_bubble():
    """Stage 1 receives from time 0 on; the send comes at 20. The transfer takes 2 of the 22 ns."""
    messages = [
        message(2, 20, 22, SEND),
        message(3, 0, 22, RECEIVE),
        message(2, 20, 60, RECEIVE),
        message(3, 58, 60, SEND),
    ]
    stages = analyze(two_stages(ROWS + messages, simulated=False)).pipeline
    assert [s.bubble for s in stages] == [36, 60]


def test_a_measured_transfer_without_its_counterpart_is_bubble_altogether():
    stages = analyze(two_stages([*ROWS, message(3, 0, 22, RECEIVE)], simulated=False)).pipeline
    assert [s.bubble for s in stages] == [40, 64]


def test_each_step_has_a_pipeline_of_its_own():
    later = [row | {"start": row["start"] + 100} for row in ROWS + MESSAGES]
    stages = analyze(two_stages(ROWS + MESSAGES + later, simulated=True, steps=2)).pipeline
    assert [(s.step, s.rank, s.bubble) for s in stages] == [(0, 0, 36), (0, 1, 60), (1, 0, 36), (1, 1, 60)]


def test_without_sends_or_microbatches_there_is_no_pipeline():
    assert analyze(two_stages(ROWS, simulated=True)).pipeline == ()
    unknown = [row | {"microbatch": -1} for row in ROWS]
    assert analyze(two_stages(unknown + MESSAGES, simulated=True)).pipeline == ()


@pytest.mark.parametrize("on_device", [True, False])
def test_annotations_of_the_pipeline_runtime_give_the_actions(on_device):
    """On the device they are device time; on the host the kernels launched under them are."""
    kernel, call = OpKind.GEMM, OpKind.HOST
    rows = [
        {"track": 0, "start": 10, "duration": 20, "name": "k", "kind": kernel},
        {"track": 0, "start": 50, "duration": 30, "name": "k", "kind": kernel},
        {"track": 1, "start": 1, "duration": 1, "name": "launch", "kind": call},
        {"track": 1, "start": 6, "duration": 1, "name": "launch", "kind": call},
        {"track": 2, "start": 0, "duration": 5, "name": "PP:0F0", "kind": OpKind.ANNOTATION},
        {"track": 2, "start": 5, "duration": 5, "name": "PP:0B0", "kind": OpKind.ANNOTATION},
        {"track": 3, "start": 10, "duration": 20, "name": "PP:0F0", "kind": OpKind.ANNOTATION},
        {"track": 3, "start": 50, "duration": 30, "name": "PP:0B0", "kind": OpKind.ANNOTATION},
    ]
    tracks = [(0, TrackRole.DEVICE, "stream"), (0, TrackRole.HOST, "thread")]
    tracks += [(0, TrackRole.ANNOTATION, "of the thread"), (0, TrackRole.ANNOTATION, "of the stream")]
    timeline = timeline_of(
        rows if on_device else rows[:6], tracks, flows=[(2, 0, FlowKind.LAUNCH), (3, 1, FlowKind.LAUNCH)]
    )
    streams = timeline.tracks.stream.copy()
    streams[3] = streams[0]
    timeline = Timeline(**{**vars(timeline), "tracks": timeline.tracks.with_columns(stream=streams)})
    (stage,) = analyze(timeline).pipeline
    assert (stage.span, stage.bubble, stage.forward, stage.backward) == (70, 20, 20, 30)
    assert longest_stage([stage]) is None


@pytest.mark.parametrize(
    "changes", [{"parallel__pp": 4}, {"parallel__pp": 2, "training__num_microbatches": 4}]
)
def test_the_bubble_of_a_simulated_run_is_that_of_its_report(changes):
    simulation = simulate(load_scenario(dense_mapping(**changes)))
    result = describe(analyze(simulation.timeline()))
    assert result["pipeline"]["bubble_fraction"] == pytest.approx(
        simulation.report["pipeline_bubble_fraction"], abs=1e-9
    )
    (path,) = result["critical_paths"]
    assert path["span_ns"] == round(simulation.report["iteration_time_ms"] * 1e6)
    assert path["pieces_ns"]["unknown"] == path["pieces_ns"]["host"] == 0
    assert sum(path["pieces_ns"].values()) == path["span_ns"]
