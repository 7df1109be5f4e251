"""Parameters gathered bucket by bucket in the first forward, all posted at its start."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import ParameterPlacement


class ParameterBuckets(ParameterPlacement):
    """Every gather is posted when the forward starts; a layer waits for its own bucket only."""

    name = "buckets"
    beside = "all buckets are posted at the start of the first forward, each beside the layers before it"
    follows = "an upper bound of Megatron-LM --overlap-param-gather, NeMo"
    in_forward = True

    def gather_after(self, readers_before: Sequence[int]) -> list[int]:
        """Behind nothing."""
        return []
