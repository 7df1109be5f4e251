"""DualPipeV: DualPipe cut in half, one copy of the model as a V (Qi et al.'s "cut-in-half" of arXiv:2412.19437's).

Rank r holds stages r and 2 p - 1 - r, so the legs of the V take the parts of DualPipe's two directions. A rank's bubble
is (p - 1) (F&B + B - 3 W) in the times of one chunk, and it holds 2 p + 1 chunks' activations. The order is PyTorch's
``ScheduleDualPipeV``.
"""

from __future__ import annotations

from .actions import Schedule, ScheduleError, v_placement
from .dual_pipe_steps import dual_pipe_row


def dualpipev(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The DualPipeV schedule of ``pp`` ranks with two stages each (``chunks`` is 2).

    Raises:
        ScheduleError: if there are fewer microbatches than stages.
    """
    if microbatches < 2 * pp:
        raise ScheduleError(
            f"dualpipev needs at least as many microbatches as stages, 2 * pp = {2 * pp}, not {microbatches}; "
            "use zb-v, or more microbatches"
        )
    rows = tuple(
        dual_pipe_row(pp, rank, microbatches, (rank, 2 * pp - 1 - rank), (0, 0)) for rank in range(pp)
    )
    return Schedule("dualpipev", pp, pp * chunks, microbatches, rows, v_placement(pp))
