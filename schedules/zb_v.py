"""ZB-V: no bubble at 1F1B's memory (Qi et al. 2023, arXiv:2401.10241, section 6).

Two chunks a rank lie as a V: rank r holds stages r and 2 p - 1 - r, so the last stage is on the first rank and its
backward starts where the forward began. With F = I = W, free communication and at least 2 p - 1 microbatches no rank
idles between its first action and its last, and each holds 2 p chunks' activations, as much as p whole stages. The
order is PyTorch's ``ScheduleZBVZeroBubble``; fewer microbatches take the same steps, without those that are not there.
"""

from __future__ import annotations

from collections import Counter

from .actions import Action, ActionKind, Schedule, v_placement

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zb_v(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The ZB-V schedule of ``pp`` ranks with two stages each (``chunks`` is 2)."""
    rows = tuple(_rank_actions(rank, pp, microbatches) for rank in range(pp))
    return Schedule("zb-v", pp, pp * chunks, microbatches, rows, v_placement(pp))


def _rank_actions(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    planned = max(microbatches, 2 * pp - 1)
    stages = (rank, 2 * pp - 1 - rank)
    done: Counter[tuple[int, ActionKind]] = Counter()
    actions: list[Action] = []

    def run(chunk: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            microbatch = done[chunk, kind]
            done[chunk, kind] += 1
            if microbatch < microbatches:
                actions.append(Action(stages[chunk], kind, microbatch))

    # Warm-up 1: forwards of the first chunk, until one comes back down the other leg of the V.
    for _ in range(2 * (pp - rank) - 1):
        run(0, _F)
    # Warm-up 2: both legs in turn.
    for _ in range(rank):
        run(1, _F)
        run(0, _F)
    # Warm-up 3: the second leg runs forward and backward.
    for _ in range(pp - rank):
        run(1, _F, _I, _W)
    # Steady state: both legs run forward and backward; the first leg runs out of forwards first.
    while done[1, _F] < done[0, _F] or done[0, _F] < planned:
        if done[0, _F] < planned:
            run(0, _F)
        run(0, _I, _W)
        run(1, _F, _I, _W)
    # Cool-down 1: backwards for the input of both legs; those for the weight wait.
    for _ in range(rank):
        run(0, _I)
        run(1, _I)
    # Cool-down 2: what is left of the first leg.
    for _ in range(pp - rank):
        run(0, _I, _W)
    # Cool-down 3: the backwards for the weight that waited.
    for chunk in (1, 0):
        while done[chunk, _W] < planned:
            run(chunk, _W)
    return tuple(actions)
