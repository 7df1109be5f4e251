"""Bubbles and activations against the closed forms of the papers, with equal stages and free communication.

A bubble is what a rank idles: within the step (``makespan``), or, where ranks need not start and end together, between
its own first and last action (``longest_rank``), as the zero-bubble papers count it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from schedule_plans import plans

from schedules import (
    ActionCosts,
    Schedule,
    add_communication,
    build_schedule,
    peak_activations,
    simulate_costs,
    simulate_unit_times,
)

UNIT = ActionCosts(1.0, 1.0, 1.0)
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8, 16)]
SOME_PP = (1, 2, 3, 4, 5, 6, 8, 12)


def own_bubble(schedule: Schedule, costs: ActionCosts = UNIT) -> float:
    """Longest rank less its work; every rank has the same work here."""
    times = simulate_costs(schedule, costs)
    return times.longest_rank - max(times.rank_busy)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, pp, microbatches):
    times = simulate_unit_times(build_schedule(name, pp, 1, microbatches))
    assert times.bubble_fraction == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert times.makespan == pytest.approx(3 * (microbatches + pp - 1))


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches"), [(2, 2, 2), (2, 4, 8), (4, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 16)]
)
def test_bubble_of_interleaved_and_looped(name, pp, chunks, microbatches, backward):
    times = simulate_unit_times(build_schedule(name, pp, chunks, microbatches), backward=backward)
    assert times.bubble_fraction == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_microbatches_in_flight(pp, microbatches):
    in_flight = peak_activations(build_schedule("1f1b", pp, 1, microbatches))
    assert in_flight == tuple(min(pp - rank, microbatches) for rank in range(pp))
    assert peak_activations(build_schedule("gpipe", pp, 1, microbatches)) == (microbatches,) * pp


@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches", "group"),
    [(4, 2, 8, 4), (4, 2, 4, 4), (4, 3, 16, 6), (2, 2, 5, 3), (8, 4, 8, 8)],
)
@pytest.mark.parametrize(("name", "more"), [("interleaved-1f1b", 1), ("1f1b-overlap", 2)])
def test_interleaved_holds_a_warm_up_and_one_more(name, more, pp, chunks, microbatches, group):
    in_flight = peak_activations(build_schedule(name, pp, chunks, microbatches, group))
    assert in_flight == tuple(
        min((pp - rank - 1) * 2 + (chunks - 1) * group + more, chunks * microbatches) for rank in range(pp)
    )


@pytest.mark.parametrize("pp", SOME_PP)
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_forward_only_takes_a_ramp_and_the_forwards(pp, waves):
    times = simulate_unit_times(build_schedule("forward", pp, 2, waves * pp))
    assert times.makespan == 2 * waves * pp + pp - 1


# --- zero bubble (arXiv:2401.10241, table 2; section 6) ---


@pytest.mark.parametrize("pp", SOME_PP)
@pytest.mark.parametrize("costs", [UNIT, ActionCosts(1.0, 1.0, 0.7), ActionCosts(1.2, 1.0, 1.0)])
def test_zb_h1_has_a_bubble_of_f_plus_i_minus_w_at_the_memory_of_1f1b(pp, costs):
    schedule = build_schedule("zb-h1", pp, 1, 3 * pp)
    expected = (pp - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
    assert own_bubble(schedule, costs) == pytest.approx(expected)
    assert peak_activations(schedule) == (pp,) * pp


@pytest.mark.parametrize("pp", SOME_PP)
@pytest.mark.parametrize("more", [0, 1, 7])
def test_zb_h2_has_no_bubble_with_enough_microbatches(pp, more):
    schedule = build_schedule("zb-h2", pp, 1, 2 * pp - 1 + more)
    assert own_bubble(schedule) == 0
    assert peak_activations(schedule) == (2 * pp - 1,) * pp


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zb_h2_has_a_bubble_of_f_plus_i_minus_2_w(pp):
    costs = ActionCosts(1.0, 1.0, 0.75)
    schedule = build_schedule("zb-h2", pp, 1, 4 * pp)
    assert own_bubble(schedule, costs) == pytest.approx((pp - 1) * 0.5)


@pytest.mark.parametrize("pp", SOME_PP)
@pytest.mark.parametrize("more", [0, 1, 7])
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(pp, more):
    schedule = build_schedule("zb-v", pp, 2, 2 * pp - 1 + more)
    assert own_bubble(schedule) == 0
    assert peak_activations(schedule) == (2 * pp,) * pp


# --- controllable memory (arXiv:2405.15362, table 3): about p / 2 and 2 p / 3 of 1F1B's bubble of 6 (p - 1) here ---


@pytest.mark.parametrize("pp", SOME_PP)
def test_v_half_holds_half_and_idles_half(pp):
    schedule = build_schedule("v-half", pp, 2, 2 * pp + 3)
    bubble = own_bubble(schedule)
    assert bubble == (max(3 * pp - 4, 0) if pp % 2 else 3 * pp - 3)
    assert bubble <= 3 * (pp - 1)
    assert max(peak_activations(schedule)) == 2 * ((pp + 2) // 2)


@pytest.mark.parametrize("pp", SOME_PP)
def test_v_min_holds_a_third_and_idles_two_thirds(pp):
    schedule = build_schedule("v-min", pp, 2, 2 * pp + 3)
    bubble = own_bubble(schedule)
    assert bubble == (4 * pp - 3 if pp % 3 == 0 else max(4 * pp - 5, 0))
    assert bubble < 4 * pp
    assert max(peak_activations(schedule)) == 2 * ((pp + 4) // 3)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_more_microbatches_add_work_but_no_bubble(name, pp):
    bubbles = {own_bubble(build_schedule(name, pp, 2, m)) for m in (2 * pp, 3 * pp, 8 * pp)}
    assert len(bubbles) == 1


# --- DualPipe (arXiv:2412.19437, table 2) ---


@pytest.mark.parametrize("pair", [3.0, 2.5, 2.0])
@pytest.mark.parametrize(
    ("name", "pp", "half", "chunks"),
    [(n, p, p // 2, 1) for n in ("dualpipe",) for p in (2, 4, 6, 8, 16)]
    + [("dualpipev", p, p, 2) for p in (1, 2, 3, 4, 8)],
)
@pytest.mark.parametrize("more", [0, 2, 8])
def test_dualpipe_has_the_bubble_of_its_report(name, pp, half, chunks, more, pair):
    """(PP / 2 - 1) (F&B + B - 3 W) on the rank that idles longest, half of PP for the cut one; PP + 1 activations."""
    costs = ActionCosts(1.0, 1.0, 1.0, overlapped=pair)
    schedule = build_schedule(name, pp, chunks, 2 * pp + more)
    times = simulate_costs(schedule, costs)
    assert times.makespan - min(times.rank_busy) == pytest.approx((half - 1) * (pair + 2 - 3))
    assert peak_activations(schedule) == (2 * half + 1,) * pp


# --- for all of them ---


@given(plans())
@settings(max_examples=60, deadline=None)
def test_free_communication_costs_nothing(plan):
    schedule = build_schedule(*plan)
    assert (
        simulate_costs(add_communication(schedule), UNIT).makespan == simulate_costs(schedule, UNIT).makespan
    )


@given(plans())
@settings(max_examples=60, deadline=None)
def test_no_schedule_beats_its_work_and_the_way_through_the_pipeline(plan):
    _, pp, chunks, microbatches, _ = plan
    schedule = build_schedule(*plan)
    times = simulate_costs(schedule, UNIT)
    actions = 1 if schedule.forward_only else 3
    assert sum(times.rank_busy) == actions * pp * chunks * microbatches
    assert times.makespan >= max(times.rank_busy)
    assert times.makespan >= (1 if schedule.forward_only else 2) * pp * chunks


def test_a_slow_stage_sets_the_pace():
    times = simulate_costs(
        build_schedule("1f1b", 4, 1, 16), ActionCosts(1.0, 1.0, 1.0, stage_factors=(1.0, 1.0, 2.0, 1.0))
    )
    assert times.rank_busy == (48, 48, 96, 48)
    # Two forwards to reach it, a unit until its first backward arrives, all of its work, and two backwards to leave it.
    assert times.makespan == 2 + 1 + 96 + 4
