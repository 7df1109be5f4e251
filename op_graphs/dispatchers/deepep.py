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
from .permutation import Permutation, add_copies, gather_copies, make_map
from .routing import COUNT_LAUNCHES, RoutedSizes, exchange, read_counts, replaced


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
        hidden, item = context.routed_size, context.item
        quantized: Tensor | None = None
        if context.dispatches_quantized:
            assert context.recipe is not None
            item = context.recipe.activation_bytes
            row = cast(builder, context, name, float(sizes.tokens * hidden), copies=1)
            quantized = builder.temporary("quantized_tokens", item * sizes.tokens * hidden, row)
        self.lay_out(builder, context, sizes, name)
        # The dispatch is launched when the host knows what arrives (``Buffer.dispatch`` waits for the layout kernels).
        read_counts(builder, context, name, builder.last_row, COUNT_LAUNCHES)
        row = self._send(builder, context, sizes, name, item)
        unique = item * self._unique(context, sizes) * hidden
        current = replaced(builder, quantized, "dispatched_tokens", unique * context.load.unique, row)
        permutation = replace(self.permutation(context, sizes), row_bytes=item * hidden)
        self.find_rows(builder, context, permutation, name)
        current = gather_copies(builder, context, permutation, f"{name}_permute", "expert_input", current)
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
        hidden, item = context.routed_size, context.item
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
        permutation = self.permutation(context, sizes)
        current = add_copies(builder, context, permutation, f"{name}_unpermute", "unpermuted_tokens", current)
        row = self._send(builder, context, sizes, name, item)
        return replaced(builder, current, "expert_output", item * sizes.tokens * hidden, row)

    def lay_out(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> None:
        """What says where tokens go, in front of a dispatch; DeepEP's kernels of a few numbers are not counted."""

    def find_rows(
        self, builder: ProgramBuilder, context: LoweringContext, permutation: Permutation, name: str
    ) -> None:
        """What says which rows of the experts a token that arrived is copied to."""
        make_map(builder, context, permutation, context.experts.top_k, name)

    def score_bytes(self, name: str) -> float:
        """Bytes of scores, for one token and expert, that travel with a token in an exchange."""
        return 0.0

    def map_bytes(self, context: LoweringContext, sizes: RoutedSizes, name: str) -> float:
        """Bytes of what a rank says of its tokens to all others in front of an exchange."""
        return 0.0

    def permutation(self, context: LoweringContext, sizes: RoutedSizes) -> Permutation:
        """Tokens that arrived, each once, to those of the local experts."""
        if context.parallel.ep == 1:
            return super().permutation(context, sizes)
        unique = self._unique(context, sizes) * context.load.unique
        copies = sizes.copies / context.parallel.etp
        return Permutation(unique, copies, sizes.local_experts, context.item * context.routed_size)

    def _unique(self, context: LoweringContext, sizes: RoutedSizes) -> float:
        """Tokens that a rank sends, each once for every rank with any of its experts."""
        ep = context.parallel.ep
        return (
            sizes.sent_copies
            / context.parallel.etp
            * ep
            * _routes(context).chance(ep)
            / context.experts.top_k
        )

    def _send(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str, item: float
    ) -> int:
        width, most = item * context.routed_size, context.load.most_unique
        tokens = sizes.sent_copies / context.parallel.etp / context.experts.top_k
        scores = self.score_bytes(name) * context.experts.experts
        shape = replace(
            _routes(context),
            token_bytes=width * tokens,
            most=most,
            score_bytes=scores * tokens,
            map_bytes=self.map_bytes(context, sizes, name),
        )
        message = (width + scores) * self._unique(context, sizes) * most
        name = f"{name}_all_to_all"
        return exchange(builder, context, name, Communication.ALL_TO_ALL, message, Dimension.EP, shape)


def _routes(context: LoweringContext) -> ExchangeShape:
    """How tokens choose among the experts; given in turn, those of a token are the next ``top_k``."""
    moe = context.experts
    if context.libraries.experts_in_turn:
        return ExchangeShape(0.0, moe.top_k, max(1, moe.experts // moe.top_k), 1)
    return ExchangeShape(0.0, moe.top_k, moe.routing_groups, moe.top_groups)
