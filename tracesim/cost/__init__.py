"""Cost models: how long each operation of a graph takes on a machine, alone and with all peers there.

One file a formula (:mod:`gemm`, :mod:`attention`, :mod:`memory_bound`, :mod:`collectives`); :mod:`compute` chooses
among the first three. No formula knows a model, a schedule or the engine.
"""

from __future__ import annotations

from hardware_profiles.profile import HardwareProfile
from op_graphs.columns import Int8, Int64
from op_graphs.graph import OpGraph

from .collectives import Algorithm, CollectiveCost, CollectiveEstimate, Placement, Protocol, Tier
from .compute import ComputeCost, ComputeEstimate, Provenance

__all__ = [
    "Algorithm",
    "CollectiveCost",
    "CollectiveEstimate",
    "ComputeCost",
    "ComputeEstimate",
    "CostModel",
    "Placement",
    "Protocol",
    "Provenance",
    "Tier",
]


class CostModel:
    """Durations of all operations of a graph on one machine.

    Args:
        profile: the machine.
        available_sms: SMs left to compute beside communication; all of them by default.
        reserved_sms: of these, SMs that matrix products leave free.

    Raises:
        ValueError: as :class:`ComputeCost`.
    """

    def __init__(
        self, profile: HardwareProfile, available_sms: int | None = None, reserved_sms: int = 0
    ) -> None:
        self.profile = profile
        self.compute = ComputeCost(profile, available_sms, reserved_sms)
        self.collectives = CollectiveCost(profile)

    @property
    def gap_ns(self) -> int:
        """Idle time between two kernels queued back to back; part of no duration."""
        return self.compute.gap_ns

    def durations_ns(self, graph: OpGraph) -> Int64:
        """Duration of every row, compute and communication, in nanoseconds.

        Rows of kind ``HOST`` or ``ANNOTATION``, and rows with neither shape, bytes nor FLOPs, take 0.

        Raises:
            ValueError: if an operation cannot be costed; names the operation and what is missing.
        """
        return self.compute.durations_ns(graph) + self.collectives.durations_ns(graph)

    def provenances(self, graph: OpGraph) -> Int8:
        """:class:`Provenance` of the duration of every compute row; communication rows count as modelled."""
        return self.compute.estimates(graph)[1]
