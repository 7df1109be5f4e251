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
    scale_bytes,
    weight_gradient_shape,
)
from .lower_quantization import prepare_weight, quantize_input
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

    ``emit`` adds it, whole or in pieces; by default the builder does.
    """
    weight = prepare_weight(builder, context, linear) if is_quantized_linear(context, linear) else None
    first = len(builder)
    row = (emit or builder.gemm)(
        linear.name, forward_shape(context, linear), scale_bytes=scale_bytes(context, linear, "TN")
    )
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
    row = (emit or builder.gemm)(
        f"{linear.name}_dgrad",
        input_gradient_shape(context, linear),
        scale_bytes=scale_bytes(context, linear, "NN"),
    )
    if weight is not None:
        builder.release(weight, row)
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
    gemm = DeferredGemm(
        f"{linear.name}_wgrad",
        weight_gradient_shape(context, linear),
        linear.parameter,
        builder.layer,
        builder.module,
        (*consumed, *borrowed),
        scale_bytes(context, linear, "NT"),
        accumulated_type(context),
    )
    if builder.deferred is not None:
        builder.defer(gemm)
    else:
        run_weight_gradient(builder, gemm, consumed)


def run_weight_gradient(builder: ProgramBuilder, gemm: DeferredGemm, consumed: Sequence[Tensor]) -> None:
    """The GEMM of a weight gradient, which releases ``consumed``, and adding its result to the main gradient.

    Without ``gradient_accumulation_fusion`` the gradient is a tensor of its own in the training dtype, which the hook
    of Megatron-Core's DistributedDataParallel adds to the main gradient and drops.
    """
    scales, phase = gemm.scale_bytes, Phase.BACKWARD_WEIGHT
    row = builder.gemm(gemm.name, gemm.shape, scale_bytes=scales, phase=phase, kind=gemm.kind)
    for tensor in consumed:
        builder.release(tensor, row)
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
