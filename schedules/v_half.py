"""V-Half: half of 1F1B's activation memory at half of its bubble (Qi et al. 2024, arXiv:2405.15362, section 4).

Ranks hold 2 floor((p + 2) / 2) chunks' activations, that is floor((p + 2) / 2) whole stages where 1F1B holds p. With
F = I = W = 1 a chunk and free communication a rank's bubble is 3 p - 3 for even p and 3 p - 4 for odd p (6 (p - 1) for
1F1B in the same unit): about half.
"""

from __future__ import annotations

from .actions import Schedule
from .building_block import squeezed_blocks


def v_half(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The V-Half schedule of ``pp`` ranks with two stages each (``chunks`` is 2)."""
    assert chunks == 2
    # Forwards move down two units a rank and up one, backwards the same; the pause keeps an even p free of collisions.
    pause = 3 if pp % 2 == 0 else 0
    offsets = [
        (2 * rank, 3 * pp - rank - 2, 3 * pp + pause + 2 * rank - 1, 6 * pp + pause - rank - 2)
        for rank in range(pp)
    ]
    return squeezed_blocks("v-half", pp, microbatches, offsets, activations=2 * ((pp + 2) // 2))
