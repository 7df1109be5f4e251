"""Matching of communication across ranks, clocks, waiting and transfer, stragglers, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, TrackRole
from tests.executed import executed_graphs
from tests.timelines import timeline_of
from tracesim.analysis import analyze, describe
from tracesim.analysis.clocks import estimate_offsets
from tracesim.analysis.matching import METHODS, match_communication
from tracesim.analysis.transfers import bandwidths, bus_factor, split_transfers, stragglers

REDUCE, GATHER, SEND, RECEIVE, TO_ALL = (
    Communication.ALL_REDUCE,
    Communication.ALL_GATHER,
    Communication.SEND,
    Communication.RECEIVE,
    Communication.ALL_TO_ALL,
)
WORLD = CommunicationGroup("world", (), 0)


def ranks_of(
    ranks: Sequence[Sequence[tuple]],
    groups=(WORLD,),
    flows=(),
    group: int = 0,
    streams: Sequence[int] | None = None,
) -> Timeline:
    """One communication stream a rank with (start, end, transfer, bytes) in microseconds, on group 0 by default.

    A fifth entry is the group, a sixth the sequence number, a seventh the rank at the other end.
    """
    rows = []
    for track, listed in enumerate(ranks):
        for start, end, what, size, *own in listed:
            is_p2p = what in (SEND, RECEIVE)
            rows.append(
                {
                    "track": track,
                    "start": start * 1000,
                    "duration": (end - start) * 1000,
                    "name": "nccl",
                    "kind": OpKind.P2P if is_p2p else OpKind.COLLECTIVE,
                    "communication": what,
                    "communication_bytes": size,
                    "group": own[0] if own else group,
                    "sequence": own[1] if len(own) > 1 else -1,
                    "peer": own[2] if len(own) > 2 else -1,
                }
            )
    timeline = timeline_of(
        rows,
        [(rank, TrackRole.DEVICE, "stream") for rank in range(len(ranks))],
        ranks=[{"rank": rank} for rank in range(len(ranks))],
        flows=flows,
        groups=groups,
    )
    number = range(len(ranks)) if streams is None else streams
    return Timeline(
        **{**vars(timeline), "tracks": timeline.tracks.with_columns(stream=np.array(list(number)))}
    )


def operations(timeline: Timeline) -> list[list[int]]:
    """Rows of each operation, in order."""
    matches = match_communication(timeline)
    return [matches.row[matches.operation == i].tolist() for i in range(len(matches.method))]


TWO = [(0, 10, REDUCE, 8), (20, 30, GATHER, 16)]
MATCHING = [
    ("same order", ranks_of([TWO, [(5, 10, REDUCE, 8), (25, 31, GATHER, 16)]]), [[0, 2], [1, 3]], "order"),
    ("aligned from the end", ranks_of([TWO, [(25, 31, GATHER, 16)]]), [[1, 2]], "order from the end"),
    ("each group has an order of its own",
     ranks_of([[(0, 9, REDUCE, 8, 0), (10, 19, REDUCE, 4, 1)], [(0, 8, REDUCE, 4, 1), (10, 11, REDUCE, 8, 0)]],
              groups=(WORLD, CommunicationGroup("other"))), [[0, 3], [1, 2]], "order"),
    ("without groups each stream counts", ranks_of([TWO, TWO], group=-1, streams=[5, 5]), [[0, 2], [1, 3]], "order"),
    ("without groups and streams all together", ranks_of([TWO, TWO], group=-1), [[0, 2], [1, 3]], "order"),
    ("orders that contradict each other are matched by their ends",
     ranks_of([[(0, 10, REDUCE, 8), (20, 30, GATHER, 8), (40, 50, REDUCE, 8)],
               [(0, 10, REDUCE, 8), (40, 51, REDUCE, 8), (60, 70, GATHER, 8)]]), [[0, 3], [2, 4], [1, 5]],
     "end time"),
    ("all-to-all may differ in size by rank", ranks_of([[(0, 9, TO_ALL, 8)], [(0, 9, TO_ALL, 24)]]), [[0, 1]], "order"),
    ("sequence numbers say which, however many came before",
     ranks_of([[(0, 10, REDUCE, 8, 0, 4), (20, 30, REDUCE, 8, 0, 5)],
               [(0, 9, REDUCE, 8, 0, 5), (20, 29, REDUCE, 8, 0, 6)]]),
     [[1, 2]], "sequence number"),
    ("the calls of a coalesced collective share a number",
     ranks_of([[(0, 9, REDUCE, 8, 0, 4), (10, 19, REDUCE, 4, 0, 4)],
               [(5, 9, REDUCE, 8, 0, 4), (10, 19, REDUCE, 4, 0, 4)]]),
     [[0, 2], [1, 3]], "sequence number"),
    ("groups number their operations each for itself",
     ranks_of([[(0, 9, REDUCE, 8, 0, 1), (10, 19, REDUCE, 4, 1, 1)],
               [(0, 8, REDUCE, 4, 1, 1), (10, 11, REDUCE, 8, 0, 1)]],
              groups=(WORLD, CommunicationGroup("other"))), [[0, 3], [1, 2]], "sequence number"),
    ("numbers of one rank only do not help",
     ranks_of([[(0, 9, REDUCE, 8, 0, 4)], [(0, 8, REDUCE, 8)]]), [[0, 1]], "order"),
    ("numbers that contradict what is done do not count",
     ranks_of([[(0, 9, REDUCE, 8, 0, 4), (10, 19, GATHER, 4, 0, 5)],
               [(0, 8, REDUCE, 8, 0, 5), (10, 18, GATHER, 4, 0, 4)]]),
     [[0, 2], [1, 3]], "order"),
    ("sends and receives that name each other pair in order, though other ends are nearer",
     ranks_of([[(0, 9, SEND, 8, 0, -1, 1), (10, 19, SEND, 8, 0, -1, 1)],
               [(10, 19, RECEIVE, 8, 0, -1, 0), (30, 39, RECEIVE, 8, 0, -1, 0)],
               [(0, 9, RECEIVE, 8, 0, -1, 3)]]), [[0, 2], [1, 3]], "order"),
    ("a group of two says who is at the other end",
     ranks_of([[(0, 9, SEND, 8), (10, 19, SEND, 8)], [(10, 19, RECEIVE, 8), (30, 39, RECEIVE, 8)]],
              groups=(CommunicationGroup("pp", (0, 1), 2),)), [[0, 2], [1, 3]], "order"),
    ("a receive that began before the trace of its sender",
     ranks_of([[(10, 19, SEND, 8, 0, -1, 1)], [(0, 3, RECEIVE, 8, 0, -1, 0), (4, 19, RECEIVE, 8, 0, -1, 0)]]),
     [[0, 2]], "order from the end"),
    ("sizes that contradict the order leave it to the ends",
     ranks_of([[(0, 9, SEND, 8, 0, -1, 1), (10, 19, SEND, 4, 0, -1, 1)],
               [(0, 9, RECEIVE, 8, 0, -1, 0), (10, 15, RECEIVE, 2, 0, -1, 0)]]), [[0, 2]], "end time"),
    ("flows say it", ranks_of([TWO, TWO], flows=[(0, 3, FlowKind.COLLECTIVE), (1, 2, FlowKind.COLLECTIVE)]),
     [[0, 3], [1, 2]], "flow"),
    ("a chain of flows is one operation",
     ranks_of([TWO[:1], TWO[:1], TWO[:1]], flows=[(0, 1, FlowKind.COLLECTIVE), (2, 1, FlowKind.COLLECTIVE)]),
     [[0, 1, 2]], "flow"),
    ("a send and the receive that ends with it",
     ranks_of([[(0, 10, SEND, 8), (20, 50, RECEIVE, 4)], [(4, 10, RECEIVE, 8), (40, 51, SEND, 4)]]),
     [[0, 2], [1, 3]], "end time"),
    ("sends of other sizes do not pair", ranks_of([[(0, 10, SEND, 8)], [(4, 10, RECEIVE, 4)]]), [], None),
    ("one rank alone", ranks_of([TWO]), [], None),
    ("nothing", ranks_of([[], []]), [], None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "timeline", "expected", "method"), MATCHING, ids=[row[0] for row in MATCHING]
)
def test_which_slices_are_one_operation(what, timeline, expected, method):
    found = operations(timeline)
    assert sorted(found) == sorted(expected)
    assert {METHODS[m] for m in match_communication(timeline).method} == ({method} if method else set())


@pytest.mark.parametrize(
    ("timeline", "unmatched"),
    [
        (ranks_of([TWO, TWO[1:]]), {"before the first on all ranks": 1}),
        (ranks_of([TWO, []]), {"on one rank only": 2}),
        (ranks_of([[(0, 9, REDUCE, 8, 0, 1), (20, 29, REDUCE, 8, 0, 2)], [(20, 29, REDUCE, 8, 0, 2)]]),
         {"sequence number on one rank only": 1}),
        (ranks_of([TWO[:1]] * 4, groups=(CommunicationGroup("tp", (), 2),)),
         {"several groups of one name, members not known": 4}),
        (ranks_of([[(0, 10, SEND, 8)], []]), {"no end near it on another rank": 1}),
        (ranks_of([[(0, 10, SEND, 8, 0, -1, 7)], []]), {"sent to or received from a rank that is not in the trace": 1}),
    ],
)  # fmt: skip
def test_what_is_left_alone_is_counted(timeline, unmatched):
    assert dict(match_communication(timeline).unmatched) == unmatched


def test_wait_is_up_to_the_last_arrival_and_transfer_the_rest():
    timeline = ranks_of([[(0, 100, REDUCE, 8)], [(60, 101, REDUCE, 8)], [(90, 99, REDUCE, 8)]])
    found = split_transfers(timeline, match_communication(timeline))
    assert found.wait.tolist() == [90_000, 30_000, 0]
    assert found.transfer.tolist() == [10_000, 11_000, 9_000]
    assert (found.delay.tolist(), found.end_spread.tolist(), found.transfer_time.tolist()) == (
        [30_000],
        [2_000],
        [9_000],
    )
    assert found.matches.row[found.last_member].tolist() == [2]


def test_a_member_that_ends_before_the_last_arrives_waits_no_longer_than_it_runs():
    """Ends cannot lie before the last arrival on one clock; on two they may."""
    timeline = ranks_of([[(0, 50, REDUCE, 8)], [(60, 70, REDUCE, 8)]])
    found = split_transfers(timeline, match_communication(timeline))
    assert found.wait.tolist() == [50_000, 0]
    assert found.transfer.tolist() == [0, 10_000]


def test_who_is_late_how_often_and_what_it_costs():
    timeline = ranks_of(
        [
            [(0, 30, REDUCE, 8), (40, 60, REDUCE, 8)],
            [(10, 30, REDUCE, 8), (50, 60, REDUCE, 8)],
            [(25, 30, REDUCE, 8), (41, 60, REDUCE, 8)],
        ]
    )
    found = stragglers(timeline, split_transfers(timeline, match_communication(timeline)))
    assert [(s.rank, s.operations, s.last) for s in found] == [(0, 2, 0), (1, 2, 1), (2, 2, 1)]
    # rank 2 comes 15 us after rank 1, for which ranks 0 and 1 wait 25 + 15 us
    assert (found[2].caused_wait, found[2].delay, found[2].waited) == (40_000, 15_000, 9_000)
    assert (found[1].caused_wait, found[1].delay) == (10_000 + 9_000, 9_000)
    assert (found[0].waited, found[0].median_wait) == (25_000 + 10_000, 17_500)


def test_nobody_is_late_where_all_arrive_together():
    timeline = ranks_of([TWO, TWO])
    found = stragglers(timeline, split_transfers(timeline, match_communication(timeline)))
    assert [s.last for s in found] == [0, 0]


@pytest.mark.parametrize(
    ("what", "size", "factor"),
    [
        (REDUCE, 8, 1.75), (GATHER, 8, 0.875), (Communication.REDUCE_SCATTER, 4, 0.75), (TO_ALL, 2, 0.5),
        (Communication.BROADCAST, 8, 1), (SEND, 2, 1), (REDUCE, 1, 0), (REDUCE, 0, 2),
    ],
)  # fmt: skip
def test_bus_factors(what, size, factor):
    assert bus_factor(what, size) == factor


def test_bandwidth_is_of_the_transfer_and_not_of_the_waiting():
    slices = [(0, 100, REDUCE, 10_000_000)], [(60, 100, REDUCE, 10_000_000)]
    timeline = ranks_of(slices)
    (found,) = bandwidths(timeline, split_transfers(timeline, match_communication(timeline)))
    # 10 MB in 40 us are 250 GB/s; an all-reduce of two moves each byte once over the bus
    assert (found.transfer, found.algorithm, found.bus, found.matched) == (40_000, 250.0, 250.0, True)
    assert (found.members, found.count, found.message) == (2, 1, 10_000_000)


def test_bandwidth_of_one_rank_is_of_the_whole_slice_and_says_so():
    timeline = ranks_of([[(0, 100, GATHER, 10_000_000)]], groups=(CommunicationGroup("dp", (), 4),))
    (found,) = bandwidths(timeline, split_transfers(timeline, match_communication(timeline)))
    assert (found.algorithm, found.bus, found.matched, found.members) == (100.0, 75.0, False, 4)


def test_sizes_that_are_not_known_have_no_bandwidth():
    timeline = ranks_of([[(0, 100, GATHER, 0)], [(0, 0, GATHER, 10)]])
    assert bandwidths(timeline, split_transfers(timeline, match_communication(timeline))) == []


def test_a_clock_that_is_ahead_is_found_and_taken_out():
    """Rank 1 shows everything 500 us later; rank 2 shares operations with rank 1 only."""
    groups = (CommunicationGroup("a", (0, 1), 2), CommunicationGroup("b", (1, 2), 2))
    first = [(100 * i, 100 * i + 10, REDUCE, 8, 0) for i in range(1, 6)]
    second = [(start + 505, end + 500, what, size, 0) for start, end, what, size, _ in first]
    shared = [(1000 + 100 * i, 1010 + 100 * i, REDUCE, 4, 1) for i in range(1, 6)]
    second += [(start + 500, end + 500, what, size, 1) for start, end, what, size, _ in shared]
    timeline = ranks_of([first, second, shared], groups=groups)
    offsets = estimate_offsets(timeline, match_communication(timeline))
    assert offsets.offset.tolist() == [0, 500_000, 0]
    assert offsets.corrected.tolist() == [False, True, False]
    result = describe(analyze(timeline))
    assert [rank["clock_corrected"] for rank in result["ranks"]] == [False, True, False]
    # with the clock put right rank 1 arrives 5 us after rank 0, each time
    assert [(s["last"], s["waited_ns"]) for s in result["stragglers"]] == [(0, 25_000), (5, 0), (0, 0)]
    assert any(finding["what"] == "clock_offset" for finding in result["findings"])


@pytest.mark.parametrize("late", [[10, 10, 12], [3000, -2000, 500, -900]])
def test_small_or_uncertain_offsets_are_left_alone(late):
    base = [(10_000 * i, 10_000 * i + 10, REDUCE, 8) for i in range(1, len(late) + 1)]
    other = [(s + late[i], e + late[i], w, b) for i, (s, e, w, b) in enumerate(base)]
    timeline = ranks_of([base, other])
    offsets = estimate_offsets(timeline, match_communication(timeline))
    assert not offsets.corrected.any()
    assert analyze(timeline).timeline is timeline


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_waits_recover_the_arrivals_they_were_made_from(arrivals, transfer):
    """Operations made from arrivals: all members end when the last has arrived and the data moved."""
    ranks: list[list[tuple]] = [[], [], []]
    origin, expected = 0, []
    for moments in arrivals:
        end = origin + max(moments) + transfer
        for rank, moment in enumerate(moments):
            ranks[rank].append((origin + moment, end, REDUCE, 8))
        expected.append([(max(moments) - moment) * 1000 for moment in moments])
        origin = end + 1
    timeline = ranks_of(ranks)
    found = split_transfers(timeline, match_communication(timeline))
    assert found.wait.reshape(-1, 3).tolist() == expected
    assert set(found.transfer.tolist()) == {transfer * 1000}
    late = stragglers(timeline, found)
    assert sum(s.waited for s in late) == sum(sum(waits) for waits in expected)
    assert sum(s.caused_wait for s in late) == sum(
        sum(waits)
        for waits, moments in zip(expected, arrivals, strict=True)
        if sorted(moments)[-1] > sorted(moments)[-2]
    )


@settings(max_examples=60, deadline=None)
@given(executed_graphs())
def test_simulated_collectives_are_matched_by_their_flows_and_wait_before_they_start(case):
    timeline, _ = case
    matches = match_communication(timeline)
    found = split_transfers(timeline, matches)
    communicates = np.flatnonzero(timeline.slices.kind == OpKind.COLLECTIVE)
    assert sorted(matches.row.tolist()) == communicates.tolist()
    assert set(matches.method.tolist()) <= {METHODS.index("flow")}
    assert not found.wait_inside.any()
    assert found.wait.tolist() == timeline.slices.wait[matches.row].tolist()
