"""Checks that a schedule is complete, stands on the right ranks, fits into memory, and can run to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .actions import WEIGHT_KINDS, Action, ActionKind, Schedule, ScheduleError, backward, forward
from .blocking import check_blocking_sends
from .grid import step_grid
from .order import gradient_source
from .unit_times import activations_held, simulate_unit_times

_MOST_SHOWN = 10
_TOLERANCE = 1e-9
"""Of sums of shares of an activation."""
_PLAIN_KINDS = frozenset(
    (
        ActionKind.FORWARD,
        ActionKind.FULL_BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    )
)


@dataclass(frozen=True)
class _Problem:
    message: str
    position: tuple[int, int] | None = None
    """(rank, step) to mark in the grid."""


def check_schedule(
    schedule: Schedule,
    memory_limit: int | Sequence[int] | None = None,
    sends_block: bool = False,
    weight_memory: float = 1.0,
) -> None:
    """Raise an error unless every rank can execute its row and together they do one training step.

    Each microbatch must pass forward, and backward (full, or for input and for weight), through each stage exactly
    once, on the rank that holds the stage; a send needs its receive and the reverse, and if any transfer is written
    out, all are; no rank may wait for an action that comes later or never.

    Args:
        schedule: what to check.
        memory_limit: most (stage, microbatch) pairs whose activations a rank may hold at once, one number for all
            ranks or one a rank; no limit if not given.
        sends_block: whether a send occupies its rank until its receive is posted
            (:func:`~schedules.blocking.check_blocking_sends`); only for a schedule with its transfers written out.
        weight_memory: share of a pair's activations that is held between its backward for the input and the one for
            the weight.

    Raises:
        ScheduleError: naming every problem (at most 10 are spelled out), with the rank-by-step grid in which
            the offending steps are marked ``>so<``; for a deadlock, what each rank waits for.
    """
    problems = [
        *_misplaced(schedule),
        *_duplicated(schedule),
        *_missing_compute(schedule),
        *_unmatched_transfers(schedule),
    ]
    if problems:
        raise ScheduleError(_report(schedule, problems))
    simulate_unit_times(schedule)
    if sends_block:
        check_blocking_sends(schedule)
    if memory_limit is not None:
        problems = _over_memory_limit(schedule, memory_limit, weight_memory)
        if problems:
            raise ScheduleError(_report(schedule, problems))


def _over_memory_limit(
    schedule: Schedule, memory_limit: int | Sequence[int], weight_memory: float
) -> list[_Problem]:
    """The first step of each rank that holds too much."""
    limits = [memory_limit] * schedule.pp if isinstance(memory_limit, int) else list(memory_limit)
    if len(limits) != schedule.pp:
        raise ScheduleError(
            f"schedule {schedule.name}: {len(limits)} memory limits for pp={schedule.pp} ranks; give one, or one a rank"
        )
    problems = []
    for rank, (row, limit) in enumerate(zip(schedule.actions, limits, strict=True)):
        held = activations_held(row, weight_memory)
        step = next((step for step, count in enumerate(held) if count > limit + _TOLERANCE), None)
        if step is not None:
            message = (
                f"rank {rank}, step {step}: {row[step]} makes {held[step]:.6g} activations held, the limit is "
                f"{limit} (the rank's peak is {max(held):.6g})"
            )
            problems.append(_Problem(message, (rank, step)))
    return problems


def _misplaced(schedule: Schedule) -> list[_Problem]:
    problems = []
    passing = [schedule.stage_microbatches(stage) for stage in range(schedule.stages)]
    for rank, step, action in schedule.steps():
        for part in action.parts:
            if (
                0 <= part.stage < schedule.stages
                and schedule.stage_ranks[part.stage] == rank
                and part.kind in _PLAIN_KINDS
                and part.microbatch in passing[part.stage]
                and not schedule.forward_only
            ):
                continue
            at = f"rank {rank}, step {step}: {part}"
            if not 0 <= part.stage < schedule.stages:
                message = f"{at} is on stage {part.stage}, but there are stages 0 to {schedule.stages - 1}"
            elif part.kind not in WEIGHT_KINDS and not 0 <= part.microbatch < schedule.microbatches:
                message = (
                    f"{at} is for microbatch {part.microbatch}, but there are microbatches 0 to "
                    f"{schedule.microbatches - 1}"
                )
            elif schedule.stage_rank(part.stage) != rank:
                holder = schedule.stage_rank(part.stage)
                message = f"{at} is on the wrong rank: stage {part.stage} lies on rank {holder}"
            elif part.microbatch >= 0 and part.microbatch not in schedule.stage_microbatches(part.stage):
                here = schedule.stage_microbatches(part.stage)
                message = (
                    f"{at} is for microbatch {part.microbatch}, but microbatches {here[0]} to {here[-1]} pass "
                    f"through stage {part.stage}, which is of one of {schedule.copies} copies of the model"
                )
            elif (part.is_send or part.is_receive) and _has_no_peer(part, schedule):
                message = f"{at} has no stage {part.peer.stage} to exchange with; remove it"
            elif schedule.forward_only and _concerns_backward(part):
                message = f"{at} is of a backward, but the schedule is forward only"
            else:
                continue
            problems.append(_Problem(message, (rank, step)))
    return problems


def _has_no_peer(transfer: Action, schedule: Schedule) -> bool:
    beyond = transfer.peer.stage > transfer.stage
    return schedule.is_last(transfer.stage) if beyond else schedule.is_first(transfer.stage)


def _concerns_backward(action: Action) -> bool:
    return action.kind not in (
        ActionKind.FORWARD,
        ActionKind.SEND_F,
        ActionKind.RECV_F,
        ActionKind.UNSHARD,
        ActionKind.RESHARD,
    )


def _duplicated(schedule: Schedule) -> list[_Problem]:
    seen: dict[Action, tuple[int, int]] = {}
    problems = []
    for rank, step, action in schedule.steps():
        for part in action.parts:
            if part.kind in (ActionKind.UNSHARD, ActionKind.RESHARD):
                continue  # weights may be gathered and released many times in a step
            if part in seen:
                first = "rank {}, step {}".format(*seen[part])
                message = f"rank {rank}, step {step}: {part} is there twice (first on {first})"
                problems.append(_Problem(message, (rank, step)))
            else:
                seen[part] = (rank, step)
    return problems


def _missing_compute(schedule: Schedule) -> list[_Problem]:
    positions = schedule.positions
    problems = []
    for stage in range(schedule.stages):
        end = (schedule.stage_rank(stage), len(schedule.actions[schedule.stage_rank(stage)]))
        for microbatch in schedule.stage_microbatches(stage):
            full = backward(stage, microbatch)
            for_input = Action(stage, ActionKind.BACKWARD_INPUT, microbatch)
            for_weight = Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch)
            halves = [half for half in (for_input, for_weight) if half in positions]
            if forward(stage, microbatch) not in positions:
                problems.append(_Problem(f"rank {end[0]} lacks {forward(stage, microbatch)}", end))
            if schedule.forward_only:
                continue
            if full in positions and halves:
                message = (
                    f"rank {end[0]} has both {full} and {halves[0]}: a backward is full or split, not both"
                )
                problems.append(_Problem(message, positions[halves[0]]))
            elif full not in positions and len(halves) < 2:
                lacking = for_weight if for_input in halves else for_input if halves else full
                problems.append(_Problem(f"rank {end[0]} lacks {lacking}", end))
    return problems


def _unmatched_transfers(schedule: Schedule) -> list[_Problem]:
    """Sends without receive, receives without send, and edges between ranks that nothing carries."""
    if not schedule.has_communication:
        return []
    positions = schedule.positions
    problems = []
    for rank, step, action in schedule.steps():
        if (action.is_send or action.is_receive) and action.peer not in positions:
            does, lacks = ("sends", "receive") if action.is_send else ("receives", "send")
            message = f"rank {rank}, step {step}: {action} {does}, but its {lacks} {action.peer} is nowhere"
            problems.append(_Problem(message, (rank, step)))
    for stage in range(schedule.stages):
        if schedule.is_last(stage) or schedule.stage_rank(stage) == schedule.stage_rank(stage + 1):
            continue
        for microbatch in schedule.stage_microbatches(stage):
            to_next = (Action(stage, ActionKind.SEND_F, microbatch), forward(stage + 1, microbatch))
            consumer_behind = gradient_source(schedule, stage, microbatch)
            to_previous = (Action(stage + 1, ActionKind.SEND_B, microbatch), consumer_behind)
            for send, consumer in (to_next,) if schedule.forward_only else (to_next, to_previous):
                if send not in positions and send.peer not in positions:
                    message = f"nothing carries the input of {consumer}: {send} and {send.peer} are missing"
                    problems.append(_Problem(message, positions.get(consumer)))
    return problems


def _report(schedule: Schedule, problems: list[_Problem]) -> str:
    lines = [f"schedule {schedule.name}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {problem.message}" for problem in problems[:_MOST_SHOWN]]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  and {len(problems) - _MOST_SHOWN} more")
    counted = Counter(problem.position for problem in problems[:_MOST_SHOWN] if problem.position is not None)
    return "\n".join([*lines, step_grid(schedule, sorted(counted))])
