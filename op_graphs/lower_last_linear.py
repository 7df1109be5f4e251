"""The last linear of a layer that runs again only as far as its backward reads."""

from __future__ import annotations

from .linear import Linear, is_quantized_linear
from .linear_gemms import linear_forward
from .lower_frozen import frozen_row_kept
from .lower_linear import row_parallel_forward
from .lower_quantization import quantize_input
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor


def last_linear_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    source: Tensor,
    *,
    discard_input: bool = False,
    keep_copy: bool = True,
) -> Tensor:
    """The last linear of a layer that runs again: what backward reads of it, which is its input.

    A function of Transformer Engine saves it behind its product; PyTorch's products save theirs before they run, and of
    quantised ones a compiler leaves the cast alone (torchao). Arguments as in :func:`row_parallel_forward`, which runs
    where ``source`` is kept quantised, or frozen weights are Transformer Engine's.
    """
    transformer_engine, quantized = context.libraries.transformer_engine, is_quantized_linear(context, linear)
    if quantized and not transformer_engine and not context.freezes_weights:
        if keep_copy and context.keeps_copies and builder.keep_activations:
            _keep_cast(builder, context, linear, source)
        return builder.temporary(f"{linear.name}_output", 1.0, builder.last_row)
    if quantized or (context.freezes_weights and transformer_engine):
        return row_parallel_forward(
            builder, context, linear, source, discard_input=discard_input, keep_copy=keep_copy
        )
    if transformer_engine:
        row = linear_forward(builder, context, linear, None)
        return builder.temporary(f"{linear.name}_output", context.gathered_bytes, row)
    if context.freezes_weights:
        frozen_row_kept(builder, context, linear, source, discard_input=discard_input)
    # Nothing is made; a byte stands for it.
    return builder.temporary(f"{linear.name}_output", 1.0, builder.last_row)


def _keep_cast(builder: ProgramBuilder, context: LoweringContext, linear: Linear, source: Tensor) -> None:
    """Cast the input of a linear, which nothing else reads, for its weight gradient alone."""
    operand = quantize_input(builder, context, linear, float(linear.tokens * linear.inputs), source)
    if operand is not None:
        builder.release(operand, builder.last_row)
    builder.discard(source)
