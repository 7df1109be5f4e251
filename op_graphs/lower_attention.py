"""Lowering of the attention block: projections to queries, keys and values, positions, core attention.

Two kinds of projections: one fused column-parallel linear (multi-head and grouped-query attention), or the low-rank
chain of multi-head latent attention (``lower_latent_attention``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import pointwise
from .linear_gemms import forward_again
from .lower_absorbed_attention import (
    AbsorbedSaved,
    absorbed_output_backward,
    absorbed_output_forward,
    absorbed_projections_backward,
    absorbed_projections_forward,
    recompute_absorbed,
)
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
from .recompute import Part
from .vocabulary import OpKind, Phase


@dataclass
class AttentionSaved:
    """What the attention block keeps between the norm and the output projection."""

    sizes: AttentionSizes
    core: CoreSaved
    output: Tensor
    """Input of the output projection."""
    latent: LatentSaved | AbsorbedSaved | None = None
    before_norm: Tensor | None = None
    """Queries and keys in front of their norm, where the model has one."""
    repeated: Tensor | None = None
    """What keys and values take more where they are repeated for all heads."""
    gate: Tensor | None = None
    """Gate of the output, where the model has one; ``output`` is behind it."""


def attention_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> AttentionSaved:
    """Emit projections and core attention.

    ``normalized`` is the output of the norm; it is released behind its last reader unless ``keep_input``.
    """
    sizes = AttentionSizes.of_layer(context, layer)
    latent: LatentSaved | AbsorbedSaved | None = None
    before_norm: Tensor | None = None
    keys: Tensor | None = None
    if context.absorbs_latents:
        latent, qkv = absorbed_projections_forward(builder, context, layer, normalized, keep_input=keep_input)
    elif context.model.latent_attention is not None:
        latent, qkv = latent_projections_forward(builder, context, layer, normalized, keep_input=keep_input)
    else:
        qkv, keys, before_norm = _projection_forward(
            builder, context, layer, sizes, normalized, keep_input=keep_input
        )
    repeated = _repeat_heads(builder, context, sizes) if latent is None else None
    gate: Tensor | None = None
    if context.model.attention_output_gate:
        gate = builder.activation("attention_gate", sizes.output_bytes, builder.last_row)
    core, output = core_forward(builder, context, sizes, qkv)
    if keys is not None:
        builder.release(keys, builder.end_row)
    if repeated is not None and (context.recomputes(Part.POSITIONS) or not builder.keep_activations):
        builder.release(repeated, builder.end_row)
    if context.model.attention_sinks:
        builder.parameter_rows.setdefault(_sinks(context, layer), builder.last_row)
    if latent is not None and latent.up_recomputed:
        # An all-to-all has released q, k and v already: then there is nothing to discard.
        latent.up_recomputed = core.qkv == qkv
        if latent.up_recomputed:
            builder.release(qkv, builder.last_row)
    if context.absorbs_latents:
        output = absorbed_output_forward(builder, context, layer, output)
    if before_norm is not None and context.recomputes(Part.POSITIONS):
        # What the projection wrote is kept once; norm and positions run again on it.
        builder.release(before_norm, builder.last_row)
    elif before_norm is not None:
        builder.forget_unless_kept(before_norm, builder.last_row)
    if gate is not None:
        output = _gated(builder, context, sizes, core.output, gate)
    return AttentionSaved(sizes, core, output, latent, before_norm, repeated, gate)


def _gated(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, output: Tensor, gate: Tensor
) -> Tensor:
    """The output times the sigmoid of its gate."""
    size = sizes.output_bytes
    row = builder.memory_bound(
        "attention_output_gate", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    for tensor in (output, gate):
        builder.forget_unless_kept(tensor, row)
    return builder.activation("gated_attention_output", size, row)


def _gate_backward(
    builder: ProgramBuilder, context: LoweringContext, saved: AttentionSaved, d_output: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the output in front of its gate, and of the gate."""
    assert saved.gate is not None
    size = saved.sizes.output_bytes
    row = builder.memory_bound(
        "attention_output_gate_backward",
        OpKind.ELEMENTWISE,
        read=3 * size,
        written=2 * size,
        dtype=context.dtype,
    )
    builder.release(d_output, row)
    builder.release(saved.gate, row)
    return (
        builder.temporary("attention_output_gradient", size, row),
        builder.temporary("attention_gate_gradient", size, row),
    )


def _joined_gradient(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, d_qkv: Tensor, d_gate: Tensor
) -> Tensor:
    """Gradients of q, k, v and of the gate as the one tensor that the projection made."""
    size = sizes.qkv_bytes + sizes.output_bytes
    row = builder.memory_bound(
        "qkv_gate_gradient", OpKind.MEMCPY, read=size, written=size, access="strided", dtype=context.dtype
    )
    builder.release(d_qkv, row)
    builder.release(d_gate, row)
    return builder.temporary("qkv_gradient", size, row)


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


