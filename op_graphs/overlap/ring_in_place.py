"""Ring attention without overlap: a step ends before the attention on the keys that are here begins."""

from __future__ import annotations

from op_graphs.program import ProgramBuilder

from .policy import RingPlacement


class RingInPlace(RingPlacement):
    """Attention waits for the step that was posted in front of it."""

    name = "in-place"
    beside = "nothing: attention waits for every step of the ring"
    follows = "a ring on the compute stream; PyTorch's context_parallel inside torch.compile"

    def behind(self, builder: ProgramBuilder, arriving: int) -> list[int]:
        """The kernel before it."""
        return [builder.last_row]

    def behind_step(self, builder: ProgramBuilder, sending: int) -> None:
        """The next kernel waits."""
        builder.wait_for(sending)
