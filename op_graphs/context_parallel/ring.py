"""Ring attention, ``p2p`` (Liu et al. 2023).

Keys and values travel in cp - 1 steps, each under the attention of the step before; in backward their gradients travel
with them.
"""

from __future__ import annotations

from ..lower_core_attention import AttentionSizes, flash_backward, flash_forward
from ..lowering_context import LoweringContext
from ..overlap.registry import RING
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, OpKind
from .algorithm import ContextParallelAlgorithm, CoreSaved, exchange


def ring_attention(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, steps: int, group: int
) -> tuple[Tensor, Tensor]:
    """Attention against each rank's keys in turn; returns the output and its log-sum-exp."""
    part, placement = sizes.part(steps), RING.chosen(context.overlap.cp)
    arriving = -1
    output: Tensor | None = None
    received: Tensor | None = None
    for step in range(steps):
        sending = -1
        if step + 1 < steps:
            after = placement.behind(builder, arriving)
            sending = exchange(
                builder, context, "ring_kv", Communication.SEND_RECEIVE, sizes.kv_bytes, group, after
            )
            placement.behind_step(builder, sending)
        builder.wait_for(arriving)
        row = flash_forward(builder, context, part)
        if output is None:
            output = builder.activation("attention_output", sizes.output_bytes, row)
        else:
            builder.memory_bound(
                "attention_merge",
                OpKind.ELEMENTWISE,
                read=2 * sizes.output_bytes,
                written=sizes.output_bytes,
                dtype=context.dtype,
            )
        if received is not None:
            builder.release(received, builder.last_row)
        received = builder.temporary("received_kv", sizes.kv_bytes, sending) if sending >= 0 else None
        arriving = sending
    assert output is not None
    log_sum_exp = builder.activation(
        "log_sum_exp", 4.0 * sizes.batch * sizes.length * sizes.heads, builder.last_row
    )
    return output, log_sum_exp


def ring_attention_backward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, steps: int, group: int
) -> Tensor:
    """Backward against each rank's keys in turn; keys and values travel on with the gradients they collected."""
    part, placement = sizes.part(steps), RING.chosen(context.overlap.cp)
    d_qkv: Tensor | None = None
    received: Tensor | None = None
    arriving = -1
    for step in range(steps):
        sending = -1
        after = placement.behind(builder, arriving)
        if step + 1 < steps:
            sending = exchange(
                builder, context, "ring_kv", Communication.SEND_RECEIVE, sizes.kv_bytes, group, after
            )
            placement.behind_step(builder, sending)
        builder.wait_for(arriving)
        row = flash_backward(builder, context, part)
        if d_qkv is None:
            d_qkv = builder.temporary("qkv_gradient", sizes.qkv_bytes, row)
        if received is not None:
            builder.release(received, row)
        gradient = exchange(
            builder, context, "ring_kv_gradient", Communication.SEND_RECEIVE, sizes.kv_bytes, group
        )
        placement.behind_step(builder, gradient)
        received = (
            builder.temporary("received_kv", 2 * sizes.kv_bytes, gradient) if step + 1 < steps else None
        )
        arriving = sending
        if step + 1 == steps:
            builder.wait_for(gradient)
    assert d_qkv is not None
    builder.memory_bound(
        "kv_gradient_sum",
        OpKind.ELEMENTWISE,
        read=2 * sizes.kv_bytes,
        written=sizes.kv_bytes,
        dtype=context.dtype,
    )
    return d_qkv


def _ring_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor, keep: bool
) -> tuple[CoreSaved, Tensor]:
    group = context.group(Dimension.CP)
    inner = [_joined_keys(builder, context, sizes)] if _joins_keys(context) else []
    output, log_sum_exp = ring_attention(builder, context, sizes, context.parallel.cp, group)
    inner.append(log_sum_exp)
    if not keep:
        for tensor in inner:
            builder.release(tensor, builder.last_row)
    return CoreSaved(qkv, output, inner if keep else []), output


def _joins_keys(context: LoweringContext) -> bool:
    """Whether keys and values are copied into one tensor for the ring, beside the projection that holds them.

    Transformer Engine ``pytorch/attention/dot_product_attention/context_parallel.py`` does, and keeps it; queries stay
    where the projection wrote them, with their keys and values. Latent attention makes keys and values of its own.
    """
    return context.libraries.transformer_engine and context.model.latent_attention is None


def _joined_keys(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> Tensor:
    row = builder.memory_bound(
        "ring_kv_copy", OpKind.MEMCPY, read=sizes.kv_bytes, written=sizes.kv_bytes, dtype=context.dtype
    )
    return builder.activation("ring_kv", sizes.kv_bytes, row)


def _ring_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
) -> Tensor:
    group = context.group(Dimension.CP)
    d_qkv = ring_attention_backward(builder, context, sizes, context.parallel.cp, group)
    for tensor in (*saved.inner, d_output):
        builder.release(tensor, builder.last_row)
    return d_qkv


RING_ATTENTION = ContextParallelAlgorithm(_ring_forward, _ring_backward)
