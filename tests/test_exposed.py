"""Why communication is not overlapped: stretches add up, causes and independent work by hand, savings by an oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, Dimension, OpKind, Phase, TrackRole
from tests.dense_scenarios import dense_mapping
from tests.executed import executed_graphs
from tests.graphs import naive_times
from tests.timelines import timeline_of
from tracesim.analysis import analyze, breakdowns, slice_dimensions
from tracesim.analysis.annotate import WHY_TRACK
from tracesim.analysis.breakdown import DIMENSIONS
from tracesim.analysis.exposed import class_keys
from tracesim.cli import main
from tracesim.cost import CostModel
from tracesim.exposed import ExposedCommunication, describe_stretches, exposed_in_trace
from tracesim.readers import read_trace
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

F, B, W = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT
COMPUTE, TP, DP = TrackRole.COMPUTE, TrackRole.COMMUNICATION_TP, TrackRole.COMMUNICATION_DP
GATHER, SCATTER, REDUCE = Communication.ALL_GATHER, Communication.REDUCE_SCATTER, Communication.ALL_REDUCE


def gemm(name: str, start: int, end: int, phase: Phase = F, layer: int = 0, microbatch: int = 0, **more):
    return {"track": 0, "start": start, "duration": end - start, "name": name, "kind": OpKind.GEMM, "phase": phase,
            "layer": layer, "microbatch": microbatch, "chunk": 0, **more}  # fmt: skip


def transfer(name: str, start: int, end: int, what: Communication = REDUCE, track: int = 1, **more):
    kind = {"kind": OpKind.COLLECTIVE, "communication": what}
    return gemm(name, start, end, **more) | kind | {"track": track}


def exposed(slices) -> ExposedCommunication:
    tracks = [(0, COMPUTE, "compute"), (0, TP, "tp"), (0, DP, "dp"), (0, COMPUTE, "second compute")]
    return exposed_in_trace(analyze(timeline_of(slices, tracks, simulated=True)))


def test_what_it_waited_for_and_what_waited_for_it():
    found = exposed(
        [
            gemm("a", 0, 10),
            transfer("reduce", 10, 30, waited_for=0),
            gemm("b", 30, 40, waited_for=1),
        ]
    )
    (entry,) = describe_stretches(found)
    assert (entry["waited_for"], entry["waited_by"], entry["waited_by_known"]) == ("a", "b", True)
    assert (entry["name"], entry["dimension"], entry["start_ns"], entry["exposed_ns"]) == (
        "reduce",
        "tp",
        10,
        20,
    )
    (only,) = found.classes
    assert (only.name, only.dimension, only.phase, only.layer_class) == ("reduce", "tp", "forward", "layer")
    assert (only.stretches, only.total, only.bound) == (1, 20, 20)


def test_compute_beside_it_cuts_a_transfer_into_stretches():
    found = exposed([transfer("reduce", 0, 100), gemm("a", 20, 30), gemm("b", 60, 100)])
    s = found.stretches
    assert list(zip(s.start.tolist(), s.end.tolist(), strict=True)) == [(0, 20), (30, 60)]
    assert s.waiter.tolist() == [1, 2]
    assert not s.waiter_known.any()


def test_an_instant_of_two_transfers_belongs_to_the_first():
    slices = [
        transfer("late", 10, 50),
        transfer("early", 0, 30),
        transfer("dp", 0, 70, track=2, phase=Phase.GRADIENT_SYNC),
    ]
    assert {c.name: c.total for c in exposed(slices).classes} == {"early": 30, "late": 20, "dp": 20}


@pytest.mark.parametrize(
    ("moved", "later", "could_run"),
    [
        # the work that follows needs the result
        ({}, gemm("next", 40, 90), 0),
        # another microbatch does not, nor does another model chunk
        ({}, gemm("next", 40, 90, microbatch=1), 30),
        ({}, gemm("next", 40, 90) | {"chunk": 1}, 30),
        ({}, gemm("next", 40, 52, microbatch=1), 12),
        # weight gradients of layers behind it in the backward are done with; those of layers before it need it
        ({"phase": B, "layer": 3}, gemm("next", 40, 90, W, layer=4), 30),
        ({"phase": B, "layer": 3}, gemm("next", 40, 90, W, layer=2), 0),
        # right behind the reduction of a layer's input gradient comes its own weight gradient
        ({"phase": B, "layer": 3}, gemm("next", 40, 90, W, layer=3), 30),
        # what is gathered may be an operand of it
        ({"phase": B, "layer": 3, "what": GATHER}, gemm("next", 40, 90, W, layer=3), 0),
        # nothing in a pass waits for gradients that are reduced
        ({"phase": Phase.GRADIENT_SYNC, "microbatch": -1, "track": 2}, gemm("next", 40, 90, B), 30),
        # the optimizer does
        ({"phase": Phase.GRADIENT_SYNC, "microbatch": -1, "track": 2},
         gemm("next", 40, 90, Phase.OPTIMIZER, microbatch=-1), 0),
        # parameters that are gathered are needed
        ({"phase": Phase.PARAM_SYNC, "what": GATHER, "track": 2}, gemm("next", 40, 90, microbatch=1), 0),
        # without microbatches: work on a stream that did not wait
        ({"microbatch": -1}, gemm("next", 40, 90, microbatch=-1) | {"track": 3}, 30),
    ],
)  # fmt: skip
def test_what_could_have_run(moved, later, could_run):
    slices = [
        gemm("before", 0, 10),
        transfer("moved", 10, 40, **moved),
        gemm("waiter", 40, 40, microbatch=-1),
        later,
    ]
    slices[2]["waited_for"] = 1
    (entry,) = describe_stretches(exposed(slices))
    assert (entry["could_run_ns"], entry["could_run"]) == (could_run, "next" if could_run else "")


def test_a_measured_kernel_goes_by_its_transfer_and_waits_inside_for_the_last_rank():
    nccl = {"kind": OpKind.COLLECTIVE, "communication": REDUCE, "group": 0, "communication_bytes": 64}
    timeline = timeline_of(
        [
            {"track": 0, "start": 0, "duration": 60, "name": "ncclDevKernel_AllReduce_RING_LL"} | nccl,
            {"track": 1, "start": 40, "duration": 20, "name": "ncclDevKernel_AllReduce_RING_LL"} | nccl,
        ],
        tracks=[(0, TrackRole.DEVICE, "7"), (1, TrackRole.DEVICE, "7")],
        ranks=[{"rank": 0}, {"rank": 1}],
        groups=(),
    )
    timeline = Timeline(
        **{**vars(timeline), "slices": timeline.slices.with_columns(group=np.array([-1, -1]))}
    )
    (only,) = exposed_in_trace(analyze(timeline)).classes
    assert (only.name, only.total, only.waiting, only.bound) == ("all_reduce", 80, 40, 60)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(executed_graphs())
def test_stretches_add_up_to_the_exposed_communication_of_each_rank(case):
    timeline, _ = case
    s = exposed_in_trace(analyze(timeline)).stretches
    for found in breakdowns(timeline):
        for number, key in enumerate(DIMENSIONS):
            mine = (s.rank == found.window.rank) & (s.dimension == number)
            assert int(s.length[mine].sum()) == found.exposed_communication[key]
    for rank in np.unique(s.rank):
        mine = s.take(np.flatnonzero(s.rank == rank))
        order = np.argsort(mine.start)
        assert (mine.end[order][:-1] <= mine.start[order][1:]).all()
    assert ((s.could_run >= 0) & (s.could_run <= s.length)).all()


SCENARIOS = [
    {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__dp": 2},
    {"parallel__tp": 2, "parallel__pp": 2, "overlap__p2p": False, "schedule": "gpipe"},
    {"parallel__dp": 4, "overlap__grad_reduce": False},
]


@pytest.mark.parametrize("changes", SCENARIOS)
def test_hiding_a_class_saves_what_a_naive_longest_path_says(changes):
    # The oracle knows no launches.
    hardware = {"base": "h100-sxm", "host": {"operation_us": 0}}
    simulation = simulate(load_scenario(dense_mapping(hardware=hardware, **changes)))
    graph, costs = simulation.graph, CostModel(simulation.scenario.hardware)
    durations = costs.durations_ns(graph)
    whole = max(end for _, end in naive_times(graph, durations.tolist(), costs.gap_ns) or [])
    rows = np.flatnonzero(graph.is_communication())
    keys = class_keys(graph.operations, graph.strings, rows, simulated=True)
    found = simulation.exposed_communication()
    assert found.classes
    # The costly oracle for the three largest; the rest goes through the same code.
    for number in range(min(3, len(found.classes))):
        c = found.classes[number]
        hidden = {
            row
            for row, key in zip(rows.tolist(), keys, strict=True)
            if key == (c.name, c.phase, c.layer_class)
        }
        ids = {int(graph.operations.rendezvous[row]) for row in hidden} - {-1}
        hidden |= {row for row in rows.tolist() if int(graph.operations.rendezvous[row]) in ids}
        shorter = [0 if row in hidden else int(length) for row, length in enumerate(durations)]
        end = max(end for _, end in naive_times(graph, shorter, costs.gap_ns) or [])
        assert found.savings[number] == whole - end


@pytest.mark.parametrize("changes", SCENARIOS)
def test_classes_of_a_report_add_up_to_the_exposed_communication_of_its_stages(changes):
    report = simulate(load_scenario(dense_mapping(**changes))).report
    for key in ("tp", "cp", "ep", "pp", "dp"):
        classes = [c["exposed_ms"] for c in report["exposed_communication"] if c["dimension"] == key]
        stages = sum(stage["exposed_communication_ms"][key] for stage in report["stages"])
        assert sum(classes) == pytest.approx(stages, abs=1e-9)
    savings = [c["saving_ms"] for c in report["exposed_communication"]]
    assert savings == sorted(savings, reverse=True)
    assert all(0 <= c["saving_ms"] <= report["iteration_time_ms"] for c in report["exposed_communication"])


@pytest.mark.parametrize("stage", [0, 1])
def test_work_whose_input_has_not_arrived_could_not_have_run(stage):
    """The first forward of stage 1 waits for the send; its second microbatch had not been sent either."""
    simulation = simulate(load_scenario(dense_mapping(parallel__pp=2, schedule="gpipe")))
    found = simulation.exposed_communication()
    timeline, s = found.timeline, found.stretches
    dimension = slice_dimensions(timeline)[s.row]
    first = np.flatnonzero((s.rank == stage) & (dimension == Dimension.PP))
    assert len(first)
    receives = first[timeline.slices.communication[s.row[first]] == Communication.RECEIVE]
    assert (s.could_run[receives[:1]] == 0).all()


def test_the_command_gives_what_the_report_says_on_a_simulated_trace(tmp_path):
    scenario = tmp_path / "small.yaml"
    scenario.write_text(json.dumps(dense_mapping(**SCENARIOS[0])))
    runner = CliRunner()
    assert runner.invoke(main, ["run", str(scenario), "-o", str(tmp_path / "run")]).exit_code == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    result = runner.invoke(main, ["analyze", str(tmp_path / "run" / "trace.pftrace"), "--exposed", "--json"])
    assert result.exit_code == 0, result.stderr
    exposed = json.loads(result.stdout)["exposed"]
    assert all(entry["saving"] == "exact" for entry in exposed["classes"])
    by_key = {(c["name"], c["phase"], c["layer_class"]): c for c in exposed["classes"]}
    for entry in report["exposed_communication"]:
        again = by_key[entry["name"], entry["phase"], entry["layer_class"]]
        assert again["exposed_ms"] == entry["exposed_ms"]
        if entry["saving"] == "exact":
            assert again == entry
    assert sum(e["exposed_ns"] for e in exposed["stretches"]) == pytest.approx(
        1e6 * sum(c["exposed_ms"] for c in exposed["classes"])
    )
    shown = runner.invoke(main, ["analyze", str(tmp_path / "run" / "trace.pftrace"), "--exposed"]).stdout
    figures = shown[shown.index("exposed communication, ms over all ranks") :].splitlines()
    lines = [line for line in figures[2:] if not line.startswith((" ", "..."))]
    assert max(map(len, lines)) <= 100
    total = lines[-1].split()
    assert total[:2] == ["all", str(sum(entry["count"] for entry in exposed["classes"]))]
    assert float(total[2]) == pytest.approx(sum(c["exposed_ms"] for c in exposed["classes"]), abs=1e-3)


def test_the_written_trace_holds_a_note_for_every_stretch(tmp_path):
    scenario, output = tmp_path / "small.yaml", tmp_path / "notes.pftrace"
    scenario.write_text(json.dumps(dense_mapping(**SCENARIOS[0])))
    runner = CliRunner()
    assert runner.invoke(main, ["run", str(scenario), "-o", str(tmp_path / "run")]).exit_code == 0
    trace = str(tmp_path / "run" / "trace.pftrace")
    result = runner.invoke(main, ["analyze", trace, "--exposed", "-o", str(output), "--json"])
    stretches = json.loads(result.stdout)["exposed"]["stretches"]
    timeline = read_trace([output])
    tracks = [n for n, name in enumerate(timeline.tracks.name) if timeline.string(name) == WHY_TRACK]
    notes = np.isin(timeline.slices.track, tracks)
    assert int(notes.sum()) == len(stretches)
    assert int(timeline.slices.duration[notes].sum()) == sum(stretch["exposed_ns"] for stretch in stretches)
    texts = [timeline.string(name) for name in timeline.slices.name[notes]]
    assert any("waited for" in text and "could have run" in text for text in texts)


@pytest.mark.shared_data
def test_a_real_trace_gives_upper_bounds_within_its_step(shared_data):
    path = shared_data / "traces" / "deepseek" / "train.json.gz"
    result = CliRunner().invoke(main, ["analyze", str(path), "--exposed", "--json"])
    document = json.loads(result.stdout)
    (step,) = document["steps"]
    total = sum(step["exposed_communication_ns"].values())
    classes = document["exposed"]["classes"]
    assert sum(c["exposed_ms"] for c in classes) == pytest.approx(total / 1e6)
    assert {c["saving"] for c in classes} == {"upper_bound"}
    assert all(c["saving_ms"] <= step["span_ns"] / 1e6 for c in classes)
