"""Lowering of core attention: rotary embedding and the attention kernel, fused (flash) or unfused.

Fused attention keeps q, k, v, its output and the log-sum-exp of each row (FlashAttention-2, Dao 2023). Unfused
attention is the sequence of kernels Megatron-LM ran before fused attention: scores GEMM, fused scale-mask-softmax,
dropout, context GEMM; it keeps the softmax, the dropout mask and the dropped softmax, 5 bytes a score (Korthikanti
et al. 2022, section 4.1), unless core attention is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .graph import AttentionShape, GemmShape
from .lower_linear import linear_forward
from .lowering_context import LoweringContext, layer_parameter
from .program import ProgramBuilder, Tensor
from .vocabulary import MemoryCategory, OpKind, Phase


@dataclass
class AttentionSaved:
    """What core attention keeps for its backward pass."""

    qkv: Tensor
    scores: list[Tensor] = field(default_factory=list)
    """Log-sum-exp of fused attention; softmax, mask and dropped softmax of unfused attention."""
    recomputed: bool = False
    """Whether the inner tensors are recomputed in backward."""
    normalized: Tensor | None = None
    """Queries and keys behind their norm, where the model has one; the norm's input lies in ``qkv``."""


def attention_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, consumed: Tensor | None
) -> tuple[AttentionSaved, Tensor]:
    """Emit QKV projection, rotary embedding and core attention; returns what is kept and the attention output.

    ``consumed`` is the input of the projection where it is not kept: it is released behind the GEMM.
    """
    row = linear_forward(builder, context, "qkv", context.local_qkv_size, context.model.hidden_size)
    builder.parameter_rows.setdefault(layer_parameter(layer, "qkv"), row)
    if consumed is not None:
        builder.release(consumed, row)
    qkv = builder.activation("qkv", context.item * context.tokens * context.local_qkv_size, row)
    rotated = context.item * context.tokens * (context.local_query_size + context.local_kv_size)
    normalized = None
    if context.model.qk_norm:
        row = builder.memory_bound(
            "qk_norm",
            OpKind.NORM,
            read=rotated,
            written=rotated,
            access="reduction",
            passes=2,
            dtype=context.dtype,
        )
        builder.parameter_rows.setdefault(layer_parameter(layer, "qk_norm"), row)
        normalized = builder.activation("qk_norm_output", rotated, row)
    if context.model.positions == "rotary":
        builder.memory_bound(
            "rotary",
            OpKind.ELEMENTWISE,
            read=rotated,
            written=rotated,
            access="strided",
            passes=2,
            dtype=context.dtype,
        )
    recomputed = "core_attn" in context.training.recompute.modules and builder.keep_activations
    output, scores = _core(builder, context, keep=builder.keep_activations and not recomputed)
    builder.forget_unless_kept(qkv, builder.last_row)
    if normalized is not None:
        builder.forget_unless_kept(normalized, builder.last_row)
    return AttentionSaved(qkv, scores, recomputed, normalized), output


def recompute_attention(
    builder: ProgramBuilder, context: LoweringContext, saved: AttentionSaved
) -> AttentionSaved:
    """Run core attention again inside the backward program."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    output, scores = _core(builder, context, keep=True)
    builder.release(output, builder.last_row)
    builder.phase = phase
    return AttentionSaved(saved.qkv, scores, normalized=saved.normalized)


def attention_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    saved: AttentionSaved,
    attention_output: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Emit the backward pass of core attention and rotary embedding; returns the gradient of the QKV output."""
    qkv_bytes = context.item * context.tokens * context.local_qkv_size
    if context.training.attention == "flash":
        row = builder.compute(
            "flash_attention_backward",
            OpKind.ATTENTION,
            flops=2.5 * _attention_flops(context),
            read=2 * qkv_bytes,
            written=qkv_bytes,
            shape=_attention_shape(context, backward=True),
            dtype=context.dtype,
        )
        d_qkv = builder.temporary("qkv_gradient", qkv_bytes, row)
    else:
        row, d_qkv = _unfused_backward(builder, context, saved, d_output)
    for tensor in saved.scores:
        builder.release(tensor, row)
    if saved.normalized is not None:
        builder.release(saved.normalized, row)
    if not context.model.qk_norm:
        builder.release(saved.qkv, row)
    builder.release(attention_output, row)
    builder.release(d_output, row)
    rotated = context.item * context.tokens * (context.local_query_size + context.local_kv_size)
    if context.model.positions == "rotary":
        builder.memory_bound(
            "rotary_backward",
            OpKind.ELEMENTWISE,
            read=rotated,
            written=rotated,
            access="strided",
            passes=2,
            dtype=context.dtype,
        )
    if context.model.qk_norm:
        builder.memory_bound(
            "qk_norm_backward",
            OpKind.NORM,
            read=2 * rotated,
            written=rotated,
            access="reduction",
            passes=2,
            dtype=context.dtype,
        )
        builder.gradient_rows[layer_parameter(builder.layer, "qk_norm")] = builder.last_row
        builder.release(saved.qkv, builder.last_row)
    return d_qkv


