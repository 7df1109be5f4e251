"""Whole gathers along the sequence, with the copy that the policy of tensor parallelism needs behind them."""

from __future__ import annotations

from .lowering_context import LoweringContext
from .overlap.registry import TENSOR
from .overlap.tensor_collectives import gather_sequence, gathered_in_order
from .program import ProgramBuilder
from .vocabulary import DType


def gather_whole(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
) -> int:
    """All-gather ``size`` bytes (whole) in one; returns the row behind which they are there in the order of tokens."""
    if TENSOR.chosen(context.overlap.tp).copies_parts(context):
        return gathered_in_order(builder, context, name, size, dtype)
    return gather_sequence(builder, context, name, size, dtype)
