"""Interleaved zero bubble: interleaved 1F1B with split backwards and half its warm-up (arXiv:2401.10241, ZB-1p).

Backwards for the weight wait until they can fill what would be a bubble: rank r starts them r backwards late. The
order is PyTorch's ``ScheduleInterleavedZeroBubble``. With one chunk a rank this is ZB-H1 (``schedules/zb_h1.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Schedule, backward_input, backward_weight, forward
from .interleaved import chunk_order, microbatch_groups


def interleaved_zero_bubble(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The interleaved zero-bubble schedule of ``pp`` ranks with ``chunks`` stages each.

    Raises:
        ScheduleError: if the groups cannot be formed (:func:`~schedules.interleaved.microbatch_groups`).
    """
    groups = microbatch_groups("interleaved-zb", pp, microbatches, group_size)
    rows = zero_bubble_rows(pp, chunks, groups)
    return Schedule("interleaved-zb", pp, pp * chunks, microbatches, rows)


def zero_bubble_rows(pp: int, chunks: int, groups: Sequence[range]) -> tuple[tuple[Action, ...], ...]:
    """The rows of all ranks."""
    order = chunk_order(chunks, groups)
    rows = []
    for rank in range(pp):
        backward_order = [((chunks - 1 - chunk) * pp + rank, microbatch) for chunk, microbatch in order]
        rows.append(
            _rank_actions(
                [forward(chunk * pp + rank, microbatch) for chunk, microbatch in order],
                [backward_input(*where) for where in backward_order],
                [backward_weight(*where) for where in backward_order],
                # All chunks but the last of the first group, and one more for each rank behind this one.
                warm_up=(pp - rank - 1) + (chunks - 1) * len(groups[0]),
                weight_delay=rank,
            )
        )
    return tuple(rows)


def _rank_actions(
    forwards: Sequence[Action],
    inputs: Sequence[Action],
    weights: Sequence[Action],
    warm_up: int,
    weight_delay: int,
) -> tuple[Action, ...]:
    actions: list[Action] = []
    # Warm-up: forwards only.
    warm_up = min(warm_up, len(forwards))
    actions += forwards[:warm_up]
    # Steady state and cool-down: a forward while there is one, a backward for the input, and one for the weight
    # of what ran backward `weight_delay` steps ago.
    for step, for_input in enumerate(inputs):
        actions += [*forwards[warm_up + step : warm_up + step + 1], for_input]
        if step >= weight_delay:
            actions.append(weights[step - weight_delay])
    # What was delayed fills the end.
    actions += weights[max(len(inputs) - weight_delay, 0) :]
    return tuple(actions)
