"""When parts of a chunk are communicated: gradients once complete, sharded weights before and while they are used."""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import Bucket
from .data_parallel import DataParallelism
from .overlap.registry import GRADIENTS
from .program import ProgramBuilder, Tensor
from .vocabulary import MemoryCategory


class GradientReduction:
    """Emits the reduction of each bucket once every gradient in it is complete."""

    def __init__(self, builder: ProgramBuilder, rules: DataParallelism, buckets: Sequence[Bucket]) -> None:
        self._builder = builder
        self._rules = rules
        self._open = list(buckets)
        self._begin = len(builder)
        self._placement = GRADIENTS.chosen(rules.context.overlap.grad_reduce)

    def emit_complete(self) -> None:
        """Reduce every bucket whose last gradient the operations added since the last call complete."""
        builder, rules = self._builder, self._rules
        for bucket in list(self._open):
            if not all(module in builder.gradient_rows for module in bucket.modules):
                continue
            self._open.remove(bucket)
            row = rules.emit_reduction(builder, bucket)
            self._placement.behind_reduction(builder, row)
            if rules.reduces_every_microbatch:
                # Whole gradients of the unit live from its first weight gradient until they are scattered.
                size = rules.context.item * bucket.elements
                gradients = builder.allocate(
                    "unsharded_gradients", size, self._begin, MemoryCategory.GRADIENTS
                )
                builder.release(gradients, row)
        self._begin = len(builder)


class ShardedWeights:
    """Gathers a unit's weights before it runs and the next unit's while it runs, and drops them behind it.

    Does nothing where weights are not sharded by unit.
    """

    def __init__(self, builder: ProgramBuilder, rules: DataParallelism, units: Sequence[str]) -> None:
        self._builder = builder
        self._rules = rules
        self._units = list(units) if rules.reshards else []
        self._buckets: dict[str, list[Bucket]] = {}
        self._gathered: dict[str, tuple[list[int], list[Tensor]]] = {}

    def with_buckets(self, buckets: Sequence[Bucket]) -> ShardedWeights:
        """Set what is gathered for each unit."""
        for bucket in buckets:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        return self

    def enter(self, unit: str, *, prefetch: bool = True) -> None:
        """Wait for the weights of a unit, and start gathering those of the unit behind it (``prefetch``)."""
        if not self._units:
            return
        self._gather(unit)
        self._builder.wait_for(*self._gathered[unit][0])
        following = self._units.index(unit) + 1
        if prefetch and following < len(self._units):
            self._gather(self._units[following])

    def leave(self, unit: str) -> None:
        """Drop the weights of a unit."""
        if not self._units:
            return
        for tensor in self._gathered.pop(unit)[1]:
            self._builder.release(tensor, self._builder.last_row)

    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        rows, tensors = [], []
        for bucket in filter(self._rules.gathers, self._buckets.get(unit, [])):
            row = self._rules.emit_gather(self._builder, bucket, after=None)
            rows.append(row)
            size = self._rules.gathered_bytes(bucket)
            tensors.append(self._builder.allocate("gathered_weights", size, row, MemoryCategory.WEIGHTS))
        self._gathered[unit] = rows, tensors
