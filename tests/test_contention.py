"""The engine with sharing: the longest path where nothing is shared, closed forms, and work that is conserved."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Stream
from tests.graphs import graph_of, naive_times
from tracesim.contention import execute
from tracesim.engine import execute as execute_alone
from tracesim.errors import SimulationError
from tracesim.sharing import Demand, SharingPolicy, max_min_shares

COMPUTE, TP, DP, EP = Stream.COMPUTE, Stream.TP, Stream.DP, Stream.EP
NOTHING = Demand()
ALL_OF_IT = Demand(uses=((0, 1.0),))
"""Uses the whole of resource 0 while it runs alone."""


def policy(demands, **more) -> SharingPolicy:
    """One class a demand; ``admission`` is off unless asked for."""
    distinct = list(dict.fromkeys(demands))
    classes = np.array([distinct.index(demand) for demand in demands], dtype=np.int64)
    return SharingPolicy(
        classes, tuple(distinct), **{"capacities": (1.0,), "admission": False, "sms": 10, **more}
    )


def times(graph: OpGraph, durations, sharing, gap_ns: int = 0) -> list[tuple[int, int]]:
    execution = execute(graph, np.array(durations, dtype=np.int64), gap_ns=gap_ns, sharing=sharing)
    return list(zip(execution.start.tolist(), execution.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("operations", "durations", "demands", "more", "expected"),
    [
        # two transfers that each fill a link take turns on it: twice as long until the shorter is through
        ([{"stream": TP}, {"stream": DP}], [10, 10], [ALL_OF_IT] * 2, {}, [(0, 20), (0, 20)]),
        ([{"stream": TP}, {"stream": DP}], [10, 30], [ALL_OF_IT] * 2, {}, [(0, 20), (0, 40)]),
        ([{"stream": TP}, {"stream": DP}, {"stream": EP}], [10, 10, 10], [ALL_OF_IT] * 3, {}, [(0, 30)] * 3),
        # one that comes later shares from then on
        ([{}, {"stream": TP, "after": [0]}, {"stream": DP}], [5, 10, 10], [NOTHING, ALL_OF_IT, ALL_OF_IT], {},
         [(0, 5), (5, 20), (0, 15)]),
        # a link that is wide enough is not felt
        ([{"stream": TP}, {"stream": DP}], [10, 30], [ALL_OF_IT] * 2, {"capacities": (2.0,)}, [(0, 10), (0, 30)]),
        # who asks for little gets it, and the other has the rest
        ([{"stream": TP}, {"stream": DP}], [10, 10], [Demand(uses=((0, 0.25),)), ALL_OF_IT], {},
         [(0, 10), (0, 13)]),
        # a kernel of ten blocks on ten SMs needs two waves where two SMs are gone, one of memory traffic a quarter more
        ([{"stream": TP}, {"after": []}], [100, 10], [Demand(sms_taken=2), Demand(blocks=10)], {},
         [(0, 100), (0, 20)]),
        ([{"stream": TP}, {}], [100, 40], [Demand(sms_taken=2), Demand(linear=True)], {}, [(0, 100), (0, 50)]),
        # ... and one of eight blocks nothing
        ([{"stream": TP}, {}], [100, 10], [Demand(sms_taken=2), Demand(blocks=8)], {}, [(0, 100), (0, 10)]),
        # when the transfer ends, the rest runs at full rate
        ([{"stream": TP}, {}], [20, 40], [Demand(sms_taken=5), Demand(linear=True)], {}, [(0, 20), (0, 50)]),
        # what waits for a peer takes its SMs already
        ([{"stream": TP, "rendezvous": 0}, {}, {"rank": 1}, {"rank": 1, "stream": TP, "after": [2], "rendezvous": 0}],
         [5, 40, 100, 5], [Demand(sms_taken=5), Demand(linear=True), NOTHING, Demand(sms_taken=5)], {},
         [(100, 105), (0, 80), (0, 100), (100, 105)]),
        # members of a rendezvous advance together
        ([{"stream": TP, "rendezvous": 0}, {"stream": DP}, {"rank": 1, "stream": TP, "rendezvous": 0}],
         [10, 10, 10], [ALL_OF_IT] * 3, {}, [(0, 20), (0, 20), (0, 20)]),
        # ... as long as both have something to do: then the longer one goes on at its own rate
        ([{"stream": TP, "rendezvous": 0}, {"stream": DP}, {"rank": 1, "stream": TP, "rendezvous": 0},
          {"rank": 1, "stream": DP}],
         [36, 0, 11, 11], [NOTHING, NOTHING, ALL_OF_IT, ALL_OF_IT], {}, [(0, 47), (0, 0), (0, 22), (0, 22)]),
        # admission: not before the last of five waves is out
        ([{}, {"stream": TP}], [100, 10], [Demand(last_wave=0.2), NOTHING], {"admission": True},
         [(0, 100), (80, 90)]),
        # ... and then it finds the kernel's blocks in place
        ([{}, {"stream": TP}], [100, 40], [Demand(blocks=50, last_wave=0.2), Demand(sms_taken=5)],
         {"admission": True}, [(0, 100), (80, 120)]),
        # the next kernel starts beside it
        ([{}, {"stream": TP}, {}], [100, 40, 10], [Demand(blocks=50, last_wave=0.2), Demand(sms_taken=5),
          Demand(blocks=10)], {"admission": True}, [(0, 100), (80, 120), (100, 120)]),
        # operations of no duration
        ([{}, {"stream": TP, "after": [0]}, {"after": [1]}], [0, 0, 0], [ALL_OF_IT] * 3, {}, [(0, 0)] * 3),
        ([], [], [], {}, []),
    ],
)  # fmt: skip
def test_when_operations_run(operations, durations, demands, more, expected):
    demands = demands or [NOTHING]
    graph = graph_of(operations)
    sharing = policy(demands, **more)
    if not operations:
        sharing = SharingPolicy(np.empty(0, dtype=np.int64), (NOTHING,))
    assert times(graph, durations, sharing) == expected


@pytest.mark.parametrize(
    ("wanted", "capacity", "shares"),
    [
        ([1, 1], 4, [1, 1]),
        ([2, 2], 2, [0.5, 0.5]),
        ([1, 3], 3, [1, 2 / 3]),
        ([0, 5], 1, [1, 0.2]),
        ([], 1, []),
    ],
)
def test_max_min_fairness(wanted, capacity, shares):
    assert max_min_shares(wanted, capacity) == pytest.approx(shares)


@st.composite
def cases(draw: st.DrawFn, ranks: int = 2):
    """A random graph of one or two ranks on four streams, with rendezvous, and durations."""
    rows: list[dict] = []
    durations: list[int] = []
    meetings = 0
    for _ in range(draw(st.integers(1, 14))):
        together = ranks > 1 and draw(st.integers(0, 4)) == 0
        stream = draw(st.sampled_from([COMPUTE, TP, DP, EP]))
        for rank in range(ranks) if together else [draw(st.integers(0, ranks - 1))]:
            mine = [i for i, row in enumerate(rows) if row["rank"] == rank]
            after = draw(st.lists(st.sampled_from(mine), max_size=2, unique=True)) if mine else []
            row = {"rank": rank, "stream": stream, "after": after}
            rows.append(row | ({"rendezvous": meetings} if together else {}))
            durations.append(draw(st.integers(0, 50)))
        meetings += together
    return graph_of(rows), durations


def demands_of(draw_from: st.DataObject, count: int) -> list[Demand]:
    demand = st.builds(
        Demand,
        sms_taken=st.sampled_from([0, 2, 5]),
        blocks=st.sampled_from([0, 8, 10, 35]),
        linear=st.booleans(),
        last_wave=st.sampled_from([1.0, 0.5, 0.1]),
        uses=st.sampled_from([(), ((0, 1.0),), ((0, 0.4), (1, 0.9)), ((1, 0.3),)]),
    )
    return [draw_from.draw(demand) for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 3), st.booleans())
def test_with_nothing_to_share_it_is_the_longest_path(case, gap, admission):
    graph, durations = case
    sharing = policy([NOTHING] * len(durations), admission=admission)
    assert times(graph, durations, sharing, gap) == naive_times(graph, durations, gap)
    alone = execute_alone(graph, np.array(durations, dtype=np.int64), gap_ns=gap)
    found = execute(graph, np.array(durations, dtype=np.int64), gap_ns=gap, sharing=sharing)
    assert found.wait.tolist() == alone.wait.tolist()
    assert execute(graph, np.array(durations), gap_ns=gap).end.tolist() == alone.end.tolist()


@settings(max_examples=150, deadline=None)
@given(cases(), st.data(), st.booleans())
def test_lags_are_those_of_the_engine_where_nothing_is_shared(case, data, admission):
    graph, durations = case
    lengths = np.array(durations, dtype=np.int64)
    # As a launch: some time after the start of the dependency.
    launched = [data.draw(st.integers(0, 60)) for _ in graph.dependencies]
    lags = np.array(launched, dtype=np.int64) - lengths[graph.dependencies]
    sharing = policy([NOTHING] * len(durations), admission=admission)
    found = execute(graph, lengths, lags=lags, sharing=sharing)
    assert found.end.tolist() == execute_alone(graph, lengths, lags=lags).end.tolist()


def test_a_lag_counts_from_the_start_of_a_slowed_operation():
    """A kernel that is launched 5 ns after the start of another does not wait for that to be slowed."""
    graph = graph_of([{"stream": TP}, {"stream": DP, "after": [0]}, {"stream": EP}])
    sharing = policy([ALL_OF_IT, NOTHING, ALL_OF_IT])
    found = execute(graph, np.array([10, 3, 10]), lags=np.array([-5]), sharing=sharing)
    assert found.end.tolist() == [20, 8, 20]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 3), st.booleans())
def test_what_never_overlaps_is_never_slowed(durations, gap, admission):
    """A chain through all streams, each operation behind the one before."""
    streams = [COMPUTE, TP, DP, EP]
    graph = graph_of({"stream": streams[i % 4], "after": [i - 1] if i else []} for i in range(len(durations)))
    greedy = Demand(sms_taken=5, blocks=35, last_wave=0.1, uses=((0, 1.0),))
    found = times(graph, durations, policy([greedy] * len(durations), admission=admission), gap)
    assert found == naive_times(graph, durations, gap)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data(), st.integers(0, 3), st.booleans())
def test_sharing_only_ever_delays_and_keeps_every_rule(case, data, gap, admission):
    graph, durations = case
    sharing = policy(demands_of(data, len(durations)), capacities=(1.0, 1.0), admission=admission)
    found = times(graph, durations, sharing, gap)
    alone = naive_times(graph, durations, gap)
    lengths = [end - start for start, end in found]
    assert all(a >= b for (pair, at) in zip(found, alone, strict=True) for a, b in zip(pair, at, strict=True))
    assert all(length >= alone_length for length, alone_length in zip(lengths, durations, strict=True))
    # With the lengths that came out, the rules of the engine give the same times, but for admission.
    again = naive_times(graph, lengths, gap)
    if not admission:
        assert again == found
    assert all(b[0] >= a[0] for a, b in zip(again, found, strict=True))
    assert times(graph, durations, sharing, gap) == found


@settings(max_examples=150, deadline=None)
@given(cases(ranks=1))
def test_work_is_conserved(case):
    """Everything fills one link by itself, so the link is busy exactly as long as all transfers together last."""
    graph, durations = case
    found = times(graph, durations, policy([ALL_OF_IT] * len(durations)))
    moments = sorted({moment for pair in found for moment in pair})
    busy = sum(
        after - before
        for before, after in itertools.pairwise(moments)
        if any(start <= before and after <= end for start, end in found)
    )
    # An end is on the next whole nanosecond.
    assert sum(durations) <= busy <= sum(durations) + len(durations)


def fluid_ends(
    graph: OpGraph, durations: list[int], sharing: SharingPolicy
) -> tuple[list[float], list[list[float]]]:
    """Ends by an independent loop without a heap, and of each interval between two events: its length, the rate of
    every operation in it.

    Everything that may run does; all rates are found anew; time goes on to the first end. No admission, no gaps.
    """
    rows = range(len(durations))
    operations = graph.operations
    rank, together = operations.rank, operations.rendezvous
    lane = list(zip(rank.tolist(), operations.stream.tolist(), strict=True))
    left = [float(length) for length in durations]
    begun: list[int] = []
    ended: dict[int, float] = {}
    now, history = 0.0, []
    while len(ended) < len(durations):
        changed = True
        while changed:
            changed = False
            reached = [
                row
                for row in rows
                if row not in begun
                and all(int(source) in ended for source in graph.dependencies_of(row))
                and all(other in ended for other in range(row) if lane[other] == lane[row])
            ]
            for row in reached:
                group = [
                    other for other in rows if together[row] >= 0 and together[other] == together[row]
                ] or [row]
                if all(other in reached for other in group) and row not in begun:
                    begun += group
                    changed = True
            for row in begun:
                if row not in ended and left[row] <= 1e-6:
                    ended[row], changed = now, True
        running = [row for row in begun if row not in ended]
        waiting = [row for row in reached if row not in begun]
        rate = dict.fromkeys(rows, 0.0)
        for device in sorted(set(rank.tolist())):
            own = [row for row in running if rank[row] == device]
            taken = sum(
                sharing.demands[sharing.classes[row]].sms_taken for row in waiting if rank[row] == device
            )
            rate.update(
                zip(own, sharing.rates([int(sharing.classes[row]) for row in own], taken), strict=True)
            )
        for row in running:
            if together[row] >= 0:
                rate[row] = min(rate[other] for other in running if together[other] == together[row])
        if not running:
            break
        step = min(left[row] / rate[row] for row in running)
        history.append([step, *(rate[row] for row in rows)])
        for row in running:
            left[row] -= step * rate[row]
        now += step
    return [ended[row] for row in rows], history


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_random_graphs_run_as_an_independent_loop_says(case, data):
    graph, durations = case
    sharing = policy(demands_of(data, len(durations)), capacities=(1.0, 1.0))
    expected, _ = fluid_ends(graph, durations, sharing)
    found = [end for _, end in times(graph, durations, sharing)]
    # Every end is on the next whole nanosecond, and what follows it begins there.
    assert found == pytest.approx(expected, abs=3 * len(durations))


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_no_work_is_lost_or_made_and_no_link_carries_more_than_it_can(case, data):
    """The rates of the independent loop, which the engine follows: work, capacity, and nothing idle that is wanted."""
    graph, durations = case
    sharing = policy(demands_of(data, len(durations)), capacities=(1.0, 1.0))
    _, history = fluid_ends(graph, durations, sharing)
    demands = [sharing.demands[number] for number in sharing.classes.tolist()]
    done = [sum(length * rates[row] for length, *rates in history) for row in range(len(durations))]
    assert done == pytest.approx(durations, abs=1e-4)
    for length, *rates in history:
        if length == 0:
            continue
        for device in set(graph.operations.rank.tolist()):
            own = [row for row, rate in enumerate(rates) if rate > 0 and graph.operations.rank[row] == device]
            load = [
                sum(rates[row] * dict(demands[row].uses).get(resource, 0.0) for row in own)
                for resource in (0, 1)
            ]
            assert max(load, default=0) <= 1 + 1e-9
            # Who is slowed by anything but SMs and its partners waits for a link that is full.
            taken = sum(demands[row].sms_taken for row in own)
            for row in own:
                alone = sharing.sm_rate(demands[row], taken - demands[row].sms_taken)
                apart = graph.operations.rendezvous[row] < 0
                waits = any(demands[other].sms_taken for other in range(len(durations)))
                if apart and not waits and rates[row] < alone - 1e-9:
                    assert any(load[resource] >= 1 - 1e-9 for resource, _ in demands[row].uses)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_more_capacity_never_makes_a_step_longer(case, data):
    graph, durations = case
    demands = demands_of(data, len(durations))
    ends = [
        max(end for _, end in times(graph, durations, policy(demands, capacities=(width, width))))
        for width in (1.0, 2.0, 100.0)
    ]
    assert ends[0] + len(durations) >= ends[1]
    assert ends[1] + len(durations) >= ends[2]


def test_a_circle_is_told():
    graph = graph_of([{"after": [1]}, {"stream": TP, "after": [0]}])
    with pytest.raises(SimulationError, match="deadlock: 2 of 2 operations"):
        execute(graph, np.array([1, 1]), sharing=policy([NOTHING] * 2))


@pytest.mark.parametrize(
    ("demands", "more", "message"),
    [
        ([Demand(sms_taken=10)], {}, "takes 10 of 10 SMs; one must be left"),
        ([Demand(last_wave=0.0)], {}, "a last wave of 0.0"),
        ([Demand(uses=((1, 1.0),))], {}, "name no resource of 1"),
        ([Demand(uses=((0, -1.0),))], {}, "are negative"),
        ([NOTHING], {"capacities": (0.0,)}, "must be above 0"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(demands, more, message):
    with pytest.raises(ValueError, match=message):
        policy(demands, **more)


def test_classes_and_durations_must_be_those_of_the_graph():
    graph = graph_of([{}, {}])
    with pytest.raises(ValueError, match="1 classes for 2 operations"):
        execute(graph, np.array([1, 1]), sharing=policy([NOTHING]))
    with pytest.raises(ValueError, match="negative duration"):
        execute(graph, np.array([1, -1]), sharing=policy([NOTHING] * 2))


def test_a_hundred_thousand_operations_take_seconds():
    count = 100_000
    compute, transfer = (
        Demand(blocks=200, last_wave=0.5, uses=((0, 0.3),)),
        Demand(sms_taken=2, uses=((0, 0.9),)),
    )
    rows = [
        {"stream": TP if i % 5 == 4 else COMPUTE, "after": [i - 1] if i % 5 == 4 else []}
        for i in range(count)
    ]
    graph = graph_of(rows)
    sharing = policy([transfer if row["stream"] == TP else compute for row in rows], admission=True)
    begin = time.process_time()
    execute(graph, np.full(count, 1000), sharing=sharing)
    assert time.process_time() - begin < 12


@pytest.mark.parametrize(
    ("lasts", "kernel_ns", "transfer", "expected"),
    [
        # a kernel takes the stall longer, be it short or long
        (10, 10.0, 1000, 30),
        (100, 100.0, 1000, 120),
        # ... as often as it is several
        (100, 50.0, 1000, 140),
        # in the part of its time in which something transfers
        (100, 100.0, 60, 110),
        # ... and not if it is no kernel
        (100, 0.0, 1000, 100),
    ],
)
def test_kernels_beside_a_transfer_take_a_fixed_time_longer(lasts, kernel_ns, transfer, expected):
    graph = graph_of([{"stream": TP}, {}])
    demands = [Demand(stall_ns=20.0), Demand(kernel_ns=kernel_ns)]
    assert times(graph, [transfer, lasts], policy(demands)) == [(0, transfer), (0, expected)]
