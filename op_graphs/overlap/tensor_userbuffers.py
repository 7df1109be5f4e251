"""Transformer Engine's user buffers: GEMMs in pieces with the ring or the reduction of each beside the next."""

from __future__ import annotations

from dataclasses import dataclass

from op_graphs.graph import GemmShape
from op_graphs.lowering_context import LoweringContext
from op_graphs.plan import ParallelPlan
from op_graphs.program import ProgramBuilder
from op_graphs.vocabulary import DType

from .policy import GatheredGemm, ReducedGemm, TensorPlacement
from .tensor_collectives import WholeReduction, exchange_shard, gemm_pieces, reduce_sums

REDUCTION_PIECES = 4
"""Pieces of a GEMM whose output is reduced: ``num_splits`` of Transformer Engine's pipelined method."""


class TensorUserbuffers(TensorPlacement):
    """An input is gathered in a ring of ``tp - 1`` steps, an output reduced in four pieces; the rest in bulk.

    A GEMM behind a gather (QKV and FC1 forward, projection and FC2 input gradient) is cut into ``tp`` pieces: each runs
    on the shard that is here while the next one arrives. A GEMM in front of a forward reduction (projection and FC2)
    is cut into four, and each piece is reduced under the next. In the backward of column-parallel linears whole
    collectives run beside whole GEMMs. These are the methods that Transformer Engine takes by default
    (``ring_exchange``, ``pipeline`` and ``bulk`` in ``module/base.py``, ``initialize_ub``).
    """

    name = "userbuffers"
    beside = (
        "pieces of a ring or a reduction beside the pieces of the GEMM that reads or makes them; in the backward of "
        "column-parallel linears as beside-weights"
    )
    follows = "Megatron-LM --tp-comm-overlap with Transformer Engine"
    beside_weights = True
    in_pieces = True

    def refusal(self, parallel: ParallelPlan, schedule: str) -> str | None:
        """It cuts along the sequence."""
        return needs_sequence_parallel(parallel)

    def gather(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
    ) -> GatheredGemm:
        """A ring whose steps follow each other."""
        rows: list[int] = []
        for _ in range(context.tp - 1):
            after = rows[-1] if rows else builder.last_row
            rows.append(exchange_shard(builder, context, f"{name}_ring", size / context.tp, dtype, after))
        return GatheredGemm(rows[0], rows[-1], PiecewiseReader(builder, rows).gemm)

    def reduction(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
    ) -> ReducedGemm:
        """A reduce-scatter for each piece."""
        if not scatter:
            return WholeReduction(builder, context, name, size, scatter)
        return _PipelinedReduction(builder, context, name, size)

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
        """In bulk, beside the weight gradient."""
        return WholeReduction(builder, context, name, size, scatter)


def needs_sequence_parallel(parallel: ParallelPlan) -> str | None:
    """What a plan lacks for policies that cut along the sequence."""
    return None if parallel.sp or parallel.tp == 1 else "needs parallel.sp: true, whose gathers it cuts"


@dataclass(frozen=True)
class PiecewiseReader:
    """A GEMM cut into one piece for the shard that is here and one for each that arrives."""

    builder: ProgramBuilder
    arrivals: list[int]

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        """Add the pieces; returns the last row."""

        def before(piece: int) -> None:
            if piece:
                self.builder.wait_for(self.arrivals[piece - 1])

        pieces = len(self.arrivals) + 1
        if shape.m < pieces:
            # Nothing to cut: the whole GEMM waits for all of it.
            self.builder.wait_for(self.arrivals[-1])
            return self.builder.gemm(name, shape, scale_bytes=scale_bytes)
        return gemm_pieces(self.builder, name, shape, scale_bytes, pieces, before=before)


@dataclass
class _PipelinedReduction:
    builder: ProgramBuilder
    context: LoweringContext
    name: str
    size: float
    last: int = -1

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        whole = shape.m

        def behind(piece: int, row: int) -> None:
            part = self.size * _piece_rows(whole, piece) / whole
            self.last = reduce_sums(self.builder, self.context, self.name, part, scatter=True)

        return gemm_pieces(self.builder, name, shape, scale_bytes, REDUCTION_PIECES, behind=behind)

    def finish(self) -> int:
        return self.last


def _piece_rows(rows: int, piece: int) -> int:
    if rows < REDUCTION_PIECES:
        return 1
    return rows * (piece + 1) // REDUCTION_PIECES - rows * piece // REDUCTION_PIECES
