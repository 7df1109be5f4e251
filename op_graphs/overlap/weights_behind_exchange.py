"""Weight gradients of a pair's backward behind the start of the exchange that carries the input gradient on."""

from __future__ import annotations

from op_graphs.columns import Bool

from .policy import WeightPlacement


class WeightsBehindExchange(WeightPlacement):
    """The exchange leaves first, and the weight gradients before it run beside it."""

    name = "behind-exchange"
    beside = "weight gradients beside the exchange that carries the input gradient of their layer on"
    follows = "DeepSeek-V3's published profile, Megatron-LM --delay-wgrad-compute"

    def can_wait(self, weights: Bool) -> Bool:
        """All of them."""
        return weights
