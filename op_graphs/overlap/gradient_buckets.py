"""Gradients reduced bucket by bucket, beside the rest of the last backward."""

from __future__ import annotations

from op_graphs.program import ProgramBuilder

from .policy import GradientPlacement


class GradientBuckets(GradientPlacement):
    """A bucket is reduced as soon as its last gradient is there, and nothing of the backward waits for it."""

    name = "buckets"
    beside = "a bucket is reduced when its last gradient is there, beside the rest of the last backward"
    follows = "Megatron-LM --overlap-grad-reduce, PyTorch DDP and FSDP"
    in_backward = True

    def behind_reduction(self, builder: ProgramBuilder, row: int) -> None:
        """Nothing waits."""
