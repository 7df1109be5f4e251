"""Lowering of low-rank adapters: what runs beside a frozen linear, forward and backward.

Order and collectives are those of Megatron Bridge (``peft/utils.py``, ``ParallelLinearAdapter``): dropout,
``linear_in``,
its gather or reduction, the scale, ``linear_out``, behind a row-parallel linear a gather of its outputs, and the sum
with what the linear made. An adapter runs in the training dtype whatever the linear does. What it keeps is the input of
``linear_in`` and that of ``linear_out``. Fused kernels for all of it (Transformer Engine's operation fuser, Triton) are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from .adapters import Adapter, linear_adapters
from .linear import Linear
from .linear_gemms import forward_gemm, input_gradient, weight_gradient
from .lowering_context import LoweringContext
from .overlap.tensor_collectives import gather_sequence, reduce_sums
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind

_INPUT, _LOW, _MASK = "input", "low", "mask"


def adapters_beside(builder: ProgramBuilder, context: LoweringContext, linear: Linear) -> tuple[Adapter, ...]:
    """The adapters of a linear of the layer that is lowered."""
    lora = context.training.lora
    if lora is None:
        return ()
    return linear_adapters(context.model, lora, context.tp, builder.layer, linear.parameter)


def drops_input(context: LoweringContext) -> bool:
    """Whether an adapter reads a copy of the linear's input that went through dropout."""
    lora = context.training.lora
    return lora is not None and lora.dropout > 0 and lora.dropout_position == "pre"


def adapters_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    adapters: Sequence[Adapter],
    *,
    kept_only: bool = False,
) -> None:
    """Emit the adapters of a linear behind its forward, each with the sum with its output.

    ``kept_only`` stops where the input of ``linear_out`` is there.
    """
    for adapter in adapters:
        _adapter_forward(builder, context, linear, adapter, kept_only=kept_only)