def _latent_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: AttentionSaved,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    """As :func:`attention_backward`, of latent attention in either form."""
    core, latent = saved.core, saved.latent
    if isinstance(latent, AbsorbedSaved):
        d_output = absorbed_output_backward(builder, context, layer, core.output, d_output)
        if latent.up_recomputed:
            core = replace(core, qkv=recompute_absorbed(builder, context, layer, latent, normalized))
        d_qkv = core_backward(builder, context, saved.sizes, core, d_output)
        return absorbed_projections_backward(builder, context, layer, latent, normalized, d_qkv)
    assert latent is not None
    if latent.up_recomputed:
        core = replace(core, qkv=recompute_up_projections(builder, context, layer, latent, normalized))
    d_qkv = core_backward(builder, context, saved.sizes, core, d_output)
    return latent_projections_backward(builder, context, layer, latent, normalized, d_qkv)


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
        return _latent_backward(builder, context, layer, saved, normalized, d_output)
    d_gate: Tensor | None = None
    if saved.gate is not None:
        d_output, d_gate = _gate_backward(builder, context, saved, d_output)
    again_rotated: Tensor | None = None
    keys: Tensor | None = None
    again = context.recomputes(Part.POSITIONS)
    if _keys_again(context):
        projection = layer_linear(context, layer, "qkv")
        linear = replace(projection, name="keys", outputs=context.local_kv_size, parts=())
        row = forward_again(builder, context, linear)
        keys = builder.temporary("keys", _key_bytes(saved.sizes), row)
    if again and (saved.before_norm is not None or context.model.is_rotary_layer(layer)):
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        if saved.before_norm is not None:
            _qk_norm(builder, context, saved.sizes)
        _positions(builder, context, layer, saved.sizes, backward=False)
        builder.phase = phase
        again_rotated = builder.temporary("rotated_qk", _rotated_bytes(saved.sizes), builder.last_row)
    repeated = saved.repeated
    if again:
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        repeated = _repeat_heads(builder, context, saved.sizes)
        builder.phase = phase
    d_qkv = core_backward(builder, context, saved.sizes, saved.core, d_output)
    if repeated is not None:
        pointwise.sum_repeated_heads(builder, context, saved.sizes.kv_bytes, _repeated_bytes(saved.sizes))
    for tensor in (again_rotated, keys, repeated):
        if tensor is not None:
            builder.release(tensor, builder.last_row)
    if context.model.attention_sinks:
        # The kernel's backward sums the gradient of the sinks on the way.
        builder.gradient_rows[_sinks(context, layer)] = builder.last_row
    _positions(builder, context, layer, saved.sizes, backward=True)
    if saved.before_norm is not None:
        rotated = _rotated_bytes(saved.sizes)
        row = pointwise.norm_backward(builder, context, "qk_norm_backward", rotated, passes=2)
        if context.model.qk_norm_weight:
            builder.gradient_rows[context.module(layer, "self_attention.q_layernorm")] = row
        if not again:
            builder.release(saved.before_norm, row)
    if d_gate is not None:
        d_qkv = _joined_gradient(builder, context, saved.sizes, d_qkv, d_gate)
    linear = layer_linear(context, layer, "qkv")
    if context.model.qkv_bias and context.libraries.separate_biases:
        pointwise.sum_bias_gradient(builder, context, linear.name, saved.sizes.qkv_bytes, linear.outputs)
    gradient = column_parallel_backward(builder, context, linear, normalized, d_qkv)
    pointwise.input_gradients(builder, context, "attention", products=3)
    return gradient


def _sinks(context: LoweringContext, layer: int) -> str:
    return context.module(layer, "self_attention.core_attention")


def _repeat_heads(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> Tensor | None:
    """Repeat keys and values for all heads, where that is done in memory; returns what they take more."""
    if not context.libraries.runs_eagerly("attention") or sizes.heads == sizes.kv_heads:
        return None
    more = _repeated_bytes(sizes)
    row = pointwise.repeat_heads(builder, context, sizes.kv_bytes, more)
    return builder.activation("repeated_keys_values", more, row)


def _repeated_bytes(sizes: AttentionSizes) -> float:
    return sizes.kv_bytes * (sizes.heads / sizes.kv_heads - 1)


def _keys_again(context: LoweringContext) -> bool:
    """Whether the projection to keys, the second product of a layer, runs again."""
    return context.recomputes(Part.SECOND_PRODUCTS)


def _key_bytes(sizes: AttentionSizes) -> float:
    return sizes.item * sizes.batch * sizes.length * sizes.kv_heads * sizes.head_size


def _rotated_bytes(sizes: AttentionSizes) -> float:
    """Bytes of queries and keys."""
    return sizes.query_bytes + _key_bytes(sizes)


def _projection_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    sizes: AttentionSizes,
    normalized: Tensor,
    *,
    keep_input: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The fused QKV projection, the norm of queries and keys, and rotary positions.

    Returns what is kept of its output, the keys where they are not, and the input of the norm.
    """
    linear = layer_linear(context, layer, "qkv")
    row = column_parallel_forward(builder, context, linear, normalized, keep_input=keep_input)
    if context.model.qkv_bias and context.libraries.separate_biases:
        row = pointwise.add_bias(builder, context, linear.name, sizes.qkv_bytes)
    apart = _key_bytes(sizes) if builder.keep_activations and _keys_again(context) else 0.0
    qkv = builder.activation("qkv", sizes.qkv_bytes - apart, row)
    keys = builder.temporary("keys", apart, row) if apart else None
    before_norm: Tensor | None = None
    if context.model.has_qk_norm(layer):
        row = _qk_norm(builder, context, sizes)
        builder.parameter_rows.setdefault(context.module(layer, "self_attention.q_layernorm"), row)
        before_norm = builder.activation("qk_norm_input", _rotated_bytes(sizes), row)
    _positions(builder, context, layer, sizes, backward=False)
    return qkv, keys, before_norm


def _qk_norm(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> int:
    return pointwise.norm(builder, context, "qk_norm", _rotated_bytes(sizes), passes=2)


def _positions(
    builder: ProgramBuilder, context: LoweringContext, layer: int, sizes: AttentionSizes, *, backward: bool
) -> None:
    """Rotary positions of queries and keys, a kernel each (Megatron-Core fused rotary embedding)."""
    if not context.model.is_rotary_layer(layer):
        return
    name = "rotary_backward" if backward else "rotary"
    pointwise.rotary(builder, context, name, _rotated_bytes(sizes))
