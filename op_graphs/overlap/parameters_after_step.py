"""Parameters gathered behind the optimizer's step, before the next one begins."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import ParameterPlacement


class ParametersAfterStep(ParameterPlacement):
    """All parameters at once, behind the update."""

    name = "after-step"
    beside = "nothing: all parameters behind the optimizer's step"
    follows = "Megatron-LM without --overlap-param-gather"
    in_forward = False

    def gather_after(self, readers_before: Sequence[int]) -> list[int]:
        """Not asked: nothing is gathered in the forward."""
        return []
