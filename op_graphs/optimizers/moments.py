"""The update all optimizers of running averages share: one fused kernel over the shard."""

from __future__ import annotations

from ..program import ProgramBuilder, Tensor
from ..vocabulary import DType, OpKind
from .shard import FP32_BYTES, OptimizerShard


def emit_fused_update(builder: ProgramBuilder, shard: OptimizerShard, name: str, moments: int) -> None:
    """Read gradient, master weight and ``moments`` states of each element; write back all but the gradient.

    Source: NVIDIA apex ``FusedAdam`` and Transformer Engine's, one multi-tensor kernel over all parameters. With
    ``libraries.eager`` each operation of the formula is such a kernel.
    """
    elements = shard.elements
    if shard.context.libraries.runs_eagerly("optimizer"):
        _emit_foreach_update(builder, shard, name, moments)
        return
    states = (FP32_BYTES + moments * shard.moment_bytes) * elements
    builder.memory_bound(
        name,
        OpKind.OPTIMIZER,
        read=states + shard.gradient_dtype.itemsize * elements,
        written=states,
        dtype=DType.FP32,
    )


def _emit_foreach_update(builder: ProgramBuilder, shard: OptimizerShard, name: str, moments: int) -> None:
    """The same one operation after another (PyTorch ``torch/optim/adamw.py``, ``_multi_tensor_adamw``).

    Weight decay, the moments' averages (the second takes two), and with a second moment its square root, division,
    sum with epsilon, and the update; with one moment the update alone.
    """
    elements = shard.elements
    single, moment, gradient = FP32_BYTES, shard.moment_bytes, shard.gradient_dtype.itemsize
    read, written, passes = 2 * single + moment, 2 * single, 2  # decay and update
    read, written, passes = read + moment + gradient, written + moment, passes + 1  # first moment
    root: Tensor | None = None
    if moments > 1:
        read += 2 * moment + gradient + moment + 3 * single
        written += 2 * moment + 3 * single
        passes += 5
        root = builder.temporary("second_moment_root", single * elements, len(builder))
    row = builder.memory_bound(
        name,
        OpKind.OPTIMIZER,
        read=read * elements,
        written=written * elements,
        passes=passes,
        dtype=DType.FP32,
    )
    if root is not None:
        builder.release(root, row)
