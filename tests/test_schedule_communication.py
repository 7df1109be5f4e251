"""The pass that writes out sends and receives: where they stand, and that no rank can wait for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import plans, rows

from schedules import (
    Action,
    ActionCosts,
    ActionKind,
    Schedule,
    ScheduleError,
    add_communication,
    build_schedule,
    check_schedule,
    greedy,
    parse_csv,
    simulate_unit_times,
    without_communication,
)


def transfers(schedule: Schedule) -> list[Action]:
    return [action for _, _, action in schedule.steps() if action.is_send or action.is_receive]


def batches(row: tuple[Action, ...]) -> list[list[Action]]:
    """The transfers before, between and after the compute actions of a rank."""
    found: list[list[Action]] = [[]]
    for action in row:
        if action.is_compute:
            found.append([])
        else:
            found[-1].append(action)
    return found


def runs_with_blocking_batches(schedule: Schedule) -> bool:
    """Whether all ranks reach their end if every transfer of a batch blocks until its peer is posted too."""
    waiting = [batches(row) for row in schedule.actions]
    posted: set[Action] = set()
    at = [0] * schedule.pp
    for rank in range(schedule.pp):
        posted.update(waiting[rank][0])
    moved = True
    while moved:
        moved = False
        for rank in range(schedule.pp):
            here = waiting[rank]
            if at[rank] < len(here) and all(transfer.peer in posted for transfer in here[at[rank]]):
                at[rank] += 1
                moved = True
                if at[rank] < len(here):
                    posted.update(here[at[rank]])
    return all(at[rank] == len(waiting[rank]) for rank in range(schedule.pp))


def test_1f1b_pairs_a_send_forward_with_a_receive_backward_as_megatron_does():
    assert rows(add_communication(build_schedule("1f1b", 2, 1, 3))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]


def test_split_backwards_send_the_gradient_of_the_input_only():
    split = parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0")
    assert rows(add_communication(split)) == [
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_stages_on_one_rank_do_not_send_to_each_other():
    v_shape = parse_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert rows(add_communication(v_shape)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]
    assert not transfers(add_communication(build_schedule("1f1b", 1, 1, 4)))


def test_an_overlapped_action_receives_for_both_parts_and_sends_from_both():
    overlapped = parse_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1")
    assert rows(add_communication(overlapped))[1] == (
        "1RECV_F0 1F0 1RECV_F1 (1F1;1B0)OVERLAP_F_B 1SEND_B0 1B1 1SEND_B1"
    )


def moved_receives(schedule: Schedule) -> set[tuple[int, str]]:
    """(rank, kind) of receives that do not stand right before the action that consumes them."""
    moved = set()
    for rank, row in enumerate(schedule.actions):
        consumers = [action for action in row if action.is_compute]
        for batch, consumer in zip(batches(row), consumers, strict=False):
            moved |= {
                (rank, receive.kind.value)
                for receive in batch
                if receive.is_receive and (receive.stage, receive.microbatch) != consumer[0:3:2]
            }
    return moved


@pytest.mark.parametrize(
    ("plan", "moved"),
    [
        (("gpipe", 4, 1, 8), set()),
        (("1f1b", 4, 1, 8), set()),
        (("1f1b", 4, 1, 2), set()),
        (("interleaved-1f1b", 4, 2, 16, 8), {(0, "RECV_F"), (3, "RECV_B")}),
        (("interleaved-1f1b", 4, 4, 12, 6), {(0, "RECV_F"), (3, "RECV_B")}),
    ],
)
def test_only_receives_that_hold_up_everybody_move_forward(plan, moved):
    """They are those from the other end of the pipeline, which are sent long before they are needed."""
    assert moved_receives(add_communication(build_schedule(*plan))) == moved


@given(plans())
@settings(max_examples=80, deadline=None)
def test_every_schedule_runs_with_blocking_and_with_non_blocking_sends(plan):
    computes = build_schedule(*plan)
    schedule = add_communication(computes)
    assert runs_with_blocking_batches(schedule)
    check_schedule(schedule, sends_block=True)
    assert simulate_unit_times(schedule).makespan == simulate_unit_times(computes).makespan
    assert without_communication(schedule) == computes
    crossings = sum(
        len(schedule.stage_microbatches(stage))
        for stage in range(schedule.stages)
        if not schedule.is_last(stage) and schedule.stage_rank(stage) != schedule.stage_rank(stage + 1)
    )
    assert len(transfers(schedule)) == (2 if schedule.forward_only else 4) * crossings


def test_the_blocking_simulation_can_fail():
    """Receives left right before their consumer stop an interleaved schedule whose groups exceed the pipeline."""
    schedule = add_communication(build_schedule("interleaved-1f1b", 4, 2, 16, 8))
    late = []
    for row in schedule.actions:
        kept: list[Action] = []
        receives = {(r.stage, r.kind.value[-1], r.microbatch): r for r in row if r.is_receive}
        for action in row:
            if action.is_compute and (
                receive := receives.get((action.stage, action.kind.value, action.microbatch))
            ):
                kept.append(receive)
            if not action.is_receive:
                kept.append(action)
        late.append(tuple(kept))
    stuck = schedule.with_actions(tuple(late))
    assert not runs_with_blocking_batches(stuck)
    check_schedule(stuck)
    with pytest.raises(ScheduleError) as caught:
        check_schedule(stuck, sends_block=True)
    lines = str(caught.value).splitlines()
    assert "deadlock if sends block until their receive is posted" in lines[0]
    assert lines[1].startswith("  rank 0 at step ")
    assert "waits for" in lines[1]
    assert ">" in lines[-1]


def test_blocking_cannot_be_asked_of_a_schedule_without_transfers():
    with pytest.raises(ScheduleError, match="sends and receives are not written out"):
        check_schedule(build_schedule("1f1b", 2, 1, 2), sends_block=True)


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (add_communication(build_schedule("1f1b", 2, 1, 2)), "holds sends or receives already"),
        (parse_csv("0F0,0B0\n1B0,1F0"), "deadlock"),
    ],
)
def test_what_the_pass_cannot_take(schedule, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        add_communication(schedule)


@given(
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(1, 8),
    st.integers(0, 8),
    st.builds(
        ActionCosts, *[st.sampled_from([0.5, 0.7, 1.0, 1.3])] * 3, transfer=st.sampled_from([0.0, 0.2])
    ),
)
@settings(max_examples=60, deadline=None)
def test_receives_stand_in_the_order_of_their_sends(pp, chunks, microbatches, more, costs):
    """Ranks of a loop hold several stages; what they receive from one rank is matched in the order of its sends."""
    compute = greedy(pp, chunks, microbatches, chunks + more, costs)
    schedule = add_communication(compute)
    check_schedule(schedule)
    assert without_communication(schedule).actions == compute.actions
    for kind in (ActionKind.SEND_F, ActionKind.SEND_B):
        for rank, row in enumerate(schedule.actions):
            for other, its_row in enumerate(schedule.actions):
                sends = [
                    action.peer
                    for action in row
                    if action.kind is kind and schedule.stage_rank(action.peer.stage) == other
                ]
                receives = [
                    action
                    for action in its_row
                    if action.is_receive
                    and action.peer.kind is kind
                    and schedule.stage_rank(action.peer.stage) == rank
                ]
                assert sends == receives
