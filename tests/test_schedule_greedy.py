"""The automatic schedule: what limit it keeps, what it is never worse than, and what it cannot do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    ActionCosts,
    Objective,
    ScheduleError,
    build_schedule,
    check_schedule,
    greedy,
    peak_activations,
    simulate_costs,
)

UNIT = ActionCosts()
HANDMADE = {1: ("1f1b", "zb-h1", "zb-h2"), 2: ("zb-v", "v-half", "v-min")}
COSTS = st.builds(
    ActionCosts, *[st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.3])] * 3, transfer=st.sampled_from([0.0, 0.2])
)
OBJECTIVES = st.sampled_from(Objective)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(0, 12), COSTS)
@settings(max_examples=120, deadline=None)
def test_it_is_complete_and_keeps_its_limit(pp, chunks, microbatches, more, costs):
    limit = chunks + more
    check_schedule(greedy(pp, chunks, microbatches, limit, costs), memory_limit=limit)


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 12),
    COSTS,
    st.sampled_from([0.0, 0.3, 0.43, 1.0]),
    OBJECTIVES,
)
@settings(max_examples=120, deadline=None)
def test_it_keeps_its_limit_where_weight_gradients_need_less(
    pp, chunks, microbatches, more, costs, share, objective
):
    limit = chunks + more
    schedule = greedy(pp, chunks, microbatches, limit, costs, share, objective)
    check_schedule(schedule, memory_limit=limit, weight_memory=share)


@given(st.integers(1, 5), st.sampled_from([1, 2]), st.integers(1, 10), st.integers(0, 10), COSTS, OBJECTIVES)
@settings(max_examples=60, deadline=None)
def test_it_is_never_worse_than_a_schedule_of_the_papers_that_fits(
    pp, chunks, microbatches, more, costs, objective
):
    def length(schedule):
        times = simulate_costs(schedule, costs)
        return times.makespan if objective is Objective.MAKESPAN else times.longest_rank

    limit = chunks + more
    found = length(greedy(pp, chunks, microbatches, limit, costs, objective=objective))
    for name in HANDMADE[chunks]:
        schedule = build_schedule(name, pp, chunks, microbatches)
        if max(peak_activations(schedule)) <= limit:
            assert found <= length(schedule) + 1e-9


@pytest.mark.parametrize("microbatches", [1, 5, 12])
def test_a_limit_of_one_runs_one_microbatch_after_the_other(microbatches):
    times = simulate_costs(greedy(4, 1, microbatches, 1), UNIT)
    # Forward and backward for the input through 4 stages, and one backward for the weight before the next may enter.
    assert times.makespan == 9 * microbatches


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_enough_memory_leaves_no_bubble(pp):
    times = simulate_costs(greedy(pp, 1, 4 * pp, 2 * pp - 1), UNIT)
    assert times.longest_rank == 12 * pp
    assert times.makespan == 12 * pp + pp - 1


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 24), (8, 64)])
def test_weight_gradients_that_need_nothing_leave_no_bubble(pp, microbatches):
    """Short ones too: rank 0 has enough of them to fill all its gaps, and the last rank starts before rank 0 ends."""
    costs = ActionCosts(1.0, 1.0, 0.5)
    times = simulate_costs(greedy(pp, 1, microbatches, 2 * pp, costs, 0.0, Objective.LONGEST_RANK), costs)
    held = simulate_costs(greedy(pp, 1, microbatches, 2 * pp, costs, 1.0, Objective.LONGEST_RANK), costs)
    assert times.longest_rank == pytest.approx(2.5 * microbatches)
    assert held.longest_rank > 2.5 * microbatches


def test_a_short_step_may_make_the_longest_rank_longer():
    """Either objective is met at least as well by the schedule that was searched for it."""
    costs = ActionCosts(18.5, 18.1, 9.3, transfer=0.6)
    spans, ends = {}, {}
    for objective in Objective:
        times = simulate_costs(greedy(8, 1, 24, 16, costs, 0.37, objective), costs)
        spans[objective], ends[objective] = times.longest_rank, times.makespan
    assert spans[Objective.LONGEST_RANK] < spans[Objective.MAKESPAN]
    assert ends[Objective.MAKESPAN] <= ends[Objective.LONGEST_RANK]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_lies_between_nothing_and_all(share):
    with pytest.raises(
        ScheduleError, match=r"weight_memory=.* must be a share of an activation, between 0 and 1"
    ):
        greedy(4, 1, 8, 4, weight_memory=share)


def test_times_of_f_i_and_w_change_the_order():
    costs = ActionCosts(1.0, 1.3, 0.5)
    found = greedy(4, 1, 12, 6, costs)
    assert found.actions != greedy(4, 1, 12, 6).actions
    others = [simulate_costs(build_schedule(name, 4, 1, 12), costs).makespan for name in ("1f1b", "zb-h1")]
    assert simulate_costs(found, costs).makespan < min(others)


def test_uneven_stages_are_taken_into_account():
    uneven = ActionCosts(stage_factors=(1.0, 1.0, 1.0, 1.5))
    found = simulate_costs(greedy(4, 1, 12, 8, uneven), uneven)
    slowest = 12 * 3 * 1.5
    assert slowest <= found.makespan <= slowest + 3 + 3 + 1.5


def test_it_is_deterministic():
    assert greedy(4, 2, 9, 7, ActionCosts(1.0, 1.1, 0.9)) == greedy(4, 2, 9, 7, ActionCosts(1.0, 1.1, 0.9))


def test_large_plans_try_the_rules_on_fewer_microbatches():
    schedule = greedy(32, 1, 160, 32)
    check_schedule(schedule, memory_limit=32)
    assert simulate_costs(schedule, UNIT).makespan <= 3 * 160 + 2 * 31


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((4, 2, 8, 1), "memory limit of 1 activations is below 2"),
        ((4, 1, 8, 0), "allow at least 1"),
        ((4, 1, 8, 4, ActionCosts(stage_factors=(1.0,))), "1 stage factors are given for 4 stages"),
    ],
)
def test_what_cannot_be_asked_of_it(arguments, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        greedy(*arguments)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_are_numbers_of_at_least_zero(value):
    with pytest.raises(ScheduleError, match=r"backward_weight=.* must be a number of at least 0"):
        ActionCosts(1.0, 1.0, value)
