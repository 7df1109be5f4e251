"""Muon: momentum made orthogonal by Newton-Schulz iterations for matrices inside layers, AdamW for the rest.

Jordan et al. 2024 ("Muon"); Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982), for its
distributed form: every rank updates the momentum of its shard, the shards are gathered in bf16, each matrix is made
orthogonal by one of the ranks that share it, and its weights travel with the usual gather. A matrix cut over
tensor-parallel ranks is gathered over them too and worked on by each, since the iteration needs all of it.

A matrix of m x n, m <= n, takes five iterations of ``A = X X'``, ``B = b A + c A A``, ``X = a X + B X``, which is
``5 (4 m^2 n + 2 m^3)`` FLOPs. Matrices of one shape are dealt evenly over the ranks; the represented rank is one of
those that got most. Equal matrices run as one batched product here.

Left out: kernels that use the symmetry of A and B, and splitting of fused projections into their heads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..graph import GemmShape
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, DType, OpKind
from .moments import emit_fused_update
from .shard import FP32_BYTES, OptimizerShard, Part

ITERATIONS = 5
"""Newton-Schulz iterations of both sources."""


@dataclass(frozen=True)
class _Matrices:
    """Equal matrices, whole, that this rank orthogonalises."""

    rows: int
    columns: int
    """At least ``rows``: a tall matrix is transposed."""
    count: int

    @property
    def elements(self) -> float:
        return float(self.rows) * self.columns * self.count


class Muon:
    """One momentum for matrices inside layers, Adam's two moments for everything else."""

    chooses_moments = True

    def state_bytes(self, shard: OptimizerShard) -> float:
        """4 bytes a parameter of a matrix, 8 of another, in fp32."""
        matrices, rest = _split(shard)
        return shard.moment_bytes * (matrices.elements + 2 * rest.elements)

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """Momentum, gathers, Newton-Schulz, update; then AdamW for what is no matrix."""
        matrices, rest = _split(shard)
        if matrices.parts:
            _emit_matrices(builder, matrices)
        if rest.parts:
            emit_fused_update(builder, rest, "muon_adam", moments=2)


def _split(shard: OptimizerShard) -> tuple[OptimizerShard, OptimizerShard]:
    """Matrices inside layers, and the rest: norms, biases, embeddings, head."""
    chosen = [part for part in shard.parts if _is_matrix(part)]
    rest = [part for part in shard.parts if not _is_matrix(part)]
    return shard.subset(chosen), shard.subset(rest)


def _is_matrix(part: Part) -> bool:
    tensor = part.tensor
    return tensor.role == "weight" and tensor.layer >= 0 and len(tensor.shape) == 2 and min(tensor.shape) > 1


def _emit_matrices(builder: ProgramBuilder, shard: OptimizerShard) -> None:
    elements, moment = shard.elements, shard.moment_bytes
    row = builder.memory_bound(
        "muon_momentum",
        OpKind.OPTIMIZER,
        read=(shard.gradient_dtype.itemsize + moment) * elements,
        written=(moment + DType.BF16.itemsize) * elements,
        dtype=DType.FP32,
    )
    momentum = builder.temporary("muon_momentum", DType.BF16.itemsize * elements, row)
    gathered = [
        tensor
        for dimension in (Dimension.DP, Dimension.EDP)
        for tensor in (*_gather_shards(builder, shard, dimension), *_gather_cuts(builder, shard, dimension))
    ]
    for group in _owned(shard):
        _newton_schulz(builder, group)
    row = builder.memory_bound(
        "muon_update",
        OpKind.OPTIMIZER,
        read=(DType.BF16.itemsize + FP32_BYTES) * elements,
        written=FP32_BYTES * elements,
        dtype=DType.FP32,
    )
    for tensor in (momentum, *gathered):
        builder.release(tensor, row)


