"""Lowering of quantisation: the kernels in front of the GEMMs of a linear, and the copies they leave behind.

See ``op_graphs.precision`` for what a recipe does. Every function here is called for quantised linears only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .linear import Linear
from .lower_row_scales import cast_gradient, cast_input, cast_input_columns, cast_weight
from .lowering_context import LoweringContext
from .precision import PrecisionRecipe
from .program import ProgramBuilder, Tensor
from .tensor_gathers import gather_whole
from .vocabulary import Communication, Dimension, DType, OpKind

_SCALE_BYTES = 4.0


@dataclass(frozen=True)
class GradientOperands:
    """What the two GEMMs of a backward pass read of an output gradient; one buffer where both read the same."""

    rowwise: Tensor | None
    """Read by the input gradient alone, and released behind it."""
    columnwise: Tensor
    """Read by the weight gradient."""


def _recipe(context: LoweringContext) -> PrecisionRecipe:
    assert context.recipe is not None, "only called where a recipe quantises"
    return context.recipe


def _kernels(recipe: PrecisionRecipe, linear: Linear) -> int:
    return 1 if recipe.fused_grouped_cast else linear.count


def cast(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    elements: float,
    *,
    copies: int,
    kernels: int = 1,
    sharded: bool = False,
) -> int:
    """Quantise ``elements`` of a bf16 tensor into ``copies`` copies; returns the row that writes them.

    One copy is along rows. ``sharded`` says that other tensor-parallel ranks hold the
    rest of the tensor, so that one scale for all of it needs a reduction of the magnitudes.
    """
    recipe, source = _recipe(context), context.item * elements
    if recipe.amax_kernel:
        builder.memory_bound(
            f"{name}_amax",
            OpKind.REDUCTION,
            read=source,
            written=4.0 * kernels,
            passes=kernels,
            dtype=context.dtype,
        )
        if sharded and recipe.amax_over_ranks and context.tp > 1:
            row = builder.collective(
                f"{name}_amax_all_reduce",
                Communication.ALL_REDUCE,
                4.0,
                Dimension.TP,
                context.group(Dimension.TP),
                dtype=DType.FP32,
            )
            builder.wait_for(row)
    written = recipe.activation_size(elements)
    if copies > 1 and recipe.columns_apart:
        _cast_kernel(builder, recipe, f"{name}_cast", source, written, kernels)
        return _cast_kernel(
            builder, recipe, f"{name}_cast_columns", source, written, kernels, access="strided"
        )
    if copies > 1:
        size = recipe.activation_size(elements, copies)
        return _cast_kernel(
            builder, recipe, f"{name}_cast_transpose", source, size, kernels, access="strided"
        )
    return _cast_kernel(builder, recipe, f"{name}_cast", source, written, kernels)


def _cast_kernel(
    builder: ProgramBuilder,
    recipe: PrecisionRecipe,
    name: str,
    read: float,
    written: float,
    kernels: int,
    *,
    access: str = "stream",
) -> int:
    return builder.memory_bound(
        name,
        OpKind.CAST,
        read=read,
        written=written,
        access=access,
        passes=kernels,
        dtype=recipe.element,
    )


def transpose(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, kernels: int = 1
) -> int:
    """Make the copy along columns out of ``size`` quantised bytes; returns the row."""
    return builder.memory_bound(
        f"{name}_transpose",
        OpKind.CAST,
        read=size,
        written=size,
        access="strided",
        passes=kernels,
        dtype=_recipe(context).element,
    )


ATTENTION_OUTPUT_BYTES = 1.5 + _SCALE_BYTES / 128
"""Bytes of an element of the output of attention where it is stored: 12 bits and its share of the scales."""


def store(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    elements: float,
    source: Tensor,
    width: float,
) -> Tensor:
    """Keep a bf16 tensor of the forward pass in ``width`` bytes an element; releases it, returns what is kept."""
    row = builder.memory_bound(
        f"{name}_store_cast",
        OpKind.CAST,
        read=context.item * elements,
        written=width * elements,
        access="strided",
        dtype=_recipe(context).element,
    )
    builder.release(source, row)
    return builder.activation(f"stored_{name}", width * elements, row)


def restore(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    elements: float,
    stored: Tensor,
    width: float,
) -> Tensor:
    """The bf16 tensor of what :func:`store` kept, which is released."""
    row = builder.memory_bound(
        f"{name}_restore_cast",
        OpKind.CAST,
        read=width * elements,
        written=context.item * elements,
        access="strided",
        dtype=context.dtype,
    )
    builder.release(stored, row)
    return builder.temporary(f"restored_{name}", context.item * elements, row)


def quantize_input(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    elements: float,
    source: Tensor | None,
    *,
    sharded: bool = False,
) -> Tensor | None:
    """Quantise the input of a linear; the copy for the weight gradient is kept in the place of ``source``.

    Without ``source`` nothing is kept. A shard that is to be gathered again is kept along rows, for its bytes can be
    transposed behind the gather.

    Returns:
        The copy the forward GEMM reads, which the caller releases; None if the kept copy is that one.
    """
    recipe = _recipe(context)
    if recipe.quantizes_each_use:
        row = cast_input(builder, context, linear, elements)
        return builder.temporary("quantized_input", recipe.activation_size(elements), row)
    once = source is None or recipe.stored_once or (sharded and recipe.transposes)
    copies = 1 if once else recipe.copies
    name = f"{linear.name}_input"
    row = cast(
        builder, context, name, elements, copies=copies, kernels=_kernels(recipe, linear), sharded=sharded
    )
    size = recipe.activation_size(elements)
    if source is not None:
        builder.keep_copy(
            source, linear.name, builder.activation(f"{linear.name}_quantized_input", size, row)
        )
        if copies == 1:
            return None
    return builder.temporary("quantized_input", size, row)


def weight_gradient_input(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    elements: float,
    source: Tensor,
    *,
    sharded: bool = False,
) -> Tensor:
    """The copy of a linear's input that its weight gradient reads: kept since forward, or made of ``source`` now."""
    kept = builder.kept_copy(source, linear.name)
    recipe = _recipe(context)
    name = f"{linear.name}_input"
    if kept is not None and recipe.stored_once:
        size = recipe.activation_size(elements)
        row = transpose(builder, context, name, size, _kernels(recipe, linear))
        builder.release(kept, row)
        return builder.temporary(f"{linear.name}_quantized_input", size, row)
    if kept is not None:
        return kept
    if recipe.quantizes_each_use:
        row = cast_input_columns(builder, context, linear, elements)
    else:
        kernels = _kernels(recipe, linear)
        row = cast(builder, context, name, elements, copies=1, kernels=kernels, sharded=sharded)
    return builder.temporary(f"{linear.name}_quantized_input", recipe.activation_size(elements), row)


