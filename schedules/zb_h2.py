"""ZB-H2: no bubble at twice the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241, section 2.2).

The warm-up fills the pipeline until the first backward returns, 2 (p - r) - 1 forwards on rank r, and backwards for
the weight fill the end: rank r leaves out 2 r of them and runs those last. With equal stages, F = I = W, free
communication and at least 2 p - 1 microbatches each rank is busy from its first action to its last, at p - 1 - r
before the end of the step, and holds 2 p - 1 microbatches. In general a rank's bubble is (p - 1) (F + I - 2 W).
"""

from __future__ import annotations

from .actions import Action, Schedule, backward_input, backward_weight, forward


def zb_h2(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The ZB-H2 schedule of ``pp`` ranks with one stage each (``chunks`` is 1)."""
    rows = tuple(_rank_actions(rank, pp, microbatches) for rank in range(pp))
    return Schedule("zb-h2", pp, pp * chunks, microbatches, rows)


def _rank_actions(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [forward(rank, microbatch) for microbatch in range(microbatches)]
    inputs = [backward_input(rank, microbatch) for microbatch in range(microbatches)]
    weights = [backward_weight(rank, microbatch) for microbatch in range(microbatches)]
    actions: list[Action] = []
    # Warm-up: forwards until the first backward comes back from the last rank.
    warm_up = min(2 * (pp - rank) - 1, microbatches)
    actions += forwards[:warm_up]
    # Steady state: backward for the input, for the weight, forward.
    steady = max(microbatches - (2 * pp - 1), 0)
    for step in range(steady):
        actions += [inputs[step], weights[step], forwards[warm_up + step]]
    # Last forwards: weights wait, so that backwards reach the first rank at twice the pace.
    hurried = microbatches - warm_up - steady
    for step in range(steady, steady + hurried):
        actions += [inputs[step], forwards[warm_up + step]]
    # Cool-down: backwards for the input, each with one for the weight.
    for step in range(steady + hurried, microbatches):
        actions += [inputs[step], weights[step - hurried]]
    # What waited fills the end.
    actions += weights[microbatches - hurried :]
    return tuple(actions)
