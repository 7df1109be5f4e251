"""The timeline of a simulated step: tracks, slices, flows, counters and copies of ranks, for any legal scenario."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import yaml
from hypothesis import given, settings

from op_graphs.plan import ParallelPlan
from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, FlowKind, MemoryCategory, OpKind, Phase, TrackRole
from tests.dense_scenarios import dense_mapping, dense_scenarios
from tracesim import load_scenario, simulate
from tracesim.analysis import breakdowns
from tracesim.errors import ScenarioError
from tracesim.report import breakdown
from tracesim.simulated_timeline import corresponding_group
from tracesim.simulation import Simulation

EXAMPLES = settings(max_examples=10, deadline=None)
GROUP_AXES = {"world": {"tp", "pp", "dp"}, "embedding": {"pp"}}
"""Coordinates in which the members of a group differ, where it is not named after the one."""


def small(**changes) -> Simulation:
    return simulate(load_scenario(dense_mapping(**changes)))


def by_track(timeline: Timeline) -> list[list[tuple[int, int]]]:
    """(start, end) of the slices of each track, in the order of their start."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(timeline.tracks))]
    slices = timeline.slices
    for track, start, length in zip(
        slices.track.tolist(), slices.start.tolist(), slices.duration.tolist(), strict=True
    ):
        found[track].append((start, start + length))
    return [sorted(track) for track in found]


