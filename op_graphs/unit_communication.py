"""When parts of a chunk are communicated: gradients once complete, sharded weights before and while they are used."""

from __future__ import annotations

from collections.abc import Sequence

from .buckets import ENDS, ROOT, Bucket
from .data_parallel import DataParallelism
from .overlap.registry import GRADIENTS
from .program import ProgramBuilder, Tensor
from .vocabulary import REDUCTION_POOL, MemoryCategory, OpKind, Phase, Stream

FP32_BYTES = 4


class GradientReduction:
    """Emits the reduction of each bucket once every gradient in it is complete."""

    def __init__(
        self,
        builder: ProgramBuilder,
        rules: DataParallelism,
        buckets: Sequence[Bucket],
        units: Sequence[Bucket] = (),
    ) -> None:
        """``units`` are those of ZeRO-3 whose gradients are added to what earlier microbatches left."""
        self._builder = builder
        self._rules = rules
        self._open = list(buckets)
        self._adding = list(units) if rules.copies_units and not rules.reduces_every_microbatch else []
        self._begin = len(builder)
        self._placement = GRADIENTS.chosen(rules.context.overlap.grad_reduce)
        self._gradients: dict[tuple[Bucket, str], Tensor] = {}
        self._added: dict[tuple[Bucket, str], int] = {}
        """Row from which the gradient of a module lives that is added at once."""
        self._input: Tensor | None = None
        """What the reduction before this one reads."""

    def emit_complete(self) -> None:
        """Reduce every bucket whose last gradient the operations added since the last call complete."""
        builder, rules = self._builder, self._rules
        for bucket in list(self._adding):
            self._note_added_gradients(bucket)
            if self._is_complete(bucket):
                self._adding.remove(bucket)
                self._hold_added_gradients(bucket)
        for bucket in list(self._open):
            if rules.copies_units and rules.reduces_every_microbatch:
                self._hold_single_gradients(bucket)
            if not self._is_complete(bucket):
                continue
            self._open.remove(bucket)
            copied = len(builder)
            row = rules.emit_reduction(builder, bucket)
            self._placement.behind_reduction(builder, row)
            if rules.reduces_every_microbatch:
                self._hold_whole(bucket, copied, row)
        self._begin = len(builder)

    def _is_complete(self, bucket: Bucket) -> bool:
        return all(module in self._builder.gradient_rows for module in bucket.trained_modules)

    def _hold_single_gradients(self, bucket: Bucket) -> None:
        """The whole gradient of each parameter of a unit lives from its product on."""
        builder = self._builder
        for module, elements in bucket.gradient_elements:
            if module not in builder.gradient_rows or (bucket, module) in self._gradients:
                continue
            row = builder.gradient_rows[module] if builder.gradient_rows[module] >= 0 else self._begin
            size = self._rules.context.item * elements
            self._gradients[bucket, module] = builder.allocate(
                "unsharded_gradients", size, row, MemoryCategory.GRADIENTS
            )

    def _note_added_gradients(self, bucket: Bucket) -> None:
        for module, _ in bucket.gradient_elements:
            row = self._builder.gradient_rows.get(module)
            if row is not None and (bucket, module) not in self._added:
                row = row if row >= 0 else self._begin
                self._added[bucket, module] = min(row + 1, self._builder.last_row)

    def _hold_added_gradients(self, bucket: Bucket) -> None:
        """What is added at once is held until its unit is complete all the same.

        Where passes for the weight are apart, no pass completes a unit, and nothing waits for one.
        """
        builder = self._builder
        for module, elements in bucket.gradient_elements:
            size, row = self._rules.context.item * elements, self._added[bucket, module]
            held = builder.allocate("unsharded_gradients", size, row, MemoryCategory.GRADIENTS)
            builder.release(held, builder.last_row)

    def _release_single_gradients(self, bucket: Bucket, row: int) -> None:
        for module, _ in bucket.gradient_elements:
            self._builder.release(self._gradients.pop((bucket, module)), row)

    def _hold_whole(self, bucket: Bucket, copied: int, reduced: int) -> None:
        """What a unit's reduction reads, and what is left of it.

        Gradients that are apart are copied together in the type of the reduction; the copy is held until the next unit
        has one, so that its memory is not used again before the reduction has run (FSDP2 ``ReduceScatterState``). The
        shard that comes of it is the gradient, which the next step drops before its forward
        (``zero_grad(set_to_none=True)``).
        """
        builder, rules = self._builder, self._rules
        if rules.copies_units:
            self._release_single_gradients(bucket, copied)
            size = rules.context.gradient_dtype.itemsize * bucket.trained_elements
            if self._input is not None:
                builder.release(self._input, copied)
            self._input = builder.allocate("reduce_scatter_input", size, copied, MemoryCategory.COMMUNICATION)
            builder.release(self._input, reduced)
        else:
            size = rules.context.item * bucket.trained_elements
            gradients = builder.allocate("unsharded_gradients", size, self._begin, MemoryCategory.GRADIENTS)
            builder.release(gradients, reduced)
        if rules.drops_gradients:
            size = FP32_BYTES * bucket.trained_elements / rules.shard_size(bucket.dimension)
            builder.allocate("main_gradients", size, copied, MemoryCategory.GRADIENTS, pool=REDUCTION_POOL)


