"""Collectives of tensor parallelism where they stand: every GEMM waits for the one before it."""

from __future__ import annotations

from op_graphs.lowering_context import LoweringContext
from op_graphs.program import ProgramBuilder
from op_graphs.vocabulary import DType

from .policy import GatheredGemm, ReducedGemm, TensorPlacement
from .tensor_collectives import WholeReduction, gather_sequence


class TensorInPlace(TensorPlacement):
    """One collective, which the next compute waits for."""

    name = "in-place"
    beside = "nothing: each collective where it stands"
    follows = "Megatron-LM without --tp-comm-overlap"

    def gather(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
    ) -> GatheredGemm:
        """An all-gather that the GEMM waits for."""
        row = gather_sequence(builder, context, name, size, dtype)
        builder.wait_for(row)
        return GatheredGemm(row, row, builder.gemm)

    def reduction(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
    ) -> ReducedGemm:
        """A collective behind the GEMM."""
        return WholeReduction(builder, context, name, size, scatter)

    def gradient_reduction(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        name: str,
        size: float,
        *,
        scatter: bool,
        summed: bool = False,
    ) -> ReducedGemm:
        """A collective behind the GEMM."""
        return WholeReduction(builder, context, name, size, scatter)
