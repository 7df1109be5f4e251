"""Memory that a model chunk holds over several of its actions: sharded weights and gradients behind a pipeline.

With ZeRO-3 and a pipeline every microbatch of a chunk uses the same gathered weights and adds to the same gradients. As
PyTorch's FSDP2 has it under ``torch.distributed.pipelining`` (``stage.py``, ``backward_maybe_with_nosync``):

- weights are gathered, unit by unit, by the first forward and dropped behind the last backward of the chunk
  (``reshard_after_forward=False``, ``set_reshard_after_backward``);
- a unit's gradient becomes one in the type of the reduction with its first backward, is added to by the others, and is
  scattered behind the last (``to_accumulated_grad_if_needed``, ``run_post_backward``); chunks of an interleaved
  schedule do so one after another, so that the last one's whole gradients are gone when the first one's are made;
- the shard that is left is dropped before the next step's forward (``zero_grad(set_to_none=True)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from .buckets import ROOT, Bucket
from .data_parallel import DataParallelism
from .unit_communication import FP32_BYTES
from .vocabulary import REDUCTION_POOL, MemoryCategory, Stream


class Edge(IntEnum):
    """Actions of a chunk in a step between which it holds something."""

    FIRST_FORWARD = 0
    FIRST_BACKWARD = 1
    LAST_BACKWARD = 2


@dataclass(frozen=True)
class Moment:
    """A row of an action: in a forward where the first of some modules runs, in a backward where the last is complete.

    Without modules its last row.
    """

    edge: Edge
    modules: tuple[str, ...] = ()
    at_begin: bool = False
    """Its first row instead."""


@dataclass(frozen=True)
class ChunkBuffer:
    """A buffer that outlives an action."""

    name: str
    size: int
    category: MemoryCategory
    begin: Moment
    end: Moment | None
    """None: the end of the step."""
    pool: int = Stream.COMPUTE


def chunk_buffers(rules: DataParallelism, buckets: Sequence[Bucket]) -> tuple[ChunkBuffer, ...]:
    """What a chunk with these units holds over its actions; nothing where weights and gradients do not wait."""
    if rules.zero != 3 or rules.reduces_every_microbatch:
        return ()
    held = [] if rules.gathers_by_unit else _weights(rules, buckets[::-1])
    return (*held, *_gradients(rules, buckets))


def _weights(rules: DataParallelism, units: Sequence[Bucket]) -> list[ChunkBuffer]:
    """Units in the order in which forward uses them; the model's own is gathered before those of its layers."""
    units = sorted(units, key=lambda unit: unit.unit != ROOT)
    begins = [Moment(Edge.FIRST_FORWARD, unit.modules, at_begin=unit.unit == ROOT) for unit in units]
    last = Moment(Edge.LAST_BACKWARD)
    held = [
        ChunkBuffer("gathered_weights", size, MemoryCategory.WEIGHTS, begin, last)
        for unit, begin in zip(units, begins, strict=True)
        for size in _shares(rules, unit, rules.gathered_bytes(unit), unit.elements)
    ]
    if not rules.copies_units:
        return held
    # A unit is gathered into a buffer that is held until the next one is copied out of its own.
    ends = [*begins[1:], Moment(Edge.FIRST_FORWARD)][: len(begins)]
    return held + [
        ChunkBuffer(
            "gathered_weights",
            round(rules.gathered_bytes(unit)),
            MemoryCategory.COMMUNICATION,
            begin,
            end,
            Stream.DP,
        )
        for unit, begin, end in zip(units, begins, ends, strict=True)
        if rules.gathers(unit)
    ]


def _shares(rules: DataParallelism, unit: Bucket, size: float, elements: int) -> list[int]:
    """Bytes of a unit by its modules where each parameter is by itself, else in one piece."""
    parts = [count for _, count in unit.gradient_elements] if rules.copies_units else []
    parts.append(elements - sum(parts))
    return [round(size * part / elements) for part in parts if part]


def _gradients(rules: DataParallelism, units: Sequence[Bucket]) -> list[ChunkBuffer]:
    last, item = Moment(Edge.LAST_BACKWARD), rules.context.gradient_dtype.itemsize
    learned = [unit for unit in units if unit.trained_elements]
    held = [
        ChunkBuffer(
            "accumulated_gradients",
            size,
            MemoryCategory.GRADIENTS,
            Moment(Edge.FIRST_BACKWARD, unit.trained_modules),
            last,
        )
        for unit in learned
        for size in _shares(rules, unit, item * unit.trained_elements, unit.trained_elements)
    ]
    if rules.copies_units and learned:
        largest = round(item * max(unit.trained_elements for unit in learned))
        held.append(ChunkBuffer("reduce_scatter_input", largest, MemoryCategory.COMMUNICATION, last, last))
    return held + [
        ChunkBuffer(
            "main_gradients",
            round(FP32_BYTES * unit.trained_elements / rules.shard_size(unit.dimension)),
            MemoryCategory.GRADIENTS,
            last,
            None,
            REDUCTION_POOL,
        )
        for unit in learned
    ]
