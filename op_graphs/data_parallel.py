"""How parameters, gradients and optimizer states are spread over data-parallel ranks, by ZeRO stage.

``zero`` 0 replicates everything and all-reduces gradients (DDP). 1 shards optimizer states: gradients are
reduce-scattered, updated weights gathered (Megatron's distributed optimizer). 2 also shards gradients: they are
reduce-scattered after every microbatch (Rajbhandari et al. 2020, "ZeRO", section 5). 3 also shards weights: a unit,
one layer, is gathered before it runs and dropped behind it (PyTorch FSDP2, ``torch.distributed.fsdp.fully_shard``);
with pipeline parallelism gradients are reduced at the end of the step, and units stay gathered over it, as torchtitan
does, unless ``reshard`` says otherwise (:mod:`.chunk_buffers` has what they hold until then).
``hsdp_shard`` shards over groups of that many ranks and replicates across them. With ``whole_tensors`` the states of a
tensor lie on one rank of ZeRO 1 (:mod:`.whole_tensors`), and the represented rank is the fullest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .adapters import trained
from .buckets import Bucket, form_buckets, form_units
from .lowering_context import LoweringContext
from .offload_optimizer import split_shard
from .optimizers import OPTIMIZERS, OptimizerShard
from .optimizers.shard import Part
from .parameters import ParameterTensor, elements_of
from .plan import OptimizerDTypes
from .precision import quantized_elements
from .program import ProgramBuilder
from .vocabulary import Communication, Dimension, DType, MemoryCategory, OpKind, Phase
from .whole_tensors import tensors_by_rank

_ALIGNMENT, _END_ALIGNMENT = 64, 128
"""Elements to which Megatron-Core aligns parameters in their buffer, and its end."""


def buffer_slice(elements: Sequence[int], shards: int, member: int) -> list[int]:
    """Elements of each parameter in one shard of the buffer that holds them, the last parameter first.

    The buffer is cut evenly; ranks beyond one set of shards begin again (Megatron-Core ``_ParamAndGradBuffer`` and
    ``_build_model_gbuf_param_range_map``).
    """
    begin, ranges = 0, []
    for size in reversed(elements):
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        ranges.append((begin, begin + size))
        begin += size
    granule = math.lcm(shards, _END_ALIGNMENT)
    share = -(-begin // granule) * granule // shards
    first = member % shards * share
    cut = (min(end, first + share) - max(start, first) for start, end in ranges)
    return [size for size in cut if size > 0]


@dataclass(frozen=True)
class DataParallelism:
    """The rules of a context's ZeRO stage."""

    context: LoweringContext

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        return self.context.parallel.zero

    @property
    def reshards(self) -> bool:
        """Whether weights are dropped behind every unit and gathered again."""
        return self.context.parallel.reshards

    @property
    def gathers_by_unit(self) -> bool:
        """Whether every microbatch gathers weights unit by unit."""
        return self.context.parallel.gathers_by_unit

    @property
    def copies_units(self) -> bool:
        """Whether parameters of a unit are sharded one by one, and copied to and from what is communicated."""
        return self.zero == 3 and not self.context.parallel.flat_parameters

    @property
    def reduces_every_microbatch(self) -> bool:
        """Whether gradients leave the rank after every microbatch; pipelines accumulate them."""
        return self.zero >= 2 and not self.context.parallel.keeps_gradients_whole

    @property
    def drops_gradients(self) -> bool:
        """Whether a rank's gradients are what reductions leave, and are dropped before the next step's forward.

        Without a pipeline, those of several microbatches are added to what the first one left, which stays.
        """
        single = self.context.training.num_microbatches == 1 and self.context.training.offload.optimizer == 0
        return self.zero == 3 and (single or not self.reduces_every_microbatch)

    @property
    def whole_tensors(self) -> bool:
        """Whether the states of a tensor lie whole on one rank."""
        return self.zero == 1 and self.context.parallel.whole_tensors

    @property
    def accumulates_main_gradients(self) -> bool:
        """Whether weight gradients are added into a main gradient, in its type."""
        return self.zero <= 1

    def buckets(self, tensors: list[ParameterTensor], *, split: bool) -> tuple[Bucket, ...]:
        """What is communicated together: layers where units are sharded, else Megatron's buckets."""
        if self.zero == 3:
            return form_units(tensors, root=self.context.parallel.root_unit)
        # Frozen weights are whole on every rank, and in no buffer.
        tensors = trained(tensors)
        if self.zero == 2:
            return form_units(tensors)
        return form_buckets(tensors, self.context.parallel, split=split)

    def shard_size(self, dimension: Dimension) -> int:
        """Ranks over which sharded things of a dimension are spread."""
        if self.zero == 0:
            return 1
        replicas = self.context.parallel.replicas(dimension)
        return min(self.context.parallel.hsdp_shard or replicas, replicas)

    def shard_group(self, dimension: Dimension) -> int:
        """Group over which gradients are scattered and weights gathered."""
        ranks = self.context.parallel.group_ranks(dimension, self.context.rank)
        size = self.shard_size(dimension)
        if size in (1, len(ranks)):
            return self.context.group(dimension)
        start = ranks.index(self.context.rank) // size * size
        return self.context.names.group(f"{dimension.name.lower()}_shard", ranks[start : start + size])

    def reshard_size(self, dimension: Dimension) -> int:
        """Ranks over which weights stay spread between a forward and its backward; 0 where they do not stay so."""
        size = self.context.parallel.reshard
        return size if isinstance(size, int) and self.shard_size(dimension) > size else 0

    def reshard_group(self, dimension: Dimension) -> int:
        """Group from which the backward gathers what stayed: neighbours in the shard group (FSDP2)."""
        ranks = self.context.parallel.group_ranks(dimension, self.context.rank)
        size = self.reshard_size(dimension)
        start = ranks.index(self.context.rank) // size * size
        return self.context.names.group(f"{dimension.name.lower()}_reshard", ranks[start : start + size])

    def replica_group(self, dimension: Dimension) -> int:
        """Group of ranks that hold the same shard."""
        ranks = self.context.parallel.group_ranks(dimension, self.context.rank)
        size = self.shard_size(dimension)
        if size == 1:
            return self.context.group(dimension)
        return self.context.names.group(
            f"{dimension.name.lower()}_replicate", ranks[ranks.index(self.context.rank) % size :: size]
        )

    # -- memory ----------------------------------------------------------------------------------------------

    def persistent_bytes(self, tensors: list[ParameterTensor]) -> dict[MemoryCategory, int]:
        """Bytes a rank holds from start to end of the job for its parameters."""
        context = self.context
        whole, learned = elements_of(tensors), elements_of(trained(tensors))
        sharded = self.sharded_elements(tensors)
        updated = split_shard(self.optimizer_shard(tensors)).device
        states = OPTIMIZERS[context.training.optimizer].state_bytes(updated)
        master = 0.0 if context.dtype is DType.FP32 else context.training.optimizer_dtypes.master.itemsize
        if self.zero == 3:
            # The sharded parameter is the fp32 master; computing copies are gathered in the training dtype, and gone
            # between steps (``op_graphs.chunk_buffers``).
            gradients = 0.0 if self.drops_gradients else 4 * sharded
            # Frozen weights have no fp32 master: they are loaded, and stay, in the training dtype.
            frozen = context.item * self._frozen_shard(tensors)
            return {
                MemoryCategory.WEIGHTS: round(4 * sharded + frozen),
                MemoryCategory.GRADIENTS: round(gradients),
                MemoryCategory.OPTIMIZER_STATES: round(states),
            }
        gradient_elements = sharded if self.zero == 2 else learned
        return {
            MemoryCategory.WEIGHTS: round(context.item * (whole - self._replaced_elements(tensors))),
            MemoryCategory.GRADIENTS: round(context.gradient_dtype.itemsize * gradient_elements),
            MemoryCategory.OPTIMIZER_STATES: round(states + master * updated.elements),
        }

    def persistent_allocations(
        self, tensors: list[ParameterTensor], category: MemoryCategory, total: int
    ) -> list[int]:
        """Sizes of the allocations that make up the persistent bytes of a category; they sum to ``total``.

        Gradients are one buffer, and so are weights where the distributed optimizer gathers into it (Megatron-Core
        ``distributed/param_and_grad_buffer.py``). Everything else is a tensor for each parameter, or for the part of it
        that lies in this rank's shard of the buffer; states are so many tensors as they have times four bytes.
        """
        frozen = any(tensor.frozen for tensor in tensors)
        whole_buffer = self.zero <= 1
        if category is MemoryCategory.WEIGHTS:
            whole_buffer = self.zero == 1 and not frozen
        if category is not MemoryCategory.OPTIMIZER_STATES and whole_buffer:
            return [total]
        sizes = self._sharded_sizes(tensors, category)
        elements = sum(sizes)
        if not elements or not total:
            return [total]
        copies = 1
        if category is MemoryCategory.OPTIMIZER_STATES:
            copies = max(1, round(total / (4 * elements)))
        ends = [round(total * end / (copies * elements)) for end in accumulate(sizes * copies)]
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _sharded_sizes(self, tensors: list[ParameterTensor], category: MemoryCategory) -> list[float]:
        """Elements of each tensor, or of each part of one, that a rank holds of its own."""
        if category is not MemoryCategory.WEIGHTS:
            tensors = trained(tensors)
        elif self.zero == 3:
            ranks = {dimension: self.shard_size(dimension) for dimension in (Dimension.DP, Dimension.EDP)}
            return [t.elements / ranks[Dimension.EDP if t.is_expert else Dimension.DP] for t in tensors]
        if self.zero == 0 or (category is MemoryCategory.WEIGHTS and self.zero < 3):
            return [float(tensor.elements) for tensor in tensors]
        if self.zero >= 2 or self.whole_tensors:
            return [part.elements for part in self.optimizer_shard(tensors).parts]
        return [
            float(elements)
            for dimension in (Dimension.DP, Dimension.EDP)
            for elements in buffer_slice(
                [t.elements for t in tensors if t.is_expert == (dimension is Dimension.EDP)],
                self.shard_size(dimension),
                self.context.parallel.group_ranks(dimension, self.context.rank).index(self.context.rank),
            )
        ]

    def shards_of_states(self, tensors: list[ParameterTensor]) -> list[float]:
        """Elements of each tensor, or of each part of one, whose optimizer states this rank holds."""
        return self._sharded_sizes(tensors, MemoryCategory.OPTIMIZER_STATES)

    def _frozen_shard(self, tensors: list[ParameterTensor]) -> float:
        """Elements of this rank's shard of the frozen weights (ZeRO-3)."""
        return sum(
            tensor.elements / self.shard_size(Dimension.EDP if tensor.is_expert else Dimension.DP)
            for tensor in tensors
            if tensor.frozen
        )

    def sharded_elements(self, tensors: list[ParameterTensor]) -> float:
        """Elements of this rank's shard of the trained parameters."""
        return self.optimizer_shard(tensors).elements

    def optimizer_shard(self, tensors: list[ParameterTensor]) -> OptimizerShard:
        """What this rank's optimizer updates, and how."""
        ranks = {dimension: self.shard_size(dimension) for dimension in (Dimension.DP, Dimension.EDP)}
        parts: Iterable[Part] = (
            Part(tensor, ranks[Dimension.EDP if tensor.is_expert else Dimension.DP])
            for tensor in trained(tensors)
        )
        if self.whole_tensors:
            parts = (Part(tensor, 1) for owned in self.owners(tensors).values() for tensor in owned[0])
        dtype = DType.FP32 if self.copies_gradients else self.context.gradient_dtype
        return OptimizerShard(self.context, tuple(parts), dtype, self.shard_group)

    def owners(self, tensors: list[ParameterTensor]) -> dict[Dimension, list[list[ParameterTensor]]]:
        """Trained tensors of each dimension by the rank that holds their states whole, the fullest rank first."""
        learned = trained(tensors)
        by_dimension = {
            Dimension.DP: [tensor for tensor in learned if not tensor.is_expert],
            Dimension.EDP: [tensor for tensor in learned if tensor.is_expert],
        }
        return {
            dimension: tensors_by_rank(members, self.shard_size(dimension))
            for dimension, members in by_dimension.items()
            if members
        }

    @property
    def copies_gradients(self) -> bool:
        """Whether the step copies gradients of two bytes to fp32 first.

        Megatron-Core ``optimizer.py`` and ``distrib_optimizer.py`` do, unless a precision-aware optimizer reads them as
        they are; FSDP's sharded gradients are fp32 already.
        """
        training = self.context.training
        aware = training.optimizer_dtypes != OptimizerDTypes()
        return self.context.gradient_dtype.itemsize < 4 and self.zero < 3 and not aware

    def quantized_weight_bytes(self, tensors: list[ParameterTensor]) -> int:
        """Bytes of the quantised copies of weights that stay over a step; none where they are made for each use."""
        recipe = self.context.recipe
        if recipe is None or self.context.quantizes_weights_anew:
            return 0
        return round(recipe.weight_size(quantized_elements(tensors)))

    def _replaced_elements(self, tensors: list[ParameterTensor]) -> int:
        """Elements of weights that exist in quantised form only."""
        quantized_only = self.context.recipe is not None and self.context.training.fp8_param_gather
        return quantized_elements(tensors) if quantized_only else 0

    # -- communication ---------------------------------------------------------------------------------------

    def emit_reduction(self, builder: ProgramBuilder, bucket: Bucket) -> int:
        """Scale the gradients of a bucket by the data-parallel size and reduce them; returns the last row."""
        context = self.context
        layer, module = builder.layer, builder.module
        builder.layer, builder.module = -1, "data_parallel"
        size = context.gradient_dtype.itemsize * bucket.trained_elements
        whole = context.item * bucket.trained_elements
        # Autograd puts the gradient of a flat parameter together from those of its views.
        views = whole if self.zero == 3 and context.parallel.flat_parameters else 0.0
        read = whole if self.reduces_every_microbatch else size
        if context.libraries.nan_checks:
            # A norm of the bucket before it is reduced (Megatron-Core ``param_and_grad_buffer.py``, ``check_grads``).
            builder.memory_bound(
                "gradient_check",
                OpKind.REDUCTION,
                read=read,
                written=4.0,
                access="stream",
                dtype=context.gradient_dtype,
                phase=Phase.GRADIENT_SYNC,
            )
        row = builder.memory_bound(
            "gradient_scale",
            OpKind.ELEMENTWISE,
            read=read + views,
            written=size + views,
            passes=2 if views else 1,
            dtype=context.gradient_dtype,
            phase=Phase.GRADIENT_SYNC,
        )
        shard = 1 if self.whole_tensors else self.shard_size(bucket.dimension)
        if shard > 1:
            row = self._collective(
                builder, "gradient_reduce_scatter", Communication.REDUCE_SCATTER, size, bucket, row
            )
        replicas = context.parallel.replicas(bucket.dimension) // shard
        if replicas > 1:
            row = self._collective(
                builder, "gradient_all_reduce", Communication.ALL_REDUCE, size / shard, bucket, row
            )
        builder.layer, builder.module = layer, module
        return row

    def _collective(
        self,
        builder: ProgramBuilder,
        name: str,
        communication: Communication,
        size: float,
        bucket: Bucket,
        after: int,
    ) -> int:
        scatters = communication is Communication.REDUCE_SCATTER
        group = self.shard_group(bucket.dimension) if scatters else self.replica_group(bucket.dimension)
        if self.whole_tensors:
            group = self.context.group(bucket.dimension)
        return builder.collective(
            name,
            communication,
            size,
            bucket.dimension,
            group,
            after=[after],
            phase=Phase.GRADIENT_SYNC,
            dtype=self.context.gradient_dtype,
        )

    def emit_gather(
        self, builder: ProgramBuilder, bucket: Bucket, after: list[int] | None, *, resharded: bool = False
    ) -> int:
        """Gather the weights of a bucket, from all shards or from those left behind a forward; returns the row."""
        layer, module = builder.layer, builder.module
        builder.layer, builder.module = -1, "data_parallel"
        row = builder.collective(
            "parameter_all_gather",
            Communication.ALL_GATHER,
            self.gathered_bytes(bucket),
            bucket.dimension,
            self.reshard_group(bucket.dimension) if resharded else self.shard_group(bucket.dimension),
            after=after,
            phase=Phase.PARAM_SYNC,
            dtype=self.context.dtype,
        )
        builder.layer, builder.module = layer, module
        return row

    def emit_broadcasts(self, builder: ProgramBuilder, tensors: list[ParameterTensor]) -> None:
        """Send updated weights from the ranks that own them to the others, one owner after the other."""
        layer, module = builder.layer, builder.module
        builder.layer, builder.module = -1, "data_parallel"
        for dimension, owners in self.owners(tensors).items():
            if self.shard_size(dimension) == 1:
                continue
            for owned in owners:
                bucket = Bucket(dimension, elements_of(owned), (), quantized_elements(owned))
                builder.collective(
                    "parameter_broadcast",
                    Communication.BROADCAST,
                    self.gathered_bytes(bucket),
                    dimension,
                    self.shard_group(dimension),
                    after=None,
                    phase=Phase.PARAM_SYNC,
                    dtype=self.context.dtype,
                )
        builder.layer, builder.module = layer, module

    def gathered_bytes(self, bucket: Bucket) -> float:
        """Bytes of the weights of a bucket as they are gathered."""
        context, recipe = self.context, self.context.recipe
        if recipe is None or not context.training.fp8_param_gather:
            return context.item * bucket.elements
        whole = bucket.elements - bucket.quantized_elements
        return context.item * whole + recipe.gathered_weight_bytes * bucket.quantized_elements

    def gathers(self, bucket: Bucket) -> bool:
        """Whether the weights of a bucket have to be gathered at all."""
        return self.shard_size(bucket.dimension) > 1

    def reduces(self, bucket: Bucket) -> bool:
        """Whether the gradients of a bucket have to be reduced at all."""
        return bucket.trained_elements > 0 and self.context.parallel.replicas(bucket.dimension) > 1
