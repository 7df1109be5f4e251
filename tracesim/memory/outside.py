"""Device memory that a process takes beside its allocator: the context, and the buffers of its communicators.

PyTorch counts neither in allocated nor in reserved memory; ``nvidia-smi`` shows both. The figures are those of the
machine's profile, with their sources: per process, per communicator, and per peer of an all-to-all, for which the
collective library connects every pair with channels of their own. Left out: buffers of other libraries (NVSHMEM,
DeepEP's for the network), and registered user buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware_profiles.profile import HardwareProfile
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication

_GIB = 2**30


@dataclass(frozen=True)
class OutsideAllocator:
    """Bytes of a rank that its allocator does not know of."""

    context: int
    communicators: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.context + self.communicators


def outside_allocator(graph: OpGraph, rank: int, profile: HardwareProfile) -> OutsideAllocator:
    """What the rank at row ``rank`` of ``graph.ranks`` takes beside its allocator.

    The pairs of a pipeline share a communicator, as in Megatron-LM; otherwise each group of ranks has its own.
    """
    operations, network = graph.operations, profile.network
    rows = np.flatnonzero((operations.rank == rank) & (operations.group >= 0))
    used = [graph.groups[number] for number in np.unique(operations.group[rows]).tolist()]
    communicators = {(group.name, () if group.name == "pp" else group.ranks) for group in used}
    exchanges = rows[operations.communication[rows] == Communication.ALL_TO_ALL]
    own = int(graph.ranks[rank]) // network.gpus_per_domain
    peers = {
        (number, peer)
        for number in np.unique(operations.group[exchanges]).tolist()
        for peer in graph.groups[number].ranks
        if peer // network.gpus_per_domain == own and peer != int(graph.ranks[rank])
    }
    size = len(communicators) * network.communicator_gib + len(peers) * network.exchange_peer_gib
    return OutsideAllocator(round(profile.memory.context_gib * _GIB), round(size * _GIB))
