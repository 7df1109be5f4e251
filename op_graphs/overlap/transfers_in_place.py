"""Transfers between stages in place: a send holds up the compute behind it."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import RankTransfers, TransferPlacement


class TransfersInPlace(TransferPlacement):
    """Compute waits for the sends before it; a receive is posted as early as it likes.

    Frameworks without overlap post both directions of an exchange together (Megatron-LM
    ``send_forward_recv_backward``), so a send never waits for a receive that is not posted.
    """

    name = "in-place"
    beside = "nothing on the sender: a send holds up the compute behind it for as long as it transfers"
    follows = "Megatron-LM without --overlap-p2p-communication, if the other side is always ready"

    host_waits = True

    def behind(self, transfers: RankTransfers, *, is_send: bool, awaited: bool) -> Sequence[int]:
        """Nothing more."""
        return ()

    def compute_waits(self, transfers: RankTransfers) -> Sequence[int]:
        """The sends."""
        return transfers.sends
