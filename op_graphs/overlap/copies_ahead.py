"""Copies of kept activations beside compute, both ways: back one layer ahead of the backward that reads them."""

from __future__ import annotations

from collections.abc import Sequence

from op_graphs.program import ProgramBuilder

from .policy import CopyPlacement


class CopiesAhead(CopyPlacement):
    """Compute waits for a copy to the host only where too many are under way, and for one back where it is read."""

    name = "ahead"
    beside = (
        "a copy to the host beside the compute behind it, a copy back beside the backward of the layer above"
    )
    follows = "Megatron-Core --fine-grained-activation-offloading, Transformer Engine get_cpu_offload_context"
    announces = True

    def behind_copy(self, builder: ProgramBuilder, copies: Sequence[int], in_flight: int | None) -> None:
        """The copy that leaves ``in_flight`` under way."""
        if in_flight is not None and len(copies) > in_flight:
            builder.wait_for(copies[-1 - in_flight])
