"""Ring attention: the next keys and values travel under the attention on those that are here."""

from __future__ import annotations

from op_graphs.program import ProgramBuilder

from .policy import RingPlacement


class RingUnderAttention(RingPlacement):
    """A step is awaited by the kernel that reads it, one kernel later."""

    name = "under-attention"
    beside = "the next keys and values travel under the attention on those that are here"
    follows = "Liu et al. 2023 (ring attention), Transformer Engine cp_comm_type p2p"

    def behind(self, builder: ProgramBuilder, arriving: int) -> list[int]:
        """The step that brought what it sends on."""
        return [arriving if arriving >= 0 else builder.last_row]

    def behind_step(self, builder: ProgramBuilder, sending: int) -> None:
        """Nothing waits yet."""
