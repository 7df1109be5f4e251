"""Random damage to good schedules: what is missing, doubled or out of order is refused, and the step is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import plans

from schedules import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    add_communication,
    build_schedule,
    check_schedule,
)

SMALL = plans().filter(lambda plan: plan[1] * plan[2] * plan[3] <= 60)


def damaged(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return schedule.with_actions(tuple(rows))


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A schedule, with or without its transfers, and a step of a rank."""
    schedule = build_schedule(*draw(SMALL))
    if draw(st.booleans()):
        schedule = add_communication(schedule)
    rank = draw(st.integers(0, schedule.pp - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.actions[rank]) - 1))


def complaint(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    assert any(">" in line for line in str(caught.value).splitlines())
    return str(caught.value)


@given(places())
@settings(max_examples=120, deadline=None)
def test_a_missing_action_is_named(place):
    schedule, rank, step = place
    row = list(schedule.actions[rank])
    removed = row.pop(step)
    message = complaint(damaged(schedule, rank, row))
    assert all(str(part) in message for part in removed.parts)


@given(places(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_doubled_action_is_named_with_both_places(place, data):
    schedule, rank, step = place
    row = list(schedule.actions[rank])
    again = data.draw(st.integers(0, len(row)))
    row.insert(again, row[step])
    message = complaint(damaged(schedule, rank, row))
    first, second = sorted((again, step + (again <= step)))
    for part in schedule.actions[rank][step].parts:
        assert (
            f"rank {rank}, step {second}: {part} is there twice (first on rank {rank}, step {first})"
            in message
        )


@given(places(), st.data())
@settings(max_examples=200, deadline=None)
def test_swapped_actions_are_refused_exactly_if_they_close_a_circle(place, data):
    schedule, rank, step = place
    row = list(schedule.actions[rank])
    other = data.draw(st.integers(0, len(row) - 1))
    row[step], row[other] = row[other], row[step]
    swapped = damaged(schedule, rank, row)
    if has_circle(swapped):
        message = complaint(swapped)
        assert "deadlock" in message
        assert "waits for" in message
    else:
        check_schedule(swapped)


@given(SMALL)
@settings(max_examples=60, deadline=None)
def test_an_action_on_another_rank_is_named(plan):
    schedule = build_schedule(*plan)
    if schedule.pp == 1:
        return
    rows = list(schedule.actions)
    stray, rows[0] = rows[0][0], rows[0][1:]
    rows[1] = (*rows[1], stray)
    message = complaint(schedule.with_actions(tuple(rows)))
    assert f"rank 1, step {len(rows[1]) - 1}: {stray.parts[0]} is on the wrong rank" in message


# --- an oracle that shares nothing with the check: a topological sort of everything that must come before ---


def has_circle(schedule: Schedule) -> bool:
    steps = [(rank, step) for rank, row in enumerate(schedule.actions) for step in range(len(row))]
    place = {
        part: (rank, step)
        for rank, row in enumerate(schedule.actions)
        for step, action in enumerate(row)
        for part in action.parts
    }
    before: dict[tuple[int, int], set[tuple[int, int]]] = {where: set() for where in steps}
    for rank, step in steps:
        if step:
            before[rank, step].add((rank, step - 1))
        for part in schedule.actions[rank][step].parts:
            for need in data_needs(part, schedule, place):
                if place[need] != (rank, step):
                    before[rank, step].add(place[need])
    done: set[tuple[int, int]] = set()
    moved = True
    while moved:
        ready = {where for where in steps if where not in done and before[where] <= done}
        done |= ready
        moved = bool(ready)
    return len(done) < len(steps)


def data_needs(action: Action, schedule: Schedule, place: dict[Action, tuple[int, int]]) -> list[Action]:
    stage, kind, microbatch, _ = action
    per_copy = schedule.stages // schedule.copies

    def back(where: int) -> Action:
        split = Action(where, ActionKind.BACKWARD_INPUT, microbatch)
        return split if split in place else Action(where, ActionKind.FULL_BACKWARD, microbatch)

    def arriving(produced: Action, receive: ActionKind) -> list[Action]:
        """What carries a neighbour's product here: a receive (posted) and its send, or nothing but the product."""
        posted = Action(stage, receive, microbatch)
        return [posted, posted.peer] if posted in place else [produced]

    if kind is ActionKind.FORWARD and stage % per_copy:
        produced = Action(stage - 1, ActionKind.FORWARD, microbatch)
        return arriving(produced, ActionKind.RECV_F)
    if kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT):
        own = [Action(stage, ActionKind.FORWARD, microbatch)]
        if stage % per_copy == per_copy - 1:
            return own
        return own + arriving(back(stage + 1), ActionKind.RECV_B)
    if kind is ActionKind.BACKWARD_WEIGHT:
        return [Action(stage, ActionKind.BACKWARD_INPUT, microbatch)]
    if kind is ActionKind.SEND_F:
        return [Action(stage, ActionKind.FORWARD, microbatch)]
    if kind is ActionKind.SEND_B:
        return [back(stage)]
    return []
