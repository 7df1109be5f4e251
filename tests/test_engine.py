"""The engine: when does every operation run. Judged by a naive longest path, to the nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Stream
from tests.graphs import graph_of, naive_times
from tracesim.engine import execute
from tracesim.errors import SimulationError

COMPUTE, TP, DP, SEND = Stream.COMPUTE, Stream.TP, Stream.DP, Stream.PP_SEND_NEXT


def times(graph: OpGraph, durations, gap_ns: int = 0) -> list[tuple[int, int]]:
    execution = execute(graph, np.array(durations, dtype=np.int64), gap_ns=gap_ns)
    return list(zip(execution.start.tolist(), execution.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("operations", "durations", "gap", "expected"),
    [
        # operations of a stream run one after the other, in the order of their rows
        ([{}, {}, {}], [3, 4, 5], 0, [(0, 3), (3, 7), (7, 12)]),
        # ... with a gap between kernels of a compute stream, and of no other
        ([{}, {}, {"stream": TP}, {"stream": TP}], [3, 4, 5, 6], 2, [(0, 3), (5, 9), (0, 5), (5, 11)]),
        # streams run beside each other until one waits for another
        ([{}, {"stream": TP, "after": [0]}, {}, {"after": [1]}], [3, 9, 4, 1], 0,
         [(0, 3), (3, 12), (3, 7), (12, 13)]),
        # a gap is time the stream needs anyway: it is over when another stream is waited for longer
        ([{}, {"stream": TP, "after": [0]}, {"after": [1]}], [3, 9, 1], 5, [(0, 3), (3, 12), (12, 13)]),
        # an operation may wait for one further down
        ([{"after": [1]}, {"stream": TP}], [1, 5], 0, [(5, 6), (0, 5)]),
        # members of a rendezvous start together, when the last has reached it, and each takes its own time
        ([{}, {"stream": SEND, "after": [0], "rendezvous": 0}, {"rank": 1, "rendezvous": 0}], [7, 2, 4], 0,
         [(0, 7), (7, 9), (7, 11)]),
        # what queues behind a waiting operation waits too
        ([{}, {"stream": SEND, "after": [0], "rendezvous": 0}, {"rank": 1, "rendezvous": 0}, {"rank": 1}],
         [7, 2, 4, 1], 0, [(0, 7), (7, 9), (7, 11), (11, 12)]),
        # operations that take no time
        ([{}, {"after": [0]}, {"stream": TP, "after": [1]}], [0, 0, 0], 0, [(0, 0), (0, 0), (0, 0)]),
        ([], [], 0, []),
    ],
)  # fmt: skip
def test_when_operations_run(operations, durations, gap, expected):
    graph = graph_of(operations)
    assert times(graph, durations, gap) == expected
    assert naive_times(graph, durations, gap) == expected


def test_what_an_operation_waited_for():
    graph = graph_of(
        [
            {},
            {"stream": TP, "after": [0]},
            {"after": [1]},
            {"stream": SEND, "after": [2], "rendezvous": 0},
            {"rank": 1},
            {"rank": 1, "stream": TP, "after": [4], "rendezvous": 0},
        ]
    )
    execution = execute(graph, np.array([3, 9, 1, 5, 2, 5]))
    # The receiver (f) came at 2 and waits for its peer's cause, c, which ends at 13.
    assert execution.waited_for.tolist() == [-1, 0, 1, 2, -1, 2]
    assert execution.wait.tolist() == [0, 0, 0, 0, 0, 11]


# -- random graphs -----------------------------------------------------------------------------------------------

STREAMS = st.sampled_from([COMPUTE, COMPUTE, TP, DP])
LENGTH = st.integers(0, 9)


@st.composite
def programs(draw):
    """Operations that are laid out several times: (stream, rows inside that are waited for, duration)."""
    size = draw(st.integers(1, 5))
    hangs_on_first = draw(st.booleans())
    rows = []
    for row in range(size):
        inner = draw(st.lists(st.integers(0, size - 1).filter(lambda r, row=row: r != row), max_size=2))
        if draw(st.integers(0, 9)) != 0:
            inner = [source for source in inner if source < row]
        if row and hangs_on_first:
            inner.append(0)
        rows.append((draw(STREAMS), inner, draw(LENGTH)))
    return rows


@st.composite
def steps(draw):
    """A graph of several ranks whose parts repeat, with its durations.

    A part is a copy of a program, a segment, or an operation of its own, and operations of their own at the same
    place on several ranks may meet. Most dependencies lead to earlier parts, a few anywhere: those can deadlock.
    """
    known = draw(st.lists(programs(), min_size=1, max_size=3))
    world = draw(st.integers(1, 3))
    meeting = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    operations, durations, segments, place, part = [], [], [], [], []
    for rank in range(world):
        for number, meets in enumerate(meeting):
            base = len(operations)
            if meets:
                operations.append({"rank": rank, "stream": draw(STREAMS), "after": [], "rendezvous": number})
                durations.append(draw(LENGTH))
            else:
                template = draw(st.integers(0, len(known) - 1))
                for stream, inner, length in known[template]:
                    after = [base + row for row in inner]
                    operations.append({"rank": rank, "stream": stream, "after": after})
                    durations.append(length)
                segments.append((base, len(operations), template))
            place += [number] * (len(operations) - base)
            part += [base] * (len(operations) - base)
    last = len(operations) - 1
    for row, source in draw(st.lists(st.tuples(st.integers(0, last), st.integers(0, last)), max_size=6)):
        anywhere = draw(st.integers(0, 9)) == 0
        # Inside a part the dependencies are the program's.
        if part[row] != part[source] and (anywhere or place[source] < place[row]):
            operations[row]["after"].append(source)
    return operations, durations, segments


@settings(max_examples=250, deadline=None)
@given(steps(), st.integers(0, 3))
def test_times_are_the_longest_path(step, gap):
    operations, durations, segments = step
    graph = graph_of(operations, segments)
    expected = naive_times(graph, durations, gap)
    if expected is None:
        with pytest.raises(SimulationError, match="deadlock"):
            execute(graph, np.array(durations), gap_ns=gap)
    else:
        assert times(graph, durations, gap) == expected


@settings(max_examples=80, deadline=None)
@given(steps(), st.integers(0, 3))
def test_a_template_is_a_shortcut_and_changes_nothing(step, gap):
    operations, durations, segments = step
    plain = graph_of(operations, [(begin, end, -1) for begin, end, _ in segments])
    if naive_times(plain, durations, gap) is None:
        return
    shared = graph_of(operations, segments)
    slow, fast = (execute(graph, np.array(durations), gap_ns=gap) for graph in (plain, shared))
    assert slow.start.tolist() == fast.start.tolist()
    assert slow.wait.tolist() == fast.wait.tolist()
    again = execute(shared, np.array(durations), gap_ns=gap)
    assert again.waited_for.tolist() == fast.waited_for.tolist()


@settings(max_examples=80, deadline=None)
@given(steps(), st.integers(0, 3))
def test_what_was_waited_for_ends_when_the_operation_is_ready(step, gap):
    operations, durations, segments = step
    graph = graph_of(operations, segments)
    if naive_times(graph, durations, gap) is None:
        return
    execution = execute(graph, np.array(durations), gap_ns=gap)
    for row, cause in enumerate(execution.waited_for.tolist()):
        start = int(execution.start[row])
        if cause < 0:
            assert start == 0
        else:
            assert start - int(execution.end[cause]) in (0, gap)


def test_equal_segments_with_unequal_durations_are_not_placed_alike():
    operations = [{}, {"stream": TP, "after": [0]}, {"after": [1]}] * 2
    for row in (4, 5):
        operations[row] = {**operations[row], "after": [row - 1]}
    graph = graph_of(operations, [(0, 3, 0), (3, 6, 0)])
    durations = [1, 2, 3, 10, 20, 30]
    assert times(graph, durations) == naive_times(graph, durations)


def test_a_stream_still_busy_when_a_segment_enters_it_delays_what_needs_it():
    """The second copy starts while the collective of the first still runs."""
    program = [{}, {"stream": DP}, {}]
    operations = [{**row, "after": [base] if row else []} for base in (0, 3, 6) for row in program]
    graph = graph_of(operations, [(0, 3, 0), (3, 6, 0), (6, 9, 0)])
    assert times(graph, [1, 10, 1] * 3) == [
        (0, 1), (1, 11), (1, 2),
        (2, 3), (11, 21), (3, 4),
        (4, 5), (21, 31), (5, 6),
    ]  # fmt: skip


def test_a_segment_whose_inside_waits_for_something_that_waits_for_its_beginning():
    """Not a deadlock: the copy is not placed as a whole."""
    operations = [{"stream": TP, "after": [1]}, {}, {"stream": TP, "after": [1]}]
    assert times(graph_of(operations, [(1, 3, 0)]), [5, 1, 2]) == [(1, 6), (0, 1), (6, 8)]


# -- what cannot run ---------------------------------------------------------------------------------------------


def report_of(operations, segments=(), **options) -> str:
    graph = graph_of(operations, segments, **options)
    with pytest.raises(SimulationError) as caught:
        execute(graph, np.ones(len(graph.operations), dtype=np.int64))
    return str(caught.value)


@pytest.mark.parametrize(
    ("operations", "segments", "expected"),
    [
        ([{"after": [1]}, {"stream": TP, "after": [0]}], (), """
