"""Lowering of the attention block: projections to queries, keys and values, positions, core attention.

Two kinds of projections: one fused column-parallel linear (multi-head and grouped-query attention), or the low-rank
chain of multi-head latent attention (``lower_latent_attention``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .lower_context_parallel import CoreSaved, core_backward, core_forward
from .lower_core_attention import AttentionSizes
from .lower_latent_attention import (
    LatentSaved,
    latent_projections_backward,
    latent_projections_forward,
    recompute_up_projections,
)
from .lower_linear import (
    column_parallel_backward,
    column_parallel_forward,
    layer_linear,
)
from .lower_quantization import ATTENTION_OUTPUT_BYTES, restore, store
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind, Phase


@dataclass
class AttentionSaved:
    """What the attention block keeps between the norm and the output projection."""

    sizes: AttentionSizes
    core: CoreSaved
    output: Tensor
    """Input of the output projection."""
    latent: LatentSaved | None = None
    before_norm: Tensor | None = None
    """Queries and keys in front of their norm, where the model has one."""


def attention_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> AttentionSaved:
    """Emit projections and core attention.

    ``normalized`` is the output of the norm; it is released behind its last reader unless ``keep_input``.
    """
    sizes = AttentionSizes.of_layer(context, layer)
    latent: LatentSaved | None = None
    before_norm: Tensor | None = None
    if context.model.latent_attention is not None:
        latent, qkv = latent_projections_forward(builder, context, layer, normalized, keep_input=keep_input)
    else:
        qkv, before_norm = _projection_forward(
            builder, context, layer, sizes, normalized, keep_input=keep_input
        )
    core, output = core_forward(builder, context, sizes, qkv)
    if context.model.attention_sinks:
        builder.parameter_rows.setdefault(_sinks(context, layer), builder.last_row)
    if latent is not None and latent.up_recomputed:
        # An all-to-all has released q, k and v already: then there is nothing to discard.
        latent.up_recomputed = core.qkv == qkv
        if latent.up_recomputed:
            builder.release(qkv, builder.last_row)
    if before_norm is not None and context.training.recompute.keeps_products:
        # What the projection wrote is kept once; norm and positions run again on it.
        builder.release(before_norm, builder.last_row)
    elif before_norm is not None:
        builder.forget_unless_kept(before_norm, builder.last_row)
    return AttentionSaved(sizes, core, output, latent, before_norm)


def stored_attention(
    builder: ProgramBuilder, context: LoweringContext, saved: AttentionSaved
) -> AttentionSaved:
    """What is kept with the output of core attention in fewer bits."""
    elements = saved.sizes.output_bytes / saved.sizes.item
    output = store(builder, context, "attention_output", elements, saved.output, ATTENTION_OUTPUT_BYTES)
    return replace(saved, output=output, core=replace(saved.core, output=output))


def restored_attention(
    builder: ProgramBuilder, context: LoweringContext, saved: AttentionSaved
) -> AttentionSaved:
    """The reverse of :func:`stored_attention`, in the backward program."""
    elements = saved.sizes.output_bytes / saved.sizes.item
    output = restore(builder, context, "attention_output", elements, saved.output, ATTENTION_OUTPUT_BYTES)
    return replace(saved, output=output, core=replace(saved.core, output=output))


def attention_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: AttentionSaved,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Emit the backward pass from the gradient of the projection's input to that of the norm's output."""
    if saved.latent is not None:
        core = saved.core
        if saved.latent.up_recomputed:
            qkv = recompute_up_projections(builder, context, layer, saved.latent, normalized)
            core = replace(core, qkv=qkv)
        d_qkv = core_backward(builder, context, saved.sizes, core, d_output)
        return latent_projections_backward(builder, context, layer, saved.latent, normalized, d_qkv)
    again_rotated: Tensor | None = None
    again = context.training.recompute.keeps_products
    if again and (saved.before_norm is not None or context.model.is_rotary_layer(layer)):
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        if saved.before_norm is not None:
            _qk_norm(builder, context, saved.sizes)
        _positions(builder, context, layer, saved.sizes, backward=False)
        builder.phase = phase
        again_rotated = builder.temporary("rotated_qk", _rotated_bytes(saved.sizes), builder.last_row)
    d_qkv = core_backward(builder, context, saved.sizes, saved.core, d_output)
    if again_rotated is not None:
        builder.release(again_rotated, builder.last_row)
    if context.model.attention_sinks:
        # The kernel's backward sums the gradient of the sinks on the way.
        builder.gradient_rows[_sinks(context, layer)] = builder.last_row
    _positions(builder, context, layer, saved.sizes, backward=True)
    if saved.before_norm is not None:
        rotated = _rotated_bytes(saved.sizes)
        row = builder.memory_bound(
            "qk_norm_backward",
            OpKind.NORM,
            read=2 * rotated,
            written=rotated,
            access="reduction",
            passes=2,
            dtype=context.dtype,
        )
        if context.model.qk_norm_weight:
            builder.gradient_rows[context.module(layer, "self_attention.q_layernorm")] = row
        if not again:
            builder.release(saved.before_norm, row)
    return column_parallel_backward(builder, context, layer_linear(context, layer, "qkv"), normalized, d_qkv)


def _sinks(context: LoweringContext, layer: int) -> str:
    return context.module(layer, "self_attention.core_attention")


def _rotated_bytes(sizes: AttentionSizes) -> float:
    """Bytes of queries and keys."""
    keys = sizes.item * sizes.batch * sizes.length * sizes.kv_heads * sizes.head_size
    return sizes.query_bytes + keys


def _projection_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    sizes: AttentionSizes,
    normalized: Tensor,
    *,
    keep_input: bool,
) -> tuple[Tensor, Tensor | None]:
    """The fused QKV projection, the norm of queries and keys, and rotary positions."""
    linear = layer_linear(context, layer, "qkv")
    row = column_parallel_forward(builder, context, linear, normalized, keep_input=keep_input)
    qkv = builder.activation("qkv", sizes.qkv_bytes, row)
    before_norm: Tensor | None = None
    if context.model.has_qk_norm(layer):
        row = _qk_norm(builder, context, sizes)
        builder.parameter_rows.setdefault(context.module(layer, "self_attention.q_layernorm"), row)
        before_norm = builder.activation("qk_norm_input", _rotated_bytes(sizes), row)
    _positions(builder, context, layer, sizes, backward=False)
    return qkv, before_norm


def _qk_norm(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> int:
    rotated = _rotated_bytes(sizes)
    return builder.memory_bound(
        "qk_norm",
        OpKind.NORM,
        read=rotated,
        written=rotated,
        access="reduction",
        passes=2,
        dtype=context.dtype,
    )


def _positions(
    builder: ProgramBuilder, context: LoweringContext, layer: int, sizes: AttentionSizes, *, backward: bool
) -> None:
    """Rotary positions of queries and keys, a kernel each (Megatron-Core fused rotary embedding)."""
    if not context.model.is_rotary_layer(layer):
        return
    rotated = _rotated_bytes(sizes)
    builder.memory_bound(
        "rotary_backward" if backward else "rotary",
        OpKind.ELEMENTWISE,
        read=rotated,
        written=rotated,
        access="strided",
        passes=2,
        dtype=context.dtype,
    )
