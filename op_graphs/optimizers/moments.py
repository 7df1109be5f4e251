"""The update all optimizers of running averages share: one fused kernel over the shard."""

from __future__ import annotations

from ..program import ProgramBuilder
from ..vocabulary import DType, OpKind
from .shard import FP32_BYTES, OptimizerShard


def emit_fused_update(builder: ProgramBuilder, shard: OptimizerShard, name: str, moments: int) -> None:
    """Read gradient, master weight and ``moments`` states of each element; write back all but the gradient.

    Source: NVIDIA apex ``FusedAdam`` and Transformer Engine's, one multi-tensor kernel over all parameters.
    """
    elements = shard.elements
    states = (FP32_BYTES + moments * shard.moment_bytes) * elements
    builder.memory_bound(
        name,
        OpKind.OPTIMIZER,
        read=states + shard.gradient_dtype.itemsize * elements,
        written=states,
        dtype=DType.FP32,
    )
