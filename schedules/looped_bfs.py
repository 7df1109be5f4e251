"""Looped breadth-first (Lamy-Poirier 2022, arXiv:2211.05953): each chunk runs all microbatches before the next.

Gradients of a chunk are complete at once, so that their reduction, or the gathering of its weights under FSDP, happens
once a step and overlaps with the other chunks. The order is PyTorch's ``ScheduleLoopedBFS``: backwards take the
chunks and the microbatches in reverse. All v m microbatches of a rank are in flight, and with m >= p the bubble is
that of interleaved 1F1B, (p - 1) / (v m + p - 1).
"""

from __future__ import annotations

from .actions import Action, Schedule, backward, forward


def looped_bfs(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The looped breadth-first schedule of ``pp`` ranks with ``chunks`` stages each."""
    rows = tuple(_rank_actions(range(rank, pp * chunks, pp), microbatches) for rank in range(pp))
    return Schedule("looped-bfs", pp, pp * chunks, microbatches, rows)


def _rank_actions(stages: range, microbatches: int) -> tuple[Action, ...]:
    forwards = [forward(stage, microbatch) for stage in stages for microbatch in range(microbatches)]
    backwards = [backward(action.stage, action.microbatch) for action in reversed(forwards)]
    return (*forwards, *backwards)
