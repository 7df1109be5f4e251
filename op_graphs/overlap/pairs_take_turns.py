"""Pairs of a forward and a backward whose pieces take turns, each exchange under a piece of the other."""

from __future__ import annotations

from collections.abc import Callable

from op_graphs.columns import Int64
from op_graphs.program import Program

from .policy import PairPlacement


class PairsTakeTurns(PairPlacement):
    """Pieces that end with an exposed exchange alternate, beginning with the backward, which others wait for.

    DeepSeek-V3's DualPipe (arXiv:2412.19437, section 3.2.1, figure 4), and Megatron-Core's combined 1F1B, whose order
    of layers it is: combine of the backward under attention of the forward, both dispatches under the experts of the
    backward and the forward, combine of the forward under attention of the backward.
    """

    name = "turns"
    beside = "dispatch and combine of one microbatch beside compute of the other, in the pairs of a schedule"
    follows = "DeepSeek-V3 DualPipe, Megatron-LM --overlap-moe-expert-parallel-comm"

    def order(
        self, first: Program, second: Program, pieces: Callable[[Program], list[Int64]]
    ) -> list[tuple[bool, Int64]]:
        """One piece of each in turn."""
        cut = (pieces(second), pieces(first))
        return [
            (bool(which), found[turn])
            for turn in range(max(map(len, cut)))
            for which, found in enumerate(cut)
            if turn < len(found)
        ]
