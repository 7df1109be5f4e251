"""The pass that writes out sends and receives between pipeline ranks: compute-only schedule -> schedule.

A send stands right after the action that produces what it sends, a receive right before the action that consumes
it. The transfers between two compute actions of a rank are one *batch*: posted together, and all have ended before
the rank computes on. This is how Megatron-LM pairs them (``send_forward_recv_backward``), so that two neighbours
that send to each other do not wait for each other's receive. With ``joined`` a forward and the backward directly
behind it are one step, with one batch behind it: its interleaved schedule
(``send_forward_backward_recv_forward_backward``). A step in which the backward waits for its own forward on another
rank, as the last forward of a warm-up that has them all, is taken apart.

With sends that block until their receive is posted, a late receive can still hold up its sender so long that all
ranks wait (interleaved schedules whose groups are larger than the pipeline). The pass runs the batches once, and
where all ranks wait it moves the receive with most time to spare to where its rank stands: mostly one on the first
or last rank, from the other end of the pipeline. The result runs with blocking and with non-blocking sends.

Transfers of one kind between two ranks are matched in their order. A rank with several stages may consume what another
one sends in another order than that made it; its receives are posted in the order of the sends all the same.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

from .actions import Action, ActionKind, Schedule, ScheduleError
from .check import check_schedule
from .order import gradient_source, requirements


def add_communication(schedule: Schedule, *, joined: bool = False) -> Schedule:
    """The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B`` and ``RECV_B`` wherever data crosses ranks.

    Args:
        schedule: compute-only.
        joined: whether nothing is sent or received between a forward and the full backward directly behind it.

    Raises:
        ScheduleError: if the schedule holds sends or receives already, or is broken (see
            :func:`~schedules.check.check_schedule`).
    """
    if schedule.has_communication:
        raise ScheduleError(f"schedule {schedule.name} holds sends or receives already; drop them first")
    check_schedule(schedule)
    apart: set[Action] = set()
    while True:
        placement = _Placement(schedule, joined, apart)
        rows = placement.run()
        if rows is not None:
            return schedule.with_actions(_in_order_of_sends(rows, schedule))
        apart |= placement.waiting_forwards()


def _in_order_of_sends(
    rows: Sequence[Sequence[Action]], schedule: Schedule
) -> tuple[tuple[Action, ...], ...]:
    """The rows, in which a receive that would stand behind that of a later send is moved before it."""
    sent_before: dict[Action, Action] = {}
    latest: dict[tuple[int, int, ActionKind], Action] = {}
    for rank, row in enumerate(rows):
        for send in (action for action in row if action.is_send):
            channel = (rank, schedule.stage_rank(send.peer.stage), send.kind)
            if channel in latest:
                sent_before[send.peer] = latest[channel]
            latest[channel] = send.peer
    ordered = []
    for row in rows:
        posted: set[Action] = set()
        kept: list[Action] = []
        for action in row:
            if not action.is_receive:
                kept.append(action)
                continue
            missing = []
            receive: Action | None = action
            while receive is not None and receive not in posted:
                missing.append(receive)
                receive = sent_before.get(receive)
            posted.update(missing)
            kept += reversed(missing)
        ordered.append(tuple(kept))
    return tuple(ordered)


def without_communication(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    return schedule.with_actions(
        tuple(
            tuple(action for action in row if not (action.is_send or action.is_receive))
            for row in schedule.actions
        )
    )


def sends_after(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Sends of what ``action`` produces for a stage on another rank."""
    sends = []
    for part in action.parts:
        stage = part.stage
        if part.kind is ActionKind.FORWARD and not schedule.is_last(stage):
            send, neighbour = Action(stage, ActionKind.SEND_F, part.microbatch), stage + 1
        elif not schedule.is_first(stage) and part == gradient_source(schedule, stage, part.microbatch):
            send, neighbour = Action(stage, ActionKind.SEND_B, part.microbatch), stage - 1
        else:
            continue
        if schedule.stage_rank(neighbour) != schedule.stage_rank(stage):
            sends.append(send)
    return tuple(sends)


