"""Adafactor: the second moment of a matrix by its row and column means (Shazeer and Stern 2018, arXiv:1804.04235).

A matrix of R x C keeps R + C figures in fp32, any other tensor a whole second moment; there is no first moment. Rows
are dealt over the ranks that share an update, so row means are local and column means are summed over these ranks.
Updates are clipped by their root mean square, so they are written before they are applied.

Left out: the reduction of these means and of the root mean squares over tensor-parallel ranks, as implementations
that work on local shards do.
"""

from __future__ import annotations

from ..program import ProgramBuilder
from ..vocabulary import Communication, Dimension, DType, MemoryCategory, OpKind
from .shard import FP32_BYTES, OptimizerShard, Part


class Adafactor:
    """Factored second moment."""

    chooses_moments = False

    def state_bytes(self, shard: OptimizerShard) -> float:
        """Row and column means of matrices, second moments of the rest."""
        return sum(FP32_BYTES * _state_elements(part) for part in shard.parts)

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """Means of squares, their sum over ranks, the update and its size, the update applied."""
        elements, states = shard.elements, self.state_bytes(shard)
        gradient = shard.gradient_dtype.itemsize * elements
        builder.memory_bound(
            "adafactor_means",
            OpKind.REDUCTION,
            read=2 * gradient + states,
            written=states,
            access="reduction",
            passes=2,
            dtype=DType.FP32,
        )
        for dimension in (Dimension.DP, Dimension.EDP):
            _sum_columns(builder, shard, dimension)
        update = FP32_BYTES * elements
        row = builder.memory_bound(
            "adafactor_update",
            OpKind.OPTIMIZER,
            read=gradient + states,
            written=update,
            access="reduction",
            dtype=DType.FP32,
        )
        largest = max((part.elements for part in shard.parts), default=0.0)
        buffer = builder.allocate("adafactor_update", FP32_BYTES * largest, row, MemoryCategory.TEMPORARY)
        row = builder.memory_bound(
            "adafactor_apply", OpKind.OPTIMIZER, read=2 * update, written=update, dtype=DType.FP32
        )
        builder.release(buffer, row)


def _is_factored(part: Part) -> bool:
    return len(part.tensor.shape) == 2 and min(part.tensor.shape) > 1


def _state_elements(part: Part) -> float:
    if not _is_factored(part):
        return part.elements
    rows, columns = part.tensor.shape
    return rows / part.ranks + columns


def _sum_columns(builder: ProgramBuilder, shard: OptimizerShard, dimension: Dimension) -> None:
    """Sum the column means of all matrices along a dimension in one all-reduce."""
    spread = [part for part in shard.parts if part.dimension is dimension and part.ranks > 1]
    columns = sum(part.tensor.shape[1] for part in spread if _is_factored(part))
    if columns:
        row = builder.collective(
            "adafactor_column_all_reduce",
            Communication.ALL_REDUCE,
            FP32_BYTES * columns,
            dimension,
            shard.group_of(dimension),
            dtype=DType.FP32,
        )
        builder.wait_for(row)
