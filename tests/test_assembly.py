"""Programs + schedule -> graph: closed forms of the schedules' papers, transfers, and what is kept in memory."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.graph import OpGraph
from op_graphs.plan import OverlapPlan
from op_graphs.vocabulary import Communication, MemoryCategory
from schedules import ScheduleError, build_schedule
from schedules.csv_format import parse_csv
from schedules.unit_times import peak_activations
from tests.one_operation_programs import ACTIVATION_BYTES, WEIGHT_BYTES, durations_of, one_operation_step
from tests.schedule_plans import plans as all_plans
from tracesim.engine import execute
from tracesim.memory.curves import memory_curve
from tracesim.report import bubble_fraction

BLOCKING = OverlapPlan(p2p=False)
OVERLAPS = [OverlapPlan(), BLOCKING]
FULL_BACKWARDS = ("gpipe", "1f1b", "interleaved-1f1b")


def plans():
    return all_plans().filter(lambda plan: plan[0] in FULL_BACKWARDS)


def makespan(graph: OpGraph, **durations: int) -> int:
    return int(execute(graph, durations_of(graph, **durations)).end.max())


def compute_names(graph: OpGraph, rank: int) -> list[str]:
    """Names of a rank's compute, in order, but for what frames the step."""
    operations = graph.operations
    rows = np.flatnonzero((operations.rank == rank) & (operations.stream == 0))
    return [graph.strings[name] for name in operations.name[rows]][1:-1]


@pytest.mark.parametrize("overlap", OVERLAPS, ids=["p2p overlapped", "p2p blocking"])
@pytest.mark.parametrize(
    ("name", "pp", "vpp", "microbatches"),
    [
        *((name, pp, 1, m) for name in ("gpipe", "1f1b") for pp in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 13)),
        *(("interleaved-1f1b", pp, vpp, pp * k) for pp in (2, 4) for vpp in (2, 3, 4) for k in (1, 2, 4)),
    ],
)
def test_the_bubble_is_that_of_the_paper(name, pp, vpp, microbatches, overlap):
    """(p - 1) / (v m + p - 1) with equal stages and free transfers; also with fewer microbatches than stages.

    Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2.
    """
    graph = one_operation_step(build_schedule(name, pp, vpp, microbatches), overlap)
    execution = execute(graph, durations_of(graph, F=10, B=20))
    busy = vpp * microbatches * 30
    bubble = 1 - Fraction(busy, int(execution.end.max()))
    assert bubble == Fraction(pp - 1, vpp * microbatches + pp - 1)
    assert bubble_fraction(graph, execution) == pytest.approx(float(bubble), abs=1e-12)


@pytest.mark.parametrize(
    ("overlap", "rank_0", "rank_1", "end"),
    [
        (
            OverlapPlan(),
            [(0, 10), (10, 20), (60, 80), (80, 100)],
            [(15, 25), (25, 35), (35, 55), (55, 75)],
            100,
        ),
        # a send holds up the compute behind it
        (BLOCKING, [(0, 10), (15, 25), (65, 85), (90, 110)], [(15, 25), (30, 40), (40, 60), (65, 85)], 110),
    ],
)
def test_transfers_take_their_time(overlap, rank_0, rank_1, end):
    graph = one_operation_step(build_schedule("gpipe", 2, 1, 2), overlap)
    execution = execute(graph, durations_of(graph, F=10, B=20, transfer=5))
    for rank, expected in enumerate((rank_0, rank_1)):
        rows = np.flatnonzero((graph.operations.rank == rank) & (graph.operations.stream == 0))[1:-1]
        found = zip(execution.start[rows].tolist(), execution.end[rows].tolist(), strict=True)
        assert list(found) == expected
    assert execution.end.max() == end


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(OVERLAPS), st.integers(0, 3))
def test_every_schedule_runs_to_its_end(plan, overlap, transfer):
    """With its transfers as long as they like, and never faster than its busiest rank."""
    name, pp, vpp, microbatches, group = plan
    graph = one_operation_step(build_schedule(name, pp, vpp, microbatches, group), overlap)
    assert makespan(graph, F=2, B=4, transfer=transfer) >= vpp * microbatches * 6


@settings(max_examples=25, deadline=None)
@given(plans())
def test_slower_transfers_never_make_a_step_faster(plan):
    name, pp, vpp, microbatches, group = plan
    graph = one_operation_step(build_schedule(name, pp, vpp, microbatches, group))
    spans = [makespan(graph, F=3, B=5, transfer=transfer) for transfer in range(4)]
    assert spans == sorted(spans)