def receives_before(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Receives of what ``action`` consumes from a stage on another rank."""
    rank = schedule.stage_rank(action.parts[0].stage)
    return tuple(
        send.peer
        for need in requirements(action, schedule)
        if schedule.stage_rank(need.stage) != rank
        for send in sends_after(need, schedule)
        if send.peer.stage in {part.stage for part in action.parts}
    )


class _Placement:
    """Runs the batches of all ranks with blocking sends, and writes the rows as it goes."""

    def __init__(self, schedule: Schedule, joined: bool, apart: Set[Action]) -> None:
        self.schedule = schedule
        self.rows: list[list[Action]] = [[] for _ in range(schedule.pp)]
        self.turns = [_turns(row, joined, apart) for row in schedule.actions]
        """Actions of each rank that have no transfer between them."""
        self.steps = [0] * schedule.pp
        """Turns that each rank has executed."""
        self.open: list[set[Action]] = [set() for _ in range(schedule.pp)]
        """Transfers of each rank's batch that have not ended."""
        self.posted: dict[Action, int] = {}
        """Serial number of every transfer posted so far."""

    def run(self) -> tuple[tuple[Action, ...], ...] | None:
        """The rows with communication; None if every rank waits, and a forward need not."""
        ranks = range(self.schedule.pp)
        for rank in ranks:
            self._post_receives(rank)
        while True:
            moved = [self._advance(rank) for rank in ranks]
            if any(moved):
                continue
            if all(self.steps[rank] == len(self.turns[rank]) and not self.open[rank] for rank in ranks):
                return tuple(map(tuple, self.rows))
            if self.waiting_forwards():
                return None
            self._pull_receive()

    def waiting_forwards(self) -> set[Action]:
        """Forwards that are held up by nothing but what the backward behind them waits for."""
        found = set()
        for rank, turns in enumerate(self.turns):
            for first, *others in turns[self.steps[rank] : self.steps[rank] + 1]:
                if others and self.open[rank]:
                    needed = {
                        receive for other in others for receive in receives_before(other, self.schedule)
                    }
                    if self.open[rank] <= needed:
                        found.add(first)
        return found

    def _advance(self, rank: int) -> bool:
        """Execute the rank's next turns while its batch has ended; whether any was executed."""
        moved = False
        turns = self.turns[rank]
        while not self.open[rank] and self.steps[rank] < len(turns):
            turn = turns[self.steps[rank]]
            self.steps[rank] += 1
            self.rows[rank] += turn
            for action in turn:
                for send in sends_after(action, self.schedule):
                    self._post(rank, send)
            self._post_receives(rank)
            moved = True
        return moved

    def _post_receives(self, rank: int) -> None:
        for turn in self.turns[rank][self.steps[rank] : self.steps[rank] + 1]:
            for action in turn:
                for receive in receives_before(action, self.schedule):
                    if receive not in self.posted:
                        self._post(rank, receive)

    def _post(self, rank: int, transfer: Action) -> None:
        """Put a transfer into the rank's batch; it ends at once if the other side is posted."""
        self.rows[rank].append(transfer)
        self.posted[transfer] = len(self.posted)
        peer = transfer.peer
        if peer in self.posted:
            self.open[self.schedule.stage_rank(peer.stage)].discard(peer)
        else:
            self.open[rank].add(transfer)

    def _pull_receive(self) -> None:
        """Move a receive to where its rank stands: the one whose consumer is farthest away, the oldest of several."""
        held_up = [send for ended in self.open for send in ended if send.is_send]
        assert held_up, (
            "a schedule that runs with sends that never block is stuck only where a send is held up"
        )
        receive = max(held_up, key=lambda send: (self._distance(send.peer), -self.posted[send])).peer
        self._post(self.schedule.stage_rank(receive.stage), receive)

    def _distance(self, receive: Action) -> int:
        """Turns the receiving rank still executes before the one that consumes the transfer."""
        if receive.kind is ActionKind.RECV_F:
            consumer = Action(receive.stage, ActionKind.FORWARD, receive.microbatch)
        else:
            consumer = gradient_source(self.schedule, receive.stage, receive.microbatch)
        rank, step = self.schedule.positions[consumer]
        ends = accumulate(len(turn) for turn in self.turns[rank])
        return next(number for number, end in enumerate(ends) if step < end) - self.steps[rank]


def _turns(row: Sequence[Action], joined: bool, apart: Set[Action]) -> list[tuple[Action, ...]]:
    """The actions of a rank one by one, or forwards with the full backward that comes next, but for those ``apart``."""
    turns: list[tuple[Action, ...]] = []
    for action in row:
        backward = action.kind is ActionKind.FULL_BACKWARD
        last = turns[-1] if turns else ()
        if (
            joined
            and backward
            and len(last) == 1
            and last[0].kind is ActionKind.FORWARD
            and last[0] not in apart
        ):
            turns[-1] += (action,)
        else:
            turns.append((action,))
    return turns
