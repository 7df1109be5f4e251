"""The GEMMs of a linear on operands that are there: forward, input gradient, weight gradient, now or put off.

Which collectives stand around them under tensor parallelism is ``op_graphs.lower_linear``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .linear import (
    Linear,
    accumulated_type,
    forward_shape,
    input_gradient_shape,
    is_quantized_linear,
    products,
    scale_bytes,
    weight_gradient_shape,
)
from .lower_quantization import prepare_weight, quantize_input
from .lower_row_scales import rescale
from .lowering_context import LoweringContext
from .overlap.policy import GemmEmitter
from .program import DeferredGemm, ProgramBuilder, Tensor
from .vocabulary import OpKind, Phase


def linear_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    kept_for: Tensor | None = None,
    emit: GemmEmitter | None = None,
) -> int:
    """The forward GEMM of a linear behind the quantisation of its input; returns its last row.

    ``kept_for`` is the input, where a quantised copy of it is kept for the weight gradient; ``emit`` as in
    :func:`forward_gemm`.
    """
    if not is_quantized_linear(context, linear):
        return forward_gemm(builder, context, linear, emit)
    operand = quantize_input(builder, context, linear, float(linear.tokens * linear.inputs), kept_for)
    row = forward_gemm(builder, context, linear, emit)
    if operand is not None:
        builder.release(operand, row)
    return row


def forward_gemm(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, emit: GemmEmitter | None = None
) -> int:
    """The forward GEMM of a linear on operands that are there, but for its weight; returns its last row.

    ``emit`` adds it, whole or in pieces; by default the builder does. Pieces of all the products of a linear follow
    each other on each shard, which is one GEMM here.
    """
    weight = prepare_weight(builder, context, linear) if is_quantized_linear(context, linear) else None
    first, row = len(builder), -1
    add = emit or builder.gemm
    for part in products(linear) if add == builder.gemm else [linear]:
        row = add(part.name, forward_shape(context, part), scale_bytes=scale_bytes(context, part, "TN"))
    builder.parameter_rows.setdefault(linear.parameter, first)
    if weight is not None:
        builder.release(weight, row)
    return row


def forward_again(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> int:
    """The forward GEMM of a linear that a backward program runs again, with its casts; returns its last row."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    row = linear_forward(builder, context, linear)
    builder.phase = phase
    return row


def input_gradient(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, emit: GemmEmitter | None = None
) -> Tensor:
    """The GEMM of an input gradient; returns the gradient. ``emit`` as in :func:`forward_gemm`."""
    row = input_gradient_gemm(builder, context, linear, emit)
    size = context.item * linear.tokens * linear.inputs
    return builder.temporary(f"{linear.name}_input_gradient", size, row)


def input_gradient_gemm(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, emit: GemmEmitter | None = None
) -> int:
    """The GEMM of an input gradient on operands that are there, but for its weight; returns its last row."""
    weight = None
    if is_quantized_linear(context, linear):
        weight = prepare_weight(builder, context, linear, backward=True)
    add, parts, row = emit or builder.gemm, products(linear), -1
    for part in parts:
        row = add(
            f"{part.name}_dgrad",
            input_gradient_shape(context, part),
            scale_bytes=scale_bytes(context, part, "NN"),
        )
    if weight is not None:
        builder.release(weight, row)
    if len(parts) > 1:
        return _sum_of_gradients(builder, context, linear, row)
    if linear.reads_attention and _rescales(context, linear):
        elements = float(linear.tokens * linear.inputs)
        row = rescale(builder, f"{linear.name}_dgrad", elements, context.dtype)
    return row


def _rescales(context: LoweringContext, linear: Linear) -> bool:
    """Whether products of backward run without the scales of their operands."""
    recipe = context.recipe
    return is_quantized_linear(context, linear) and recipe is not None and recipe.quantizes_each_use


def _sum_of_gradients(builder: ProgramBuilder, context: LoweringContext, linear: Linear, row: int) -> int:
    """Add up what an input gets from each product that reads it; returns the row.

    Autograd adds them one by one; a compiler makes one kernel of it.
    """
    count, size = len(linear.parts), context.item * linear.tokens * linear.inputs
    others = builder.temporary(f"{linear.name}_other_gradients", (count - 1) * size, row)
    part = "attention" if linear.name == "qkv" else "mlp"
    kernels = count - 1 if context.libraries.runs_eagerly(part) else 1
    row = builder.memory_bound(
        f"{linear.name}_gradient_sum",
        OpKind.ELEMENTWISE,
        read=(count + kernels - 1) * size,
        written=kernels * size,
        passes=kernels,
        dtype=context.dtype,
    )
    builder.release(others, row)
    return row


def weight_gradient(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    consumed: Sequence[Tensor],
    borrowed: Sequence[Tensor] = (),
) -> None:
    """The GEMM that adds a weight gradient to the main gradient, now or, in a split backward, in its second half.

    It reads ``consumed``, which it releases, and ``borrowed``, which others release when it runs at once.
    """
    parts = products(linear)
    for part in parts:
        last = part is parts[-1]
        gemm = DeferredGemm(
            f"{part.name}_wgrad",
            weight_gradient_shape(context, part),
            linear.parameter,
            builder.layer,
            builder.module,
            (*consumed, *borrowed) if last else (),
            scale_bytes(context, part, "NT"),
            accumulated_type(context),
            rescaled=context.dtype if _rescales(context, linear) else None,
        )
        if builder.deferred is not None:
            builder.defer(gemm)
        else:
            run_weight_gradient(builder, gemm, consumed if last else ())


def run_weight_gradient(builder: ProgramBuilder, gemm: DeferredGemm, consumed: Sequence[Tensor]) -> None:
    """The GEMM of a weight gradient, which releases ``consumed``, and adding its result to the main gradient.

    Without ``gradient_accumulation_fusion`` the gradient is a tensor of its own in the training dtype, which the hook
    of Megatron-Core's DistributedDataParallel adds to the main gradient and drops; as FSDP2 does in a pipeline.
    """
    scales, phase = gemm.scale_bytes, Phase.BACKWARD_WEIGHT
    row = builder.gemm(gemm.name, gemm.shape, scale_bytes=scales, phase=phase, kind=gemm.kind)
    for tensor in consumed:
        builder.release(tensor, row)
    if gemm.rescaled is not None:
        elements = float(gemm.shape.m) * gemm.shape.n * gemm.shape.count
        row = rescale(builder, gemm.name, elements, gemm.rescaled, phase)
    if gemm.accumulates_in is not None:
        elements = float(gemm.shape.m) * gemm.shape.n * gemm.shape.count
        written, main = gemm.shape.output.itemsize * elements, gemm.accumulates_in.itemsize * elements
        gradient = builder.temporary("weight_gradient", written, row)
        row = builder.memory_bound(
            f"{gemm.name}_accumulate",
            OpKind.ELEMENTWISE,
            read=written + main,
            written=main,
            dtype=gemm.accumulates_in,
            phase=Phase.BACKWARD_WEIGHT,
        )
        builder.release(gradient, row)
    builder.gradient_rows[gemm.parameter] = row


def run_deferred(builder: ProgramBuilder, gemms: Sequence[DeferredGemm]) -> Iterator[None]:
    """Run the weight-gradient GEMMs a backward for the input put off; yields behind each."""
    for gemm in gemms:
        builder.layer, builder.module = gemm.layer, gemm.module
        run_weight_gradient(builder, gemm, gemm.reads)
        yield
