"""Lowering of linears under tensor parallelism: the collectives in front of and behind their GEMMs.

Column-parallel linears (QKV, FC1, head) read the whole hidden state: with sequence parallelism it is gathered first,
and gathered again in backward for the weight gradient. Row-parallel linears (projection, FC2) leave partial sums that
are reduced behind them. What of this runs beside what is the policy of ``overlap.tp`` (``op_graphs.overlap``).

Under a low-precision recipe the operands are quantised in front of the GEMMs (``op_graphs.lower_quantization``), and
what is gathered and kept are the quantised copies.

Source: Megatron-Core ``tensor_parallel/layers.py``, Transformer Engine ``pytorch/module/linear.py``; Korthikanti et al.
2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from .linear import (
    Linear as Linear,
)
from .linear import (
    is_quantized_linear,
)
from .linear_gemms import (
    forward_gemm as forward_gemm,
)
from .linear_gemms import (
    input_gradient as input_gradient,
)
from .linear_gemms import (
    input_gradient_gemm as input_gradient_gemm,
)
from .linear_gemms import (
    linear_forward as linear_forward,
)
from .linear_gemms import (
    run_deferred as run_deferred,
)
from .linear_gemms import (
    run_weight_gradient as run_weight_gradient,
)
from .linear_gemms import (
    weight_gradient as weight_gradient,
)
from .lower_frozen import (
    frozen_column_backward,
    frozen_column_forward,
    frozen_linear_backward,
    frozen_row_forward,
)
from .lower_quantization import (
    gather_gradient,
    quantize_gradient,
    quantize_input,
    transpose,
    weight_gradient_input,
)
from .lower_row_scales import cast_input_columns
from .lowering_context import LoweringContext
from .overlap import tensor_collectives
from .overlap.policy import GemmEmitter, ReducedGemm, TensorPlacement
from .overlap.registry import TENSOR
from .program import ProgramBuilder, Tensor
from .tensor_gathers import gather_whole, in_token_order


def _placement(context: LoweringContext) -> TensorPlacement:
    """How collectives of tensor parallelism lie beside GEMMs."""
    return TENSOR.chosen(context.overlap.tp)


def gather_sequence(
    builder: ProgramBuilder, context: LoweringContext, name: str, width: int | None = None
) -> int:
    """All-gather ``[tokens, width]`` (a hidden state by default) over the tensor-parallel ranks; returns the row."""
    return gather_whole(builder, context, name, context.token_bytes(width), context.dtype)


def reduce_partial_sums(
    builder: ProgramBuilder, context: LoweringContext, name: str, *, scatter: bool, width: int | None = None
) -> int:
    """Reduce ``[tokens, width]`` over the tensor-parallel ranks, scattered along the sequence or whole."""
    size = context.token_bytes(width)
    if scatter and _placement(context).copies_parts(context):
        return tensor_collectives.CopiedReduction(builder, context, name, size).finish()
    return tensor_collectives.reduce_sums(builder, context, name, size, scatter=scatter)


def gathered_input(
    builder: ProgramBuilder, context: LoweringContext, name: str, width: int | None = None
) -> Tensor | None:
    """With sequence parallelism, gather the input of the next GEMM; None where it is whole already."""
    if not context.sequence_parallel:
        return None
    row = gather_sequence(builder, context, f"{name}_all_gather", width)
    builder.wait_for(row)
    return builder.temporary("gathered_input", context.token_bytes(width), row)


def layer_linear(context: LoweringContext, layer: int, name: str) -> Linear:
    """The fused ``qkv`` projection of a layer, or its output projection ``proj``."""
    model, hidden = context.model, context.model.hidden_size
    if name == "qkv":
        path, inputs, outputs = "linear_qkv", hidden, context.local_qkv_size
    else:
        path, inputs, outputs = "linear_proj", model.attention_output_size // context.tp, hidden
    parts: tuple[tuple[str, int], ...] = ()
    if name == "qkv" and context.libraries.separate_projections:
        queries = context.local_qkv_size - 2 * context.local_kv_size
        parts = ("queries", queries), ("keys", context.local_kv_size), ("values", context.local_kv_size)
    module = context.module(layer, f"self_attention.{path}")
    behind = name == "proj"
    return Linear(
        name,
        module,
        inputs,
        outputs,
        context.tokens,
        row_parallel=behind,
        reads_attention=behind,
        parts=parts,
    )


def column_parallel_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    keep_input: bool,
    keep_copy: bool = True,
    width: int | None = None,
) -> int:
    """The GEMM of a column-parallel linear behind the gather of its input; returns its row.

    Args:
        builder: where it runs.
        context: sizes and recipe.
        linear: the linear.
        source: its input, as it lies between the tensor-parallel blocks.
        keep_input: leave ``source`` to others, or to the backward pass; else it is released behind its reader.
        keep_copy: with ``keep_input``, leave a quantised or gathered copy to the backward pass, which gets the same
            ``source``.
        width: columns that are gathered, if more than the inputs of the linear.
    """
    if context.freezes_weights:
        return frozen_column_forward(builder, context, linear, source, keep_input=keep_input, width=width)
    if is_quantized_linear(context, linear):
        return _quantized_column_forward(
            builder, context, linear, source, keep_input=keep_input, keep_copy=keep_copy, width=width
        )
    if not context.sequence_parallel:
        row = forward_gemm(builder, context, linear)
        if not keep_input:
            builder.release(source, row)
        return row
    size = context.token_bytes(width or linear.inputs)
    placement = _placement(context)
    gather = placement.gather(builder, context, f"{linear.name}_all_gather", size, context.dtype)
    gathered = builder.temporary("gathered_input", size, gather.row)
    if not keep_input:
        builder.release(source, gather.end)
    row = forward_gemm(builder, context, linear, gather.gemm)
    if keep_input and keep_copy and builder.keep_activations and not placement.gathers_again:
        builder.promote(gathered, "gathered_input")
        builder.keep_copy(source, linear.name, gathered)
    else:
        builder.release(gathered, row)
    return row


def _quantized_column_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    keep_input: bool,
    keep_copy: bool,
    width: int | None,
) -> int:
    recipe = context.recipe
    assert recipe is not None
    elements = float(linear.tokens * linear.inputs)
    sharded = context.sequence_parallel
    if sharded and not _gathers_quantized(context):
        return _gathered_column_forward(
            builder, context, linear, source, keep_input=keep_input, keep_copy=keep_copy, width=width
        )
    keep_copy = keep_copy and context.keeps_copies
    kept_for = source if keep_input and keep_copy and builder.keep_activations else None
    local = elements / context.tp if sharded else elements
    emit: GemmEmitter | None = None
    operand = quantize_input(builder, context, linear, local, kept_for, sharded=sharded)
    if not keep_input:
        builder.release(source, builder.last_row)
    if sharded:
        # Columns beside the inputs of the linear are not quantised.
        size = recipe.activation_size(elements) + context.token_bytes(
            (width or linear.inputs) - linear.inputs
        )
        name = f"{linear.name}_all_gather"
        gather = _placement(context).gather(builder, context, name, size, recipe.element)
        if operand is not None:
            builder.release(operand, gather.end)
        operand, emit = builder.temporary("gathered_input", size, gather.row), gather.gemm
    row = forward_gemm(builder, context, linear, emit)
    if operand is not None:
        builder.release(operand, row)
    return row


def row_parallel_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    discard_input: bool = False,
    keep_copy: bool = True,
) -> Tensor:
    """A row-parallel linear and the reduction of its partial sums; returns the reduced output.

    ``discard_input`` says that nothing but this linear reads ``source``, so a quantised copy may stand in for it;
    without ``keep_copy`` the backward pass makes its copy of ``source``.
    """
    if context.freezes_weights:
        return frozen_row_forward(builder, context, linear, source, discard_input=discard_input)
    # Of what is kept of operators alone, the input of a product is not: it is computed, and quantised, again.
    keep_copy = keep_copy and context.keeps_copies and not context.training.recompute.keeps_products
    kept = builder.keep_activations and keep_copy and is_quantized_linear(context, linear)
    kept_for = source if kept else None
    reduction: ReducedGemm | None = None
    if context.tp > 1:
        size, scatter = context.gathered_bytes, context.sequence_parallel
        reduction = _placement(context).reduction(builder, context, linear.name, size, scatter=scatter)
    row = linear_forward(builder, context, linear, kept_for, reduction.gemm if reduction else None)
    if kept and discard_input:
        builder.discard(source)
    partial = builder.temporary(f"{linear.name}_output", context.gathered_bytes, row)
    if reduction is None:
        return partial
    reduced = reduction.finish()
    builder.wait_for(reduced)
    if not context.sequence_parallel:
        return partial
    builder.release(partial, reduced)
    return builder.temporary(f"{linear.name}_reduced", context.hidden_bytes, reduced)


def _gathers_quantized(context: LoweringContext) -> bool:
    """Whether inputs and gradients are gathered quantised; pieces always are, for each is what a product reads."""
    assert context.recipe is not None
    return context.recipe.gathers_quantized or _placement(context).cuts_gathers(context)


def _gathered_column_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    keep_input: bool,
    keep_copy: bool,
    width: int | None,
) -> int:
    """A column-parallel linear that quantises its input behind the gather."""
    size, placement = context.token_bytes(width or linear.inputs), _placement(context)
    arrived = gather_whole(builder, context, f"{linear.name}_all_gather", size, context.dtype)
    builder.wait_for(arrived)
    gathered = builder.temporary("gathered_input", size, arrived)
    if not keep_input:
        builder.release(source, arrived)
    row = linear_forward(builder, context, linear)
    if keep_input and keep_copy and builder.keep_activations and not placement.gathers_again:
        builder.promote(gathered, "gathered_input")
        builder.keep_copy(source, linear.name, gathered)
    else:
        builder.release(gathered, row)
    return row


def linear_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    d_output: Tensor,
    *,
    consumed: Sequence[Tensor] = (),
    borrowed: Sequence[Tensor] = (),
    gathers: bool = False,
) -> Tensor:
    """Input and weight gradient of a linear whose input is not gathered; returns the gradient of its input.

    ``consumed`` and ``borrowed`` are as in :func:`weight_gradient`; ``d_output`` and the input of the linear are each
    in one of them. ``gathers`` says that ``d_output`` is a shard of the sequence, to be gathered first.
    """
    if context.freezes_weights:
        return frozen_linear_backward(
            builder, context, linear, d_output, consumed=consumed, borrowed=borrowed, gathers=gathers
        )
    if not is_quantized_linear(context, linear):
        emit: GemmEmitter | None = None
        if gathers:
            name, size = f"{linear.name}_gradient_all_gather", context.gathered_bytes
            gather = _placement(context).gather(builder, context, name, size, context.dtype)
            gathered, emit = builder.temporary("gathered_gradient", size, gather.row), gather.gemm
            # The weight gradient reads the gathered gradient, not the shard it was gathered from.
            if d_output in consumed:
                builder.release(d_output, gather.end)
            consumed = (gathered, *(tensor for tensor in consumed if tensor != d_output))
            borrowed = tuple(tensor for tensor in borrowed if tensor != d_output)
        d_input = input_gradient(builder, context, linear, emit)
        if gathers:
            consumed = (in_token_order(builder, context, name, gathered, size), *consumed[1:])
        weight_gradient(builder, context, linear, consumed, borrowed)
        return d_input
    (source,) = (tensor for tensor in (*consumed, *borrowed) if tensor != d_output)
    quantize = gather_gradient if gathers and _gathers_quantized(context) else quantize_gradient
    whole: Tensor | None = None
    if gathers and not _gathers_quantized(context):
        row = gather_sequence(builder, context, f"{linear.name}_gradient_all_gather")
        builder.wait_for(row)
        whole = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    gradient = quantize(builder, context, linear, float(linear.tokens * linear.outputs))
    if whole is not None:
        builder.release(whole, builder.last_row)
    d_input = input_gradient(builder, context, linear)
    if gradient.rowwise is not None:
        builder.release(gradient.rowwise, builder.last_row)
    operand = weight_gradient_input(builder, context, linear, float(linear.tokens * linear.inputs), source)
    weight_gradient(builder, context, linear, (gradient.columnwise, operand))
    for tensor in consumed:
        builder.release(tensor, builder.last_row)
    return d_input


def row_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    d_output: Tensor,
    *,
    consumed: Sequence[Tensor] = (),
    borrowed: Sequence[Tensor] = (),
) -> Tensor:
    """Input and weight gradient of a row-parallel linear; arguments and result as in :func:`linear_backward`."""
    return linear_backward(
        builder,
        context,
        linear,
        d_output,
        consumed=consumed,
        borrowed=borrowed,
        gathers=context.sequence_parallel,
    )


def column_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Input and weight gradient of a column-parallel linear; returns the gradient of its (sharded) input."""
    if context.freezes_weights:
        return frozen_column_backward(builder, context, linear, normalized, d_output)
    if is_quantized_linear(context, linear):
        if context.sequence_parallel and not _gathers_quantized(context):
            return _gathered_column_backward(builder, context, linear, normalized, d_output)
        return _quantized_column_backward(builder, context, linear, normalized, d_output)
    gathered: Tensor | None = None
    gather = -1
    if context.sequence_parallel:
        gathered = builder.kept_copy(normalized, linear.name)
    if context.sequence_parallel and gathered is None:
        gather = gather_sequence(builder, context, f"{linear.name}_input_all_gather", linear.inputs)
        gathered = builder.temporary("gathered_input", context.token_bytes(linear.inputs), gather)
        if not _placement(context).beside_weights:
            builder.wait_for(gather)
    d_input, reduction = _reduced_input_gradient(builder, context, linear, gather)
    if gathered is None:
        weight_gradient(builder, context, linear, (d_output, normalized))
    else:
        name, size = f"{linear.name}_input", context.token_bytes(linear.inputs)
        gathered = in_token_order(builder, context, name, gathered, size)
        weight_gradient(builder, context, linear, (d_output, gathered))
        builder.release(normalized, builder.last_row)
    return _awaited_input_gradient(builder, context, linear, d_input, reduction)


