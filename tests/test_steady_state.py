"""Steps whose ranks do not meet in between: the time of a step is that after which it repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.vocabulary import OpKind, Stream
from tests.dense_scenarios import dense_mapping
from tests.graphs import graph_of
from tracesim import contention, engine
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping
from tracesim.sharing import Demand, SharingPolicy
from tracesim.simulation import iteration_ms, simulate
from tracesim.steady_state import steady_execution

# rank 0 runs a and d, rank 1 b and c, and data goes a -> b, c -> d.
CYCLE = [{}, {"rank": 1, "after": [0]}, {"rank": 1}, {"after": [2]}]


def period(operations, durations) -> int:
    graph = graph_of(operations)
    found = steady_execution(
        graph, lambda starts: engine.execute(graph, np.array(durations), rank_starts=starts)
    )
    assert found.iteration_ns == found.period_ns
    return found.iteration_ns


def period_by_repetition(operations, durations, steps: int = 40) -> float:
    """The step written out many times: ranks go on in order, and nothing else joins two steps."""
    rows = [
        {**operation, "after": [len(operations) * step + source for source in operation.get("after", ())]}
        for step in range(steps)
        for operation in operations
    ]
    graph = graph_of(rows)
    ends = engine.execute(graph, np.tile(np.array(durations), steps)).end
    half = steps // 2
    return (int(ends.max()) - int(ends[: half * len(operations)].max())) / (steps - half)


@pytest.mark.parametrize(
    ("operations", "durations", "expected"),
    [
        # One rank: a step follows the other.
        ([{}, {}], [3, 4], 7),
        # Rank 0 waits for rank 1 in each step: as long as the step is.
        (CYCLE, [3, 2, 2, 1], 3 + 2 + 2 + 1),
        # A rank that nothing comes back from: the slowest of both, though the step takes 3 + 5.
        ([{}, {"rank": 1, "after": [0]}], [3, 5], 5),
        ([{}, {"rank": 1, "after": [0]}], [5, 3], 5),
        # A parallelogram: both ranks work without a pause, rank 1 a little later.
        ([{}, {}, {"rank": 1, "after": [0]}, {"rank": 1}], [2, 2, 2, 2], 4),
    ],
)
def test_the_period_is_that_of_the_slowest_rank_or_circle(operations, durations, expected):
    assert period(operations, durations) == expected
    assert period_by_repetition(operations, durations) == pytest.approx(expected)


@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6), st.lists(st.integers(0, 4), min_size=3, max_size=3)
)
@settings(max_examples=60, deadline=None)
def test_it_equals_the_step_written_out_many_times(durations, sources):
    """Three ranks with two operations each; the second waits for the first operation of any rank."""
    operations = [{"rank": rank} for rank in range(3)]
    operations += [{"rank": rank, "after": [sources[rank] % 3]} for rank in range(3)]
    assert period(operations, durations) == pytest.approx(
        period_by_repetition(operations, durations), rel=0.02
    )


def test_ranks_that_begin_later_run_the_same_later():
    operations = [*CYCLE, {"rank": 1, "stream": Stream.PP_SEND_NEXT, "rendezvous": 0}]
    operations += [{"stream": Stream.PP_RECEIVE_PREVIOUS, "rendezvous": 0}]
    graph, durations = graph_of(operations), np.array([3, 2, 4, 5, 6, 6])
    sharing = SharingPolicy(np.zeros(6, dtype=np.int64), (Demand(),))
    for run in (engine.execute, lambda *given, **named: contention.execute(*given, sharing=sharing, **named)):
        plain = run(graph, durations)
        later = run(graph, durations, rank_starts=[10, 10])
        assert (later.end == plain.end + 10).all()
        apart = run(graph, durations, rank_starts=[0, 4])
        # b waits for rank 1 to begin, the transfer too.
        assert apart.start.tolist() == [0, 4, 6, 10, 4, 4]
    with pytest.raises(ValueError, match="1 starts for 2 ranks"):
        engine.execute(graph, durations, rank_starts=[0])


def scenario_with(schedule: str, post_validation: bool, **changes):
    changes = {"parallel__pp": 4, "training__num_microbatches": 16, "model__layers": 8, **changes}
    return load_scenario(
        dense_mapping(
            schedule=schedule, training__post_validation=post_validation, overlap__p2p=True, **changes
        )
    )


def test_a_staggered_schedule_repeats_before_its_last_rank_is_done():
    together, overlapped = (simulate(scenario_with("zb-h2", flag)) for flag in (False, True))
    graph, execution = overlapped.graph, overlapped.execution
    spans = []
    for rank in range(4):
        own = graph.operations.rank == rank
        compute = own & (graph.operations.stream == Stream.COMPUTE)
        spans.append(int(execution.end[own].max()) - int(execution.start[compute].min()))
    # The longest rank goes on without a pause.
    assert execution.iteration_ns == pytest.approx(max(spans), rel=1e-3)
    assert execution.iteration_ns < together.execution.iteration_ns < int(execution.end.max()) * 1.01
    begins = [int(execution.start[graph.operations.rank == rank].min()) for rank in range(4)]
    assert min(begins) == 0 < max(begins)


def test_a_schedule_whose_first_rank_works_all_the_time_gains_nothing_but_the_norm():
    together, overlapped = (iteration_ms(scenario_with("1f1b", flag)) for flag in (False, True))
    assert overlapped == pytest.approx(together, rel=0.02)
    assert overlapped <= together


def test_no_collective_joins_the_stages():
    scenario = scenario_with("zb-h1", True, parallel__dp=2)
    graph = lower_scenario(scenario)
    operations = graph.operations
    norms = [
        graph.groups[operations.group[row]].ranks
        for row in np.flatnonzero(operations.kind == OpKind.COLLECTIVE)
        if graph.strings[operations.name[row]] == "gradient_norm_all_reduce"
    ]
    stages = [
        tuple(
            rank
            for rank in range(scenario.parallel.world_size)
            if scenario.parallel.coordinates(rank)["pp"] == stage
        )
        for stage in range(4)
    ]
    assert [tuple(group) for group in norms] == stages
    alone = lower_scenario(scenario_with("zb-h1", True, parallel__tp=1, parallel__dp=1))
    assert "gradient_norm_all_reduce" not in alone.strings


def test_a_shared_embedding_still_joins_first_and_last_stage():
    apart, tied = (
        simulate(scenario_with("zb-h2", True, model__tied_embeddings=flag)).execution
        for flag in (False, True)
    )
    assert apart.iteration_ns < tied.iteration_ns


def test_the_parts_of_every_stage_add_up_to_the_period():
    report, together = (simulate(scenario_with("zb-h2", flag)).report for flag in (True, False))
    assert report["iteration_time_ms"] == iteration_ms(scenario_with("zb-h2", True))
    for stage in report["stages"]:
        exposed = sum(stage["exposed_communication_ms"].values())
        total = stage["compute_ms"] + exposed + stage["idle_ms"] + stage["optimizer_ms"]
        assert total == pytest.approx(report["iteration_time_ms"])
    # Of each rank from its own first pass to its last, without the time in which the pipeline fills before it.
    assert 0 <= report["pipeline_bubble_fraction"] < together["pipeline_bubble_fraction"]


def test_contention_finds_a_period_too():
    execution = simulate(scenario_with("zb-h2", True, overlap__contention=True)).execution
    without = simulate(scenario_with("zb-h2", True)).execution
    assert without.iteration_ns <= execution.iteration_ns < 1.2 * without.iteration_ns


def test_it_is_read_and_written():
    scenario = scenario_with("zb-h1", True)
    assert scenario_to_mapping(scenario)["training"]["post_validation"] is True
    assert load_scenario(scenario_to_mapping(scenario)) == scenario
