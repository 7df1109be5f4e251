"""Lowering of linears under tensor parallelism: the collectives in front of and behind their GEMMs.

Column-parallel linears (QKV, FC1, head) read the whole hidden state: with sequence parallelism it is gathered first,
and gathered again in backward for the weight gradient. With ``overlap.tp`` that gather runs beside the input-gradient
GEMM, and the reduction of the input gradient beside the weight-gradient GEMM; without, compute waits for both, as it
does where a GEMM that fills the device keeps the communication kernel out until its last wave. Row-parallel linears
(projection, FC2) leave partial sums that are reduced behind them.

Source: Megatron-Core ``tensor_parallel/layers.py``, Transformer Engine ``pytorch/module/linear.py``; Korthikanti et al.
2022, section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .graph import GemmShape
from .lowering_context import LoweringContext
from .program import DeferredGemm, ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, Phase


def gather_sequence(
    builder: ProgramBuilder, context: LoweringContext, name: str, width: int | None = None
) -> int:
    """All-gather ``[tokens, width]`` (a hidden state by default) over the tensor-parallel ranks; returns the row."""
    return builder.collective(
        name,
        Communication.ALL_GATHER,
        context.token_bytes(width),
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )


def reduce_partial_sums(
    builder: ProgramBuilder, context: LoweringContext, name: str, *, scatter: bool, width: int | None = None
) -> int:
    """Reduce ``[tokens, width]`` over the tensor-parallel ranks, scattered along the sequence or whole."""
    return builder.collective(
        f"{name}_{'reduce_scatter' if scatter else 'all_reduce'}",
        Communication.REDUCE_SCATTER if scatter else Communication.ALL_REDUCE,
        context.token_bytes(width),
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )


def gathered_input(
    builder: ProgramBuilder, context: LoweringContext, name: str, width: int | None = None
) -> Tensor | None:
    """With sequence parallelism, gather the input of the next GEMM; None where it is whole already."""
    if not context.sequence_parallel:
        return None
    row = gather_sequence(builder, context, f"{name}_all_gather", width)
    builder.wait_for(row)
    return builder.temporary("gathered_input", context.token_bytes(width), row)


@dataclass(frozen=True)
class Linear:
    """A linear as one rank runs it: ``[tokens, inputs] -> [tokens, outputs]``, sizes after tensor-parallel cutting."""

    name: str
    parameter: str
    """Module that holds its weight."""
    inputs: int
    outputs: int
    tokens: int


def layer_linear(context: LoweringContext, layer: int, name: str) -> Linear:
    """The fused ``qkv`` projection of a layer, or its output projection ``proj``."""
    model, hidden = context.model, context.model.hidden_size
    if name == "qkv":
        path, inputs, outputs = "linear_qkv", hidden, context.local_qkv_size
    else:
        path, inputs, outputs = "linear_proj", model.attention_output_size // context.tp, hidden
    return Linear(name, context.module(layer, f"self_attention.{path}"), inputs, outputs, context.tokens)


def linear_forward(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> int:
    """The forward GEMM of a linear; returns its row."""
    shape = GemmShape(
        linear.tokens, linear.outputs, linear.inputs, "TN", dtype=context.dtype, output=context.dtype
    )
    row = builder.gemm(linear.name, shape)
    builder.parameter_rows.setdefault(linear.parameter, row)
    return row


def input_gradient(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> tuple[int, Tensor]:
    """The GEMM of an input gradient; returns its row and the gradient."""
    shape = GemmShape(
        linear.tokens, linear.inputs, linear.outputs, "NN", dtype=context.dtype, output=context.dtype
    )
    row = builder.gemm(f"{linear.name}_dgrad", shape)
    size = context.item * linear.tokens * linear.inputs
    return row, builder.temporary(f"{linear.name}_input_gradient", size, row)


def weight_gradient_shape(
    context: LoweringContext, outputs: int, inputs: int, tokens: int, count: int = 1
) -> GemmShape:
    """The GEMM of a weight gradient: added to the main gradient, or, where units are sharded, written out."""
    accumulate = context.parallel.zero <= 1
    output = context.gradient_dtype if accumulate else context.dtype
    return GemmShape(outputs, inputs, tokens, "NT", context.dtype, output, accumulate, count)


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
    shape = weight_gradient_shape(context, linear.outputs, linear.inputs, linear.tokens)
    name = f"{linear.name}_wgrad"
    if builder.deferred is not None:
        reads = (*consumed, *borrowed)
        builder.defer(DeferredGemm(name, shape, linear.parameter, builder.layer, builder.module, reads))
        return
    row = builder.gemm(name, shape, phase=Phase.BACKWARD_WEIGHT)
    builder.gradient_rows[linear.parameter] = row
    for tensor in consumed:
        builder.release(tensor, row)


def run_deferred(builder: ProgramBuilder, gemms: Sequence[DeferredGemm]) -> Iterator[None]:
    """Run the weight-gradient GEMMs a backward for the input put off; yields behind each."""
    left = Counter(gemm.parameter for gemm in gemms)
    for gemm in gemms:
        builder.layer, builder.module = gemm.layer, gemm.module
        row = builder.gemm(gemm.name, gemm.shape)
        left[gemm.parameter] -= 1
        # A matrix that is used several times is complete with its last GEMM.
        if not left[gemm.parameter]:
            builder.gradient_rows[gemm.parameter] = row
        for tensor in gemm.reads:
            builder.release(tensor, row)
        yield


def row_parallel_forward(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> Tensor:
    """A row-parallel linear and the reduction of its partial sums; returns the reduced output."""
    row = linear_forward(builder, context, linear)
    partial = builder.temporary(f"{linear.name}_output", context.gathered_bytes, row)
    if context.tp == 1:
        return partial
    reduced = reduce_partial_sums(builder, context, linear.name, scatter=context.sequence_parallel)
    builder.wait_for(reduced)
    if not context.sequence_parallel:
        return partial
    builder.release(partial, reduced)
    return builder.temporary(f"{linear.name}_reduced", context.hidden_bytes, reduced)


def row_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    d_output: Tensor,
    *,
    consumed: Sequence[Tensor] = (),
    borrowed: Sequence[Tensor] = (),
) -> Tensor:
    """Input and weight gradient of a row-parallel linear; returns the gradient of its input.

    ``consumed`` and ``borrowed`` are as in :func:`weight_gradient`; ``d_output`` stands among one of them.
    """
    if context.sequence_parallel:
        row = gather_sequence(builder, context, f"{linear.name}_gradient_all_gather")
        builder.wait_for(row)
        gathered = builder.temporary("gathered_gradient", context.gathered_bytes, row)
        # The weight gradient reads the gathered gradient, not the shard it was gathered from.
        if d_output in consumed:
            builder.release(d_output, row)
        consumed = (gathered, *(tensor for tensor in consumed if tensor != d_output))
        borrowed = tuple(tensor for tensor in borrowed if tensor != d_output)
    _, d_input = input_gradient(builder, context, linear)
    weight_gradient(builder, context, linear, consumed, borrowed)
    return d_input


def column_parallel_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Input and weight gradient of a column-parallel linear; returns the gradient of its (sharded) input."""
    gathered: Tensor | None = None
    gather = -1
    if context.sequence_parallel:
        gather = gather_sequence(builder, context, f"{linear.name}_input_all_gather", linear.inputs)
        gathered = builder.temporary("gathered_input", context.token_bytes(linear.inputs), gather)
        if not context.overlap.tp:
            builder.wait_for(gather)
    _row, d_input = input_gradient(builder, context, linear)
    reduction = -1
    if context.tp > 1:
        reduction = reduce_partial_sums(
            builder,
            context,
            f"{linear.name}_gradient",
            scatter=context.sequence_parallel,
            width=linear.inputs,
        )
        builder.wait_for(gather if context.overlap.tp else reduction)
    if gathered is None:
        weight_gradient(builder, context, linear, (d_output, normalized))
    else:
        weight_gradient(builder, context, linear, (d_output, gathered))
        builder.release(normalized, builder.last_row)
    if reduction >= 0 and context.overlap.tp:
        builder.wait_for(reduction)
    if not context.sequence_parallel:
        return d_input
    builder.release(d_input, reduction)
    size = context.sharded_token_bytes(linear.inputs)
    return builder.temporary(f"{linear.name}_reduced_gradient", size, reduction)