def covered(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# -- time --------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios())
def test_the_parts_of_a_step_add_up_on_every_rank_to_the_nanosecond(scenario):
    simulation = simulate(scenario)
    timeline = simulation.timeline()
    iteration = int(simulation.execution.end.max())
    tracks = by_track(timeline)
    for rank, measured in enumerate(breakdowns(timeline)):
        compute, optimizer, exposed = breakdown(simulation.graph, simulation.execution, rank)
        device = [
            interval
            for row, intervals in enumerate(tracks)
            if timeline.tracks.rank[row] == rank and TrackRole(int(timeline.tracks.role[row])).is_device
            for interval in intervals
        ]
        idle = iteration - covered(device)
        assert compute + optimizer + sum(exposed.values()) + idle == iteration
        # What is read from the trace is what the report says.
        assert (measured.compute, measured.optimizer, measured.idle) == (compute, optimizer, idle)
        assert {**exposed, "other": 0} == dict(measured.exposed_communication)
        assert measured.memory == 0
        assert (measured.window.start, measured.window.end) == (0, iteration)


@EXAMPLES
@given(dense_scenarios())
def test_slices_of_a_track_never_overlap(scenario):
    """Streams are FIFO, and the pipeline track shows one action after the other."""
    for track in by_track(simulate(scenario).timeline()):
        for (_, end), (start, _) in itertools.pairwise(track):
            assert end <= start


@EXAMPLES
@given(dense_scenarios())
def test_pipeline_slices_are_the_actions_of_the_schedule(scenario):
    simulation = simulate(scenario)
    timeline = simulation.timeline()
    pipeline = timeline.slice_roles() == TrackRole.PIPELINE
    assert (timeline.slices.kind[pipeline] == OpKind.ANNOTATION).all()
    microbatches, vpp = scenario.training.num_microbatches, scenario.parallel.vpp
    for rank in range(scenario.parallel.pp):
        own = np.flatnonzero(pipeline & (timeline.slice_ranks() == rank))
        names = Counter(timeline.string(int(name)) for name in timeline.slices.name[own])
        expected = {f"{kind}{m}": vpp for kind in "FB" for m in range(microbatches)}
        assert names == {**expected, "zero_gradients": 1, "optimizer": 1}
        for row in own.tolist():
            name = timeline.string(int(timeline.slices.name[row]))
            microbatch = int(timeline.slices.microbatch[row])
            assert microbatch == (int(name[1:]) if name[0] in "FB" else -1)
            assert 0 <= timeline.slices.chunk[row] < vpp or microbatch < 0


@EXAMPLES
@given(dense_scenarios())
def test_what_a_slice_waited_for_has_ended_when_it_starts(scenario):
    slices = simulate(scenario).timeline().slices
    known = np.flatnonzero(slices.waited_for >= 0)
    cause = slices.waited_for[known]
    assert (slices.start[cause] + slices.duration[cause] <= slices.start[known]).all()
    # Only what starts at once, and what waits for its peers alone, waits for nothing.
    device = np.flatnonzero((slices.waited_for < 0) & (slices.kind != OpKind.ANNOTATION))
    assert (slices.start[device] == 0).all()


# -- layout ------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios())
def test_tracks_are_in_drawing_order(scenario):
    timeline = simulate(scenario).timeline()
    tracks = timeline.tracks
    keys = list(zip(tracks.rank.tolist(), tracks.role.tolist(), tracks.stream.tolist(), strict=True))
    assert keys == sorted(keys)
    assert len(keys) == len(set(keys))
    ranks = timeline.ranks.rank.tolist()
    assert ranks == sorted(ranks)
    at = [scenario.parallel.coordinates(rank) for rank in ranks]
    for name in ("tp", "cp", "pp", "dp"):
        assert getattr(timeline.ranks, name).tolist() == [point[name] for point in at]


def test_tracks_of_a_rank_by_name():
    timeline = small(parallel__tp=2, parallel__pp=2, parallel__dp=2).timeline()
    names = [timeline.string(int(name)) for name in timeline.tracks.name]
    assert names == [
        "pipeline", "compute", "tp communication", "pp send to next", "pp receive from next", "dp communication",
        "pipeline", "compute", "tp communication", "pp receive from previous", "pp send to previous",
        "dp communication",
    ]  # fmt: skip


# -- ranks -------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios())
def test_all_ranks_are_copies_of_their_stage_with_groups_of_their_own(scenario):
    simulation = simulate(scenario)
    parallel = scenario.parallel
    timeline = simulation.timeline(range(parallel.world_size))
    assert timeline.ranks.rank.tolist() == list(range(parallel.world_size))
    representatives = simulation.timeline()
    slices = timeline.slices
    rank_of_slice = timeline.slice_ranks()
    names = [timeline.string(int(name)) for name in slices.name]
    expected_names = [representatives.string(int(name)) for name in representatives.slices.name]
    for rank in range(parallel.world_size):
        rows = np.flatnonzero(rank_of_slice == rank)
        stage = parallel.coordinates(rank)["pp"]
        same = np.flatnonzero(representatives.slice_ranks() == stage)
        for column in ("start", "duration", "kind", "phase", "layer", "chunk", "microbatch", "wait", "flops"):
            mine = getattr(slices, column)[rows].tolist()
            assert mine == getattr(representatives.slices, column)[same].tolist()
        assert [names[row] for row in rows] == [expected_names[row] for row in same]
        groups = {int(number) for number in slices.group[rows] if number >= 0}
        for number in groups:
            group = timeline.groups[number]
            assert rank in group.ranks
            assert len(set(group.ranks)) == group.size == len(group.ranks)
            where = [parallel.coordinates(member) for member in group.ranks]
            varying = {name for name in ("tp", "pp", "dp") if len({point[name] for point in where}) > 1}
            assert varying <= GROUP_AXES.get(group.name, {group.name.split("_")[0]})
        # What is communicated has a group, nothing else has.
        communicates = slices.communication[rows] != Communication.NONE
        assert ((slices.group[rows] >= 0) == communicates).all()


@EXAMPLES
@given(dense_scenarios())
def test_flows_join_each_send_to_the_receive_of_its_microbatch(scenario):
    parallel = scenario.parallel
    timeline = simulate(scenario).timeline(range(parallel.world_size))
    slices, rank_of_slice = timeline.slices, timeline.slice_ranks()
    flows = timeline.flows.take(timeline.flows.kind == FlowKind.P2P)
    assert (slices.communication[flows.source] == Communication.SEND).all()
    assert (slices.communication[flows.target] == Communication.RECEIVE).all()
    assert (slices.microbatch[flows.source] == slices.microbatch[flows.target]).all()
    assert (slices.start[flows.source] == slices.start[flows.target]).all()
    # Every send and every receive has exactly one.
    for ends, kind in ((flows.source, Communication.SEND), (flows.target, Communication.RECEIVE)):
        assert sorted(ends.tolist()) == np.flatnonzero(slices.communication == kind).tolist()
    borders = parallel.stages - 1 if parallel.pp > 1 else 0
    copies = parallel.world_size // parallel.pp
    assert len(flows) == 2 * borders * scenario.training.num_microbatches * copies
    for source, target in zip(flows.source.tolist(), flows.target.tolist(), strict=True):
        ends = [parallel.coordinates(int(rank_of_slice[row])) for row in (source, target)]
        assert all(ends[0][name] == ends[1][name] for name in ("tp", "dp"))
        assert (ends[0]["pp"] - ends[1]["pp"]) % parallel.pp in (1, parallel.pp - 1)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([8], "ranks [8] do not exist: the world has ranks 0 to 7"),
        ([0, -1, 99], "ranks [-1, 99] do not exist"),
        ([], "no rank is selected; choose from 0 to 7"),
    ],
)
def test_ranks_that_do_not_exist(ranks, said):
    with pytest.raises(ScenarioError) as caught:
        small(parallel__tp=2, parallel__pp=2, parallel__dp=2).timeline(ranks)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "representative", "rank", "expected"),
    [
        # tp 2, cp 2, dp 4, pp 2 from the fastest to the slowest: rank 13 is tp 1, cp 0, dp 3
        ("tp", (0, 1), 13, (12, 13)),
        ("cp", (0, 2), 13, (13, 15)),
        ("dp", (0, 2, 4, 6, 8, 10, 12, 14), 13, (1, 3, 5, 7, 9, 11, 13, 15)),
        ("pp", (0, 16), 13, (13, 29)),
        ("pp", (16, 0), 13, (29, 13)),
        ("embedding", (0, 16), 13, (13, 29)),
        ("world", tuple(range(32)), 13, tuple(range(32))),
        # a block of four of the dp group of eight, and every fourth of it
        ("dp_shard", (0, 2, 4, 6), 13, (9, 11, 13, 15)),
        ("dp_replicate", (0, 8), 13, (5, 13)),
        ("dp_replicate", (0,), 13, (13,)),
    ],
)
def test_the_group_of_a_rank_that_corresponds_to_its_representatives(name, representative, rank, expected):
    plan = ParallelPlan(tp=2, cp=2, dp=4, pp=2)
    group = CommunicationGroup(name, representative, len(representative))
    found = corresponding_group(plan, group, rank)
    assert found == CommunicationGroup(name, expected, len(expected))


