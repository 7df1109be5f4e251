"""From shards of the sequence to whole sequences and back, around what goes through a sequence token by token.

A linear leaves ``[tokens, batch, width]``; a scan wants ``[batch, tokens, width]``, which is a copy where there are
several sequences. Under context parallelism each part of the width is exchanged by an all-to-all that gathers the
sequence and cuts the width by heads (Megatron-Core ``ssm/mamba_context_parallel.py``): with a copy that sorts it by
destination, one that joins the parts, and one that brings the halves of a sequence, which attention shares out for
balance, into their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, OpKind


@dataclass(frozen=True)
class Part:
    """One part of a width that is exchanged on its own."""

    name: str
    sharded: int
    """Elements of a token on a rank that holds a shard of the sequence."""
    repeat: int = 1
    """Times that it is repeated before the exchange, so that each rank gets what its heads need."""
    degree: int = 1
    """Ranks of the exchange."""

    @property
    def exchanged(self) -> int:
        """Elements of a token that a rank sends: all of them, repeated."""
        return self.sharded * self.repeat

    @property
    def whole(self) -> int:
        """Elements of a token on a rank that holds whole sequences."""
        return self.exchanged // self.degree


def shards_to_sequences(
    builder: ProgramBuilder, context: LoweringContext, name: str, source: Tensor, parts: Sequence[Part]
) -> Tensor:
    """Whole sequences of a rank's heads out of all heads of its shard; releases ``source`` where it makes another."""
    sharded = context.token_bytes(sum(part.sharded for part in parts))
    if context.parallel.cp == 1:
        return _turned(builder, context, name, source, sharded)
    exchanged = context.token_bytes(sum(part.exchanged for part in parts))
    row = _copy(builder, context, f"{name}_by_head", sharded, exchanged)
    builder.release(source, row)
    current = builder.temporary(name, exchanged, row)
    _exchange(builder, context, name, parts)
    arrived = builder.temporary(name, exchanged, builder.end_row)
    builder.release(current, builder.end_row)
    for step in ("joined", "in_order"):
        row = _copy(builder, context, f"{name}_{step}", exchanged, exchanged)
        builder.release(arrived, row)
        arrived = builder.activation(name, exchanged, row)
    return _turned(builder, context, name, arrived, exchanged)


def sequences_to_shards(
    builder: ProgramBuilder, context: LoweringContext, name: str, source: Tensor, parts: Sequence[Part]
) -> Tensor:
    """The reverse of :func:`shards_to_sequences`."""
    sharded = context.token_bytes(sum(part.sharded for part in parts))
    if context.parallel.cp == 1:
        return _turned(builder, context, name, source, sharded)
    exchanged = context.token_bytes(sum(part.exchanged for part in parts))
    current = _turned(builder, context, name, source, exchanged)
    row = _copy(builder, context, f"{name}_balanced", exchanged, exchanged)
    builder.release(current, row)
    current = builder.temporary(name, exchanged, row)
    _exchange(builder, context, name, parts)
    arrived = builder.temporary(name, exchanged, builder.end_row)
    builder.release(current, builder.end_row)
    row = _copy(builder, context, f"{name}_joined", exchanged, sharded)
    builder.release(arrived, row)
    return builder.activation(name, sharded, row)


def _turned(
    builder: ProgramBuilder, context: LoweringContext, name: str, source: Tensor, size: float
) -> Tensor:
    """Swap sequences and tokens: nothing to do where there is one sequence."""
    if context.training.micro_batch_size == 1:
        return source
    row = _copy(builder, context, f"{name}_turned", size, size)
    builder.release(source, row)
    return builder.activation(name, size, row)


def _copy(builder: ProgramBuilder, context: LoweringContext, name: str, read: float, written: float) -> int:
    return builder.memory_bound(
        name, OpKind.MEMCPY, read=read, written=written, access="strided", dtype=context.dtype
    )


def _exchange(builder: ProgramBuilder, context: LoweringContext, name: str, parts: Sequence[Part]) -> None:
    """The all-to-alls of all parts, which the next compute waits for."""
    for part in parts:
        row = builder.collective(
            f"{name}_{part.name}_all_to_all",
            Communication.ALL_TO_ALL,
            context.token_bytes(part.exchanged),
            Dimension.CP,
            context.group(Dimension.CP),
            dtype=context.dtype,
        )
        builder.wait_for(row)
