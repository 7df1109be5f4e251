"""DualPipe: two copies of the model in opposite directions (DeepSeek-V3 report, arXiv:2412.19437, section 3.2.1).

Half the microbatches enter at rank 0 and half at rank p - 1. Rank r holds stage r of the first copy, and of the second
the part p - 1 - r of the model, which is stage 2 p - 1 - r here: stages p and up are the second copy. A forward of one
direction runs beside a backward of the other. A rank's bubble is (p / 2 - 1) (F&B + B - 3 W), and it holds p + 1
microbatches. Both copies' gradients must be added at the end.
"""

from __future__ import annotations

from .actions import Schedule, ScheduleError, v_placement
from .dual_pipe_steps import dual_pipe_row


def dualpipe(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The DualPipe schedule of ``pp`` ranks with one stage of each copy on every rank (``chunks`` is 1).

    Raises:
        ScheduleError: if ``pp`` is odd, or the microbatches are odd or fewer than ``2 * pp``.
    """
    if pp % 2 or microbatches % 2 or microbatches < 2 * pp:
        raise ScheduleError(
            f"dualpipe needs an even pp and an even number of at least 2 * pp = {2 * pp} microbatches, half in each "
            f"direction, not pp={pp} and microbatches={microbatches}; use zb-h1, or change them"
        )
    half = microbatches // 2
    rows = []
    for rank in range(pp):
        mirrored = 2 * pp - 1 - rank
        # The second half of the ranks sees the second copy's input as the nearer one.
        first, second = ((rank, 0), (mirrored, half)) if rank < pp // 2 else ((mirrored, half), (rank, 0))
        from_end = min(rank, pp - 1 - rank)
        stages, begins = (first[0], second[0]), (first[1], second[1])
        rows.append(dual_pipe_row(pp // 2, from_end, half, stages, begins))
    return Schedule("dualpipe", pp, 2 * pp * chunks, microbatches, tuple(rows), v_placement(pp), copies=2)
