"""Lowering of one transformer layer: norm, attention, residual, norm, MLP or experts, residual.

Granularity and order are those of Megatron-Core with Transformer Engine: layer norms as kernels of their own, fused
activation and rotary embedding, fused bias-dropout-add, weight gradients accumulated into the main gradient by the
GEMM. Saved activations follow the same sources: the inputs of both norms and their outputs, what attention and MLP
keep, and dropout masks. Parts named in ``recompute.modules`` keep less and run again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lower_attention import (
    AttentionSaved,
    attention_backward,
    attention_forward,
    restored_attention,
    stored_attention,
)
from .lower_experts import ExpertsSaved, experts_backward, experts_forward
from .lower_linear import layer_linear, row_parallel_backward, row_parallel_forward
from .lower_mlp import Mlp, MlpSaved, mlp_backward, mlp_forward, recompute_mlp
from .lowering_context import LoweringContext
from .offload_activations import begin_part, end_part, offload
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind, Phase


@dataclass
class _NormSaved:
    """Input and output of a norm; the output is None where it is recomputed."""

    block_input: Tensor
    normalized: Tensor | None


@dataclass
class LayerSaved:
    """Activations a layer keeps for its backward pass."""

    attention_norm: _NormSaved
    attention: AttentionSaved
    mlp_norm: _NormSaved
    mlp: MlpSaved | ExpertsSaved | None
    """None where the whole MLP is recomputed."""
    attention_mask: Tensor | None
    """Dropout mask of the residual behind attention."""
    mlp_mask: Tensor | None
    mlp_output: Tensor | None = None
    """Output of the second linear, where outputs of matrix products are kept though nothing reads them."""


# -- forward -----------------------------------------------------------------------------------------------------


def layer_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    block_input: Tensor,
    *,
    keep_input: bool = False,
) -> tuple[LayerSaved, Tensor]:
    """Emit the forward pass of a layer; returns what it keeps and its output.

    ``keep_input`` keeps the layer's input even where the builder keeps no activations (a recomputed layer keeps
    just that).
    """
    builder.layer = layer
    builder.module = "self_attention"
    keep_normalized = builder.keep_activations and not _recomputes_norms(context)
    normalized = _norm(builder, context, "input_layernorm", layer)
    attention = attention_forward(builder, context, layer, normalized, keep_input=keep_normalized)
    if keep_normalized and not context.freezes_weights and _copies_suffice(context, attention):
        builder.discard(normalized)
    latents = attention.latent.tensors() if attention.latent is not None else []
    offload(builder, context, layer, "qkv_linear", [normalized, *latents])
    offload(builder, context, layer, "core_attn", [attention.core.qkv, *attention.core.inner])
    projected = row_parallel_forward(
        builder,
        context,
        layer_linear(context, layer, "proj"),
        attention.output,
        discard_input=attention.output != attention.core.output,
        keep_copy=not context.stores_quantized,
    )
    builder.forget_unless_kept(attention.output, builder.last_row)
    if builder.keep_activations and context.stores_quantized:
        attention = stored_attention(builder, context, attention)
    offload(builder, context, layer, "attn_proj", [attention.output])
    middle, attention_mask = _bias_dropout_add(builder, context, "attention_residual", projected)
    attention_norm = _NormSaved(block_input, normalized if keep_normalized else None)
    if not keep_input:
        builder.forget_unless_kept(block_input, builder.last_row)
    offload(builder, context, layer, "attn_norm", [block_input])

    builder.module = "mlp"
    normalized = _norm(builder, context, "pre_mlp_layernorm", layer)
    mlp, projected = _mlp_forward(builder, context, layer, normalized, keep_input=keep_normalized)
    # The router reads the norm's output as it is; so does an MLP that runs again.
    copied = context.recipe is not None and not context.freezes_weights
    if keep_normalized and copied and isinstance(mlp, MlpSaved):
        builder.discard(normalized)
    mlp_norm = _NormSaved(middle, normalized if keep_normalized else None)
    output, mlp_mask = _bias_dropout_add(builder, context, "mlp_residual", projected)
    mlp_output: Tensor | None = None
    if builder.keep_activations and context.training.recompute.keeps_products:
        mlp_output = builder.activation("mlp_output", context.hidden_bytes, builder.last_row)
    builder.forget_unless_kept(middle, builder.last_row)
    offload(builder, context, layer, "mlp_norm", [middle])
    saved = LayerSaved(attention_norm, attention, mlp_norm, mlp, attention_mask, mlp_mask, mlp_output)
    return saved, output


def _norm(builder: ProgramBuilder, context: LoweringContext, name: str, layer: int) -> Tensor:
    size = context.hidden_bytes
    row = builder.memory_bound(
        name, OpKind.NORM, read=size, written=size, access="reduction", dtype=context.dtype
    )
    builder.parameter_rows.setdefault(context.module(layer, name), row)
    return builder.activation(f"{name}_output", size, row)


def _copies_suffice(context: LoweringContext, attention: AttentionSaved) -> bool:
    """Whether all that reads the norm's output in the backward of attention reads quantised copies of it."""
    latent = attention.latent
    reads_again = latent is not None and latent.query is None
    return context.recipe is not None and not (
        reads_again and "mla_up_proj" in context.training.recompute.modules
    )


