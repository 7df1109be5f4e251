"""Whether a schedule still runs when sends block: a rank cannot go on before its transfers have met their peers.

The transfers between two compute actions of a rank are one batch, posted together (Megatron-LM's
``send_forward_recv_backward``; one ``ncclGroup``). A rank computes on when every transfer of its batch has met its peer
in the batch of another rank. With sends that do not block only receives wait.
"""

from __future__ import annotations

from .actions import Action, Schedule, ScheduleError
from .grid import step_grid


def check_blocking_sends(schedule: Schedule) -> None:
    """Raise an error if ranks would wait for each other with sends that block.

    Raises:
        ScheduleError: with what each rank waits for and the grid with those steps marked, or if the schedule's
            transfers are not written out.
    """
    if not schedule.has_communication and schedule.pp > 1:
        raise ScheduleError(
            f"schedule {schedule.name}: sends and receives are not written out, so there is nothing to block; "
            "add them first (add_communication, or export with communication)"
        )
    run = _Run(schedule)
    run.advance_all()
    stuck = {rank: run.batches[rank][at] for rank, at in enumerate(run.at) if at < len(run.batches[rank])}
    if stuck:
        raise ScheduleError(_report(schedule, stuck, run.posted))


class _Run:
    """How far each rank has come, batch by batch."""

    def __init__(self, schedule: Schedule) -> None:
        self.batches = [_batches(row) for row in schedule.actions]
        self.at = [0] * schedule.pp
        self.unmet = [0] * schedule.pp
        """Transfers of each rank's present batch that have not met their peer."""
        self.posted: dict[Action, int] = {}
        """Rank of every transfer posted so far."""

    def advance_all(self) -> None:
        """Run every rank as far as it comes."""
        for rank in range(len(self.batches)):
            self._post(rank)
        ready = [rank for rank, unmet in enumerate(self.unmet) if not unmet]
        while ready:
            rank = ready.pop()
            while not self.unmet[rank] and self.at[rank] < len(self.batches[rank]):
                self.at[rank] += 1
                if self.at[rank] < len(self.batches[rank]):
                    ready += self._post(rank)

    def _post(self, rank: int) -> list[int]:
        """Post a rank's batch; the other ranks that can go on thereby."""
        freed = []
        for _, transfer in self.batches[rank][self.at[rank]]:
            self.posted[transfer] = rank
            other = self.posted.get(transfer.peer)
            if other is None:
                self.unmet[rank] += 1
            else:
                self.unmet[other] -= 1
                if not self.unmet[other] and other != rank:
                    freed.append(other)
        return freed


def _batches(row: tuple[Action, ...]) -> list[list[tuple[int, Action]]]:
    """(step, transfer) of the transfers before, between and behind the compute actions of a rank."""
    batches: list[list[tuple[int, Action]]] = [[]]
    for step, action in enumerate(row):
        if action.is_send or action.is_receive:
            batches[-1].append((step, action))
        elif action.is_compute:
            batches.append([])
    return batches


def _report(schedule: Schedule, stuck: dict[int, list[tuple[int, Action]]], posted: dict[Action, int]) -> str:
    lines = [f"schedule {schedule.name}: deadlock if sends block until their receive is posted:"]
    marked = []
    for rank, batch in stuck.items():
        for step, transfer in batch:
            if transfer.peer in posted:
                continue
            other, there = schedule.positions[transfer.peer]
            lines.append(
                f"  rank {rank} at step {step} ({transfer}) waits for {transfer.peer}, which is step {there} of rank "
                f"{other}: post it earlier, or let sends not block"
            )
            marked.append((rank, step))
    return "\n".join([*lines, step_grid(schedule, sorted(marked))])
