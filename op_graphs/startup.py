"""What a rank allocates once in a job, in the order in which it does: the history that its caching allocator has.

Where the allocator puts the activations of a step depends on what was allocated and released before, so reserved
memory needs more than the sizes of what is kept (``tracesim/memory/job.py``). The order is Megatron-Core's:

1. The parameters, one by one in the order of the model. With the distributed optimizer they are then copied into one
   buffer, behind which the gradient buffer is made, and released (``distributed/param_and_grad_buffer.py``): what they
   leave is a cache of blocks of their sizes.
2. The fp32 master weights, one by one: a copy in the type of the parameter, the fp32 tensor, and the copy is gone
   (``optimizer/distrib_optimizer.py``, ``shard_model_param.clone().float()``).
3. With the first matrix product the workspaces of the libraries, with the first weight gradient of a shape Transformer
   Engine's stand-in for it.
4. In the first optimizer step the moments, parameter by parameter, in blocks that the activations of this step left.

The buffer is laid out from the last parameter to the first, each aligned to 64 elements, and cut evenly: ranks of a
data-parallel group hold tensors of different sizes, and reserve different amounts. PyTorch's FSDP shards each tensor
by itself, so its ranks are alike; its states come with the first step too. DeepSpeed (ZeRO-2) makes all at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from .columns import Int64
from .data_parallel import DataParallelism
from .graph import GemmShape, Operations, Shape, Startup
from .lowering_context import LoweringContext
from .parameters import ParameterTensor, elements_of
from .plan import OptimizerDTypes
from .vocabulary import REDUCTION_POOL, Dimension, DType, MemoryCategory, OpKind, Phase, Stream

MOST_RANKS = 8
"""Ranks of a stage with shards of their own that are described; of more, so many, evenly chosen."""


class FirstUse(IntEnum):
    """With which operation of the first step something is allocated that stays."""

    BEFORE = 0
    PRODUCT = 1
    WEIGHT_GRADIENT = 2
    UPDATE = 3


@dataclass(frozen=True)
class PersistentBuffer:
    """Memory that lives as long as the job, from its first use on."""

    name: str
    size: int
    category: MemoryCategory
    first_use: FirstUse = FirstUse.BEFORE
    weight: tuple[int, ...] = ()
    """With :attr:`FirstUse.WEIGHT_GRADIENT`: the shape of the weight."""


@dataclass(frozen=True)
class StartupEntry:
    """One allocation. ``until`` is the entry before whose allocation it is released; -1 for never."""

    size: int
    first_use: FirstUse = FirstUse.BEFORE
    weight: tuple[int, ...] = ()
    until: int = -1
    pool: int = Stream.COMPUTE


@dataclass
class _Entries:
    """Entries under construction."""

    rows: list[StartupEntry] = field(default_factory=list)

    def add(
        self,
        size: float,
        first_use: FirstUse = FirstUse.BEFORE,
        weight: tuple[int, ...] = (),
        pool: int = Stream.COMPUTE,
    ) -> int:
        """Append an allocation and return its number; one of 0 bytes is appended too, and takes no block."""
        self.rows.append(StartupEntry(round(size), first_use, weight, pool=pool))
        return len(self.rows) - 1

    def release(self, number: int) -> None:
        """Release an entry now."""
        self.rows[number] = replace(self.rows[number], until=len(self.rows))


def startups(
    context: LoweringContext, tensors: list[ParameterTensor], others: Sequence[PersistentBuffer]
) -> tuple[tuple[int, tuple[StartupEntry, ...]], ...]:
    """The allocations of ranks that share a stage, by global rank: the represented rank's first.

    ``others`` are persistent buffers beside weights, gradients and optimizer states.
    """
    return tuple(
        (rank, tuple(_entries(replace(context, rank=rank), tensors, others)))
        for rank in _ranks_with_own_shards(context)
    )


def _ranks_with_own_shards(context: LoweringContext) -> list[int]:
    rules = DataParallelism(context)
    if rules.zero != 1 or rules.whole_tensors:
        return [context.rank]
    members = context.parallel.group_ranks(Dimension.DP, context.rank)[: rules.shard_size(Dimension.DP)]
    count = min(len(members), MOST_RANKS)
    chosen = [members[at * (len(members) - 1) // max(1, count - 1)] for at in range(count)]
    # The ends differ most, so they come first.
    return list(dict.fromkeys([context.rank, chosen[0], chosen[-1], *chosen]))


def _entries(
    context: LoweringContext, tensors: list[ParameterTensor], others: Sequence[PersistentBuffer]
) -> list[StartupEntry]:
    rules, entries = DataParallelism(context), _Entries()
    totals = rules.persistent_bytes(tensors)
    if rules.zero <= 1:
        _parameters_and_gradients(entries, tensors, totals, in_buffer=rules.zero == 1)
    else:
        for category in (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS):
            # A gradient of FSDP is what a reduction left.
            reduced = rules.zero == 3 and category is MemoryCategory.GRADIENTS
            for size in rules.persistent_allocations(tensors, category, totals[category]):
                entries.add(size, pool=REDUCTION_POOL if reduced else Stream.COMPUTE)
    states = rules.persistent_allocations(
        tensors, MemoryCategory.OPTIMIZER_STATES, totals[MemoryCategory.OPTIMIZER_STATES]
    )
    parts = max(1, len(rules.shards_of_states(tensors)))
    masters = states[:parts] if _has_masters_at_the_start(context) else []
    for size in masters:
        copy = entries.add(size * context.item / 4)
        entries.add(size)
        entries.release(copy)
    for other in others:
        if other.first_use is FirstUse.BEFORE:
            entries.add(other.size)
    for other in others:
        if other.first_use is not FirstUse.BEFORE:
            entries.add(other.size, other.first_use, other.weight)
    moments = states[len(masters) :]
    with_step = FirstUse.BEFORE if rules.zero == 2 else FirstUse.UPDATE
    for at in range(min(parts, len(moments))):
        for size in moments[at::parts]:
            entries.add(size, with_step)
    return entries.rows


def _has_masters_at_the_start(context: LoweringContext) -> bool:
    """Whether fp32 master weights are made with the optimizer, and not by its first step."""
    plain = context.training.optimizer_dtypes == OptimizerDTypes()
    return context.parallel.zero <= 2 and context.dtype is not DType.FP32 and plain


def _parameters_and_gradients(
    entries: _Entries, tensors: list[ParameterTensor], totals: dict[MemoryCategory, int], *, in_buffer: bool
) -> None:
    """Parameters one by one, then their buffer and that of the gradients: dense ones, and experts."""
    whole = max(1, elements_of(tensors))
    weight, gradient = (
        totals[category] / whole for category in (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS)
    )
    made = [entries.add(weight * tensor.elements) for tensor in tensors]
    for is_expert in (False, True):
        group = [at for at, tensor in enumerate(tensors) if tensor.is_expert == is_expert]
        elements = elements_of(tensors[at] for at in group)
        if not elements:
            continue
        if in_buffer:
            entries.add(weight * elements)
        entries.add(gradient * elements)
        for at in group if in_buffer else ():
            entries.release(made[at])


def place(
    entries: Sequence[StartupEntry], operations: Operations, shapes: Sequence[Shape], rank: int
) -> Startup:
    """Entries with the rows of the first step that allocate them.

    ``rank`` is the represented rank, a row of the graph's ranks. What has no row of its own comes with the first
    matrix product, and in a graph without one before the step.
    """
    own = np.flatnonzero(operations.rank == rank)
    kind, phase = operations.kind[own], operations.phase[own]
    product = _first(own[np.isin(kind, (OpKind.GEMM, OpKind.GROUPED_GEMM))], -1)
    rows: dict[tuple[FirstUse, tuple[int, ...]], int] = {
        (FirstUse.BEFORE, ()): -1,
        (FirstUse.PRODUCT, ()): product,
        (FirstUse.UPDATE, ()): _first(
            own[(kind == OpKind.OPTIMIZER) & (phase == Phase.OPTIMIZER)], int(own[-1]) if len(own) else -1
        ),
    }
    for entry in entries:
        key = entry.first_use, entry.weight
        if key not in rows:
            numbers = [at for at, shape in enumerate(shapes) if _makes_gradient(shape, entry.weight)]
            rows[key] = _first(own[np.isin(operations.shape[own], numbers)], product)
    return Startup(
        row=np.array([rows[entry.first_use, entry.weight] for entry in entries], dtype=np.int64),
        size=np.array([entry.size for entry in entries], dtype=np.int64),
        until=np.array([entry.until for entry in entries], dtype=np.int64),
        pool=np.array([entry.pool for entry in entries], dtype=np.int8),
    )


def _first(rows: Int64, otherwise: int) -> int:
    return int(rows[0]) if len(rows) else otherwise


def _makes_gradient(shape: Shape, weight: tuple[int, ...]) -> bool:
    """Whether a product is the gradient of a weight of such a shape."""
    return isinstance(shape, GemmShape) and shape.layout == "NT" and {*weight} <= {shape.m, shape.n, shape.k}