def _adapter_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    adapter: Adapter,
    *,
    kept_only: bool,
) -> None:
    lora = context.training.lora
    assert lora is not None
    name, path = _name(linear, adapter), _path(linear, adapter)
    dropped: Tensor | None = None
    if drops_input(context):
        size = context.token_bytes(adapter.inputs)
        row = _dropout_forward(builder, context, name, path, size)
        dropped = builder.activation(f"{name}_input", size, row)
    low_linear, high_linear = _linears(linear, adapter)
    row = forward_gemm(builder, context, low_linear)
    if dropped is not None:
        _keep(builder, f"{path}.{_INPUT}", dropped, row)
    low_bytes = context.token_bytes(adapter.rank)
    low = builder.activation(f"{name}_low", low_bytes, row)
    if context.tp > 1:
        if adapter.is_row_parallel:
            row = reduce_sums(builder, context, name, low_bytes, scatter=False)
        else:
            row = gather_sequence(builder, context, f"{name}_all_gather", low_bytes, context.dtype)
        builder.wait_for(row)
    builder.memory_bound(
        f"{name}_scale", OpKind.ELEMENTWISE, read=low_bytes, written=low_bytes, dtype=context.dtype
    )
    if kept_only and (lora.dropout == 0 or drops_input(context)):
        _keep(builder, f"{path}.{_LOW}", low, builder.last_row)
        return
    row = forward_gemm(builder, context, high_linear)
    _keep(builder, f"{path}.{_LOW}", low, row)
    outputs = context.token_bytes(adapter.high_outputs)
    high = builder.temporary(f"{name}_output", outputs, row)
    if adapter.is_row_parallel and context.tp > 1:
        high = _gather_outputs(builder, context, name, high)
    size = _output_bytes(context, adapter)
    if lora.dropout > 0 and not drops_input(context):
        _dropout_forward(builder, context, name, path, size)
    row = builder.memory_bound(
        f"{name}_add", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(high, row)


def adapters_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    adapters: Sequence[Adapter],
    source: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Emit the backward of the adapters of a linear; returns the gradient of their input, over all tokens.

    Under tensor parallelism with sequence parallelism that of a column-parallel linear is a partial sum, left to the
    reduction of the linear's own; without, it is reduced here.

    Args:
        builder: where it runs.
        context: sizes and groups.
        linear: the linear.
        adapters: what is beside it, at least one.
        source: what ``linear_in`` read, where that went through no dropout: the input of the linear over all tokens.
        d_output: gradient of the output over all tokens, which the caller releases.
    """
    total: Tensor | None = None
    size = context.token_bytes(linear.inputs)
    for adapter in reversed(adapters):
        d_input = _adapter_backward(builder, context, linear, adapter, source, d_output)
        if total is not None:
            row = builder.memory_bound(
                f"{_name(linear, adapter)}_gradient_add",
                OpKind.ELEMENTWISE,
                read=2 * size,
                written=size,
                dtype=context.dtype,
            )
            builder.release(d_input, row)
        else:
            total = d_input
    assert total is not None
    return total


def _adapter_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    adapter: Adapter,
    source: Tensor,
    d_output: Tensor,
) -> Tensor:
    name, path = _name(linear, adapter), _path(linear, adapter)
    low_linear, high_linear = _linears(linear, adapter)
    low_bytes, owned = context.token_bytes(adapter.rank), list[Tensor]()
    lora = context.training.lora
    assert lora is not None
    if lora.dropout > 0 and not drops_input(context):
        size = _output_bytes(context, adapter)
        row = _dropout_backward(builder, context, name, path, size)
        d_output = builder.temporary(f"{name}_output_gradient", size, row)
        owned.append(d_output)
    if adapter.is_row_parallel and context.tp > 1:
        whole = _own_outputs(builder, context, name, adapter)
        for tensor in owned:
            builder.release(tensor, builder.last_row)
        owned, d_output = [whole], whole
    d_low = input_gradient(builder, context, high_linear)
    reduction = -1
    if context.tp > 1:
        reduction = reduce_sums(builder, context, f"{name}_low_gradient", low_bytes, scatter=False)
    low = builder.kept_copy(None, f"{path}.{_LOW}")
    assert low is not None, "the input of linear_out is kept wherever activations are"
    weight_gradient(builder, context, high_linear, (low, *owned), () if owned else (d_output,))
    builder.wait_for(reduction)
    builder.memory_bound(
        f"{name}_scale_backward", OpKind.ELEMENTWISE, read=low_bytes, written=low_bytes, dtype=context.dtype
    )
    d_input = input_gradient(builder, context, low_linear)
    reduction = -1
    if context.tp > 1 and not adapter.is_row_parallel and not context.sequence_parallel:
        size = context.token_bytes(adapter.inputs)
        reduction = reduce_sums(builder, context, f"{name}_gradient", size, scatter=False)
    dropped = builder.kept_copy(None, f"{path}.{_INPUT}")
    if dropped is not None:
        weight_gradient(builder, context, low_linear, (dropped, d_low))
    else:
        weight_gradient(builder, context, low_linear, (d_low,), (source,))
    builder.wait_for(reduction)
    if drops_input(context):
        size = context.token_bytes(adapter.inputs)
        row = _dropout_backward(builder, context, name, path, size)
        builder.release(d_input, row)
        d_input = builder.temporary(f"{name}_input_gradient", size, row)
    return d_input


def _name(linear: Linear, adapter: Adapter) -> str:
    return f"{linear.name}_lora{'_' if adapter.part else ''}{adapter.part}"


def _path(linear: Linear, adapter: Adapter) -> str:
    """Full module path of an adapter."""
    return f"{linear.parameter.removesuffix(adapter.linear)}{adapter.module}"


def _linears(linear: Linear, adapter: Adapter) -> tuple[Linear, Linear]:
    """``linear_in`` and ``linear_out`` as this rank runs them."""
    name, path = _name(linear, adapter), _path(linear, adapter)
    return (
        Linear(
            f"{name}_in",
            f"{path}.linear_in",
            adapter.inputs,
            adapter.low_outputs,
            linear.tokens,
            quantized=False,
        ),
        Linear(
            f"{name}_out",
            f"{path}.linear_out",
            adapter.rank,
            adapter.high_outputs,
            linear.tokens,
            quantized=False,
        ),
    )


def _output_bytes(context: LoweringContext, adapter: Adapter) -> float:
    """Bytes of what an adapter adds to: the output of the linear as it lies behind its collectives."""
    return context.hidden_bytes if adapter.is_row_parallel else context.token_bytes(adapter.outputs)


def _keep(builder: ProgramBuilder, reader: str, tensor: Tensor, row: int) -> None:
    """Leave a tensor to the backward pass of ``reader``; release it at ``row`` where nothing is kept."""
    if builder.keep_activations:
        builder.keep_copy(None, reader, tensor)
    else:
        builder.release(tensor, row)


def _dropout_forward(
    builder: ProgramBuilder, context: LoweringContext, name: str, path: str, size: float
) -> int:
    """Dropout of ``size`` bytes, whose mask of a byte an element is kept; returns the row."""
    elements = size / context.item
    row = builder.memory_bound(
        f"{name}_dropout", OpKind.ELEMENTWISE, read=size, written=size + elements, dtype=context.dtype
    )
    _keep(builder, f"{path}.{_MASK}", builder.activation(f"{name}_mask", elements, row), row)
    return row


def _dropout_backward(
    builder: ProgramBuilder, context: LoweringContext, name: str, path: str, size: float
) -> int:
    """A gradient of ``size`` bytes times the mask of dropout, which is released; returns the row."""
    row = builder.memory_bound(
        f"{name}_dropout_backward",
        OpKind.ELEMENTWISE,
        read=size + size / context.item,
        written=size,
        dtype=context.dtype,
    )
    mask = builder.kept_copy(None, f"{path}.{_MASK}")
    assert mask is not None, "masks are kept wherever activations are"
    builder.release(mask, row)
    return row


def _gather_outputs(builder: ProgramBuilder, context: LoweringContext, name: str, high: Tensor) -> Tensor:
    """Gather the outputs of ``linear_out`` behind a row-parallel linear, and cut them along the sequence again."""
    whole_bytes = context.gathered_bytes
    row = gather_sequence(builder, context, f"{name}_output_all_gather", whole_bytes, context.dtype)
    builder.wait_for(row)
    whole = builder.temporary(f"{name}_gathered_output", whole_bytes, row)
    builder.release(high, row)
    if not context.sequence_parallel:
        return whole
    size = context.hidden_bytes
    row = builder.memory_bound(
        f"{name}_output_scatter", OpKind.MEMCPY, read=size, written=size, dtype=context.dtype
    )
    builder.release(whole, row)
    return builder.temporary(f"{name}_scattered_output", size, row)


def _own_outputs(builder: ProgramBuilder, context: LoweringContext, name: str, adapter: Adapter) -> Tensor:
    """The reverse of :func:`_gather_outputs`: this rank's columns of the gradient, of all tokens."""
    gathered: Tensor | None = None
    if context.sequence_parallel:
        size = context.gathered_bytes
        row = gather_sequence(builder, context, f"{name}_gradient_all_gather", size, context.dtype)
        builder.wait_for(row)
        gathered = builder.temporary(f"{name}_gathered_gradient", size, row)
    size = context.token_bytes(adapter.high_outputs)
    row = builder.memory_bound(
        f"{name}_gradient_columns",
        OpKind.MEMCPY,
        read=size,
        written=size,
        access="strided",
        dtype=context.dtype,
    )
    if gathered is not None:
        builder.release(gathered, row)
    return builder.temporary(f"{name}_gradient_columns", size, row)
