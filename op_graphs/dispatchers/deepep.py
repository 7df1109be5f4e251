"""Node-limited dispatch: ``deepep`` (DeepEP, DeepSeek; Megatron-Core's flex dispatcher).

A token crosses the fabric once to each *domain*, and travels there once to each *rank*, that holds any of its experts;
a kernel behind copies it for each local expert.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import ExchangeShape
from ..lower_quantization import cast
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension
from .alltoall import AllToAll
from .routing import RoutedSizes, exchange, permute, replaced


class DeepEP(AllToAll):
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
        current = replaced(builder, quantized, "dispatched_tokens", unique * context.load.unique, row)
        local = item * sizes.copies / context.parallel.etp * hidden
        row = permute(builder, context, f"{name}_permute", unique * context.load.unique, local)
        current = replaced(builder, current, "expert_input", local, row)
        if context.parallel.etp > 1:
            arrived = item * sizes.copies * hidden
            row = exchange(
                builder, context, f"{name}_all_gather", Communication.ALL_GATHER, arrived, Dimension.ETP
            )
            current = replaced(builder, current, "gathered_tokens", arrived, row)
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
            row = exchange(
                builder,
                context,
                f"{name}_reduce_scatter",
                Communication.REDUCE_SCATTER,
                arrived,
                Dimension.ETP,
            )
            current = replaced(builder, current, "reduced_tokens", arrived / etp, row)
        unique = item * self._unique(context, sizes) * hidden * context.load.unique
        row = permute(builder, context, f"{name}_unpermute", arrived / etp, unique)
        current = replaced(builder, current, "unpermuted_tokens", unique, row)
        row = self._send(builder, context, sizes, f"{name}_all_to_all", item)
        return replaced(builder, current, "expert_output", item * sizes.tokens * hidden, row)

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
        return exchange(builder, context, name, Communication.ALL_TO_ALL, message, Dimension.EP, shape)


def _top_k(context: LoweringContext) -> int:
    assert context.model.moe is not None
    return context.model.moe.top_k


def _routes(context: LoweringContext) -> ExchangeShape:
    """How tokens choose among the experts."""
    moe = context.model.moe
    assert moe is not None
    return ExchangeShape(0.0, moe.top_k, moe.routing_groups, moe.top_groups)
