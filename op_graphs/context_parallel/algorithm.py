"""What a context-parallel algorithm is, what core attention keeps, and exchanges over a context-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..lower_core_attention import AttentionSizes
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, DType, OpKind


@dataclass
class CoreSaved:
    """What core attention keeps for its backward pass."""

    qkv: Tensor
    """Queries, keys and values as the kernels read them."""
    output: Tensor
    """Attention output as the kernels wrote it."""
    inner: list[Tensor] = field(default_factory=list)
    switch_row: int = -1
    """Row of the all-to-all behind which only ``qkv``, not what it was made from, is needed; -1 without one."""
    recomputed: bool = False
    """Whether the kernels run again in backward; ``qkv`` and ``output`` are then those outside of any all-to-all."""


Forward = Callable[[ProgramBuilder, LoweringContext, AttentionSizes, Tensor, bool], tuple[CoreSaved, Tensor]]
"""Of q, k and v, and whether anything is kept: what is kept, and the output that the projection reads."""
Backward = Callable[[ProgramBuilder, LoweringContext, AttentionSizes, CoreSaved, Tensor], Tensor]
"""Of what was kept and the gradient of the output, which it releases with what is inner: the gradient of q, k and v."""


@dataclass(frozen=True)
class ContextParallelAlgorithm:
    """Forward and backward of core attention over a context-parallel group."""

    forward: Forward
    backward: Backward


def exchange(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    communication: Communication,
    size: float,
    group: int,
    after: Sequence[int] | None = None,
    dtype: DType | None = None,
) -> int:
    """A transfer of ``size`` bytes over a group, behind the rows ``after`` (the compute before it); returns its row.

    ``dtype`` is what travels, by default the training dtype.
    """
    return builder.collective(
        name,
        communication,
        size,
        Dimension.CP,
        group,
        after=after,
        dtype=context.dtype if dtype is None else dtype,
        kind=OpKind.P2P if communication is Communication.SEND_RECEIVE else OpKind.COLLECTIVE,
    )


def all_to_all(builder: ProgramBuilder, context: LoweringContext, name: str, size: float, group: int) -> int:
    """An exposed all-to-all of ``size`` bytes a rank."""
    row = exchange(builder, context, name, Communication.ALL_TO_ALL, size, group)
    builder.wait_for(row)
    return row