def _attention_shape(context: LoweringContext, *, backward: bool) -> AttentionShape:
    model, training = context.model, context.training
    length = training.seq_len // context.parallel.cp
    return AttentionShape(
        batch=training.micro_batch_size,
        query_length=length,
        key_length=training.seq_len,
        heads=model.heads // context.tp,
        kv_heads=context.local_kv_heads,
        head_size=model.head_size,
        value_head_size=model.head_size,
        causal=True,
        backward=backward,
        dtype=context.dtype,
    )


def _attention_flops(context: LoweringContext) -> float:
    """FLOPs of a causal attention forward: two products of query x key x head size, half of the square."""
    shape = _attention_shape(context, backward=False)
    square = shape.batch * shape.query_length * shape.key_length * shape.heads
    return 2.0 * square * (shape.head_size + shape.value_head_size) / 2


def _core(builder: ProgramBuilder, context: LoweringContext, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """Core attention; returns its output and the inner tensors that are kept."""
    output_bytes = context.item * context.tokens * context.local_query_size
    if context.training.attention == "flash":
        row = builder.compute(
            "flash_attention",
            OpKind.ATTENTION,
            flops=_attention_flops(context),
            read=context.item * context.tokens * context.local_qkv_size,
            written=output_bytes,
            shape=_attention_shape(context, backward=False),
            dtype=context.dtype,
        )
        output = builder.activation("attention_output", output_bytes, row)
        heads = context.model.heads // context.tp
        log_sum_exp = builder.activation("log_sum_exp", 4.0 * context.tokens * heads, row)
        if not keep:
            builder.release(log_sum_exp, row)
            return output, []
        return output, [log_sum_exp]
    return _unfused_forward(builder, context, output_bytes, keep=keep)


def _score_elements(context: LoweringContext) -> float:
    heads = context.model.heads // context.tp
    return float(context.tokens) * heads * context.training.seq_len


def _batched_gemm(
    builder: ProgramBuilder, context: LoweringContext, name: str, m: int, n: int, k: int, layout: str
) -> int:
    """A product for every head and sequence of the microbatch."""
    count = context.training.micro_batch_size * context.model.heads // context.tp
    shape = GemmShape(m, n, k, layout, dtype=context.dtype, output=context.dtype, count=count)
    # Batched over heads, not over experts: one strided-batched kernel, so the kind is GEMM.
    elements = count * (m * k + k * n)
    return builder.compute(
        name,
        OpKind.GEMM,
        read=elements * context.item,
        written=count * m * n * context.item,
        flops=2.0 * count * m * n * k,
        shape=shape,
        dtype=context.dtype,
    )


def _unfused_forward(
    builder: ProgramBuilder, context: LoweringContext, output_bytes: float, *, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    length, head_size = context.training.seq_len, context.model.head_size
    score_bytes = context.item * _score_elements(context)
    row = _batched_gemm(builder, context, "attention_scores", length, length, head_size, "TN")
    raw = builder.temporary("attention_scores", score_bytes, row)
    row = builder.memory_bound(
        "scale_mask_softmax",
        OpKind.SOFTMAX,
        read=score_bytes,
        written=score_bytes,
        access="reduction",
        dtype=context.dtype,
    )
    builder.release(raw, row)
    kept = [builder.activation("softmax", score_bytes, row)]
    if context.model.attention_dropout > 0:
        row = builder.memory_bound(
            "attention_dropout",
            OpKind.ELEMENTWISE,
            read=score_bytes,
            written=score_bytes + _score_elements(context),
            dtype=context.dtype,
        )
        kept.append(builder.activation("attention_dropout_mask", _score_elements(context), row))
        kept.append(builder.activation("dropped_softmax", score_bytes, row))
    row = _batched_gemm(builder, context, "attention_context", length, head_size, length, "NN")
    output = builder.activation("attention_output", output_bytes, row)
    if not keep:
        for tensor in kept:
            builder.release(tensor, row)
        return output, []
    return output, kept


def _unfused_backward(
    builder: ProgramBuilder, context: LoweringContext, saved: AttentionSaved, d_output: Tensor
) -> tuple[int, Tensor]:
    """Gradients of values, scores, queries and keys; returns the last row and the gradient of QKV."""
    length, head_size = context.training.seq_len, context.model.head_size
    elements = _score_elements(context)
    score_bytes = context.item * elements
    row = _batched_gemm(builder, context, "attention_context_dgrad", length, length, head_size, "TN")
    d_scores = builder.allocate("score_gradient", score_bytes, row, MemoryCategory.TEMPORARY)
    _batched_gemm(builder, context, "attention_value_grad", length, head_size, length, "NT")
    if context.model.attention_dropout > 0:
        builder.memory_bound(
            "attention_dropout_backward",
            OpKind.ELEMENTWISE,
            read=score_bytes + elements,
            written=score_bytes,
            dtype=context.dtype,
        )
    builder.memory_bound(
        "scale_mask_softmax_backward",
        OpKind.SOFTMAX,
        read=2 * score_bytes,
        written=score_bytes,
        access="reduction",
        dtype=context.dtype,
    )
    row = _batched_gemm(builder, context, "attention_query_grad", length, head_size, length, "NN")
    d_qkv = builder.temporary("qkv_gradient", context.item * context.tokens * context.local_qkv_size, row)
    row = _batched_gemm(builder, context, "attention_key_grad", length, head_size, length, "NT")
    builder.release(d_scores, row)
    return row, d_qkv