def _gathered_column_backward(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, source: Tensor, d_output: Tensor
) -> Tensor:
    """As :func:`column_parallel_backward`, on operands that are quantised behind the gather of the input."""
    gradient = quantize_gradient(builder, context, linear, float(linear.tokens * linear.outputs))
    gathered, gather = builder.kept_copy(source, linear.name), -1
    if gathered is None:
        gather = gather_sequence(builder, context, f"{linear.name}_input_all_gather", linear.inputs)
        gathered = builder.temporary("gathered_input", context.token_bytes(linear.inputs), gather)
        if not _placement(context).beside_weights:
            builder.wait_for(gather)
    d_input, reduction = _reduced_input_gradient(builder, context, linear, gather, gradient.rowwise)
    elements = float(linear.tokens * linear.inputs)
    row = cast_input_columns(builder, context, linear, elements)
    builder.release(gathered, row)
    assert context.recipe is not None
    operand = builder.temporary("quantized_input", context.recipe.activation_size(elements), row)
    weight_gradient(builder, context, linear, (gradient.columnwise, operand))
    for tensor in (d_output, source):
        builder.release(tensor, builder.last_row)
    return _awaited_input_gradient(builder, context, linear, d_input, reduction)


def _quantized_column_backward(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, source: Tensor, d_output: Tensor
) -> Tensor:
    """As :func:`column_parallel_backward`, on quantised operands."""
    recipe, sharded = context.recipe, context.sequence_parallel
    assert recipe is not None
    elements = float(linear.tokens * linear.inputs)
    size = recipe.activation_size(elements)
    gradient = quantize_gradient(builder, context, linear, float(linear.tokens * linear.outputs))
    local = elements / context.tp if sharded else elements
    shard = operand = weight_gradient_input(builder, context, linear, local, source, sharded=sharded)
    gather = -1
    if sharded:
        gather = gather_whole(builder, context, f"{linear.name}_input_all_gather", size, recipe.element)
        operand = builder.temporary("gathered_input", size, gather)
        if not _placement(context).beside_weights:
            builder.wait_for(gather)
    d_input, reduction = _reduced_input_gradient(builder, context, linear, gather, gradient.rowwise)
    if sharded and recipe.transposes and recipe.copies > 1:
        row = transpose(builder, context, f"{linear.name}_input", size)
        builder.release(operand, row)
        operand = builder.temporary("gathered_input_columns", size, row)
    weight_gradient(builder, context, linear, (gradient.columnwise, operand))
    for tensor in (d_output, source, *((shard,) if sharded else ())):
        builder.release(tensor, builder.last_row)
    return _awaited_input_gradient(builder, context, linear, d_input, reduction)