deadlock: 2 of 2 operations can never start
  rank 0 compute: a (rank 0, compute) waits for b (rank 0, tp)
  rank 0 tp: b (rank 0, tp) waits for a (rank 0, compute)"""),
        # each rank sends before it receives
        ([{"name": "send_0", "rendezvous": 0}, {"name": "receive_1", "rendezvous": 1},
          {"name": "send_1", "rank": 1, "rendezvous": 1}, {"name": "receive_0", "rank": 1, "rendezvous": 0}], (), """
deadlock: 4 of 4 operations can never start
  rank 0 compute: send_0 (rank 0, compute) waits for receive_0 (rank 1, compute)
  rank 1 compute: send_1 (rank 1, compute) waits for receive_1 (rank 0, compute)"""),
        # only who has not come is waited for
        ([{"rendezvous": 0}, {"rank": 1, "rendezvous": 0},
          {"rank": 2, "after": [3]}, {"rank": 2, "stream": TP, "after": [4]},
          {"rank": 2, "rendezvous": 0}], (), """
deadlock: 5 of 5 operations can never start
  rank 0 compute: a (rank 0, compute) waits for e (rank 2, compute)
  rank 1 compute: b (rank 1, compute) waits for e (rank 2, compute)
  rank 2 compute: c (rank 2, compute) waits for d (rank 2, tp)
  rank 2 tp: d (rank 2, tp) waits for e (rank 2, compute)"""),
        # members of a rendezvous that wait for each other cannot start together
        ([{"rendezvous": 0}, {"stream": TP, "after": [0], "rendezvous": 0}], (), """
