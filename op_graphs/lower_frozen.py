"""Lowering of linears whose weights are frozen, with low-rank adapters beside some of them.

A frozen linear has no weight gradient, so its input is not kept for it: neither the tensor nor a quantised or gathered
copy, unless an adapter reads it. Its backward is the input gradient with the collectives around it. Under a
low-precision recipe inputs and gradients are quantised along rows only.

The adapter beside a column-parallel linear reads the gathered input that the linear reads (Transformer Engine
``return_layernorm_output_gathered``), and its part of the input gradient is added in front of the one reduction; where
the linear's gather comes in pieces it gathers, and reduces, for itself (Megatron Bridge ``peft/utils.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .linear import Linear, is_quantized_linear
from .linear_gemms import forward_gemm, input_gradient
from .lower_adapters import adapters_backward, adapters_beside, adapters_forward, drops_input
from .lower_quantization import cast, gather_quantized
from .lowering_context import LoweringContext
from .overlap.policy import GemmEmitter, ReducedGemm, TensorPlacement
from .overlap.registry import TENSOR
from .overlap.tensor_collectives import gather_sequence, reduce_sums
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind

_GATHERED = "gathered_for_adapter"


def _placement(context: LoweringContext) -> TensorPlacement:
    return TENSOR.chosen(context.overlap.tp)


def frozen_column_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    keep_input: bool,
    width: int | None = None,
) -> int:
    """The forward of a frozen column-parallel linear and of its adapters; returns its last row.

    Arguments as in ``lower_linear.column_parallel_forward``; with ``keep_input`` the backward pass gets ``source`` too,
    but it is alive until then only if an adapter reads it.
    """
    adapters = adapters_beside(builder, context, linear)
    whole: Tensor | None = None
    if adapters and context.sequence_parallel and not _placement(context).in_pieces:
        whole = _gather_for_adapters(builder, context, linear)
        operand = _quantized(builder, context, linear, float(linear.tokens * linear.inputs))
        row = forward_gemm(builder, context, linear)
        if operand is not None:
            builder.release(operand, row)
    else:
        row = _gathered_forward(builder, context, linear, width)
        if adapters and context.sequence_parallel:
            whole = _gather_for_adapters(builder, context, linear)
    if adapters:
        output = builder.temporary(f"{linear.name}_base_output", context.token_bytes(linear.outputs), row)
        adapters_forward(builder, context, linear, adapters)
        row = builder.last_row
        builder.release(output, row)
    if whole is not None and builder.keep_activations and not drops_input(context):
        builder.promote(whole, "gathered_input")
        builder.keep_copy(None, f"{linear.parameter}.{_GATHERED}", whole)
    elif whole is not None:
        builder.release(whole, row)
    reads_source = bool(adapters) and whole is None and not drops_input(context)
    if not keep_input:
        builder.release(source, row)
    elif builder.keep_activations and not reads_source:
        builder.discard(source, row)
    return row


def frozen_row_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    discard_input: bool,
) -> Tensor:
    """The forward of a frozen row-parallel linear and of its adapters; returns the reduced output.

    ``discard_input`` says that nothing but this linear reads ``source``.
    """
    adapters = adapters_beside(builder, context, linear)
    reduction: ReducedGemm | None = None
    if context.tp > 1:
        size, scatter = context.gathered_bytes, context.sequence_parallel
        reduction = _placement(context).reduction(builder, context, linear.name, size, scatter=scatter)
    operand = _quantized(builder, context, linear, float(linear.tokens * linear.inputs))
    row = forward_gemm(builder, context, linear, reduction.gemm if reduction else None)
    if operand is not None:
        builder.release(operand, row)
    output = builder.temporary(f"{linear.name}_output", context.gathered_bytes, row)
    if reduction is not None:
        reduced = reduction.finish()
        builder.wait_for(reduced)
        if context.sequence_parallel:
            builder.release(output, reduced)
            output = builder.temporary(f"{linear.name}_reduced", context.hidden_bytes, reduced)
    if adapters:
        adapters_forward(builder, context, linear, adapters)
        builder.release(output, builder.last_row)
        output = builder.temporary(f"{linear.name}_adapted", context.hidden_bytes, builder.last_row)
    if builder.keep_activations and discard_input and (not adapters or drops_input(context)):
        builder.discard(source, builder.last_row)
    return output


def frozen_row_kept(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    discard_input: bool,
) -> None:
    """Of the forward of a frozen row-parallel linear and of its adapters only what leads to what they keep."""
    adapters = adapters_beside(builder, context, linear)
    adapters_forward(builder, context, linear, adapters, kept_only=True)
    if builder.keep_activations and discard_input and (not adapters or drops_input(context)):
        builder.discard(source, builder.last_row)


def frozen_column_backward(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, source: Tensor, d_output: Tensor
) -> Tensor:
    """The backward of a frozen column-parallel linear and of its adapters; returns the gradient of its input."""
    adapters = adapters_beside(builder, context, linear)
    d_adapted: Tensor | None = None
    if adapters:
        gathered = _gathered_input(builder, context, linear)
        d_adapted = adapters_backward(builder, context, linear, adapters, gathered or source, d_output)
        if gathered is not None:
            builder.release(gathered, builder.last_row)
    reduced: ReducedGemm | None = None
    if context.tp > 1:
        name, size = f"{linear.name}_gradient", context.token_bytes(linear.inputs)
        scatter = context.sequence_parallel
        reduced = _placement(context).gradient_reduction(builder, context, name, size, scatter=scatter)
    operand = _quantized(builder, context, linear, float(linear.tokens * linear.outputs), suffix="gradient")
    d_input = input_gradient(builder, context, linear, reduced.gemm if reduced else None)
    for tensor in (d_output, source, *((operand,) if operand is not None else ())):
        builder.release(tensor, builder.last_row)
    size = context.token_bytes(linear.inputs)
    joins_reduction = context.sequence_parallel and not _placement(context).in_pieces
    if d_adapted is not None and (joins_reduction or reduced is None):
        _add(builder, context, linear, d_adapted, size)
        d_adapted = None
    if reduced is None:
        return d_input
    reduction = reduced.finish()
    builder.wait_for(reduction)
    if context.sequence_parallel:
        builder.release(d_input, reduction)
        size = context.sharded_token_bytes(linear.inputs)
        d_input = builder.temporary(f"{linear.name}_reduced_gradient", size, reduction)
    if d_adapted is None:
        return d_input
    if context.sequence_parallel:
        row = reduce_sums(
            builder,
            context,
            f"{linear.name}_adapter_gradient",
            context.token_bytes(linear.inputs),
            scatter=True,
        )
        builder.wait_for(row)
        builder.release(d_adapted, row)
        d_adapted = builder.temporary(f"{linear.name}_adapter_gradient", size, row)
    _add(builder, context, linear, d_adapted, size)
    return d_input


def frozen_linear_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    d_output: Tensor,
    *,
    consumed: Sequence[Tensor],
    borrowed: Sequence[Tensor],
    gathers: bool,
) -> Tensor:
    """The backward of a frozen row-parallel linear and of its adapters; arguments as in ``linear_backward``."""
    (source,) = (tensor for tensor in (*consumed, *borrowed) if tensor != d_output)
    adapters = adapters_beside(builder, context, linear)
    d_adapted: Tensor | None = None
    if adapters:
        d_adapted = adapters_backward(builder, context, linear, adapters, source, d_output)
    emit: GemmEmitter | None = None
    elements = float(linear.tokens * linear.outputs)
    if gathers and is_quantized_linear(context, linear):
        shard = _quantized(builder, context, linear, elements / context.tp, suffix="gradient", sharded=True)
        assert context.recipe is not None
        assert shard is not None
        size = context.recipe.activation_size(elements)
        row = gather_quantized(builder, context, f"{linear.name}_gradient_all_gather", size)
        builder.release(shard, row)
        builder.wait_for(row)
        operand: Tensor | None = builder.temporary("gathered_gradient", size, row)
    elif gathers:
        name, size = f"{linear.name}_gradient_all_gather", context.gathered_bytes
        gather = _placement(context).gather(builder, context, name, size, context.dtype)
        operand, emit = builder.temporary("gathered_gradient", size, gather.row), gather.gemm
    else:
        operand = _quantized(builder, context, linear, elements, suffix="gradient")
    d_input = input_gradient(builder, context, linear, emit)
    if operand is not None:
        builder.release(operand, builder.last_row)
    if d_adapted is not None:
        _add(builder, context, linear, d_adapted, context.token_bytes(linear.inputs))
    for tensor in consumed:
        builder.release(tensor, builder.last_row)
    return d_input


def _gathered_forward(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, width: int | None
) -> int:
    """The forward GEMM behind the gather of its input, of which nothing stays."""
    sharded, recipe = context.sequence_parallel, context.recipe
    elements = float(linear.tokens * linear.inputs)
    local = elements / context.tp if sharded else elements
    operand = _quantized(builder, context, linear, local, sharded=sharded)
    emit: GemmEmitter | None = None
    if sharded:
        size, dtype = context.token_bytes(width or linear.inputs), context.dtype
        if operand is not None:
            assert recipe is not None
            rest = (width or linear.inputs) - linear.inputs
            size, dtype = recipe.activation_size(elements) + context.token_bytes(rest), recipe.element
        gather = _placement(context).gather(builder, context, f"{linear.name}_all_gather", size, dtype)
        if operand is not None:
            builder.release(operand, gather.end)
        operand, emit = builder.temporary("gathered_input", size, gather.row), gather.gemm
    row = forward_gemm(builder, context, linear, emit)
    if operand is not None:
        builder.release(operand, row)
    return row


def _quantized(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    elements: float,
    *,
    suffix: str = "input",
    sharded: bool = False,
) -> Tensor | None:
    """The copy along rows of an input or a gradient, which the caller releases; None where nothing is quantised."""
    if not is_quantized_linear(context, linear):
        return None
    assert context.recipe is not None
    row = cast(builder, context, f"{linear.name}_{suffix}", elements, copies=1, sharded=sharded)
    return builder.temporary(f"quantized_{suffix}", context.recipe.activation_size(elements), row)


def _gather_for_adapters(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> Tensor:
    size = context.token_bytes(linear.inputs)
    shared = not _placement(context).in_pieces
    name = f"{linear.name}_all_gather" if shared else f"{linear.name}_adapter_all_gather"
    row = gather_sequence(builder, context, name, size, context.dtype)
    builder.wait_for(row)
    return builder.temporary("gathered_input", size, row)


def _gathered_input(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> Tensor | None:
    """What the adapters of a column-parallel linear read in forward, if that was a gathered copy of its input."""
    if not context.sequence_parallel or drops_input(context):
        return None
    kept = builder.kept_copy(None, f"{linear.parameter}.{_GATHERED}")
    assert kept is not None, "what an adapter reads is kept wherever activations are"
    return kept


def _add(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, gradient: Tensor, size: float
) -> None:
    """Add the adapters' part of an input gradient to the linear's, in its place."""
    row = builder.memory_bound(
        f"{linear.name}_adapter_gradient_add",
        OpKind.ELEMENTWISE,
        read=2 * size,
        written=size,
        dtype=context.dtype,
    )
    builder.release(gradient, row)
