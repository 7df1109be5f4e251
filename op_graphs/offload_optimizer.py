"""Optimizer states in the memory of the host: gradients go there, the processor updates, parameters come back.

Order is that of Megatron-Core's ``HybridDeviceOptimizer`` (``optimizer/cpu_offloading/hybrid_optimizer.py``), behind
the clipping of gradients: copies of the gradients of the moved parameters are started, the device updates the
parameters that stay, then the processor updates each moved parameter once its gradient is there, and its new value is
copied back in the type of the model. With ``optimizer_overlap`` this is a pipeline of layers, without it one after the
other.
DeepSpeed's ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) moves the same bytes; its copies of gradients under the
backward pass are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .graph import HostCopyShape, HostUpdateShape
from .optimizers import OPTIMIZERS, OptimizerShard
from .optimizers.shard import FP32_BYTES, Part
from .program import ProgramBuilder
from .vocabulary import DType, OpKind, Phase, Stream


@dataclass(frozen=True)
class SplitShard:
    """A rank's share of the parameters, by where it is updated."""

    host: OptimizerShard
    device: OptimizerShard


def split_shard(shard: OptimizerShard) -> SplitShard:
    """Whole parameters, in order, go to the host until they are the part of all elements that the plan asks for."""
    wanted = shard.context.training.offload.optimizer * shard.elements
    moved: list[Part] = []
    elements = 0.0
    for part in shard.parts:
        if elements >= wanted:
            break
        moved.append(part)
        elements += part.elements
    return SplitShard(shard.subset(moved), shard.subset(shard.parts[len(moved) :]))


def host_state_bytes(shard: OptimizerShard) -> float:
    """Bytes in the memory of the host: fp32 parameter, states, and the pinned fp32 gradient."""
    if not shard.parts:
        return 0.0
    return 2 * FP32_BYTES * shard.elements + OPTIMIZERS[shard.context.training.optimizer].state_bytes(shard)


def emit_gradient_copies(builder: ProgramBuilder, shard: OptimizerShard) -> list[tuple[OptimizerShard, int]]:
    """Start copying gradients to the host; returns what is updated together, each with the row of its copy."""
    overlap = shard.context.training.offload.optimizer_overlap
    groups = _by_layer(shard) if overlap else [shard]
    source = builder.last_row
    copied = []
    for group in groups:
        row = builder.beside(
            "offload_gradients",
            OpKind.MEMCPY,
            Stream.COPY_TO_HOST,
            after=[source],
            read=shard.gradient_dtype.itemsize * group.elements,
            shape=HostCopyShape(to_host=True, copies=len(group.parts)),
            dtype=shard.gradient_dtype,
            phase=Phase.OPTIMIZER,
        )
        copied.append((group, row))
    if not overlap:
        # Without streams of its own the copy lies in front of the update on the device.
        builder.wait_for_arrival(copied[-1][1])
    return copied


def emit_host_updates(
    builder: ProgramBuilder, copied: Sequence[tuple[OptimizerShard, int]], item: float
) -> None:
    """Update on the host behind each copy and bring the parameters back, ``item`` bytes an element."""
    for shard, arrived in copied:
        elements = shard.elements
        states = FP32_BYTES * elements + OPTIMIZERS[shard.context.training.optimizer].state_bytes(shard)
        updated = builder.beside(
            f"host_{shard.context.training.optimizer}",
            OpKind.OPTIMIZER,
            Stream.HOST,
            after=[arrived],
            read=states + FP32_BYTES * elements,
            written=states + item * elements,
            shape=HostUpdateShape(),
            dtype=DType.FP32,
            phase=Phase.OPTIMIZER,
        )
        row = builder.beside(
            "reload_parameters",
            OpKind.MEMCPY,
            Stream.COPY_TO_DEVICE,
            after=[updated],
            written=item * elements,
            shape=HostCopyShape(to_host=False, copies=len(shard.parts)),
            dtype=shard.context.dtype,
            phase=Phase.OPTIMIZER,
        )
    builder.wait_for_arrival(row)


def _by_layer(shard: OptimizerShard) -> list[OptimizerShard]:
    """Parameters of one layer, and those of each end of the model, together."""
    layers: dict[int, list[Part]] = {}
    for part in shard.parts:
        layers.setdefault(part.tensor.layer, []).append(part)
    return [shard.subset(parts) for parts in layers.values()]
