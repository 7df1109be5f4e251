"""Schedules made by repeating a building block, squeezed (Qi et al. 2024, arXiv:2405.15362, sections 2 and 4).

A block says when each rank runs one microbatch: the offsets of its two forwards and its two backwards for the input,
on stages laid out as a V. The block repeats every 6 units, the time of F, I and W of both chunks, and how long its
parts live decides how many activations are held. Squeezing removes the gaps: ranks keep the order of the repeated
blocks and start each action as soon as it can, and backwards for the weight go where nothing else can run, or before a
forward that would otherwise exceed the memory of the steady state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .actions import Action, ActionKind, Schedule, backward_input, backward_weight, forward, v_placement

_INTERVAL = 6
_F, _I = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT


def squeezed_blocks(
    name: str, pp: int, microbatches: int, offsets: Sequence[tuple[int, int, int, int]], activations: int
) -> Schedule:
    """The schedule of a repeated building block.

    Args:
        name: of the schedule.
        pp: pipeline ranks, each with stages ``rank`` and ``2 * pp - 1 - rank``.
        microbatches: repetitions of the block.
        offsets: for each rank the times of forward on its first and second stage, and of the backward for the input on
            its second and first stage, with F = I = W = 1; distinct modulo 6.
        activations: most (stage, microbatch) pairs a rank may hold.
    """
    queues = [deque(_block_order(pp, rank, microbatches, times)) for rank, times in enumerate(offsets)]
    waiting_weights: list[deque[Action]] = [deque() for _ in range(pp)]
    held = [0] * pp
    forwards, inputs = [0] * (2 * pp), [0] * (2 * pp)
    rows: list[list[Action]] = [[] for _ in range(pp)]
    while any(queues):
        chosen = []
        for rank, queue in enumerate(queues):
            if (
                queue
                and held[rank] + (queue[0].kind is _F) <= activations
                and _is_ready(queue[0], forwards, inputs)
            ):
                chosen.append((rank, queue.popleft()))
            elif waiting_weights[rank]:
                chosen.append((rank, waiting_weights[rank].popleft()))
        assert chosen, f"a block of {name} does not fit into {activations} activations"
        # All ranks step together, so that what one finishes now another can use in the next unit.
        for rank, action in chosen:
            rows[rank].append(action)
            if action.kind is _F:
                forwards[action.stage] += 1
                held[rank] += 1
            elif action.kind is _I:
                inputs[action.stage] += 1
                waiting_weights[rank].append(backward_weight(action.stage, action.microbatch))
            else:
                held[rank] -= 1
    complete = tuple((*row, *weights) for row, weights in zip(rows, waiting_weights, strict=True))
    return Schedule(name, pp, 2 * pp, microbatches, complete, v_placement(pp))


def _block_order(pp: int, rank: int, microbatches: int, times: tuple[int, int, int, int]) -> list[Action]:
    """Forwards and backwards for the input of a rank in the order in which the repeated blocks start them."""
    parts = ((forward, rank), (forward, 2 * pp - 1 - rank), (backward_input, 2 * pp - 1 - rank))
    starts = [
        (time + _INTERVAL * microbatch, make(stage, microbatch))
        for time, (make, stage) in zip(times, (*parts, (backward_input, rank)), strict=True)
        for microbatch in range(microbatches)
    ]
    return [action for _, action in sorted(starts, key=lambda start: start[0])]


def _is_ready(action: Action, forwards: Sequence[int], inputs: Sequence[int]) -> bool:
    """Whether the neighbouring stage is done with the microbatch; stages take microbatches in order."""
    if action.kind is _F:
        return action.stage == 0 or forwards[action.stage - 1] > action.microbatch
    if forwards[action.stage] <= action.microbatch:
        return False
    return action.stage == len(inputs) - 1 or inputs[action.stage + 1] > action.microbatch
