"""Stochastic gradient descent with momentum (Polyak 1964; Sutskever et al. 2013): one running average."""

from __future__ import annotations

from ..program import ProgramBuilder
from .moments import emit_fused_update
from .shard import OptimizerShard


class Sgd:
    """Momentum, 4 bytes a parameter in fp32."""

    chooses_moments = True

    def state_bytes(self, shard: OptimizerShard) -> float:
        """One moment."""
        return shard.moment_bytes * shard.elements

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """One fused kernel."""
        emit_fused_update(builder, shard, "sgd", moments=1)