def _reduced_input_gradient(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    gather: int,
    operand: Tensor | None = None,
) -> tuple[Tensor, int]:
    """An input gradient and the row of its reduction, -1 without one; ``operand`` is released behind the GEMM.

    The next compute waits for the reduction, or with overlap for the gather that it reads.
    """
    placement = _placement(context)
    reduced: ReducedGemm | None = None
    if context.tp > 1:
        name, size = f"{linear.name}_gradient", context.token_bytes(linear.inputs)
        scatter, summed = context.sequence_parallel, bool(linear.parts)
        reduced = placement.gradient_reduction(builder, context, name, size, scatter=scatter, summed=summed)
    d_input = input_gradient(builder, context, linear, reduced.gemm if reduced else None)
    if operand is not None:
        builder.release(operand, builder.last_row)
    if reduced is None:
        return d_input, -1
    reduction = reduced.finish()
    # The weight gradient behind it reads what is gathered.
    builder.wait_for(gather, -1 if _reduces_beside_weights(context, linear) else reduction)
    return d_input, reduction


def _reduces_beside_weights(context: LoweringContext, linear: Linear) -> bool:
    """Whether the gradient of the input is reduced beside the weight gradient."""
    placement = _placement(context)
    return placement.beside_weights and (placement.reduces_sums_beside or not linear.parts)


def _awaited_input_gradient(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, d_input: Tensor, reduction: int
) -> Tensor:
    if reduction >= 0 and _reduces_beside_weights(context, linear):
        builder.wait_for(reduction)
    if not context.sequence_parallel:
        return d_input
    builder.release(d_input, reduction)
    size = context.sharded_token_bytes(linear.inputs)
    return builder.temporary(f"{linear.name}_reduced_gradient", size, reduction)
