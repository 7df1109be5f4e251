"""Gradients reduced behind the last backward, where nothing is left to run beside them."""

from __future__ import annotations

from op_graphs.program import ProgramBuilder

from .policy import GradientPlacement


class GradientsAfterBackward(GradientPlacement):
    """All buckets behind the last backward; those that must leave in every microbatch, where they are complete."""

    name = "after-backward"
    beside = "nothing: all buckets behind the last backward"
    follows = "Megatron-LM without --overlap-grad-reduce"
    in_backward = False

    def behind_reduction(self, builder: ProgramBuilder, row: int) -> None:
        """The rest of the backward waits."""
        builder.wait_for(row)
