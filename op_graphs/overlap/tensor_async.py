"""PyTorch's asynchronous tensor parallelism: shards copied from their owners beside a GEMM in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from op_graphs.graph import GemmShape
from op_graphs.lowering_context import LoweringContext
from op_graphs.plan import ParallelPlan
from op_graphs.program import ProgramBuilder
from op_graphs.vocabulary import DType, OpKind

from .policy import GatheredGemm, ReducedGemm, TensorPlacement
from .tensor_collectives import WholeReduction, exchange_shard, gemm_pieces, summed_reduction
from .tensor_userbuffers import PiecewiseReader, needs_sequence_parallel


class TensorAsync(TensorPlacement):
    """All-gather and GEMM, and GEMM and reduce-scatter, are each one operation of ``tp`` pieces.

    In front of a GEMM the own shard is copied into symmetric memory; the shards of the others are copied from there
    one after the other, and the GEMM runs on each as it arrives. A GEMM in front of a reduction computes the piece of
    one rank after the other and sends each to its owner, the own one last; then a kernel adds the ``tp`` partial sums.
    Gradients of inputs are reduced in the same way, but where several products add up to one: in front of a reduction
    the compiler looks for a product, and finds a sum (``torch/_inductor/fx_passes/micro_pipeline_tp.py``,
    ``_find_producer_matmul``). Nor does it find gathers in front of products whose scales are of rows
    (github.com/pytorch/pytorch/issues/149990). Both are whole, with the copies of ``gathered-once``. Gathered inputs
    are kept for the backward, as autograd keeps what a redistributed DTensor's linear reads; quantised ones are
    gathered again. What was gathered in pieces has the sequence in front of the batch, and what a weight gradient reads
    of it is copied first.

    Source: ``torch/distributed/_symmetric_memory`` (``_fused_all_gather_matmul``, ``_fused_matmul_reduce_scatter``).
    """

    name = "async-tp"
    beside = "copies of shards beside the pieces of the GEMM that reads or makes them, forward and backward"
    follows = "torchtitan with parallelism.enable_async_tensor_parallel"
    beside_weights = True
    reduces_sums_beside = False
    in_pieces = True
    gathers_again = False

    def refusal(self, parallel: ParallelPlan, schedule: str) -> str | None:
        """It cuts along the sequence."""
        return needs_sequence_parallel(parallel)

    def gather(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
    ) -> GatheredGemm:
        """Copies from one rank after the other, behind the copy of the own shard to where others read it."""
        shard = size / context.tp
        own = builder.memory_bound(f"{name}_own_shard", OpKind.MEMCPY, read=shard, written=shard, dtype=dtype)
        rows = [
            exchange_shard(builder, context, f"{name}_copy", shard, dtype, own) for _ in range(context.tp - 1)
        ]
        return GatheredGemm(rows[0], rows[-1], PiecewiseReader(builder, rows).gemm)

    def reduction(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
    ) -> ReducedGemm:
        """A piece for each rank."""
        if not scatter:
            return WholeReduction(builder, context, name, size, scatter)
        return _SentPieces(builder, context, name, size)

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
        """As :meth:`reduction`; a sum is reduced whole, where it stands."""
        if summed and scatter:
            return summed_reduction(builder, context, name, size)
        return self.reduction(builder, context, name, size, scatter=scatter)

    def cuts_gathers(self, context: LoweringContext) -> bool:
        """Not in front of products whose scales are of rows: the compiler does not find the pair."""
        return context.recipe is None or context.recipe.gathers_quantized

    def copies_parts(self, context: LoweringContext) -> bool:
        """Where gathers are whole."""
        return not self.cuts_gathers(context)

    def orders_for_weights(self, context: LoweringContext) -> bool:
        """Pieces lie one after the other, the sequences of a batch interleaved; its other operand is in order."""
        return self.cuts_gathers(context) and context.training.micro_batch_size > 1


@dataclass
class _SentPieces:
    builder: ProgramBuilder
    context: LoweringContext
    name: str
    size: float
    last: int = -1

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        builder, context, ranks = self.builder, self.context, self.context.tp
        if shape.m < ranks:
            raise AssertionError("a sequence shard has at least one token")

        def behind(piece: int, row: int) -> None:
            if piece < ranks - 1:
                self.last = exchange_shard(
                    builder, context, f"{self.name}_scatter_copy", self.size / ranks, context.dtype, row
                )

        return gemm_pieces(builder, name, shape, scale_bytes, ranks, behind=behind)

    def finish(self) -> int:
        builder = self.builder
        builder.wait_for(self.last)
        return builder.memory_bound(
            f"{self.name}_sum",
            OpKind.REDUCTION,
            read=self.size,
            written=self.size / self.context.tp,
            dtype=self.context.dtype,
        )
