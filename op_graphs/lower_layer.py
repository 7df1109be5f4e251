"""Lowering of one dense transformer layer: attention, MLP, and the residual path around them.

Granularity and order are those of Megatron-Core with Transformer Engine: layer norms as kernels of their own, fused
SwiGLU, fused rotary embedding, fused bias-dropout-add, weight gradients accumulated into the main gradient by the
GEMM.

Saved activations follow the same sources: the inputs of both norms, of QKV and of FC1, q, k, v, the attention output
and its log-sum-exp, FC1's and FC2's outputs and inputs around the activation, and dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lower_attention import AttentionSaved, attention_backward, attention_forward, recompute_attention
from .lower_linear import (
    column_parallel_backward,
    gathered_input,
    linear_forward,
    row_parallel_backward,
    row_parallel_forward,
)
from .lowering_context import LoweringContext, layer_parameter
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind, Phase


@dataclass
class LinearSaved:
    """What a norm and the column-parallel linear behind it keep."""

    block_input: Tensor
    normalized: Tensor


@dataclass
class LayerSaved:
    """Activations a layer keeps for its backward pass."""

    attention_linear: LinearSaved
    attention: AttentionSaved
    attention_output: Tensor
    mlp_linear: LinearSaved
    fc1_output: Tensor
    fc2_input: Tensor
    attention_mask: Tensor | None
    """Dropout mask of the residual behind attention."""
    mlp_mask: Tensor | None


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
    attention_linear, consumed = _norm(builder, context, "input_norm", layer, block_input)
    attention, core_output = attention_forward(builder, context, layer, consumed)
    module = layer_parameter(layer, "proj")
    projected = row_parallel_forward(builder, context, "proj", module, context.local_query_size)
    builder.forget_unless_kept(core_output, builder.last_row)
    middle, attention_mask = _bias_dropout_add(builder, context, "attention_residual", projected)
    if not keep_input:
        builder.forget_unless_kept(block_input, builder.last_row)

    builder.module = "mlp"
    mlp_linear, consumed = _norm(builder, context, "pre_mlp_norm", layer, middle)
    fc1_output, fc2_input = _fc1_and_activation(builder, context, layer, consumed)
    module = layer_parameter(layer, "fc2")
    projected = row_parallel_forward(builder, context, "fc2", module, context.local_ffn_size)
    builder.forget_unless_kept(fc2_input, builder.last_row)
    output, mlp_mask = _bias_dropout_add(builder, context, "mlp_residual", projected)
    builder.forget_unless_kept(middle, builder.last_row)
    saved = LayerSaved(
        attention_linear, attention, core_output, mlp_linear, fc1_output, fc2_input, attention_mask, mlp_mask
    )
    return saved, output


def _norm(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, block_input: Tensor
) -> tuple[LinearSaved, Tensor | None]:
    """A norm and, with sequence parallelism, the gather behind it.

    Returns what is kept, and the tensor that the GEMM which reads it has to release (None if it is kept).
    """
    size = context.hidden_bytes
    row = builder.memory_bound(
        name, OpKind.NORM, read=size, written=size, access="reduction", dtype=context.dtype
    )
    builder.parameter_rows.setdefault(layer_parameter(layer, name), row)
    normalized = builder.activation(f"{name}_output", size, row)
    saved = LinearSaved(block_input, normalized)
    gathered = gathered_input(builder, context, name)
    if gathered is None:
        return saved, None if builder.keep_activations else normalized
    builder.forget_unless_kept(normalized, len(builder) - 1)
    return saved, gathered


def _fc1_and_activation(
    builder: ProgramBuilder, context: LoweringContext, layer: int, consumed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """First linear and activation of the MLP; returns the output of each."""
    row = linear_forward(builder, context, "fc1", context.local_fc1_size, context.model.hidden_size)
    builder.parameter_rows.setdefault(layer_parameter(layer, "fc1"), row)
    if consumed is not None:
        builder.release(consumed, row)
    fc1_bytes = context.item * context.tokens * context.local_fc1_size
    fc2_bytes = context.item * context.tokens * context.local_ffn_size
    fc1_output = builder.activation("fc1_output", fc1_bytes, row)
    row = builder.memory_bound(
        context.model.activation, OpKind.ELEMENTWISE, read=fc1_bytes, written=fc2_bytes, dtype=context.dtype
    )
    fc2_input = builder.activation("fc2_input", fc2_bytes, row)
    builder.forget_unless_kept(fc1_output, row)
    return fc1_output, fc2_input


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
    d_fc1 = _mlp_backward(builder, context, layer, saved, gradient)
    gradient = _norm_backward(
        builder, context, "fc1", "pre_mlp_norm", layer, saved.mlp_linear, d_fc1, gradient
    )
    builder.module = "self_attention"
    branch = _residual_backward(
        builder, context, "attention_residual", layer, "proj", saved.attention_mask, gradient
    )
    module = layer_parameter(layer, "proj")
    d_core, row = row_parallel_backward(builder, context, "proj", module, context.local_query_size)
    if branch is not gradient:
        builder.release(branch, row)
    attention = saved.attention
    if attention.recomputed:
        attention = recompute_attention(builder, context, attention)
    d_qkv = attention_backward(builder, context, attention, saved.attention_output, d_core)
    return _norm_backward(
        builder, context, "qkv", "input_norm", layer, saved.attention_linear, d_qkv, gradient
    )


def _mlp_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: LayerSaved, gradient: Tensor
) -> Tensor:
    """Backward of residual, FC2 and activation; returns the gradient of FC1's output."""
    branch = _residual_backward(builder, context, "mlp_residual", layer, "fc2", saved.mlp_mask, gradient)
    width = context.local_ffn_size
    d_fc2_input, row = row_parallel_backward(builder, context, "fc2", layer_parameter(layer, "fc2"), width)
    builder.release(saved.fc2_input, row)
    if branch is not gradient:
        builder.release(branch, row)
    fc1_bytes = context.item * context.tokens * context.local_fc1_size
    row = builder.memory_bound(
        f"{context.model.activation}_backward",
        OpKind.ELEMENTWISE,
        read=fc1_bytes + context.item * context.tokens * width,
        written=fc1_bytes,
        dtype=context.dtype,
    )
    builder.release(d_fc2_input, row)
    builder.release(saved.fc1_output, row)
    return builder.temporary("fc1_gradient", fc1_bytes, row)


def _residual_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    layer: int,
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
    if context.model.mlp_bias if linear == "fc2" else context.model.attention_output_bias:
        row = builder.memory_bound(
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
    linear: str,
    norm: str,
    layer: int,
    saved: LinearSaved,
    d_output: Tensor,
    residual_gradient: Tensor,
) -> Tensor:
    """Backward of norm and column-parallel linear with the residual path; returns the gradient of the block input."""
    outputs = context.local_qkv_size if linear == "qkv" else context.local_fc1_size
    d_normalized = column_parallel_backward(
        builder, context, linear, layer_parameter(layer, linear), outputs, saved.normalized, d_output
    )
    size = context.hidden_bytes
    row = builder.memory_bound(
        f"{norm}_backward",
        OpKind.NORM,
        read=2 * size,
        written=size,
        access="reduction",
        dtype=context.dtype,
    )
    builder.gradient_rows[layer_parameter(layer, norm)] = row
    builder.release(d_normalized, row)
    builder.release(saved.block_input, row)
    d_input = builder.temporary("input_gradient", size, row)
    row = builder.memory_bound(
        f"{linear}_residual_gradient", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(residual_gradient, row)
    return d_input