deadlock: 2 of 2 operations can never start
  rank 0 compute: a (rank 0, compute) waits for b (rank 0, tp)
  rank 0 tp: b (rank 0, tp) waits for a (rank 0, compute)"""),
        # a segment is stuck where it is stuck, not where it begins
        ([{"layer": 7, "microbatch": 3}, {"stream": TP, "after": [0, 2]}, {"after": [0, 1], "layer": 8}],
         [(0, 3, 0)], """
deadlock: 2 of 3 operations can never start
  rank 0 compute: c layer 8 (rank 0, compute) waits for b (rank 0, tp)
  rank 0 tp: b (rank 0, tp) waits for c layer 8 (rank 0, compute)"""),
    ],
)  # fmt: skip
def test_a_deadlock_names_the_head_of_each_stream_and_what_it_waits_for(operations, segments, expected):
    assert report_of(operations, segments) == expected.strip()


def test_ranks_are_called_by_their_global_number():
    report = report_of([{"rank": 1, "after": [1]}, {"rank": 0, "after": [0]}], ranks=[4, 12])
    assert "rank 12 compute: a (rank 12, compute) waits for b (rank 4, compute)" in report


def test_a_deadlock_of_many_streams_is_cut():
    circle = [{"rank": rank, "after": [(rank + 1) % 200]} for rank in range(200)]
    lines = report_of(circle).splitlines()
    assert len(lines) < 50
    assert lines[-1] == "  ... and 161 more streams"


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        ([1], "1 durations for 2 operations"),
        ([1, 2, 3], "3 durations for 2 operations"),
        ([1, -5], "b microbatch 2 (rank 0, compute) has a negative duration of -5 ns"),
    ],
)
def test_wrong_durations(durations, said):
    with pytest.raises(ValueError, match=r"duration") as caught:
        execute(graph_of([{}, {"microbatch": 2}]), np.array(durations))
    assert said in str(caught.value)
