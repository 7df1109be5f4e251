"""Pairs of a forward and a backward run one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from op_graphs.columns import Int64
from op_graphs.program import Program

from .policy import PairPlacement


class PairsInSequence(PairPlacement):
    """The backward, then the forward; every exchange is exposed."""

    name = "in-sequence"
    beside = "nothing: the backward of a pair, then its forward"
    follows = "Megatron-LM without --overlap-moe-expert-parallel-comm"

    def order(
        self, first: Program, second: Program, pieces: Callable[[Program], list[Int64]]
    ) -> list[tuple[bool, Int64]]:
        """All of the second, then all of the first."""
        return [(False, np.concatenate(pieces(second))), (True, np.concatenate(pieces(first)))]
