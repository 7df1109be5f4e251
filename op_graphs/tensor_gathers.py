"""Gathers along the sequence with the copies that the policy of tensor parallelism needs behind them."""

from __future__ import annotations

from .lowering_context import LoweringContext
from .overlap.registry import TENSOR
from .overlap.tensor_collectives import copy_parts, gather_sequence, gathered_in_order
from .program import ProgramBuilder, Tensor
from .vocabulary import DType


def gather_whole(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
) -> int:
    """All-gather ``size`` bytes (whole) in one; returns the row behind which they are there in the order of tokens."""
    if TENSOR.chosen(context.overlap.tp).copies_parts(context):
        return gathered_in_order(builder, context, name, size, dtype)
    return gather_sequence(builder, context, name, size, dtype)


def in_token_order(
    builder: ProgramBuilder, context: LoweringContext, name: str, gathered: Tensor, size: float
) -> Tensor:
    """What was gathered, ``size`` bytes, as a weight gradient reads it: a copy that takes its place, or itself."""
    if not TENSOR.chosen(context.overlap.tp).orders_for_weights(context):
        return gathered
    row = copy_parts(builder, context, f"{name}_order", size, context.dtype)
    builder.release(gathered, row)
    return builder.temporary("gathered_in_order", size, row)
