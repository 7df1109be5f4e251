"""Dispatch by gathering: ``allgather`` (Megatron-Core ``MoEAllGatherTokenDispatcher``).

Every rank of the group gets all tokens and picks its own; partial results are reduce-scattered.
"""

from __future__ import annotations

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension
from .permutation import Permutation, add_copies, gather_copies
from .routing import COUNT_LAUNCHES, RoutedSizes, exchange, read_counts, replaced


class AllGather:
    """Every rank of the expert-parallel group gets all tokens."""

    def dispatch(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> Tensor:
        """Gather all tokens, then pick those of the local experts."""
        hidden = context.routed_size
        gathered_bytes = context.item * sizes.tokens * hidden * context.parallel.ep * context.parallel.etp
        gathered: Tensor | None = None
        if context.parallel.ep * context.parallel.etp > 1:
            row = exchange(
                builder,
                context,
                f"{name}_all_gather",
                Communication.ALL_GATHER,
                gathered_bytes,
                Dimension.EP if context.parallel.etp == 1 else Dimension.ETP_EP,
            )
            gathered = builder.temporary("gathered_tokens", gathered_bytes, row)
        read_counts(builder, context, name, builder.end_row, COUNT_LAUNCHES)
        permutation = self.permutation(context, sizes)
        return gather_copies(builder, context, permutation, f"{name}_permute", "expert_input", gathered)

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Spread the outputs over all tokens, then reduce-scatter."""
        hidden = context.routed_size
        gathered_bytes = context.item * sizes.tokens * hidden * context.parallel.ep * context.parallel.etp
        permutation = self.permutation(context, sizes)
        current = add_copies(builder, context, permutation, f"{name}_unpermute", "unpermuted_tokens", source)
        if context.parallel.ep * context.parallel.etp == 1:
            return current
        row = exchange(
            builder,
            context,
            f"{name}_reduce_scatter",
            Communication.REDUCE_SCATTER,
            gathered_bytes,
            Dimension.EP if context.parallel.etp == 1 else Dimension.ETP_EP,
        )
        return replaced(builder, current, "expert_output", context.item * sizes.tokens * hidden, row)

    def permutation(self, context: LoweringContext, sizes: RoutedSizes) -> Permutation:
        """Tokens of the whole group to those of the local experts."""
        width = context.item * context.routed_size
        tokens = sizes.tokens * context.parallel.ep * context.parallel.etp
        return Permutation(tokens, sizes.copies, sizes.local_experts, width)
