"""Context-parallel algorithms by the name ``parallel.cp_comm`` gives them: one file each, one line here."""

from __future__ import annotations

from .algorithm import ContextParallelAlgorithm
from .dtensor_ring import DTENSOR_ALLGATHER, DTENSOR_ALLTOALL
from .gathered import GATHERED
from .ring import RING_ATTENTION
from .switched import ALL_TO_ALL, ALL_TO_ALL_AND_RING

ALGORITHMS: dict[str, ContextParallelAlgorithm] = {
    "p2p": RING_ATTENTION,
    "a2a": ALL_TO_ALL,
    "allgather": GATHERED,
    "a2a+p2p": ALL_TO_ALL_AND_RING,
    "dtensor-allgather": DTENSOR_ALLGATHER,
    "dtensor-alltoall": DTENSOR_ALLTOALL,
}