def test_ranks_are_sorted_and_named_once():
    simulation = small(parallel__tp=2, parallel__pp=2, parallel__dp=2)
    assert simulation.timeline([6, 1, 6]).ranks.rank.tolist() == [1, 6]


def test_a_flow_needs_both_its_ends():
    """Ranks 1 and 4 lie on different pipelines: nothing joins them."""
    simulation = small(parallel__tp=2, parallel__pp=2, parallel__dp=2)
    assert len(simulation.timeline([1, 4]).flows) == 0
    assert len(simulation.timeline([0, 4]).flows) > 0


# -- memory ------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios())
def test_memory_counters_reach_the_peaks_of_the_report(scenario):
    simulation = simulate(scenario)
    timeline = simulation.timeline()
    samples, tracks = timeline.counter_samples, timeline.counter_tracks
    assert tracks.is_bytes.all()
    curves: dict[tuple[int, str], dict[int, float]] = {}
    for row in range(len(tracks)):
        own = samples.track == row
        times = samples.time[own].tolist()
        assert times == sorted(set(times))
        key = int(tracks.rank[row]), timeline.string(int(tracks.name[row]))
        curves[key] = dict(zip(times, samples.value[own].tolist(), strict=True))
    for rank, stage in enumerate(simulation.report["stages"]):
        allocated, reserved = curves[rank, "allocated"], curves[rank, "reserved"]
        assert max(allocated.values()) == stage["peak_allocated_gib"] * 2**30
        assert max(reserved.values()) == stage["peak_reserved_gib"] * 2**30
        # Allocated is the sum of the categories at every moment, and a step ends as it began.
        categories = [curves[rank, category.name.lower()] for category in MemoryCategory]
        levels = [0.0] * len(categories)
        for moment in sorted(set().union(*categories)):
            levels = [curve.get(moment, level) for curve, level in zip(categories, levels, strict=True)]
            if moment in allocated:
                assert sum(levels) == allocated[moment]
        assert list(allocated.values())[-1] == sum(
            simulation.graph.buffers.size[
                (simulation.graph.buffers.rank == rank) & (simulation.graph.buffers.allocate < 0)
            ]
        )
        assert sum(stage["memory_at_peak_gib"].values()) == pytest.approx(stage["peak_allocated_gib"])


def test_the_two_halves_of_a_split_backward_are_drawn_apart(tmp_path):
    (tmp_path / "split.csv").write_text("0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n")
    timeline = small(parallel__pp=2, schedule=str(tmp_path / "split.csv")).timeline()
    rows = np.flatnonzero((timeline.slice_roles() == TrackRole.PIPELINE) & (timeline.slice_ranks() == 1))
    drawn = [
        (timeline.string(int(timeline.slices.name[row])), Phase(int(timeline.slices.phase[row])))
        for row in rows[1:-1]
    ]
    assert drawn == [
        ("F0", Phase.FORWARD), ("I0", Phase.BACKWARD_INPUT), ("F1", Phase.FORWARD),
        ("I1", Phase.BACKWARD_INPUT), ("W0", Phase.BACKWARD_WEIGHT), ("W1", Phase.BACKWARD_WEIGHT),
    ]  # fmt: skip


def test_the_timeline_carries_its_scenario():
    simulation = small(parallel__pp=2)
    timeline = simulation.timeline()
    assert timeline.simulated
    assert (timeline.name, timeline.device, timeline.world_size) == ("small", "h100-sxm", 2)
    assert load_scenario(yaml.safe_load(timeline.properties["scenario"])) == simulation.scenario
