"""Weight gradients of a pair's backward where autograd runs them: in front of the exchange."""

from __future__ import annotations

from op_graphs.columns import Bool

from .policy import WeightPlacement, nowhere


class WeightsInPlace(WeightPlacement):
    """The exchange waits for the weight gradients before it."""

    name = "in-place"
    beside = "nothing: weight gradients in front of the exchange"
    follows = "Megatron-LM without --delay-wgrad-compute"

    def can_wait(self, weights: Bool) -> Bool:
        """None."""
        return nowhere(weights)
