"""Broken schedules: what the check says of each, and which step it marks."""

from __future__ import annotations

import pytest

from schedules import (
    Schedule,
    ScheduleError,
    build_schedule,
    check_schedule,
    parse_action,
    peak_activations,
    requirements,
    simulate_unit_times,
)


def schedule(*texts: str, stages: int | None = None, microbatches: int = 2, stage_ranks=()) -> Schedule:
    rows = tuple(tuple(parse_action(cell) for cell in text.split()) for text in texts)
    return Schedule("broken", len(rows), stages or len(rows), microbatches, rows, stage_ranks)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
SPLIT = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")


@pytest.mark.parametrize(
    "rows",
    [
        GOOD,
        SPLIT,
        ("0UNSHARD 0F0 0RESHARD 0F1 0UNSHARD 0B0 0B1 0REDUCE_GRAD", GOOD[1]),
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", GOOD[1]),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        ),
    ],
)
def test_a_good_schedule_passes(rows):
    check_schedule(schedule(*rows))


@pytest.mark.parametrize(
    ("rows", "complaint", "mark"),
    [
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "rank 1 lacks 1B1", ">end<"),
        (("0F0 0F1 0B0 0B1", "1B0 1F1 1B1"), "rank 1 lacks 1F0", ">end<"),
        (("0F0 0F1 0I0 0B1", GOOD[1]), "rank 0 lacks 0W0", ">end<"),
        (("0F0 0F1 0B0 0W0 0B1", GOOD[1]), "both 0B0 and 0W0", ">0W0<"),
        (
            ("0F0 0F1 0B0 0B1 0B0", GOOD[1]),
            "rank 0, step 4: 0B0 is there twice (first on rank 0, step 2)",
            ">0B0<",
        ),
        (
            ("0F0 0F1 0B0 0B1 1F1", "1F0 1B0 1B1"),
            "step 4: 1F1 is on the wrong rank: stage 1 lies on rank 1",
            ">1F1<",
        ),
        (("0F0 0F1 0B0 0B1 2F0", GOOD[1]), "2F0 is on stage 2, but there are stages 0 to 1", ">2F0<"),
        (("0F0 0F1 0B0 0B1 0F2", GOOD[1]), "microbatch 2, but there are microbatches 0 to 1", ">0F2<"),
        (
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            ),
            "rank 0, step 3: 0SEND_F1 sends, but its receive 1RECV_F1 is nowhere",
            ">0SEND_F1<",
        ),
        (
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ),
            "rank 0, step 4: 0RECV_B0 receives, but its send 1SEND_B0 is nowhere",
            ">0RECV_B0<",
        ),
        (
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ),
            "nothing carries the input of 0B0: 1SEND_B0 and 0RECV_B0 are missing",
            ">0B0<",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1SEND_F0"),
            "1SEND_F0 has no stage 2 to exchange with",
            ">1SEND_F0<",
        ),
    ],
)
def test_what_is_missing_doubled_or_misplaced_is_named_and_marked(rows, complaint, mark):
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule(*rows))
    assert complaint in str(caught.value)
    assert mark in str(caught.value)


def test_a_deadlock_shows_where_each_rank_stands_and_what_it_waits_for():
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule("0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"))
    assert str(caught.value).splitlines() == [
        "schedule broken: deadlock, 3 of 8 actions can run and then every rank waits:",
        "  rank 0 at step 2 (0B0) waits for 1B0, which is step 3 of rank 1, now at step 1",
        "  rank 1 at step 1 (1B1) waits for 1F1, which comes later on the same rank (step 2): put it first",
        "  step  0    1      2      3",
        "rank 0  0F0  0F1    >0B0<  0B1",
        "rank 1  1F0  >1B1<  1F1    1B0",
    ]


def test_ranks_that_wait_for_each_other_are_a_deadlock():
    crossed = schedule("0F0 2B0 2F0 0B0", "1F0 3F0 3B0 1B0", stages=4, microbatches=1)
    with pytest.raises(
        ScheduleError, match="rank 1 at step 1 \\(3F0\\) waits for 2F0, which is step 2 of rank 0"
    ):
        check_schedule(crossed)


@pytest.mark.parametrize(
    ("limit", "complaint", "mark"),
    [
        (3, "rank 0, step 3: 0F3 makes 4 activations held, the limit is 3 (the rank's peak is 4)", ">0F3<"),
        ((4, 2, 2, 1), "rank 1, step 2: 1F2 makes 3 activations held, the limit is 2", ">1F2<"),
        ((4, 3), "2 memory limits for pp=4 ranks; give one, or one a rank", "4"),
    ],
)
def test_the_step_that_exceeds_the_memory_limit_is_marked(limit, complaint, mark):
    with pytest.raises(ScheduleError) as caught:
        check_schedule(build_schedule("1f1b", 4, 1, 8), memory_limit=limit)
    assert complaint in str(caught.value)
    assert mark in str(caught.value)


