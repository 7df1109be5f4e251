"""Kernels between matrix products: each fused into one, or one by one as PyTorch runs them eagerly.

With ``libraries.eager`` norms, rotary positions and gated activations are written out in tensor operations, as in
Meta's reference code of Llama that torchtitan and others train (``torchtitan/models/llama/model.py``), and nothing
fuses them. It may hold for some parts only (:data:`op_graphs.plan.EAGER_PARTS`):

- RMSNorm: cast to fp32, square, mean, multiply by the reciprocal root, cast back, multiply by the weight; backward
  differentiates each of these. 36 bytes an element forward and 84 backward in 16-bit types, where a fused kernel
  moves 4 and 6. A layer norm is a kernel of PyTorch's either way.
- Rotary positions: cast to fp32, complex product, cast back. 20 bytes an element instead of 4.
- Gated activation: the activation and the product with the other half, each a kernel; three backward.
- An input that several products read gets a gradient from each, summed by autograd; fused linears have one.
- Keys and values of fewer heads than queries are repeated in memory in front of attention.
- Optimizers run a kernel for each operation of their formula over all parameters (PyTorch's ``foreach``).

A fused norm may read an fp32 copy of its input (``libraries.fp32_norm_inputs``): a cast in front of it, and one of the
gradient behind its backward, 12 and 16 bytes an element in place of 4 and 6.

Bytes are those of reading and writing each operand once; kernels of one sequence are one operation with as many passes.
"""

from __future__ import annotations

from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind, Phase

_SINGLE = 4.0
"""Bytes of an fp32 element."""


def runs_eagerly_norm(context: LoweringContext) -> bool:
    """Whether a norm is a sequence of kernels."""
    return context.libraries.runs_eagerly("norms") and context.model.norm == "rmsnorm"


def _copies_norm_input(context: LoweringContext) -> bool:
    """Whether a fused norm reads a copy in fp32."""
    return context.libraries.fp32_norm_inputs and not runs_eagerly_norm(context)


def _cast(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, to_fp32: bool, passes: int
) -> int:
    """Cast ``size`` bytes of the training dtype to fp32, or as much fp32 back to it."""
    single = size * _SINGLE / context.item
    return builder.memory_bound(
        name,
        OpKind.CAST,
        read=size if to_fp32 else single,
        written=single if to_fp32 else size,
        access="stream",
        passes=passes,
        dtype=context.dtype,
    )


def norm(builder: ProgramBuilder, context: LoweringContext, name: str, size: float, passes: int = 1) -> int:
    """A norm of ``size`` bytes in the training dtype; returns its row."""
    if not runs_eagerly_norm(context):
        copied, of_input = _copies_norm_input(context), size
        copy: Tensor | None = None
        if copied:
            of_input = size * _SINGLE / context.item
            row = _cast(builder, context, f"{name}_input_to_fp32", size, to_fp32=True, passes=passes)
            copy = builder.temporary("norm_input_fp32", of_input, row)
        row = builder.memory_bound(
            name,
            OpKind.NORM,
            read=of_input,
            written=size,
            access="reduction",
            passes=passes,
            dtype=context.dtype,
        )
        if copy is not None:
            builder.release(copy, row)
        return row
    elements = size / context.item
    # Cast, square, mean, scale, cast back, weight.
    read = elements * (2 * context.item + 4 * _SINGLE)
    written = elements * (2 * context.item + 3 * _SINGLE)
    return builder.memory_bound(
        name, OpKind.NORM, read=read, written=written, access="stream", passes=8 * passes, dtype=context.dtype
    )


def inside_norm_bytes(context: LoweringContext, size: float) -> float:
    """Bytes that a norm of ``size`` bytes keeps beside its input and output.

    Autograd keeps the input in fp32 and the scaled values in front of the weight; of the input itself nothing is kept,
    whose bytes are taken off. A fused norm of an fp32 copy keeps that copy alone.
    """
    if _copies_norm_input(context):
        return size * (_SINGLE / context.item - 1)
    return size * _SINGLE / context.item if runs_eagerly_norm(context) else 0.0


def norm_backward(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, passes: int = 1
) -> int:
    """The backward of a norm of ``size`` bytes in the training dtype; returns its row."""
    if not runs_eagerly_norm(context):
        copied = _copies_norm_input(context)
        of_input = size * _SINGLE / context.item if copied else size
        row = builder.memory_bound(
            name,
            OpKind.NORM,
            read=of_input + size,
            written=of_input,
            access="reduction",
            passes=passes,
            dtype=context.dtype,
        )
        if copied:
            gradient = builder.temporary("norm_input_gradient_fp32", of_input, row)
            row = _cast(builder, context, f"{name}_cast", size, to_fp32=False, passes=passes)
            builder.release(gradient, row)
        return row
    elements = size / context.item
    # Weight (two products and a sum), cast, scale (two products and a sum), square (three), sum of both paths, cast.
    read = elements * (5 * context.item + 10 * _SINGLE)
    written = elements * (3 * context.item + 7 * _SINGLE)
    return builder.memory_bound(
        name,
        OpKind.NORM,
        read=read,
        written=written,
        access="stream",
        passes=15 * passes,
        dtype=context.dtype,
    )


