"""What every dispatcher works with: tokens and experts of a rank, the kernels and exchanges around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..cuda_graphs import host_reads_token_counts
from ..expert_tokens import padded, pads_on_arrival, routed, source_multiple, token_multiple
from ..graph import ExchangeShape, MemoryShape
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, DType, OpKind, Stream
from .permutation import Permutation, reorder

COUNT_LAUNCHES = 5
"""Operations of PyTorch that sum the numbers of tokens by expert and copy them to the host."""
_SORT_LAUNCHES = 2
"""Kernels with which Transformer Engine sorts chunks: a map of their places, and the copy."""


@dataclass(frozen=True)
class RoutedSizes:
    """Tokens and experts of one rank."""

    tokens: int
    """Tokens the rank routes."""
    copies: int
    """Token copies that dispatch brings it: tokens * top_k, less what is dropped and with what is padded, by load."""
    rows: int
    """Rows of its experts' products: ``copies``, and what the experts pad themselves."""
    local_experts: int
    sent_copies: int
    """Token copies it sends: as many as a rank receives in the mean."""

    @property
    def per_expert(self) -> int:
        """Rows of each local expert, over all ranks that send to it (mean)."""
        return max(1, self.rows // self.local_experts)

    @classmethod
    def of(cls, context: LoweringContext) -> RoutedSizes:
        """Sizes of the ranks of a context."""
        moe, parallel, training, load = context.experts, context.parallel, context.training, context.load
        tokens, local = context.sharded_tokens, moe.experts // context.parallel.ep
        demand = tokens * moe.top_k / moe.experts
        each = routed(moe, tokens, demand, source_multiple(parallel, training))
        sent = max(1, round(each * moe.experts * load.sent))
        # Ranks that share an expert's cut all work on the tokens of all of them.
        copies = max(1, round(sent * load.copies)) * parallel.etp
        rows = round(copies * load.padding)
        if training.routing is None:
            rows = round(padded(copies / local, token_multiple(training)) * local)
        if pads_on_arrival(parallel, training, context.libraries):
            copies = rows
        return cls(tokens, copies, rows, local, sent * parallel.etp)


FIRST_DISPATCH = "dispatch"
"""Name of the dispatch in a forward pass, which is the first to need to know how many tokens go where."""


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
    return reorder(builder, context, name, read, written, _SORT_LAUNCHES)


def read_counts(
    builder: ProgramBuilder, context: LoweringContext, name: str, after: int, launches: int
) -> None:
    """Let the host wait for the numbers of tokens, copied behind row ``after``; what is added next is launched then.

    Only the first dispatch of a layer asks for them; its way back and the backward pass know them. ``launches`` counts
    the operations of the framework that compute and copy them, none of which moves much.
    """
    if name != FIRST_DISPATCH or not host_reads_token_counts(context):
        return
    builder.beside(
        "token_counts_to_host",
        OpKind.HOST,
        Stream.HOST,
        after=[after],
        read=8.0 * context.experts.experts,
        shape=MemoryShape("stream", launches=launches),
        dtype=DType.INT64,
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
