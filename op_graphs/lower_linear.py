"""Lowering of linears under tensor parallelism: the collectives in front of and behind their GEMMs.

Column-parallel linears (QKV, FC1, head) read the whole hidden state: with sequence parallelism it is gathered first,
and gathered again in backward for the weight gradient. With ``overlap.tp`` that gather runs beside the input-gradient
GEMM, and the reduction of the input gradient beside the weight-gradient GEMM; without, compute waits for both, as it
does where a GEMM that fills the device keeps the communication kernel out until its last wave. Row-parallel linears (projection, FC2) leave partial sums that
are reduced behind them. Source: Megatron-Core ``tensor_parallel/layers.py``, Transformer Engine
``pytorch/module/linear.py``; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from .graph import GemmShape
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, Phase


def gather_sequence(builder: ProgramBuilder, context: LoweringContext, name: str) -> int:
    """All-gather a hidden state over the tensor-parallel ranks; returns the collective's row."""
    return builder.collective(
        name,
        Communication.ALL_GATHER,
        context.gathered_bytes,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )


def reduce_partial_sums(
    builder: ProgramBuilder, context: LoweringContext, name: str, *, scatter: bool
) -> int:
    """Reduce a hidden state over the tensor-parallel ranks, scattered along the sequence or whole."""
    return builder.collective(
        f"{name}_{'reduce_scatter' if scatter else 'all_reduce'}",
        Communication.REDUCE_SCATTER if scatter else Communication.ALL_REDUCE,
        context.gathered_bytes,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )


def gathered_input(builder: ProgramBuilder, context: LoweringContext, name: str) -> Tensor | None:
    """With sequence parallelism, gather the input of the next GEMM; None where it is whole already."""
    if not context.sequence_parallel:
        return None
    row = gather_sequence(builder, context, f"{name}_all_gather")
    builder.wait_for(row)
    return builder.temporary("gathered_input", context.gathered_bytes, row)


def linear_forward(
    builder: ProgramBuilder, context: LoweringContext, name: str, outputs: int, inputs: int
) -> int:
    """The forward GEMM of a linear over all tokens of the rank; returns its row."""
    shape = GemmShape(context.tokens, outputs, inputs, "TN", dtype=context.dtype, output=context.dtype)
    return builder.gemm(name, shape)


def input_gradient(
    builder: ProgramBuilder, context: LoweringContext, name: str, outputs: int, inputs: int
) -> int:
    """The GEMM of an input gradient; returns its row."""
    shape = GemmShape(context.tokens, inputs, outputs, "NN", dtype=context.dtype, output=context.dtype)
    return builder.gemm(f"{name}_dgrad", shape)


def weight_gradient(
    builder: ProgramBuilder, context: LoweringContext, name: str, module: str, outputs: int, inputs: int
) -> int:
    """The GEMM that adds a weight gradient to the main gradient; returns its row."""
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
    builder.gradient_rows[module] = row
    return row


def row_parallel_forward(
    builder: ProgramBuilder, context: LoweringContext, name: str, module: str, width: int
) -> Tensor:
    """A row-parallel linear and the reduction of its partial sums; returns the reduced output."""
    row = linear_forward(builder, context, name, context.model.hidden_size, width)
    builder.parameter_rows.setdefault(module, row)
    partial = builder.temporary(f"{name}_output", context.gathered_bytes, row)
    if context.tp == 1:
        return partial
    reduced = reduce_partial_sums(builder, context, name, scatter=context.sequence_parallel)
    builder.wait_for(reduced)
    if not context.sequence_parallel:
        return partial
    builder.release(partial, reduced)
    return builder.temporary(f"{name}_reduced", context.hidden_bytes, reduced)


def row_parallel_backward(
    builder: ProgramBuilder, context: LoweringContext, name: str, module: str, width: int
) -> tuple[Tensor, int]:
    """Input and weight gradient of a row-parallel linear.

    Returns the gradient of its input, and the row behind which its input and output gradient are no longer needed.
    """
    gathered = None
    if context.sequence_parallel:
        row = gather_sequence(builder, context, f"{name}_gradient_all_gather")
        builder.wait_for(row)
        gathered = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    hidden = context.model.hidden_size
    row = input_gradient(builder, context, name, hidden, width)
    d_input = builder.temporary(f"{name}_input_gradient", context.item * context.tokens * width, row)
    row = weight_gradient(builder, context, name, module, hidden, width)
    if gathered is not None:
        builder.release(gathered, row)
    return d_input, row


def column_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    module: str,
    outputs: int,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Input and weight gradient of a column-parallel linear; returns the gradient of its (sharded) input."""
    hidden = context.model.hidden_size
    gathered: Tensor | None = None
    gather = -1
    if context.sequence_parallel:
        gather = gather_sequence(builder, context, f"{name}_input_all_gather")
        gathered = builder.temporary("gathered_input", context.gathered_bytes, gather)
        if not context.overlap.tp:
            builder.wait_for(gather)
    row = input_gradient(builder, context, name, outputs, hidden)
    d_input = builder.temporary(f"{name}_input_gradient", context.gathered_bytes, row)
    reduction = -1
    if context.tp > 1:
        reduction = reduce_partial_sums(
            builder, context, f"{name}_gradient", scatter=context.sequence_parallel
        )
        builder.wait_for(gather if context.overlap.tp else reduction)
    row = weight_gradient(builder, context, name, module, outputs, hidden)
    builder.release(d_output, row)
    builder.release(normalized, row)
    if gathered is not None:
        builder.release(gathered, row)
    if reduction >= 0 and context.overlap.tp:
        builder.wait_for(reduction)
    if not context.sequence_parallel:
        return d_input
    builder.release(d_input, reduction)
    return builder.temporary(f"{name}_reduced_gradient", context.hidden_bytes, reduction)
