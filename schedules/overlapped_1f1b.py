"""Megatron-LM's combined 1F1B: the forward of one microbatch beside the backward of another, to hide expert all-to-all.

Interleaved 1F1B (``--overlap-moe-expert-parallel-comm``) with one more forward in the warm-up, so that the forward
and the backward of a steady step belong to different microbatches and can run layer by layer side by side: the
all-to-all of one under the compute of the other. With ``--delay-wgrad-compute`` the backward of a pair is the one for
the input, and the one for the weight follows, under the sending of the gradient.

Megatron-LM combines on one rank (v = 1) or with v >= 2 chunks a rank; v = 1 on several ranks follows the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Schedule, backward, backward_input, backward_weight, forward, overlapped
from .interleaved import chunk_order, microbatch_groups


def overlapped_one_forward_one_backward(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The combined 1F1B schedule with full backwards.

    Raises:
        ScheduleError: if the groups cannot be formed (:func:`~schedules.interleaved.microbatch_groups`).
    """
    return _build("1f1b-overlap", pp, chunks, microbatches, group_size, delays_weights=False)


def overlapped_with_delayed_weights(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The combined 1F1B schedule with the backward for the weight behind each pair.

    Raises:
        ScheduleError: if the groups cannot be formed (:func:`~schedules.interleaved.microbatch_groups`).
    """
    return _build("1f1b-overlap-wgrad", pp, chunks, microbatches, group_size, delays_weights=True)


def _build(
    name: str, pp: int, chunks: int, microbatches: int, group_size: int | None, delays_weights: bool
) -> Schedule:
    groups = microbatch_groups(name, pp, microbatches, group_size)
    order = chunk_order(chunks, groups)
    rows = []
    for rank in range(pp):
        forwards = [forward(chunk * pp + rank, microbatch) for chunk, microbatch in order]
        backward_order = [((chunks - 1 - chunk) * pp + rank, microbatch) for chunk, microbatch in order]
        # As interleaved 1F1B, and one more.
        warm_up = (pp - rank - 1) * 2 + (chunks - 1) * len(groups[0]) + 1
        rows.append(_rank_actions(forwards, backward_order, warm_up, delays_weights))
    return Schedule(name, pp, pp * chunks, microbatches, tuple(rows))


def _rank_actions(
    forwards: Sequence[Action],
    backward_order: Sequence[tuple[int, int]],
    warm_up: int,
    delays_weights: bool,
) -> tuple[Action, ...]:
    actions: list[Action] = []
    # Warm-up: forwards only.
    warm_up = min(warm_up, len(forwards))
    actions += forwards[:warm_up]
    # Steady state: a forward beside a backward. Cool-down: the backwards that are left.
    for step, where in enumerate(backward_order):
        back = backward_input(*where) if delays_weights else backward(*where)
        ahead = warm_up + step
        actions.append(overlapped(forwards[ahead], back) if ahead < len(forwards) else back)
        if delays_weights:
            actions.append(backward_weight(*where))
    return tuple(actions)
