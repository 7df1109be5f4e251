"""Softmax of unfused attention: Megatron-LM's fused kernel, or PyTorch's operations where that kernel cannot run.

The kernel scales, masks and normalises in one pass. A block of it takes four rows of scores (eight of at most 128
keys), each of another head or sequence with a causal mask, so these must divide (``is_kernel_available`` of Megatron-LM
``core/fusions/fused_softmax.py``). With few heads on a rank and a microbatch of one they do not: 16 heads over 8 ranks
are two. Then scores are cast to fp32, scaled, masked, normalised and cast back by kernels of their own, and the
probabilities are kept in fp32.
"""

from __future__ import annotations

from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import DType, OpKind

_SINGLE = 4.0
"""Bytes of an fp32 element."""
_LEAST_KEYS = 16
"""Keys that the kernel needs more than."""
_ROWS, _ROWS_OF_SHORT, _SHORT_KEYS = 4, 8, 128
"""Rows of scores that a block takes: of its four warps each takes one, or two of at most 128 keys."""


def kernel_runs(heads_and_sequences: int, queries: int, keys: int, *, causal: bool) -> bool:
    """Whether Megatron-LM's kernel takes scores of these sizes.

    Args:
        heads_and_sequences: heads of a rank times sequences of a microbatch.
        queries: of a sequence.
        keys: of a sequence.
        causal: whether the mask is causal.
    """
    rows = _ROWS_OF_SHORT if keys <= _SHORT_KEYS else _ROWS
    divide = queries % 4 == 0 and keys % 4 == 0 and heads_and_sequences % 4 == 0
    return keys > _LEAST_KEYS and divide and (heads_and_sequences if causal else queries) % rows == 0


def softmax_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    elements: float,
    scores: Tensor,
    *,
    read_share: float,
    fused: bool,
) -> tuple[int, list[Tensor]]:
    """Emit the softmax of scores, which it releases; returns its last row and its results, the probabilities last.

    The backward of the fused kernel needs the probabilities themselves, that of PyTorch's softmax those in fp32. Of the
    scores the fused kernel reads ``read_share``.
    """
    half, single = context.item * elements, _SINGLE * elements
    if fused:
        row = builder.memory_bound(
            "scale_mask_softmax",
            OpKind.SOFTMAX,
            read=read_share * half,
            written=half,
            access="reduction",
            dtype=context.dtype,
        )
        builder.release(scores, row)
        return row, [builder.activation("softmax", half, row)]
    row = _kernel(builder, "scores_to_fp32", OpKind.CAST, half, single)
    in_fp32 = builder.temporary("scores_fp32", single, row)
    builder.release(scores, row)
    row = _kernel(builder, "scale_scores", OpKind.ELEMENTWISE, single, single)
    scaled = builder.temporary("scaled_scores", single, row)
    builder.release(in_fp32, row)
    _kernel(builder, "mask_scores", OpKind.ELEMENTWISE, single, single)
    row = _kernel(builder, "softmax", OpKind.SOFTMAX, single, single)
    kept = [builder.activation("softmax_fp32", single, row)]
    builder.release(scaled, row)
    row = _kernel(builder, "softmax_cast", OpKind.CAST, single, half)
    return row, [*kept, builder.activation("softmax", half, row)]


def softmax_backward(
    builder: ProgramBuilder, context: LoweringContext, elements: float, *, read_share: float, fused: bool
) -> None:
    """Emit the gradient of the scores from that of their softmax."""
    half, single = context.item * elements, _SINGLE * elements
    if fused:
        builder.memory_bound(
            "scale_mask_softmax_backward",
            OpKind.SOFTMAX,
            read=2 * read_share * half,
            written=half,
            access="reduction",
            dtype=context.dtype,
        )
        return
    row = _kernel(builder, "softmax_cast_backward", OpKind.CAST, half, single)
    outer = builder.temporary("softmax_gradient_fp32", single, row)
    row = _kernel(builder, "softmax_backward", OpKind.SOFTMAX, 2 * single, single)
    inner = builder.temporary("score_gradient_fp32", single, row)
    builder.release(outer, row)
    _kernel(builder, "mask_scores_backward", OpKind.ELEMENTWISE, single, single)
    _kernel(builder, "scale_scores_backward", OpKind.ELEMENTWISE, single, single)
    row = _kernel(builder, "scores_to_fp32_backward", OpKind.CAST, single, half)
    builder.release(inner, row)


def _kernel(builder: ProgramBuilder, name: str, kind: OpKind, read: float, written: float) -> int:
    """A kernel that reads or writes scores in fp32."""
    access = "reduction" if kind == OpKind.SOFTMAX else "stream"
    return builder.memory_bound(name, kind, read=read, written=written, access=access, dtype=DType.FP32)
