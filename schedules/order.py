"""What must come before an action: the one statement of it, used by the checks, the drawings and the engine.

Only what holds in any schedule is stated here; the order inside a rank is the order of its row.
"""

from __future__ import annotations

from .actions import Action, ActionKind, Schedule, backward, forward


def requirements(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Actions that must have ended before ``action`` of ``schedule`` may start.

    - A forward needs the forward of the stage before; a full backward or one for the input needs the forward of its
      own stage and the backward (full or for the input) of the stage behind; a backward for the weight needs the
      one for the input of its own stage.
    - Where sends and receives are written out, what crosses ranks is needed through its receive, a receive needs
      its send, and a send what it sends.
    - A reduction of gradients needs every backward of its stage. Gathering and releasing weights needs nothing:
      the row says when.

    An overlapped action needs what its sub-actions need, but for each other.
    """
    if action.kind is ActionKind.OVERLAP_F_B:
        inside = set(action.sub_actions)
        needed = (need for part in action.sub_actions for need in requirements(part, schedule))
        return tuple(need for need in dict.fromkeys(needed) if need not in inside)
    stage, kind, microbatch, _ = action
    if kind is ActionKind.FORWARD:
        return () if schedule.is_first(stage) else _input_of(schedule, stage, stage - 1, microbatch)
    if kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT):
        own = (forward(stage, microbatch),)
        return own if schedule.is_last(stage) else own + _input_of(schedule, stage, stage + 1, microbatch)
    if kind is ActionKind.BACKWARD_WEIGHT:
        return (Action(stage, ActionKind.BACKWARD_INPUT, microbatch),)
    if kind is ActionKind.SEND_F:
        return (forward(stage, microbatch),)
    if kind is ActionKind.SEND_B:
        return (gradient_source(schedule, stage, microbatch),)
    if action.is_receive:
        return (action.peer,)
    if kind is ActionKind.REDUCE_GRAD:
        return tuple(_last_backward(schedule, stage, number) for number in schedule.stage_microbatches(stage))
    return ()


def gradient_source(schedule: Schedule, stage: int, microbatch: int) -> Action:
    """The action that yields the gradient of a stage's input: its full backward, or the one for the input."""
    split = Action(stage, ActionKind.BACKWARD_INPUT, microbatch)
    return split if schedule.splits_backward and split in schedule.positions else backward(stage, microbatch)


def _last_backward(schedule: Schedule, stage: int, microbatch: int) -> Action:
    split = Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch)
    return split if schedule.splits_backward and split in schedule.positions else backward(stage, microbatch)


def _input_of(schedule: Schedule, stage: int, source: int, microbatch: int) -> tuple[Action, ...]:
    """What a compute action on ``stage`` takes from the neighbouring stage ``source``."""
    crosses = schedule.stage_ranks[stage] != schedule.stage_ranks[source]
    if crosses and schedule.has_communication:
        return (Action(stage, ActionKind.RECV_F if source < stage else ActionKind.RECV_B, microbatch),)
    if source < stage:
        return (forward(source, microbatch),)
    return (gradient_source(schedule, source, microbatch),)