@settings(max_examples=25, deadline=None)
@given(plans())
def test_the_first_forward_and_the_last_backward_of_a_chunk_are_special(plan):
    """They gather parameters and reduce gradients: once a chunk each."""
    name, pp, vpp, microbatches, group = plan
    schedule = build_schedule(name, pp, vpp, microbatches, group)
    graph = one_operation_step(schedule)
    for rank in range(pp):
        seen: Counter[tuple[int, str]] = Counter()
        names = []
        for action in schedule.actions[rank]:
            kind = str(action.kind.value)
            seen[action.stage, kind] += 1
            is_special = seen[action.stage, kind] == (1 if kind == "F" else microbatches)
            names.append(f"{kind} {'first' if kind == 'F' else 'last'}" if is_special else kind)
        assert compute_names(graph, rank) == names
        assert names.count("F first") == names.count("B last") == vpp


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(OVERLAPS))
def test_every_send_meets_the_receive_of_its_microbatch(plan, overlap):
    name, pp, vpp, microbatches, group = plan
    graph = one_operation_step(build_schedule(name, pp, vpp, microbatches, group), overlap)
    operations = graph.operations
    joined = np.flatnonzero(operations.rendezvous >= 0)
    # One transfer forward and one backward for each microbatch at each border between stages of two ranks.
    borders = pp * vpp - 1 if pp > 1 else 0
    assert len(joined) == 2 * 2 * borders * microbatches
    meetings: dict[int, list[int]] = {}
    for row in joined.tolist():
        meetings.setdefault(int(operations.rendezvous[row]), []).append(row)
    for rows in meetings.values():
        kinds = sorted(operations.communication[rows].tolist())
        assert kinds == [Communication.SEND, Communication.RECEIVE]
        assert len(set(operations.microbatch[rows].tolist())) == 1
        (members,) = {graph.groups[int(number)].ranks for number in operations.group[rows]}
        by_role = {int(operations.communication[row]): int(operations.rank[row]) for row in rows}
        assert members == (by_role[Communication.SEND], by_role[Communication.RECEIVE])


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(OVERLAPS))
def test_a_rank_keeps_the_activations_in_flight(plan, overlap):
    name, pp, vpp, microbatches, group = plan
    schedule = build_schedule(name, pp, vpp, microbatches, group)
    graph = one_operation_step(schedule, overlap)
    execution = execute(graph, durations_of(graph, F=10, B=20))
    in_flight = {
        "gpipe": lambda rank: microbatches,
        "1f1b": lambda rank: min(pp - rank, microbatches),
    }.get(name, lambda rank: peak_activations(schedule)[rank])
    for rank in range(pp):
        curve = memory_curve(graph, execution, rank)
        assert curve.peak == WEIGHT_BYTES + ACTIVATION_BYTES * in_flight(rank)
        activations = curve.by_category[MemoryCategory.ACTIVATIONS]
        assert activations[-1] == 0
        assert curve.by_category[MemoryCategory.WEIGHTS].tolist() == [WEIGHT_BYTES] * len(curve.time)


def test_copies_of_a_program_are_segments_of_one_template():
    graph = one_operation_step(build_schedule("1f1b", 2, 1, 3))
    names = [graph.strings[name] for name in graph.segments.name]
    assert names == [
        "zero_gradients", "F0", "F1", "B0", "F2", "B1", "B2", "optimizer",
        "zero_gradients", "F0", "B0", "F1", "B1", "F2", "B2", "optimizer",
    ]  # fmt: skip
    templates = dict(zip(names[:8], graph.segments.template[:8].tolist(), strict=True))
    assert templates["F1"] == templates["F2"] != templates["F0"]
    assert templates["B0"] == templates["B1"] != templates["B2"]


def test_the_update_waits_for_every_stream():
    graph = one_operation_step(build_schedule("1f1b", 2, 1, 1))
    execution = execute(graph, durations_of(graph, F=1, B=1, transfer=50))
    last = [int(np.flatnonzero(graph.operations.rank == rank)[-1]) for rank in (0, 1)]
    # Rank 1 has sent its gradient at 1 + 50 + 2 + 50; rank 0 goes backward behind that.
    assert execution.start[last].tolist() == [104, 103]


def test_a_split_backward_sends_its_gradient_before_the_weights():
    """ZB-H1 by hand: rank 0's backward starts when the input gradient is there; the weights fill the gap."""
    schedule = parse_csv("0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n", "zero-bubble")
    graph = one_operation_step(schedule)
    execution = execute(graph, durations_of(graph, F=10, I=10, W=10))
    starts = {}
    for rank in (0, 1):
        rows = np.flatnonzero((graph.operations.rank == rank) & (graph.operations.stream == 0))[1:-1]
        starts[rank] = list(zip(compute_names(graph, rank), execution.start[rows].tolist(), strict=True))
    assert starts[0] == [("F first", 0), ("F", 10), ("I", 30), ("W", 40), ("I", 50), ("W last", 60)]
    assert starts[1] == [("F first", 10), ("I", 20), ("F", 30), ("I", 40), ("W", 50), ("W last", 60)]
    # An activation lives until its weights' backward: two on rank 1, although F0's input gradient came first.
    for rank in (0, 1):
        curve = memory_curve(graph, execution, rank)
        assert curve.peak == WEIGHT_BYTES + 2 * ACTIVATION_BYTES
        assert curve.by_category[MemoryCategory.ACTIVATIONS][-1] == 0


@pytest.mark.parametrize(
    "row",
    ["0UNSHARD,0F0,0F1,0B0,0B1", "0F0,0F1,0B0,0B1,0REDUCE_GRAD"],
)
def test_an_action_without_a_program_is_the_users_error(row):
    with pytest.raises(ScheduleError, match=r"action .* of schedule mine.csv cannot be simulated"):
        one_operation_step(parse_csv(f"{row}\r\n", "mine.csv"))
