"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).

The bubble is GPipe's, (p - 1) / (m + p - 1) of the step with equal stages and free communication, but rank r keeps
at most min(p - r, m) microbatches in flight. The order is Megatron-LM's
``forward_backward_pipelining_without_interleaving``.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Schedule, backward, forward


def one_forward_one_backward(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The 1F1B schedule of ``pp`` ranks with one stage each (``chunks`` is 1)."""
    rows = tuple(_rank_actions(rank, pp, microbatches) for rank in range(pp))
    return Schedule("1f1b", pp, pp * chunks, microbatches, rows)


def _rank_actions(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [forward(rank, microbatch) for microbatch in range(microbatches)]
    backwards = [backward(rank, microbatch) for microbatch in range(microbatches)]
    # The warm-up fills the ranks behind this one.
    return alternate(forwards, backwards, warm_up=pp - rank - 1)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Forwards and backwards, equally many, in turn, behind ``warm_up`` forwards."""
    actions: list[Action] = []
    # Warm-up: forwards only.
    warm_up = min(warm_up, len(forwards))
    actions += forwards[:warm_up]
    # Steady state: one forward, one backward.
    steady = len(forwards) - warm_up
    for step in range(steady):
        actions += [forwards[warm_up + step], backwards[step]]
    # Cool-down: drain the backwards of the warm-up.
    actions += backwards[steady:]
    return tuple(actions)
