"""When parts of a chunk are communicated: gradients once complete, sharded weights before and while they are used."""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import Bucket
from .data_parallel import DataParallelism
from .overlap.registry import GRADIENTS
from .program import ProgramBuilder, Tensor
from .vocabulary import MemoryCategory, OpKind, Phase


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
            if not all(module in builder.gradient_rows for module in bucket.trained_modules):
                continue
            self._open.remove(bucket)
            copied = len(builder)
            row = rules.emit_reduction(builder, bucket)
            self._placement.behind_reduction(builder, row)
            if rules.reduces_every_microbatch:
                self._hold_gradients(bucket, copied, row)
        self._begin = len(builder)

    def _hold_gradients(self, bucket: Bucket, copied: int, reduced: int) -> None:
        """Whole gradients of the unit live from its first weight gradient until they are scattered, or copied together.

        The copy has the type of the reduction, and lives until that has run.
        """
        builder, rules = self._builder, self._rules
        size = rules.context.item * bucket.trained_elements
        gradients = builder.allocate("unsharded_gradients", size, self._begin, MemoryCategory.GRADIENTS)
        if not rules.copies_units:
            builder.release(gradients, reduced)
            return
        builder.release(gradients, copied)
        size = rules.context.gradient_dtype.itemsize * bucket.trained_elements
        together = builder.allocate("reduce_scatter_input", size, copied, MemoryCategory.COMMUNICATION)
        builder.release(together, reduced)


class ShardedWeights:
    """Gathers a unit's weights before it runs and those of the next units while it runs, and drops them behind it.

    Where weights stay between a forward and its backward, the forward drops nothing, and ``kept`` gives the backward
    what it need not gather. Where they stay spread over fewer ranks (FSDP2 ``reshard_after_forward`` of a number), the
    forward copies that shard before it drops the rest, and the backward gathers over those ranks. Does nothing where
    weights are not gathered by unit.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        rules: DataParallelism,
        units: Sequence[str],
        kept: dict[str, list[Tensor]] | None = None,
    ) -> None:
        self._builder = builder
        self._rules = rules
        self._units = list(units) if rules.gathers_by_unit else []
        self._keeps = rules.gathers_by_unit and not rules.reshards
        self._buckets: dict[str, list[Bucket]] = {}
        self._gathered: dict[str, tuple[list[int], list[Tensor]]] = {}
        self._reshards_to = isinstance(rules.context.parallel.reshard, int)
        self._in_forward = kept is None
        self._from_forward = {} if self._reshards_to else kept or {}
        self._shards = dict(kept or {}) if self._reshards_to else {}

    def with_buckets(self, buckets: Sequence[Bucket]) -> ShardedWeights:
        """Set what is gathered for each unit."""
        for bucket in buckets:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        return self

    def kept(self) -> dict[str, list[Tensor]]:
        """What a forward program leaves gathered, by unit."""
        if self._reshards_to:
            return self._shards
        return {unit: tensors for unit, (_, tensors) in self._gathered.items()} if self._keeps else {}

    def enter(self, unit: str, *, prefetch: bool = True) -> None:
        """Wait for the weights of a unit, and start gathering those of the units behind it (``prefetch``)."""
        if not self._units or unit in self._from_forward:
            return
        self._gather(unit)
        self._builder.wait_for(*self._gathered[unit][0])
        self._copy_apart(unit)
        if prefetch:
            following = self._units.index(unit) + 1
            for ahead in self._units[following : following + self._rules.context.parallel.prefetch]:
                self._gather(ahead)

    def leave(self, unit: str) -> None:
        """Drop the weights of a unit."""
        if not self._units:
            return
        if unit in self._from_forward:
            dropped = self._from_forward[unit]
        elif self._keeps:
            return
        else:
            dropped = self._gathered.pop(unit)[1]
            if self._reshards_to and self._in_forward and unit not in self._shards:
                self._shards[unit] = self._copy_shards(unit)
        for tensor in dropped:
            self._builder.release(tensor, self._builder.last_row)

    def _copy_shards(self, unit: str) -> list[Tensor]:
        """What stays of a unit behind its forward: a copy of this rank's part (``to_sharded_post_forward``)."""
        builder, rules, shards = self._builder, self._rules, []
        layer, module = builder.layer, builder.module
        builder.layer, builder.module = -1, "data_parallel"
        for bucket in filter(rules.gathers, self._buckets.get(unit, [])):
            ranks = rules.reshard_size(bucket.dimension)
            size = rules.gathered_bytes(bucket) / ranks if ranks else 0.0
            if not size:
                continue
            row = builder.memory_bound(
                "resharded_weights_copy",
                OpKind.MEMCPY,
                read=size,
                written=size,
                dtype=rules.context.dtype,
                phase=Phase.PARAM_SYNC,
            )
            shards.append(builder.allocate("resharded_weights", size, row, MemoryCategory.WEIGHTS))
        builder.layer, builder.module = layer, module
        return shards

    def _copy_apart(self, unit: str) -> None:
        """Copy what was gathered for a unit to the parameters, where these are sharded one by one.

        A copy of a flat buffer is not needed, one of a buffer that is cut along ranks is (FSDP2
        ``foreach_all_gather_copy_out``).
        """
        rows, tensors = self._gathered[unit]
        if not self._rules.copies_units or not tensors:
            return
        builder = self._builder
        layer, module = builder.layer, builder.module
        builder.layer, builder.module = -1, "data_parallel"
        size = sum(builder.size_of(tensor) for tensor in tensors)
        row = builder.memory_bound(
            "gathered_weights_copy_out",
            OpKind.MEMCPY,
            read=size,
            written=size,
            dtype=self._rules.context.dtype,
            phase=Phase.PARAM_SYNC,
        )
        builder.layer, builder.module = layer, module
        for tensor in tensors:
            builder.release(tensor, row)
        self._gathered[unit] = rows, [builder.allocate("gathered_weights", size, row, MemoryCategory.WEIGHTS)]

    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        rows, tensors = [], []
        for bucket in filter(self._rules.gathers, self._buckets.get(unit, [])):
            resharded = unit in self._shards and self._rules.reshard_size(bucket.dimension) > 0
            row = self._rules.emit_gather(self._builder, bucket, after=None, resharded=resharded)
            rows.append(row)
            size = self._rules.gathered_bytes(bucket)
            category = MemoryCategory.WEIGHTS
            if self._rules.copies_units:
                category = MemoryCategory.COMMUNICATION
            tensors.append(self._builder.allocate("gathered_weights", size, row, category))
        self._gathered[unit] = rows, tensors
        if not self._in_forward:
            # What is whole again needs no shard, and behind its backward there is only that over all ranks.
            for tensor in self._shards.pop(unit, []):
                self._builder.release(tensor, rows[-1])
