"""Transfers between stages beside compute: sends are not waited for, receives are posted one action early."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import RankTransfers, TransferPlacement


class TransfersAhead(TransferPlacement):
    """A stream for each neighbour and direction; compute waits for nothing but what it reads."""

    name = "ahead"
    beside = (
        "a send beside the compute behind it; a receive is posted when the action before its reader starts"
    )
    follows = "Megatron-LM --overlap-p2p-communication, torch.distributed.pipelining"

    def behind(self, transfers: RankTransfers, *, is_send: bool, awaited: bool) -> Sequence[int]:
        """A receive: behind the action before the one that stands in front of it."""
        return transfers.compute_ends[-2:-1] if not is_send and len(transfers.compute_ends) > 1 else ()

    def compute_waits(self, transfers: RankTransfers) -> Sequence[int]:
        """Nothing more."""
        return ()
