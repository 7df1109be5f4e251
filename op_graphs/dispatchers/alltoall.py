"""Dispatch by all-to-all: ``alltoall`` (Megatron-Core ``token_dispatcher.py``, ``MoEAlltoAllTokenDispatcher``).

Permute by expert, all-to-all, sort by local expert; the reverse on the way back. A token travels once for each chosen
expert.
"""

from __future__ import annotations

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension
from .permutation import Permutation, add_copies, gather_copies
from .routing import RoutedSizes, exchange, permute, read_counts, replaced

_COUNT_LAUNCHES = 18
"""Operations of PyTorch before the host waits (``preprocess``): sums by expert, by rank and by local expert, five
copies to the host, and the gather of the numbers of all ranks, a collective in a function that counts as five."""


class AllToAll:
    """Permute, all-to-all, sort; with expert tensor parallelism a gather over its ranks."""

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Bring ``[tokens, hidden]`` to the experts; returns the tensor by local expert, which the caller releases."""
        hidden = context.routed_size
        sent = context.item * sizes.sent_copies / context.parallel.etp * hidden
        load, most = context.load.copies, context.load.most_copies
        arrived = context.item * sizes.copies * hidden
        routed = builder.last_row
        current = gather_copies(
            builder, context, self.permutation(context, sizes), f"{name}_permute", "permuted_tokens"
        )
        # The permutation is launched before the host waits (``before_ep_alltoall``, without peers ``before_finish``).
        read_counts(builder, context, name, routed, _COUNT_LAUNCHES)
        if context.parallel.ep > 1:
            row = exchange(
                builder, context, f"{name}_all_to_all", Communication.ALL_TO_ALL, sent * most, Dimension.EP
            )
            current = replaced(builder, current, "dispatched_tokens", sent * load, row)
        if context.parallel.etp > 1:
            row = exchange(
                builder, context, f"{name}_all_gather", Communication.ALL_GATHER, arrived, Dimension.ETP
            )
            current = replaced(builder, current, "gathered_tokens", arrived, row)
        if sizes.local_experts > 1 and context.parallel.ep > 1:
            row = permute(builder, context, f"{name}_sort_by_expert", arrived, arrived)
            current = replaced(builder, current, "expert_input", arrived, row)
        return current

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Bring expert outputs back and add them up for each token; releases ``source``."""
        hidden = context.routed_size
        sent = context.item * sizes.sent_copies / context.parallel.etp * hidden
        load, most = context.load.copies, context.load.most_copies
        arrived = context.item * sizes.copies * hidden
        current = source
        if sizes.local_experts > 1 and context.parallel.ep > 1:
            row = permute(builder, context, f"{name}_unsort", arrived, arrived)
            current = replaced(builder, current, "unsorted_tokens", arrived, row)
        if context.parallel.etp > 1:
            row = exchange(
                builder,
                context,
                f"{name}_reduce_scatter",
                Communication.REDUCE_SCATTER,
                arrived,
                Dimension.ETP,
            )
            current = replaced(builder, current, "reduced_tokens", sent * load, row)
        if context.parallel.ep > 1:
            row = exchange(
                builder, context, f"{name}_all_to_all", Communication.ALL_TO_ALL, sent * most, Dimension.EP
            )
            current = replaced(builder, current, "combined_tokens", sent, row)
        permutation = self.permutation(context, sizes)
        return add_copies(builder, context, permutation, f"{name}_unpermute", "expert_output", current)

    def permutation(self, context: LoweringContext, sizes: RoutedSizes) -> Permutation:
        """Tokens of the rank to what it sends."""
        width = context.item * context.routed_size
        copies = sizes.sent_copies / context.parallel.etp
        return Permutation(sizes.tokens, copies, context.experts.experts, width)
