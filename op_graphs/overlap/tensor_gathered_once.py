"""Collectives of tensor parallelism in place, as DTensor runs them, with gathered inputs kept for the backward."""

from __future__ import annotations

from op_graphs.lowering_context import LoweringContext
from op_graphs.program import ProgramBuilder
from op_graphs.vocabulary import DType

from .policy import GatheredGemm, ReducedGemm, TensorPlacement
from .tensor_collectives import CopiedReduction, WholeReduction, gathered_in_order, summed_reduction


class TensorGatheredOnce(TensorPlacement):
    """One collective, which the next compute waits for, with a copy between the order of ranks and that of tokens.

    The forward keeps what it gathered, as autograd keeps what a DTensor's linear reads.
    """

    name = "gathered-once"
    beside = "nothing; inputs are kept as they were gathered, not gathered again for the weight gradient"
    follows = "torchtitan without asynchronous tensor parallelism"
    gathers_again = False

    def gather(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
    ) -> GatheredGemm:
        """An all-gather and a copy that the GEMM waits for."""
        row = gathered_in_order(builder, context, name, size, dtype)
        return GatheredGemm(row, row, builder.gemm)

    def reduction(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
    ) -> ReducedGemm:
        """A copy and a collective behind the GEMM; without sequence parallelism a sum needs no copy."""
        if not scatter:
            return WholeReduction(builder, context, name, size, scatter)
        return CopiedReduction(builder, context, name, size)

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
        """As :meth:`reduction`; the kernel that adds up several products writes in the order of ranks itself."""
        if summed and scatter:
            return summed_reduction(builder, context, name, size)
        return self.reduction(builder, context, name, size, scatter=scatter)

    def copies_parts(self, context: LoweringContext) -> bool:
        """All of them, for the sequence is the second dimension."""
        return True
