"""Copies of kept activations in place: compute waits for each of them, both ways."""

from __future__ import annotations

from collections.abc import Sequence

from op_graphs.program import ProgramBuilder

from .policy import CopyPlacement


class CopiesInPlace(CopyPlacement):
    """As if they were on the compute stream."""

    name = "in-place"
    beside = (
        "nothing: compute waits for every copy, to the host behind what it keeps, and back where it is read"
    )
    follows = "torch.autograd.graph.save_on_cpu, DeepSpeed cpu_checkpointing"
    announces = False

    def behind_copy(self, builder: ProgramBuilder, copies: Sequence[int], in_flight: int | None) -> None:
        """The copy itself."""
        builder.wait_for(copies[-1])