def quantize_gradient(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, elements: float
) -> GradientOperands:
    """Quantise the output gradient of a linear along both axes."""
    recipe = _recipe(context)
    if recipe.quantizes_each_use:
        row = cast_gradient(builder, context, linear, elements)
    else:
        name, kernels = f"{linear.name}_gradient", _kernels(recipe, linear)
        row = cast(builder, context, name, elements, copies=recipe.copies, kernels=kernels)
    return _operands(builder, recipe, elements, row)


def gather_gradient(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, elements: float
) -> GradientOperands:
    """Quantise a shard of the output gradient and gather it along both axes, to ``elements`` over the ranks."""
    recipe = _recipe(context)
    name, copies = f"{linear.name}_gradient", recipe.gathers_copies
    row = cast(builder, context, name, elements / context.tp, copies=copies, sharded=True)
    shard = builder.temporary("quantized_shard", recipe.activation_size(elements / context.tp, copies), row)
    row = gather_quantized(builder, context, f"{name}_all_gather", recipe.activation_size(elements, copies))
    builder.release(shard, row)
    builder.wait_for(row)
    if copies == recipe.copies:
        return _operands(builder, recipe, elements, row)
    size = recipe.activation_size(elements)
    rowwise = builder.temporary("quantized_gradient_rows", size, row)
    row = transpose(builder, context, name, size)
    return GradientOperands(rowwise, builder.temporary("quantized_gradient_columns", size, row))


def _operands(
    builder: ProgramBuilder, recipe: PrecisionRecipe, elements: float, row: int
) -> GradientOperands:
    size = recipe.activation_size(elements)
    columnwise = builder.temporary("quantized_gradient_columns", size, row)
    rowwise = builder.temporary("quantized_gradient_rows", size, row) if recipe.copies > 1 else None
    return GradientOperands(rowwise, columnwise)


def gather_quantized(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> int:
    """All-gather ``size`` bytes (whole) of quantised elements over the tensor-parallel ranks; returns the row."""
    return gather_whole(builder, context, name, size, _recipe(context).element)


def prepare_weight(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, *, backward: bool = False
) -> Tensor | None:
    """Quantise the weight of a linear where this program does so.

    Once a step, in the first microbatch, into copies that stay; or, where it is done for each use, into
    the one copy that the next GEMM reads, which is returned for the caller to release.
    """
    recipe, elements = _recipe(context), float(linear.weight_elements)
    name, first = f"{linear.name}_weight", len(builder)
    fresh = context.quantizes_weights_anew
    if recipe.stored_once and backward and not fresh:
        size = recipe.weight_size(elements, 1)
        row = transpose(builder, context, name, size, _kernels(recipe, linear))
        return builder.temporary("quantized_weight", size, row)
    if not builder.casts_weights and not recipe.quantizes_each_use:
        return None
    if not fresh and context.training.fp8_param_gather and recipe.gathered_weight_bytes < context.item:
        if recipe.copies > 1 and not recipe.stored_once:
            transpose(builder, context, name, recipe.weight_size(elements, 1), linear.count)
    elif not fresh or not context.training.fp8_param_gather:
        once = fresh or recipe.stored_once
        copies = 1 if once else recipe.copies
        if recipe.quantizes_each_use:
            cast_weight(builder, context, linear, backward=backward)
        else:
            _cast_weight(builder, context, recipe, linear, copies=copies)
    if len(builder) == first:
        return None
    if not backward:
        builder.parameter_rows.setdefault(linear.parameter, first)
    return builder.temporary("quantized_weight", recipe.weight_size(elements, 1), first) if fresh else None


def _cast_weight(
    builder: ProgramBuilder,
    context: LoweringContext,
    recipe: PrecisionRecipe,
    linear: Linear,
    *,
    copies: int,
) -> None:
    name, elements = f"{linear.name}_weight", float(linear.weight_elements)
    source = context.item * elements
    if recipe.amax_kernel:
        builder.memory_bound(
            f"{name}_amax",
            OpKind.REDUCTION,
            read=source,
            written=4.0 * linear.count,
            passes=linear.count,
            dtype=context.dtype,
        )
    builder.memory_bound(
        f"{name}_cast{'_transpose' if copies > 1 else ''}",
        OpKind.CAST,
        read=source,
        written=recipe.weight_size(elements, copies),
        access="strided" if copies > 1 else "stream",
        passes=linear.count,
        dtype=recipe.element,
    )