def test_a_schedule_within_its_memory_limit_passes():
    check_schedule(build_schedule("1f1b", 4, 1, 8), memory_limit=(4, 3, 2, 1))


def test_a_forward_only_schedule_has_no_backward():
    forwards = build_schedule("forward", 2, 1, 2)
    check_schedule(forwards)
    assert peak_activations(forwards) == (1, 1)
    row = (*forwards.actions[0], parse_action("0B0"))
    with pytest.raises(ScheduleError, match="0B0 is of a backward, but the schedule is forward only"):
        check_schedule(forwards.with_actions((row, forwards.actions[1])))


def test_a_microbatch_of_the_other_direction_is_refused():
    both = build_schedule("dualpipe", 2, 1, 4)
    row = (*both.actions[0], parse_action("0F3"))
    with pytest.raises(
        ScheduleError, match="0F3 is for microbatch 3, but microbatches 0 to 1 pass through stage 0"
    ):
        check_schedule(both.with_actions((row, both.actions[1])))


def test_only_ten_problems_are_spelled_out_and_a_long_grid_shows_the_marked_part():
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule(" ".join(f"0F{m}" for m in range(200)), stages=1, microbatches=200))
    lines = str(caught.value).splitlines()
    assert lines[0] == "schedule broken: 200 problems"
    assert "  and 190 more" in lines
    assert lines[-1].startswith("rank 0  ... ")
    assert lines[-1].endswith("0F199  >end<")
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pp": 0}, "pp=0"),
        ({"stages": 1}, "stages=1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"actions": ()}, "0 rows of actions for pp=2"),
        ({"stage_ranks": (0, 2)}, "must name a rank below pp=2"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(changes, complaint):
    good = {"name": "x", "pp": 2, "stages": 2, "microbatches": 2, "actions": ((), ())}
    with pytest.raises(ScheduleError, match=complaint):
        Schedule(**{**good, **changes})


# --- what comes before ---


@pytest.mark.parametrize(
    ("rows", "action", "needs"),
    [
        (GOOD, "0F0", ""),
        (GOOD, "1F1", "0F1"),
        (GOOD, "1B0", "1F0"),
        (GOOD, "0B0", "0F0 1B0"),
        (SPLIT, "0I1", "0F1 1I1"),
        (SPLIT, "1W1", "1I1"),
        (("0F0 0F1 0B0 0B1", SPLIT[1]), "0B1", "0F1 1I1"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "1F0", "1RECV_F0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "0B0", "0F0 0RECV_B0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "1RECV_F0", "0SEND_F0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "1SEND_B0", "1B0"),
        (GOOD, "0REDUCE_GRAD", "0B0 0B1"),
        (SPLIT, "0REDUCE_GRAD", "0W0 0W1"),
        (GOOD, "0UNSHARD", ""),
        (GOOD, "(1F1;1B0)OVERLAP_F_B", "0F1 1F0"),
        (GOOD, "(1F0;1B0)OVERLAP_F_B", "0F0"),
    ],
)
def test_requirements(rows, action, needs):
    found = requirements(parse_action(action), schedule(*rows))
    assert " ".join(map(str, found)) == needs


# --- unit times ---


def test_starts_and_ends_of_a_schedule_worked_out_by_hand():
    times = simulate_unit_times(schedule(*GOOD), forward=1.0, backward=2.0)
    assert times.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert times.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert times.makespan == 9
    assert times.rank_bubble_fractions == pytest.approx((3 / 9, 3 / 9))


def test_split_backwards_take_half_each_unless_told():
    default = simulate_unit_times(schedule(*SPLIT))
    assert default.ends[1] == (2, 3, 4, 5, 6, 7)
    told = simulate_unit_times(schedule(*SPLIT), backward_input=3.0, backward_weight=0.5)
    assert told.ends[1] == (2, 5, 5.5, 6.5, 9.5, 10)


def test_an_overlapped_action_takes_the_sum_of_its_parts():
    times = simulate_unit_times(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1", stages=1))
    assert times.ends[0] == (1, 4, 6)


def test_activations_are_held_until_the_backward_for_the_weight():
    assert peak_activations(schedule(*SPLIT)) == (2, 1)
    assert peak_activations(schedule("0F0 0I0 0F1 0I1 0W0 0W1", stages=1)) == (2,)