def _recomputes_norms(context: LoweringContext) -> bool:
    recompute = context.training.recompute
    return recompute.keeps_products or "layernorm" in recompute.modules


def _recomputes_mlp(context: LoweringContext, layer: int) -> bool:
    modules = context.training.recompute.modules
    return ("moe" if context.model.is_moe_layer(layer) else "mlp") in modules


def _mlp_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> tuple[MlpSaved | ExpertsSaved | None, Tensor]:
    keep = builder.keep_activations
    recomputed = keep and _recomputes_mlp(context, layer)
    builder.keep_activations = keep and not recomputed
    saved: MlpSaved | ExpertsSaved
    if context.model.is_moe_layer(layer):
        saved, output = experts_forward(builder, context, layer, normalized, keep_input=keep_input)
    else:
        mlp = Mlp.dense(context, layer)
        saved, output = mlp_forward(builder, context, mlp, normalized, keep_input=keep_input)
    builder.keep_activations = keep
    return None if recomputed else saved, output


def _bias_dropout_add(
    builder: ProgramBuilder, context: LoweringContext, name: str, projected: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The fused bias, dropout and residual addition behind a block; returns the hidden state and dropout's mask."""
    size = context.hidden_bytes
    mask_bytes = context.sharded_tokens * context.model.hidden_size if context.model.hidden_dropout > 0 else 0
    row = builder.memory_bound(
        name, OpKind.ELEMENTWISE, read=2 * size, written=size + mask_bytes, dtype=context.dtype
    )
    builder.release(projected, row)
    mask = None
    if mask_bytes:
        mask = builder.activation(f"{name}_dropout_mask", mask_bytes, row)
        builder.forget_unless_kept(mask, row)
    return builder.activation("hidden_states", size, row), mask


# -- backward ----------------------------------------------------------------------------------------------------


def layer_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: LayerSaved, gradient: Tensor
) -> Tensor:
    """Emit the backward pass of a layer; takes the gradient of its output, returns the gradient of its input."""
    builder.layer = layer
    builder.module = "mlp"
    begin_part(builder, context, layer, "mlp_norm")
    if context.training.recompute.keeps_products:
        _residual_again(builder, context, saved)
    branch = _residual_backward(builder, context, "mlp_residual", "fc2", saved.mlp_mask, gradient)
    normalized = _normalized(builder, context, "pre_mlp_layernorm", layer, saved.mlp_norm)
    d_normalized = _mlp_backward(
        builder, context, layer, saved.mlp, normalized, branch, owned=branch != gradient
    )
    gradient = _norm_backward(
        builder, context, "pre_mlp_layernorm", layer, saved.mlp_norm, d_normalized, gradient
    )
    end_part(builder, context, layer, "mlp_norm")
    builder.module = "self_attention"
    begin_part(builder, context, layer, "attn_norm")
    branch = _residual_backward(
        builder, context, "attention_residual", "proj", saved.attention_mask, gradient
    )
    attention = saved.attention
    if context.stores_quantized:
        attention = restored_attention(builder, context, attention)
    begin_part(builder, context, layer, "attn_proj")
    d_core = _projection_backward(builder, context, layer, attention, branch, gradient)
    end_part(builder, context, layer, "attn_proj")
    normalized = _normalized(builder, context, "input_layernorm", layer, saved.attention_norm)
    begin_part(builder, context, layer, "core_attn")
    begin_part(builder, context, layer, "qkv_linear")
    d_normalized = attention_backward(builder, context, layer, attention, normalized, d_core)
    end_part(builder, context, layer, "core_attn")
    end_part(builder, context, layer, "qkv_linear")
    gradient = _norm_backward(
        builder, context, "input_layernorm", layer, saved.attention_norm, d_normalized, gradient
    )
    end_part(builder, context, layer, "attn_norm")
    return gradient


