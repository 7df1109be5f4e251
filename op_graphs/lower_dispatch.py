"""Lowering of expert dispatch: how tokens reach the ranks of their experts, and how results come back.

One class a dispatcher, registered in :data:`DISPATCHERS`. A rank sends what balanced routing makes it send, and gets
what ``context.load`` says; an exchange takes as long as that of its most loaded rank.

- ``alltoall`` (Megatron-Core ``token_dispatcher.py``, ``MoEAlltoAllTokenDispatcher``): permute by expert, all-to-all,
  sort by local expert; the reverse on the way back. A token travels once for each chosen expert.
- ``allgather`` (``MoEAllGatherTokenDispatcher``): every rank of the group gets all tokens and picks its own; partial
  results are reduce-scattered.
- ``deepep`` (DeepEP, DeepSeek; Megatron-Core's flex dispatcher): a token crosses the fabric once to each *domain*, and
  travels there once to each *rank*, that holds any of its experts; a kernel behind copies it for each local expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .graph import ExchangeShape
from .lower_quantization import cast
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, OpKind


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


class _AllToAll:
    """Permute, all-to-all, sort; with expert tensor parallelism a gather over its ranks."""

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Bring ``[tokens, hidden]`` to the experts; returns the tensor by local expert, which the caller releases."""
        hidden = context.model.hidden_size
        sent = context.item * sizes.sent_copies / context.parallel.etp * hidden
        load, most = context.load.copies, context.load.most_copies
        arrived = context.item * sizes.copies * hidden
        row = _permute(builder, context, f"{name}_permute", context.item * sizes.tokens * hidden, sent)
        current = builder.temporary("permuted_tokens", sent, row)
        if context.parallel.ep > 1:
            row = _exchange(
                builder, context, f"{name}_all_to_all", Communication.ALL_TO_ALL, sent * most, Dimension.EP
            )
            current = _replace(builder, current, "dispatched_tokens", sent * load, row)
        if context.parallel.etp > 1:
            row = _exchange(
                builder, context, f"{name}_all_gather", Communication.ALL_GATHER, arrived, Dimension.ETP
            )
            current = _replace(builder, current, "gathered_tokens", arrived, row)
        if sizes.local_experts > 1 and context.parallel.ep > 1:
            row = _permute(builder, context, f"{name}_sort_by_expert", arrived, arrived)
            current = _replace(builder, current, "expert_input", arrived, row)
        return current

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Bring expert outputs back and add them up for each token; releases ``source``."""
        hidden = context.model.hidden_size
        sent = context.item * sizes.sent_copies / context.parallel.etp * hidden
        load, most = context.load.copies, context.load.most_copies
        arrived = context.item * sizes.copies * hidden
        current = source
        if sizes.local_experts > 1 and context.parallel.ep > 1:
            row = _permute(builder, context, f"{name}_unsort", arrived, arrived)
            current = _replace(builder, current, "unsorted_tokens", arrived, row)
        if context.parallel.etp > 1:
            row = _exchange(
                builder,
                context,
                f"{name}_reduce_scatter",
                Communication.REDUCE_SCATTER,
                arrived,
                Dimension.ETP,
            )
            current = _replace(builder, current, "reduced_tokens", sent * load, row)
        if context.parallel.ep > 1:
            row = _exchange(
                builder, context, f"{name}_all_to_all", Communication.ALL_TO_ALL, sent * most, Dimension.EP
            )
            current = _replace(builder, current, "combined_tokens", sent, row)
        result = context.item * sizes.tokens * hidden
        row = _permute(builder, context, f"{name}_unpermute", sent, result)
        return _replace(builder, current, "expert_output", result, row)


class _DeepEP(_AllToAll):
    """A token goes once to each domain, and there once to each rank, that holds any of its experts.

    What has arrived is copied for each local expert, and the copies are added up again before the way back. With
    ``training.fp8_dispatch`` tokens and gradients are quantised before they leave; results return as they are.
    """

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Send ``[tokens, hidden]`` to the ranks of the experts, then copy them for each expert."""
        if context.parallel.ep == 1:
            return super().dispatch(builder, context, sizes, name)
        hidden, item = context.model.hidden_size, context.item
        quantized: Tensor | None = None
        if context.dispatches_quantized:
            assert context.recipe is not None
            item = context.recipe.activation_bytes
            row = cast(builder, context, name, float(sizes.tokens * hidden), copies=1)
            quantized = builder.temporary("quantized_tokens", item * sizes.tokens * hidden, row)
        row = self._send(builder, context, sizes, f"{name}_all_to_all", item)
        unique = item * self._unique(context, sizes) * hidden
        current = _replace(builder, quantized, "dispatched_tokens", unique * context.load.unique, row)
        local = item * sizes.copies / context.parallel.etp * hidden
        row = _permute(builder, context, f"{name}_permute", unique * context.load.unique, local)
        current = _replace(builder, current, "expert_input", local, row)
        if context.parallel.etp > 1:
            arrived = item * sizes.copies * hidden
            row = _exchange(
                builder, context, f"{name}_all_gather", Communication.ALL_GATHER, arrived, Dimension.ETP
            )
            current = _replace(builder, current, "gathered_tokens", arrived, row)
        return current

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Add up the copies of each token, then send them back to where they are added up over the ranks."""
        if context.parallel.ep == 1:
            return super().combine(builder, context, sizes, source, name)
        hidden, item = context.model.hidden_size, context.item
        current, etp = source, context.parallel.etp
        arrived = item * sizes.copies * hidden
        if etp > 1:
            row = _exchange(
                builder,
                context,
                f"{name}_reduce_scatter",
                Communication.REDUCE_SCATTER,
                arrived,
                Dimension.ETP,
            )
            current = _replace(builder, current, "reduced_tokens", arrived / etp, row)
        unique = item * self._unique(context, sizes) * hidden * context.load.unique
        row = _permute(builder, context, f"{name}_unpermute", arrived / etp, unique)
        current = _replace(builder, current, "unpermuted_tokens", unique, row)
        row = self._send(builder, context, sizes, f"{name}_all_to_all", item)
        return _replace(builder, current, "expert_output", item * sizes.tokens * hidden, row)

    def _unique(self, context: LoweringContext, sizes: RoutedSizes) -> float:
        """Tokens that a rank sends, each once for every rank with any of its experts."""
        ep = context.parallel.ep
        return sizes.sent_copies / context.parallel.etp * ep * _routes(context).chance(ep) / _top_k(context)

    def _send(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str, item: float
    ) -> int:
        width, most = item * context.model.hidden_size, context.load.most_unique
        tokens = sizes.sent_copies / context.parallel.etp / _top_k(context)
        shape = replace(_routes(context), token_bytes=width * tokens, most=most)
        message = width * self._unique(context, sizes) * most
        return _exchange(builder, context, name, Communication.ALL_TO_ALL, message, Dimension.EP, shape)


def _top_k(context: LoweringContext) -> int:
    assert context.model.moe is not None
    return context.model.moe.top_k


def _routes(context: LoweringContext) -> ExchangeShape:
    """How tokens choose among the experts."""
    moe = context.model.moe
    assert moe is not None
    return ExchangeShape(0.0, moe.top_k, moe.routing_groups, moe.top_groups)


class _AllGather:
    """Every rank of the expert-parallel group gets all tokens."""

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Gather all tokens, then pick those of the local experts."""
        hidden = context.model.hidden_size
        gathered_bytes = context.item * sizes.tokens * hidden * context.parallel.ep * context.parallel.etp
        arrived = context.item * sizes.copies * hidden
        gathered: Tensor | None = None
        if context.parallel.ep * context.parallel.etp > 1:
            row = _exchange(
                builder,
                context,
                f"{name}_all_gather",
                Communication.ALL_GATHER,
                gathered_bytes,
                Dimension.EP if context.parallel.etp == 1 else Dimension.ETP_EP,
            )
            gathered = builder.temporary("gathered_tokens", gathered_bytes, row)
        row = _permute(builder, context, f"{name}_permute", arrived, arrived)
        return _replace(builder, gathered, "expert_input", arrived, row)

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Spread the outputs over all tokens, then reduce-scatter."""
        hidden = context.model.hidden_size
        gathered_bytes = context.item * sizes.tokens * hidden * context.parallel.ep * context.parallel.etp
        row = _permute(
            builder, context, f"{name}_unpermute", context.item * sizes.copies * hidden, gathered_bytes
        )
        current = _replace(builder, source, "unpermuted_tokens", gathered_bytes, row)
        if context.parallel.ep * context.parallel.etp == 1:
            return current
        row = _exchange(
            builder,
            context,
            f"{name}_reduce_scatter",
            Communication.REDUCE_SCATTER,
            gathered_bytes,
            Dimension.EP if context.parallel.etp == 1 else Dimension.ETP_EP,
        )
        return _replace(builder, current, "expert_output", context.item * sizes.tokens * hidden, row)


Dispatcher = _AllToAll | _AllGather

DISPATCHERS: dict[str, Dispatcher] = {
    "alltoall": _AllToAll(),
    "allgather": _AllGather(),
    "deepep": _DeepEP(),
}
"""Dispatchers by the name ``parallel.ep_dispatcher`` gives them."""


def _permute(
    builder: ProgramBuilder, context: LoweringContext, name: str, read: float, written: float
) -> int:
    return builder.memory_bound(
        name, OpKind.PERMUTE, read=read, written=written, access="strided", dtype=context.dtype
    )


def _exchange(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    communication: Communication,
    size: float,
    dimension: Dimension,
    shape: ExchangeShape | None = None,
) -> int:
    row = builder.collective(
        name, communication, size, dimension, context.group(dimension), dtype=context.dtype, shape=shape
    )
    builder.wait_for(row)
    return row


def _replace(builder: ProgramBuilder, old: Tensor | None, name: str, size: float, row: int) -> Tensor:
    """A new buffer made by ``row`` out of an old one, which is released."""
    if old is not None:
        builder.release(old, row)
    return builder.temporary(name, size, row)
