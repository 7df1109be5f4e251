"""A schedule run several times in a step, each time for a part of the microbatches.

A trainer that accumulates gradients around its pipeline (torchtitan's ``gradient_accumulation_steps``, NeMo AutoModel's
local batches) calls the schedule once for each local batch: every call fills the pipeline and drains it again, and the
optimizer steps after the last. Against one long run the ramps are paid once a call, and no more activations are in
flight than one call has.
"""

from __future__ import annotations

from collections.abc import Callable

from .actions import Action, Schedule, ScheduleError


def flushed(build: Callable[[int], Schedule], microbatches: int, flush: int) -> Schedule:
    """The schedule that ``build`` gives for ``flush`` microbatches, as often as a step of ``microbatches`` needs it.

    Microbatches are numbered through; of schedules with two copies of the model each copy takes its half of every call.

    Raises:
        ScheduleError: if ``flush`` is below 1 or does not divide ``microbatches``.
    """
    if flush < 1 or microbatches % flush:
        divisors = [count for count in range(1, microbatches + 1) if microbatches % count == 0]
        nearest = min(divisors, key=lambda count: (abs(count - flush), count))
        raise ScheduleError(
            f"flush={flush} must divide the {microbatches} microbatches of a step; nearest: {nearest}"
        )
    once = build(flush)
    share = flush // once.copies
    calls = microbatches // flush

    def numbered(action: Action, call: int) -> Action:
        copy, index = divmod(action.microbatch, share)
        through = copy * share * calls + call * share + index if action.microbatch >= 0 else action.microbatch
        inner = tuple(numbered(sub, call) for sub in action.sub_actions)
        return action._replace(microbatch=through, sub_actions=inner)

    rows = tuple(
        tuple(numbered(action, call) for call in range(calls) for action in row) for row in once.actions
    )
    return Schedule(
        once.name,
        once.pp,
        once.stages,
        microbatches,
        rows,
        stage_ranks=once.stage_ranks,
        copies=once.copies,
        forward_only=once.forward_only,
    )
