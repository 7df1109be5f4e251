"""Adam and AdamW: two running averages for each parameter (Kingma and Ba 2015, arXiv:1412.6980)."""

from __future__ import annotations

from ..program import ProgramBuilder
from .moments import emit_fused_update
from .shard import OptimizerShard


class Adam:
    """First and second moment, 8 bytes a parameter in fp32."""

    chooses_moments = True

    def state_bytes(self, shard: OptimizerShard) -> float:
        """Two moments."""
        return 2 * shard.moment_bytes * shard.elements

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """One fused kernel."""
        emit_fused_update(builder, shard, "adam", moments=2)
