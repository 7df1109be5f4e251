"""Casts with a scale for each row, as PyTorch's compiler makes kernels of torchao's linears.

A product sums over the rows of its first operand and the columns of its second. What is needed along rows is cast by
the kernel that finds the magnitudes; along columns one kernel finds them and another casts and writes the transpose.
Where the kernel in front makes what is cast, the compiler joins it: a norm or an activation writes 8 bits itself, but
attention and collectives do not.

Under tensor parallelism operands are DTensors: where the axis that a scale spans is cut, the magnitudes are reduced
over the ranks, 8 bytes (fp64) a row, between both kernels. Products of backward run without scales, on cuBLAS (torchao
``float8_ops.py``, ``addmm_float8_unwrapped``: CUTLASS's are slow without fast accumulation), and a kernel multiplies
their results, which the compiler joins to a sum or an activation behind it.

Source: graphs and kernels that PyTorch 2.13 makes of an MLP with torchao 0.18 on 1 and on 8 ranks.
"""

from __future__ import annotations

from .linear import Linear, products
from .lowering_context import LoweringContext
from .program import ProgramBuilder
from .vocabulary import Communication, Dimension, DType, OpKind, Phase

MAGNITUDE_BYTES = 8.0
"""Of a row: magnitudes are reduced as the fp64 that scales are computed in."""


def cast_input(builder: ProgramBuilder, context: LoweringContext, linear: Linear, elements: float) -> int:
    """The input of a linear along rows, for its forward product; returns the last row."""
    part = "mlp" if linear.row_parallel else "norms"
    whole = context.tp == 1
    if whole and not linear.reads_attention and not context.libraries.runs_eagerly(part):
        return builder.last_row
    name = f"{linear.name}_input"
    if linear.row_parallel and not whole:
        if linear.reads_attention:
            _magnitudes(builder, context, name, elements)
        _reduce_magnitudes(builder, context, name, linear.tokens)
    return _cast(builder, context, name, elements)


def cast_input_columns(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, elements: float
) -> int:
    """The input of a linear along columns, for its weight gradient; returns the last row."""
    name = f"{linear.name}_input"
    _magnitudes(builder, context, name, elements)
    return _cast_columns(builder, context, name, elements)


def cast_gradient(builder: ProgramBuilder, context: LoweringContext, linear: Linear, elements: float) -> int:
    """The output gradient of a linear, whole along its sequence, along rows and along columns; returns the last row."""
    name = f"{linear.name}_gradient"
    if not linear.row_parallel:
        for _ in products(linear):
            _reduce_magnitudes(builder, context, name, linear.tokens)
    _cast(builder, context, name, elements)
    _magnitudes(builder, context, name, elements)
    return _cast_columns(builder, context, name, elements)


def cast_weight(builder: ProgramBuilder, context: LoweringContext, linear: Linear, *, backward: bool) -> int:
    """The weight of a linear along its inputs, or in backward along its outputs; returns the last row."""
    name, elements = f"{linear.name}_weight", float(linear.weight_elements)
    # Tensor parallelism cuts the inputs of a row-parallel linear, the outputs of others.
    cut = context.tp > 1 and linear.row_parallel != backward
    if cut or backward:
        _magnitudes(builder, context, name, elements)
    if cut:
        for product in products(linear):
            _reduce_magnitudes(builder, context, name, product.inputs if backward else product.outputs)
    if backward:
        return _cast_columns(builder, context, name, elements)
    return _cast(builder, context, name, elements)


def rescale(
    builder: ProgramBuilder, name: str, elements: float, dtype: DType, phase: Phase | None = None
) -> int:
    """Multiply the result of a product of backward by the scales of its operands; returns the row."""
    size = dtype.itemsize * elements
    return builder.memory_bound(
        f"{name}_rescale", OpKind.ELEMENTWISE, read=size, written=size, dtype=dtype, phase=phase
    )


def _magnitudes(builder: ProgramBuilder, context: LoweringContext, name: str, elements: float) -> int:
    return builder.memory_bound(
        f"{name}_amax",
        OpKind.REDUCTION,
        read=context.item * elements,
        written=4.0,
        dtype=context.dtype,
    )


def _reduce_magnitudes(builder: ProgramBuilder, context: LoweringContext, name: str, rows: int) -> None:
    """The largest magnitudes of the rows over the tensor-parallel ranks, which the next kernel waits for."""
    if context.tp == 1:
        return
    row = builder.collective(
        f"{name}_amax_all_reduce",
        Communication.ALL_REDUCE,
        MAGNITUDE_BYTES * rows,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )
    builder.wait_for(row)


def _cast(builder: ProgramBuilder, context: LoweringContext, name: str, elements: float) -> int:
    assert context.recipe is not None
    return builder.memory_bound(
        f"{name}_cast",
        OpKind.CAST,
        read=context.item * elements,
        written=context.recipe.activation_size(elements),
        dtype=context.recipe.element,
    )


def _cast_columns(builder: ProgramBuilder, context: LoweringContext, name: str, elements: float) -> int:
    assert context.recipe is not None
    return builder.memory_bound(
        f"{name}_columns_cast",
        OpKind.CAST,
        read=context.item * elements,
        written=context.recipe.activation_size(elements),
        access="columns",
        dtype=context.recipe.element,
    )
