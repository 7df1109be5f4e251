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


def copy_parts(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
) -> int:
    """Copy ``size`` bytes between the order of ranks, which collectives know, and that of tokens; returns the row.

    The sequence is the second dimension of a DTensor, and what a collective joins or cuts is the first: the shards of
    all ranks are put beside each other behind a gather and in front of a reduce-scatter (``torch/distributed/``
    ``_functional_collectives.py``, ``all_gather_tensor`` and ``reduce_scatter_tensor`` with a dimension other than 0).
    """
    return builder.memory_bound(name, OpKind.MEMCPY, read=size, written=size, dtype=dtype)


def gathered_in_order(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
) -> int:
    """All-gather ``size`` bytes (whole) and copy them in the order of tokens; returns the row behind which they are.

    Of a single sequence the order of ranks is that of tokens, and a compiler copies nothing.
    """
    row = gather_sequence(builder, context, name, size, dtype)
    if context.training.micro_batch_size == 1 and not context.libraries.runs_eagerly("mlp"):
        builder.wait_for(row)
        return row
    parts = builder.temporary("gathered_parts", size, row)
    builder.wait_for(row)
    row = copy_parts(builder, context, f"{name}_order", size, dtype)
    builder.release(parts, row)
    return row


@dataclass(frozen=True)
class CopiedReduction:
    """A GEMM, and behind it a copy in the order of ranks and one reduce-scatter."""

    builder: ProgramBuilder
    context: LoweringContext
    name: str
    size: float

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        """Add the GEMM whole."""
        return self.builder.gemm(name, shape, scale_bytes=scale_bytes)

    def finish(self) -> int:
        """Add the copy and the collective."""
        builder, context = self.builder, self.context
        row = copy_parts(builder, context, f"{self.name}_scatter_order", self.size, context.dtype)
        parts = builder.temporary("parts_to_scatter", self.size, row)
        row = reduce_sums(builder, context, self.name, self.size, scatter=True)
        builder.release(parts, row)
        return row


def summed_reduction(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float
) -> WholeReduction | CopiedReduction:
    """The reduction, scattered along the sequence, of a gradient that several products add up to.

    A compiler joins the sum and the copy in the order of ranks (kernels that PyTorch 2.13 makes of an MLP), unless the
    sum has the scales of its products to read as well.
    """
    rescales = context.recipe is not None and context.recipe.quantizes_each_use
    if context.libraries.runs_eagerly("mlp") or rescales:
        return CopiedReduction(builder, context, name, size)
    return WholeReduction(builder, context, name, size, scatter=True)
