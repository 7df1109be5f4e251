"""Dispatch by gathering: ``allgather`` (Megatron-Core ``MoEAllGatherTokenDispatcher``).

Every rank of the group gets all tokens and picks its own; partial results are reduce-scattered.
"""

from __future__ import annotations

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension
from .routing import RoutedSizes, exchange, permute, replaced


class AllGather:
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
            row = exchange(
                builder,
                context,
                f"{name}_all_gather",
                Communication.ALL_GATHER,
                gathered_bytes,
                Dimension.EP if context.parallel.etp == 1 else Dimension.ETP_EP,
            )
            gathered = builder.temporary("gathered_tokens", gathered_bytes, row)
        row = permute(builder, context, f"{name}_permute", arrived, arrived)
        return replaced(builder, gathered, "expert_input", arrived, row)

    def combine(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
    ) -> Tensor:
        """Spread the outputs over all tokens, then reduce-scatter."""
        hidden = context.model.hidden_size
        gathered_bytes = context.item * sizes.tokens * hidden * context.parallel.ep * context.parallel.etp
        row = permute(
            builder, context, f"{name}_unpermute", context.item * sizes.copies * hidden, gathered_bytes
        )
        current = replaced(builder, source, "unpermuted_tokens", gathered_bytes, row)
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
