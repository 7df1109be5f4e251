"""What every dispatcher works with: tokens and experts of a rank, the kernels and exchanges around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..graph import ExchangeShape
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, OpKind
from .permutation import Permutation


@dataclass(frozen=True)
class RoutedSizes:
    """Tokens and experts of one rank."""

    tokens: int
    """Tokens the rank routes."""
    copies: int
    """Token copies it receives and computes: tokens * top_k, padded to the capacity where there is one, by load."""
    local_experts: int
    sent_copies: int
    """Token copies it sends: as many as it would receive if routing were balanced."""

    @property
    def per_expert(self) -> int:
        """Tokens of each local expert, over all ranks that send to it (mean)."""
        return max(1, self.copies // self.local_experts)

    @classmethod
    def of(cls, context: LoweringContext) -> RoutedSizes:
        """Sizes of the ranks of a context."""
        moe, parallel = context.model.moe, context.parallel
        assert moe is not None
        tokens = context.sharded_tokens
        copies = tokens * moe.top_k
        if moe.capacity_factor is not None:
            # Every expert takes the same number of tokens from a rank, missing ones are padding.
            each = -(-copies * moe.capacity_factor // moe.experts)
            copies = int(each) * moe.experts
        # Ranks that share an expert's cut all work on the tokens of all of them.
        received = max(1, round(copies * context.load.copies))
        return cls(tokens, received * parallel.etp, moe.experts // parallel.ep, copies * parallel.etp)


class Dispatcher(Protocol):
    """How tokens reach the ranks of their experts, and how results come back."""

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Bring ``[tokens, hidden]`` to the experts; returns the tensor by local expert, which the caller releases."""
        ...

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Bring expert outputs back and add them up for each token; releases ``source``."""
        ...

    def permutation(self, context: LoweringContext, sizes: RoutedSizes) -> Permutation:
        """How tokens are copied for their experts, on the rank that does it."""
        ...


def permute(builder: ProgramBuilder, context: LoweringContext, name: str, read: float, written: float) -> int:
    """A kernel that reorders tokens; returns its row."""
    return builder.memory_bound(
        name, OpKind.PERMUTE, read=read, written=written, access="strided", dtype=context.dtype
    )


def exchange(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    communication: Communication,
    size: float,
    dimension: Dimension,
    shape: ExchangeShape | None = None,
) -> int:
    """A collective of ``size`` bytes that the next compute waits for; returns its row."""
    row = builder.collective(
        name, communication, size, dimension, context.group(dimension), dtype=context.dtype, shape=shape
    )
    builder.wait_for(row)
    return row


def replaced(builder: ProgramBuilder, old: Tensor | None, name: str, size: float, row: int) -> Tensor:
    """A new buffer made by ``row`` out of an old one, which is released."""
    if old is not None:
        builder.release(old, row)
    return builder.temporary(name, size, row)