class ShardedWeights:
    """Gathers a unit's weights before it runs and those of the next units while it runs, and drops them behind it.

    Where weights stay between a forward and its backward, the forward drops nothing, and ``kept`` gives the backward
    what it need not gather. Where they stay spread over fewer ranks (FSDP2 ``reshard_after_forward`` of a number), the
    forward copies that shard before it drops the rest, and the backward gathers over those ranks. A unit of both ends
    of the model stays from its first use to its last. Does nothing where weights are not gathered by unit.
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
        self._last = units[-1] if units else ""
        self._entered: set[str] = set()
        units = list(dict.fromkeys(map(self._unit_of, units)))
        self._units = units if rules.gathers_by_unit else []
        self._keeps = rules.gathers_by_unit and not rules.reshards
        self._buckets: dict[str, list[Bucket]] = {}
        self._gathered: dict[str, tuple[list[int], list[Tensor]]] = {}
        self._reshards_to = isinstance(rules.context.parallel.reshard, int)
        self._in_forward = kept is None
        kept = kept or {}
        self._from_forward = {unit: kept[unit] for unit in kept if not self._reshards_to or unit == ROOT}
        self._shards = {unit: kept[unit] for unit in kept if self._reshards_to and unit != ROOT}
        self._copied: list[Tensor] = []
        """What the unit before this one was gathered into, where forward holds it until the next one is there."""

    def _unit_of(self, name: str) -> str:
        return ROOT if self._rules.context.parallel.root_unit and name in ENDS else name

    def with_buckets(self, buckets: Sequence[Bucket]) -> ShardedWeights:
        """Set what is gathered for each unit."""
        for bucket in buckets:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        return self

    def kept(self) -> dict[str, list[Tensor]]:
        """What a forward program leaves gathered, by unit."""
        whole = {
            unit: tensors
            for unit, (_, tensors) in self._gathered.items()
            if self._keeps or (self._units and unit == ROOT)
        }
        return {**self._shards, **whole}

    def enter(self, name: str, *, prefetch: bool = True) -> None:
        """Wait for the weights of a unit, and start gathering those of the units behind it (``prefetch``)."""
        unit = self._unit_of(name)
        if not self._units or (unit in self._from_forward and unit != ROOT):
            return
        again = unit == ROOT and unit in self._entered
        self._entered.add(unit)
        if not again and unit not in self._from_forward:
            self._gather(unit)
            self._builder.wait_for(*self._gathered[unit][0])
            self._copy_apart(unit)
        if prefetch and not again:
            following = self._units.index(unit) + 1
            for ahead in self._units[following : following + self._rules.context.parallel.prefetch]:
                if ahead not in self._from_forward:
                    self._gather(ahead)

    def leave(self, name: str) -> None:
        """Drop the weights of a unit."""
        unit = self._unit_of(name)
        if not self._units:
            return
        if self._in_forward and name == self._last:
            self._release_copied(self._builder.last_row)
        if unit == ROOT and (self._in_forward or name != self._last):
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

    def _release_copied(self, row: int) -> None:
        for tensor in self._copied:
            self._builder.release(tensor, row)
        self._copied = []

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
        ``foreach_all_gather_copy_out``). In a forward that gathers one unit ahead, what was gathered is held until the
        next one is copied, whose gather so need not wait for this copy (``FSDPParamGroup.wait_for_unshard``).
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
        self._release_copied(row)
        self._copied = tensors
        if not self._in_forward or self._rules.context.parallel.prefetch != 1:
            self._release_copied(row)
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
            tensors.append(self._builder.allocate("gathered_weights", size, row, category, pool=Stream.DP))
        self._gathered[unit] = rows, tensors
        if not self._in_forward:
            # What is whole again needs no shard, and behind its backward there is only that over all ranks.
            for tensor in self._shards.pop(unit, []):
                self._builder.release(tensor, rows[-1])
