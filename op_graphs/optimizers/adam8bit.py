"""Adam with block-wise 8-bit states (Dettmers et al. 2022, arXiv:2110.02861).

Each moment takes one byte an element and one fp32 magnitude a block of 256 elements; tensors of fewer than 4096
elements keep fp32 moments. Both figures are those of bitsandbytes (``optim/optimizer.py``, ``functional.py``). States
are read, dequantised, updated and quantised in one kernel.
"""

from __future__ import annotations

from ..program import ProgramBuilder
from ..vocabulary import DType, OpKind
from .shard import FP32_BYTES, OptimizerShard, Part

BLOCK_ELEMENTS = 256
MINIMUM_ELEMENTS = 4096
"""Elements below which a tensor keeps fp32 moments."""

_MOMENTS = 2


class Adam8bit:
    """First and second moment, about 2 bytes a parameter."""

    chooses_moments = False

    def state_bytes(self, shard: OptimizerShard) -> float:
        """Two moments, by the size of each tensor."""
        return sum(_MOMENTS * _moment_bytes(part) * part.elements for part in shard.parts)

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """One fused kernel."""
        states = FP32_BYTES * shard.elements + self.state_bytes(shard)
        builder.memory_bound(
            "adam8bit",
            OpKind.OPTIMIZER,
            read=states + shard.gradient_dtype.itemsize * shard.elements,
            written=states,
            dtype=DType.FP32,
        )


def _moment_bytes(part: Part) -> float:
    if part.tensor.elements < MINIMUM_ELEMENTS:
        return FP32_BYTES
    return 1 + FP32_BYTES / BLOCK_ELEMENTS
