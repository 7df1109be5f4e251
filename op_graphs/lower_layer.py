"""Lowering of one dense transformer layer: attention, MLP, and the residual path between them.

Granularity and order are those of Megatron-Core with Transformer Engine: layer norms as kernels of their own,
fused SwiGLU, fused rotary embedding, fused bias-dropout-add, weight gradients accumulated into the fp32 main
gradient by the GEMM. Sequence parallelism gathers in front of the column-parallel linears and scatters behind the
row-parallel ones; in backward the input is gathered again for the weight gradient, and the input gradient is
reduced beside it (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models";
Megatron-Core ``tensor_parallel/layers.py``).

Saved activations follow the same sources: the inputs of both norms, of QKV and of FC1, q, k, v, the attention
output and its log-sum-exp, FC1's and FC2's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .graph import GemmShape
from .lower_attention import AttentionSaved, attention_backward, attention_forward, recompute_attention
from .lowering_context import LoweringContext, layer_parameter
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, OpKind, Phase


@dataclass
class LinearSaved:
    """What a column-parallel block keeps: its input before and after the norm."""

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
    dropout_masks: list[Tensor] = field(default_factory=list)


# -- forward -----------------------------------------------------------------------------------------------------


def layer_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, block_input: Tensor, *, keep_input: bool = False
) -> tuple[LayerSaved, Tensor]:
    """Emit the forward pass of a layer; returns what it keeps and its output.

    ``keep_input`` keeps the layer's input even where the builder keeps no activations (a recomputed layer keeps
    just that).
    """
    builder.layer = layer
    masks: list[Tensor] = []

    builder.module = "self_attention"
    attention_linear, gathered = _norm_and_gather(builder, context, "input_norm", layer, block_input)
    attention, core_output = attention_forward(builder, context, layer, gathered)
    projected = _row_parallel(builder, context, "proj", layer, core_output, context.local_query_size)
    builder.forget_unless_kept(core_output, builder.last_row)
    middle = _bias_dropout_add(builder, context, "attention_residual", projected, masks)
    if not keep_input:
        builder.forget_unless_kept(block_input, builder.last_row)

    builder.module = "mlp"
    mlp_linear, gathered = _norm_and_gather(builder, context, "pre_mlp_norm", layer, middle)
    shape = GemmShape(
        context.tokens,
        context.local_fc1_size,
        context.model.hidden_size,
        "TN",
        dtype=context.dtype,
        output=context.dtype,
    )
    row = builder.gemm("fc1", shape)
    _use(builder, layer, "fc1", row)
    if gathered is not None:
        builder.release(gathered, row)
    fc1_output = builder.activation("fc1_output", context.item * context.tokens * context.local_fc1_size, row)
    fc2_input_bytes = context.item * context.tokens * context.local_ffn_size
    row = builder.memory_bound(
        context.model.activation,
        OpKind.ELEMENTWISE,
        read=context.item * context.tokens * context.local_fc1_size,
        written=fc2_input_bytes,
        dtype=context.dtype,
    )
    fc2_input = builder.activation("fc2_input", fc2_input_bytes, row)
    builder.forget_unless_kept(fc1_output, row)
    projected = _row_parallel(builder, context, "fc2", layer, fc2_input, context.local_ffn_size)
    builder.forget_unless_kept(fc2_input, builder.last_row)
    output = _bias_dropout_add(builder, context, "mlp_residual", projected, masks)
    builder.forget_unless_kept(middle, builder.last_row)
    return LayerSaved(
        attention_linear, attention, core_output, mlp_linear, fc1_output, fc2_input, masks
    ), output


def _norm_and_gather(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, block_input: Tensor
) -> tuple[LinearSaved, Tensor | None]:
    """A norm and, with sequence parallelism, the gather behind it.

    Returns what is kept, and the tensor that the GEMM which reads it has to release (None if it is kept).
    """
    size = context.hidden_bytes
    row = builder.memory_bound(
        name, OpKind.NORM, read=size, written=size, access="reduction", dtype=context.dtype
    )
    _use(builder, layer, name, row)
    normalized = builder.activation(f"{name}_output", size, row)
    if not context.sequence_parallel:
        return LinearSaved(block_input, normalized), None if builder.keep_activations else normalized
    gather = builder.collective(
        f"{name}_all_gather",
        Communication.ALL_GATHER,
        context.gathered_bytes,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )
    builder.wait_for(gather)
    builder.forget_unless_kept(normalized, gather)
    return LinearSaved(block_input, normalized), builder.temporary("gathered_input", context.gathered_bytes, gather)


def _row_parallel(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, source: Tensor, width: int
) -> Tensor:
    """A row-parallel linear and the reduction of its partial sums; returns the reduced output."""
    shape = GemmShape(
        context.tokens, context.model.hidden_size, width, "TN", dtype=context.dtype, output=context.dtype
    )
    row = builder.gemm(name, shape)
    _use(builder, layer, name, row)
    partial = builder.temporary(f"{name}_output", context.gathered_bytes, row)
    if context.tp == 1:
        return partial
    scatter = context.sequence_parallel
    reduced = builder.collective(
        f"{name}_{'reduce_scatter' if scatter else 'all_reduce'}",
        Communication.REDUCE_SCATTER if scatter else Communication.ALL_REDUCE,
        context.gathered_bytes,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )
    builder.wait_for(reduced)
    if not scatter:
        return partial
    builder.release(partial, reduced)
    return builder.temporary(f"{name}_reduced", context.hidden_bytes, reduced)


def _bias_dropout_add(
    builder: ProgramBuilder, context: LoweringContext, name: str, projected: Tensor, masks: list[Tensor]
) -> Tensor:
    """The fused bias, dropout and residual addition behind a block; returns the new hidden state."""
    size = context.hidden_bytes
    mask_bytes = context.sharded_tokens * context.model.hidden_size if context.model.hidden_dropout > 0 else 0
    row = builder.memory_bound(
        name, OpKind.ELEMENTWISE, read=2 * size, written=size + mask_bytes, dtype=context.dtype
    )
    builder.release(projected, row)
    if mask_bytes:
        mask = builder.activation(f"{name}_dropout_mask", mask_bytes, row)
        builder.forget_unless_kept(mask, row)
        masks.append(mask)
    return builder.activation("hidden_states", size, row)


def _use(builder: ProgramBuilder, layer: int, part: str, row: int) -> None:
    builder.parameter_rows.setdefault(layer_parameter(layer, part), row)


# -- backward ----------------------------------------------------------------------------------------------------


def layer_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: LayerSaved, gradient: Tensor
) -> Tensor:
    """Emit the backward pass of a layer; takes the gradient of its output, returns the gradient of its input."""
    builder.layer = layer
    builder.module = "mlp"
    masks = list(saved.dropout_masks)
    fc2_gradient = _residual_backward(builder, context, "mlp_residual", layer, "fc2", masks, gradient)
    width = context.local_ffn_size
    d_fc2_input = _row_parallel_backward(
        builder, context, "fc2", layer, saved.fc2_input, width, fc2_gradient, keep=gradient
    )
    fc1_bytes = context.item * context.tokens * context.local_fc1_size
    row = builder.memory_bound(
        f"{context.model.activation}_backward",
        OpKind.ELEMENTWISE,
        read=fc1_bytes + context.item * context.tokens * width,
        written=fc1_bytes,
        dtype=context.dtype,
    )
    d_fc1 = builder.temporary("fc1_gradient", fc1_bytes, row)
    builder.release(d_fc2_input, row)
    builder.release(saved.fc1_output, row)
    gradient = _column_parallel_backward(
        builder, context, "fc1", "pre_mlp_norm", layer, saved.mlp_linear, d_fc1, gradient
    )

    builder.module = "self_attention"
    proj_gradient = _residual_backward(builder, context, "attention_residual", layer, "proj", masks, gradient)
    d_core = _row_parallel_backward(
        builder, context, "proj", layer, saved.attention_output, context.local_query_size, proj_gradient,
        keep=gradient, release_input=False,
    )  # fmt: skip
    attention = saved.attention
    if attention.recomputed:
        attention = recompute_attention(builder, context, attention)
    d_qkv = attention_backward(builder, context, attention, saved.attention_output, d_core)
    return _column_parallel_backward(
        builder, context, "qkv", "input_norm", layer, saved.attention_linear, d_qkv, gradient
    )


def _residual_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    layer: int,
    linear: str,
    masks: list[Tensor],
    gradient: Tensor,
) -> Tensor:
    """Backward of bias-dropout-add: dropout's mask is applied and the bias gradient summed; without either the
    gradient passes through untouched."""
    size = context.hidden_bytes
    current = gradient
    if masks:
        mask = masks.pop()
        elements = context.sharded_tokens * context.model.hidden_size
        row = builder.memory_bound(
            f"{name}_dropout_backward",
            OpKind.ELEMENTWISE,
            read=size + elements,
            written=size,
            dtype=context.dtype,
        )
        builder.release(mask, row)
        current = builder.temporary(f"{name}_gradient", size, row)
    has_bias = context.model.mlp_bias if linear == "fc2" else context.model.attention_output_bias
    if has_bias:
        row = builder.memory_bound(
            f"{linear}_bias_gradient",
            OpKind.REDUCTION,
            read=size,
            written=context.gradient_dtype.itemsize * context.model.hidden_size,
            access="reduction",
            dtype=context.dtype,
            phase=Phase.BACKWARD_WEIGHT,
        )
        builder.gradient_rows[layer_parameter(layer, linear)] = row
    return current


def _row_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    layer: int,
    linear_input: Tensor,
    width: int,
    gradient: Tensor,
    *,
    keep: Tensor,
    release_input: bool = True,
) -> Tensor:
    """Input and weight gradient of a row-parallel linear; returns the gradient of its input."""
    gathered = None
    if context.sequence_parallel:
        row = builder.collective(
            f"{name}_gradient_all_gather",
            Communication.ALL_GATHER,
            context.gathered_bytes,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=context.dtype,
        )
        builder.wait_for(row)
        gathered = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    hidden = context.model.hidden_size
    shape = GemmShape(context.tokens, width, hidden, "NN", dtype=context.dtype, output=context.dtype)
    row = builder.gemm(f"{name}_dgrad", shape)
    d_input = builder.temporary(f"{name}_input_gradient", context.item * context.tokens * width, row)
    row = _weight_gradient(builder, context, name, layer, hidden, width)
    if gathered is not None:
        builder.release(gathered, row)
    if gradient is not keep:
        builder.release(gradient, row)
    if release_input:
        builder.release(linear_input, row)
    return d_input


def _weight_gradient(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, outputs: int, inputs: int
) -> int:
    """The GEMM that adds a weight gradient to the main gradient."""
    shape = GemmShape(
        outputs,
        inputs,
        context.tokens,
        "NT",
        dtype=context.dtype,
        output=context.gradient_dtype,
        accumulate=True,
    )
    row = builder.gemm(f"{name}_wgrad", shape, phase=Phase.BACKWARD_WEIGHT)
    builder.gradient_rows[layer_parameter(layer, name)] = row
    return row


def _column_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    norm: str,
    layer: int,
    saved: LinearSaved,
    d_output: Tensor,
    residual_gradient: Tensor,
) -> Tensor:
    """Backward of norm and column-parallel linear with the residual path; returns the gradient of the block input.

    The gather of the input runs beside the input-gradient GEMM, and the reduction of the input gradient beside the
    weight-gradient GEMM.
    """
    outputs = context.local_qkv_size if name == "qkv" else context.local_fc1_size
    hidden, size = context.model.hidden_size, context.hidden_bytes
    gather, gathered = None, None
    if context.sequence_parallel:
        gather = builder.collective(
            f"{name}_input_all_gather",
            Communication.ALL_GATHER,
            context.gathered_bytes,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=context.dtype,
        )
        gathered = builder.temporary("gathered_input", context.gathered_bytes, gather)
    shape = GemmShape(context.tokens, hidden, outputs, "NN", dtype=context.dtype, output=context.dtype)
    row = builder.gemm(f"{name}_dgrad", shape)
    d_normalized = builder.temporary(f"{name}_input_gradient", context.gathered_bytes, row)
    reduction = None
    if context.tp > 1:
        scatter = context.sequence_parallel
        reduction = builder.collective(
            f"{name}_gradient_{'reduce_scatter' if scatter else 'all_reduce'}",
            Communication.REDUCE_SCATTER if scatter else Communication.ALL_REDUCE,
            context.gathered_bytes,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=context.dtype,
        )
    if gather is not None:
        builder.wait_for(gather)
    row = _weight_gradient(builder, context, name, layer, outputs, hidden)
    builder.release(d_output, row)
    if gathered is not None:
        builder.release(gathered, row)
    builder.release(saved.normalized, row)
    if reduction is not None:
        builder.wait_for(reduction)
        if context.sequence_parallel:
            builder.release(d_normalized, reduction)
            d_normalized = builder.temporary(f"{name}_reduced_gradient", size, reduction)
    row = builder.memory_bound(
        f"{norm}_backward", OpKind.NORM, read=2 * size, written=size, access="reduction", dtype=context.dtype
    )
    builder.gradient_rows[layer_parameter(layer, norm)] = row
    builder.release(d_normalized, row)
    builder.release(saved.block_input, row)
    d_input = builder.temporary("input_gradient", size, row)
    row = builder.memory_bound(
        f"{name}_residual_gradient", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(residual_gradient, row)
    return d_input