def _gather_shards(builder: ProgramBuilder, shard: OptimizerShard, dimension: Dimension) -> list[Tensor]:
    """Gather the momentum over the ranks that share an update."""
    elements = sum(p.tensor.elements for p in shard.parts if p.dimension is dimension and p.ranks > 1)
    if not elements:
        return []
    size, group = DType.BF16.itemsize * elements, shard.group_of(dimension)
    row = builder.collective(
        "muon_momentum_all_gather", Communication.ALL_GATHER, size, dimension, group, dtype=DType.BF16
    )
    builder.wait_for(row)
    return [builder.temporary("muon_gathered_momentum", size, row)]


def _cut(shard: OptimizerShard, part: Part) -> int:
    """Ranks over which tensor parallelism cuts a matrix."""
    if part.tensor.tp_axis is None:
        return 1
    parallel = shard.context.parallel
    return parallel.etp if part.tensor.is_expert else parallel.tp


def _gather_cuts(builder: ProgramBuilder, shard: OptimizerShard, dimension: Dimension) -> list[Tensor]:
    """Gather the matrices this rank owns over the tensor-parallel ranks that each hold a cut of them."""
    cut = shard.subset([p for p in shard.parts if p.dimension is dimension and _cut(shard, p) > 1])
    size = DType.BF16.itemsize * sum(group.elements for group in _owned(cut))
    if not size:
        return []
    over = Dimension.ETP if dimension is Dimension.EDP else Dimension.TP
    group = shard.context.group(over)
    row = builder.collective(
        "muon_cut_all_gather", Communication.ALL_GATHER, size, over, group, dtype=DType.BF16
    )
    builder.wait_for(row)
    return [builder.temporary("muon_whole_matrices", size, row)]


def _owned(shard: OptimizerShard) -> list[_Matrices]:
    """Whole matrices by shape, and how many of each this rank orthogonalises."""
    found: Counter[tuple[int, int, int]] = Counter()
    for part in shard.parts:
        shape = list(part.tensor.shape)
        if part.tensor.tp_axis is not None:
            shape[part.tensor.tp_axis] *= _cut(shard, part)
        found[min(shape), max(shape), part.ranks] += 1
    return [
        _Matrices(rows, columns, -(-count // ranks))
        for (rows, columns, ranks), count in sorted(found.items())
    ]


def _newton_schulz(builder: ProgramBuilder, group: _Matrices) -> None:
    m, n = group.rows, group.columns
    size = DType.BF16.itemsize * group.elements
    row = builder.memory_bound(
        "newton_schulz_normalize",
        OpKind.OPTIMIZER,
        read=2 * size,
        written=size,
        access="reduction",
        passes=2 * group.count,
        dtype=DType.BF16,
    )
    # One matrix at a time: X before and behind an iteration, A and B.
    workspace = builder.temporary("newton_schulz_workspace", DType.BF16.itemsize * 2 * (m * n + m * m), row)
    for _ in range(ITERATIONS):
        _product(builder, "newton_schulz_gram", GemmShape(m, m, n, "TN", count=group.count))
        _product(
            builder, "newton_schulz_square", GemmShape(m, m, m, "TN", accumulate=True, count=group.count)
        )
        row = _product(
            builder, "newton_schulz_apply", GemmShape(m, n, m, "TN", accumulate=True, count=group.count)
        )
    builder.release(workspace, row)


def _product(builder: ProgramBuilder, name: str, shape: GemmShape) -> int:
    """One batched kernel for equal matrices, so the kind is GEMM; ``accumulate`` adds the term without a product."""
    output = shape.output.itemsize * float(shape.count) * shape.m * shape.n
    operands = shape.dtype.itemsize * float(shape.count) * (shape.m * shape.k + shape.k * shape.n)
    return builder.compute(
        name,
        OpKind.GEMM,
        read=operands + (output if shape.accumulate else 0),
        written=output,
        flops=2.0 * shape.count * shape.m * shape.n * shape.k,
        shape=shape,
        dtype=shape.dtype,
    )