def _residual_again(builder: ProgramBuilder, context: LoweringContext, saved: LayerSaved) -> None:
    """The residual behind attention, computed again from kept outputs (what is kept of it stands for those)."""
    size = context.hidden_bytes
    row = builder.memory_bound(
        "attention_residual",
        OpKind.ELEMENTWISE,
        read=2 * size,
        written=size,
        dtype=context.dtype,
        phase=Phase.RECOMPUTE,
    )
    if saved.mlp_output is not None:
        builder.release(saved.mlp_output, row)


def _normalized(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, saved: _NormSaved
) -> Tensor:
    """The norm's output: kept, or computed again."""
    if saved.normalized is not None:
        return saved.normalized
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    normalized = _norm(builder, context, name, layer)
    builder.phase = phase
    return normalized


def _mlp_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: MlpSaved | ExpertsSaved | None,
    normalized: Tensor,
    d_output: Tensor,
    *,
    owned: bool,
) -> Tensor:
    """Backward of MLP or experts, run again first where they kept nothing; returns the gradient of their input."""
    if context.model.is_moe_layer(layer):
        if saved is None:
            phase, builder.phase = builder.phase, Phase.RECOMPUTE
            saved, output = experts_forward(builder, context, layer, normalized, keep_input=True)
            builder.release(output, builder.end_row)
            builder.phase = phase
        assert isinstance(saved, ExpertsSaved)
        return experts_backward(builder, context, layer, saved, normalized, d_output, owned=owned)
    mlp = Mlp.dense(context, layer)
    if saved is None:
        saved = recompute_mlp(builder, context, mlp, normalized)
    assert isinstance(saved, MlpSaved)
    return mlp_backward(builder, context, mlp, saved, normalized, d_output, owned=owned)


def _projection_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: AttentionSaved,
    branch: Tensor,
    residual: Tensor,
) -> Tensor:
    """Backward of the output projection; its input may be what core attention's backward still reads."""
    consumed: tuple[Tensor, ...] = ()
    borrowed: tuple[Tensor, ...] = ()
    if saved.output == saved.core.output:
        borrowed = (saved.output,)
    else:
        consumed = (saved.output,)
    if branch == residual:
        borrowed = (*borrowed, branch)
    else:
        consumed = (*consumed, branch)
    linear = layer_linear(context, layer, "proj")
    return row_parallel_backward(builder, context, linear, branch, consumed=consumed, borrowed=borrowed)


def _residual_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    linear: str,
    mask: Tensor | None,
    gradient: Tensor,
) -> Tensor:
    """Backward of bias-dropout-add on the branch of the block; returns the gradient of the linear's output.

    Dropout's mask is applied and the bias gradient summed; without either the gradient passes through untouched.
    """
    size = context.hidden_bytes
    if mask is not None:
        row = builder.memory_bound(
            f"{name}_dropout_backward",
            OpKind.ELEMENTWISE,
            read=size + context.sharded_tokens * context.model.hidden_size,
            written=size,
            dtype=context.dtype,
        )
        builder.release(mask, row)
        gradient = builder.temporary(f"{name}_gradient", size, row)
    has_bias = context.model.mlp_bias if linear == "fc2" else context.model.attention_output_bias
    if has_bias and not context.freezes_weights:
        builder.memory_bound(
            f"{linear}_bias_gradient",
            OpKind.REDUCTION,
            read=size,
            written=context.gradient_dtype.itemsize * context.model.hidden_size,
            access="reduction",
            dtype=context.dtype,
            phase=Phase.BACKWARD_WEIGHT,
        )
    return gradient


def _norm_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    layer: int,
    saved: _NormSaved,
    d_normalized: Tensor,
    residual_gradient: Tensor,
) -> Tensor:
    """Backward of a norm, joined with the residual path; returns the gradient of the block's input."""
    size = context.hidden_bytes
    row = builder.memory_bound(
        f"{name}_backward",
        OpKind.NORM,
        read=2 * size,
        written=size,
        access="reduction",
        dtype=context.dtype,
    )
    builder.gradient_rows[context.module(layer, name)] = row
    builder.release(d_normalized, row)
    builder.release(saved.block_input, row)
    d_input = builder.temporary("input_gradient", size, row)
    row = builder.memory_bound(
        "residual_gradient", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(residual_gradient, row)
    return d_input
