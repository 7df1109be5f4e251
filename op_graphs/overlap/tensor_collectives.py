"""The collectives of tensor parallelism, whole and in pieces, as the policies use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from op_graphs.graph import GemmShape
from op_graphs.lowering_context import LoweringContext
from op_graphs.program import ProgramBuilder
from op_graphs.vocabulary import Communication, Dimension, DType, OpKind


def gather_sequence(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
) -> int:
    """All-gather ``size`` bytes (whole) over the tensor-parallel ranks; returns the row."""
    return _collective(builder, context, name, Communication.ALL_GATHER, size, dtype)


def reduce_sums(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
) -> int:
    """Reduce partial sums of ``size`` bytes (whole) over the tensor-parallel ranks; returns the row."""
    communication = Communication.REDUCE_SCATTER if scatter else Communication.ALL_REDUCE
    suffix = "reduce_scatter" if scatter else "all_reduce"
    return _collective(builder, context, f"{name}_{suffix}", communication, size, context.dtype)


def _collective(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    communication: Communication,
    size: float,
    dtype: DType,
) -> int:
    group = context.group(Dimension.TP)
    return builder.collective(name, communication, size, Dimension.TP, group, dtype=dtype)


def exchange_shard(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType, after: int
) -> int:
    """Send one shard of ``size`` bytes to a tensor-parallel rank and get one from another, behind a row."""
    return builder.collective(
        name,
        Communication.SEND_RECEIVE,
        size,
        Dimension.TP,
        context.group(Dimension.TP),
        after=[after],
        dtype=dtype,
        kind=OpKind.P2P,
    )


def split_rows(shape: GemmShape, pieces: int) -> list[GemmShape]:
    """A GEMM cut into pieces along its rows (tokens); fewer where there are not enough of them."""
    bounds = [shape.m * piece // pieces for piece in range(pieces + 1)]
    sizes = [end - begin for begin, end in pairwise(bounds) if end > begin]
    return [replace(shape, m=size) for size in sizes]


def gemm_pieces(
    builder: ProgramBuilder,
    name: str,
    shape: GemmShape,
    scale_bytes: float,
    pieces: int,
    before: Callable[[int], None] = lambda piece: None,
    behind: Callable[[int, int], None] = lambda piece, row: None,
) -> int:
    """Add a GEMM in pieces, with ``before(piece)`` and ``behind(piece, row)`` around each; returns the last row."""
    cut = split_rows(shape, pieces)
    row = -1
    for piece, part in enumerate(cut):
        before(piece)
        row = builder.gemm(name, part, scale_bytes=scale_bytes / len(cut))
        behind(piece, row)
    return row


@dataclass(frozen=True)
class WholeReduction:
    """A GEMM, and one collective behind it."""

    builder: ProgramBuilder
    context: LoweringContext
    name: str
    size: float
    scatter: bool

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        """Add the GEMM whole."""
        return self.builder.gemm(name, shape, scale_bytes=scale_bytes)

    def finish(self) -> int:
        """Add the collective."""
        return reduce_sums(self.builder, self.context, self.name, self.size, scatter=self.scatter)
