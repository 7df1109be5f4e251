"""Transfers between stages in batches: what stands between two actions is one kernel, and both sides wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from op_graphs.plan import ParallelPlan

from .policy import RankTransfers, TransferPlacement

_JOINED = "interleaved-1f1b"
_POSTED_SO = ("1f1b", "gpipe", "forward", _JOINED)


class TransfersBatched(TransferPlacement):
    """The sends and receives between two compute actions are one batch, and batches follow each other.

    A batch is posted behind the compute before it and behind the batch before it, and the compute behind it waits for
    all of it: also for a send whose receiver has not come to its own batch yet. A receive that the next action does not
    need is posted with the batch but awaited by its reader only, as the schedule's communication pass posts it early.
    In the interleaved schedule one batch follows a forward and a backward together, and ranks run in lockstep.
    """

    name = "batched"
    beside = (
        "nothing: the transfers between two actions are one kernel, which compute on both sides waits for"
    )
    follows = "Megatron-LM batch_isend_irecv (batch_p2p_comm) without --overlap-p2p-communication"

    host_waits = True

    def refusal(self, parallel: ParallelPlan, schedule: str) -> str | None:
        """Ranks whose batches do not belong together run one after the other; files are taken at their word."""
        if parallel.pp == 1 or schedule.partition(":")[0] in _POSTED_SO or schedule.endswith(".csv"):
            return None
        return f"needs a schedule whose ranks post their batches together: {', '.join(_POSTED_SO)}"

    def joins(self, schedule: str) -> bool:
        """The interleaved one."""
        return schedule.partition(":")[0] == _JOINED

    def behind(self, transfers: RankTransfers, *, is_send: bool, awaited: bool) -> Sequence[int]:
        """Behind the last compute and the batch before."""
        return (*transfers.compute_ends[-1:], *transfers.batch) if is_send or awaited else ()

    def compute_waits(self, transfers: RankTransfers) -> Sequence[int]:
        """The whole batch."""
        return (*transfers.sends, *transfers.receives)
