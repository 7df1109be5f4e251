"""Parameters gathered one bucket ahead of the layers that read them."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import ParameterPlacement


class ParameterNextBucket(ParameterPlacement):
    """The gather of a bucket is posted when the first layer of the bucket before it is reached."""

    name = "next-bucket"
    beside = "a bucket is posted when the bucket before it is first read, and travels beside its layers"
    follows = "Megatron-LM --overlap-param-gather (forward hooks of distributed_data_parallel.py)"
    in_forward = True

    def gather_after(self, readers_before: Sequence[int]) -> list[int]:
        """Behind what stands in front of the first reader of the bucket before, so that it runs beside that reader."""
        first = min(readers_before, default=0)
        return [first - 1] if first > 0 else []