def rotary(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> int:
    """Rotary positions of queries and keys of ``size`` bytes together, either direction; returns the row."""
    if not context.libraries.runs_eagerly("positions"):
        return builder.memory_bound(
            name,
            OpKind.ELEMENTWISE,
            read=size,
            written=size,
            access="strided",
            passes=2,
            function=True,
            dtype=context.dtype,
        )
    elements = size / context.item
    moved = elements * (context.item + 2 * _SINGLE)
    return builder.memory_bound(
        name, OpKind.ELEMENTWISE, read=moved, written=moved, passes=6, dtype=context.dtype
    )


def activation(
    builder: ProgramBuilder, context: LoweringContext, name: str, first: float, second: float
) -> int:
    """An activation that makes ``second`` bytes of ``first``, twice as many if it is gated; returns its row."""
    eager = context.libraries.runs_eagerly("mlp") and first > second
    if context.model.activation == "gelu" and not context.libraries.gelu_fusion:
        # Ten operations, three of which read two tensors: 0.5 x (1 + tanh(0.7978 x (1 + 0.0447 x x))) of x = y + bias.
        return builder.memory_bound(
            name, OpKind.ELEMENTWISE, read=13 * first, written=10 * first, passes=10, dtype=context.dtype
        )
    return builder.memory_bound(
        name,
        OpKind.ELEMENTWISE,
        read=3 * second if eager else first,
        written=2 * second if eager else second,
        passes=2 if eager else 1,
        function=not eager,
        dtype=context.dtype,
    )


def activation_backward(
    builder: ProgramBuilder, context: LoweringContext, name: str, first: float, second: float
) -> int:
    """The backward of :func:`activation`; returns its row."""
    eager = context.libraries.runs_eagerly("mlp") and first > second
    return builder.memory_bound(
        name,
        OpKind.ELEMENTWISE,
        read=6 * second if eager else first + second,
        written=3 * second if eager else first,
        passes=3 if eager else 1,
        function=not eager,
        dtype=context.dtype,
    )


def add_bias(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> int:
    """The bias of a linear added to its output of ``size`` bytes by a kernel of its own; returns the row."""
    return builder.memory_bound(
        f"{name}_bias", OpKind.ELEMENTWISE, read=size, written=size, dtype=context.dtype
    )


def sum_bias_gradient(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, outputs: int
) -> None:
    """The gradient of a bias: the sum over tokens of an output gradient of ``size`` bytes.

    Autograd makes it in the backward for the input, also where the weight gradient is put off.
    """
    if context.freezes_weights:
        return
    builder.memory_bound(
        f"{name}_bias_gradient",
        OpKind.REDUCTION,
        read=size,
        written=context.gradient_dtype.itemsize * float(outputs),
        access="reduction",
        dtype=context.dtype,
        phase=Phase.BACKWARD_WEIGHT,
    )


def input_gradients(builder: ProgramBuilder, context: LoweringContext, part: str, products: int) -> None:
    """Sum the gradients that an input gets from ``products`` linears of a part, where they are not fused into one.

    With ``libraries.separate_projections`` the products stand for themselves, and so does their sum.
    """
    libraries = context.libraries
    if not libraries.runs_eagerly(part) or libraries.separate_projections or products < 2:
        return
    size = (products - 1) * context.token_bytes()
    builder.memory_bound(
        "input_gradient_sum",
        OpKind.ELEMENTWISE,
        read=2 * size,
        written=size,
        passes=products - 1,
        dtype=context.dtype,
    )


def repeat_heads(builder: ProgramBuilder, context: LoweringContext, kv_bytes: float, more: float) -> int:
    """Copy keys and values of ``kv_bytes`` to so much ``more``; returns the row."""
    return builder.memory_bound(
        "repeated_heads",
        OpKind.ELEMENTWISE,
        read=kv_bytes,
        written=kv_bytes + more,
        passes=2,
        dtype=context.dtype,
    )


def sum_repeated_heads(
    builder: ProgramBuilder, context: LoweringContext, kv_bytes: float, more: float
) -> None:
    """Sum the gradients of what :func:`repeat_heads` made."""
    builder.memory_bound(
        "repeated_heads_backward",
        OpKind.REDUCTION,
        read=kv_bytes + more,
        written=kv_bytes,
        access="stream",
        passes=2,
        dtype=context.dtype,
    )
