"""V-Min: a third of 1F1B's activation memory, the least of its family (Qi et al. 2024, arXiv:2405.15362, section 4).

Ranks hold 2 floor((p + 4) / 3) chunks' activations, that is floor((p + 4) / 3) whole stages where 1F1B holds p. With
F = I = W = 1 a chunk and free communication a rank's bubble is 4 p - 5, or 4 p - 3 where 3 divides p (6 (p - 1) for
1F1B in the same unit): about two thirds. It depends on F, I and W being alike: the block has no slack.
"""

from __future__ import annotations

from .actions import Schedule
from .building_block import squeezed_blocks


def v_min(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The V-Min schedule of ``pp`` ranks with two stages each (``chunks`` is 2)."""
    assert chunks == 2
    # Every hop takes one unit, down, up and back; the pause keeps multiples of 3 free of collisions.
    pause = 2 if pp % 3 == 0 else 0
    offsets = [
        (rank, 2 * pp - rank - 1, 2 * pp + pause + rank, 4 * pp + pause - rank - 1) for rank in range(pp)
    ]
    return squeezed_blocks("v-min", pp, microbatches, offsets, activations=2 * ((pp + 4) // 3))
