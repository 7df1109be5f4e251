"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

Microbatches run backward in the order they ran forward, as PyTorch's ``ScheduleGPipe`` does. With equal stages and
free communication the bubble is (p - 1) / (m + p - 1) of the step, and all m microbatches are in flight.
"""

from __future__ import annotations

from .actions import Action, Schedule, backward, forward


def gpipe(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The GPipe schedule of ``pp`` ranks with one stage each (``chunks`` is 1)."""
    rows = tuple(_rank_actions(rank, microbatches) for rank in range(pp))
    return Schedule("gpipe", pp, pp * chunks, microbatches, rows)


def _rank_actions(rank: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [forward(rank, microbatch) for microbatch in range(microbatches)]
    backwards = [backward(rank, microbatch) for microbatch in range(microbatches)]
    return (*forwards, *backwards)
