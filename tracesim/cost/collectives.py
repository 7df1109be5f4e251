"""Durations of collectives and sends: the cheapest algorithm and protocol, from latency and bandwidth of each tier.

A group is placed by its global rank numbers: ranks ``[d * g, (d + 1) * g)`` share fast domain ``d`` of ``g`` GPUs. Each
algorithm costs a number of steps, each with the latency of the tier it crosses, plus the time of its slowest link.
What NCCL's tuner does by estimate, this does as well: the minimum over all (algorithm, protocol) pairs.

- Ring: a chunk passes every member. Between domains there are as many rings as a domain has members, each with its
  own NIC (rails), so the NICs of a domain work in parallel.
- Tree: two complementary binary trees over the domains, a chain inside each (all-reduce across domains).
- NVLS: the switch reduces and multicasts (all-reduce, gather, scatter in a domain), with trees between domains for
  the all-reduce.
- Exchange: every pair sends directly (all-to-all, gather, scatter, sends). One of tokens with experts may instead cross
  to each domain once and be handed on there (:class:`~op_graphs.graph.ExchangeShape`, as DeepEP does).

Sibling groups share the bridge of a domain that has one (:mod:`.bridge`), and the uplinks of the leaf of an
oversubscribed fabric (:mod:`.uplink`).

Left out: adaptive routing and congestion beyond that, groups that share links without being siblings (contention is
another engine, :mod:`tracesim.contention`), PAT, in-network reduction in
InfiniBand switches, and the slower pairs of a mesh without a switch. Sources: Hu et al., "Demystifying NCCL"
(arXiv:2507.04786), for protocols and steps; Thakur et al. (2005) for the traffic of the algorithms; Sanders et al.
(2009) for the two trees. ``docs/collective_cost.md`` holds formulas and residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hardware_profiles.profile import HardwareProfile, LinkFigures, MeasuredCollective
from op_graphs.columns import Int64
from op_graphs.graph import ExchangeShape, OpGraph
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication

from .bridge import Crossing, crossing
from .collective_plans import (
    EXCHANGES,
    RING_PASSES,
    SENDS,
    Plan,
    plans,
    traffic_factor,
)
from .collective_plans import Algorithm as Algorithm
from .collective_plans import Placement as Placement
from .collective_plans import Protocol as Protocol
from .collective_plans import Tier as Tier
from .distinct import distinct_rows
from .uplink import Departure, departure

NANOSECONDS_PER_MICROSECOND = 1e3


PROTOCOL_BANDWIDTH: dict[Protocol, float] = {Protocol.LL: 0.375, Protocol.LL128: 0.95, Protocol.SIMPLE: 1.0}
"""Share of a link's rate. LL sends a 4-byte flag with every 4 bytes and reaches 25 to 50 % (the middle is taken),
LL128 carries 120 of 128 bytes, Simple is unhampered (arXiv:2507.04786, table of protocols)."""

PROTOCOL_LATENCY: dict[Protocol, float] = {Protocol.LL: 0.5, Protocol.LL128: 1.0, Protocol.SIMPLE: 3.0}
"""Latency of a step over the one of LL128, which is what a profile's ``latency_us`` holds. The same table gives
about 1, 2 and 6 us a hop: a flag beside the data arrives with it, a memory fence has to be waited for."""


@dataclass(frozen=True)
class CollectiveEstimate:
    """Duration of a collective once all members are there, and what it does to the links."""

    time_ns: int
    algorithm: Algorithm
    protocol: Protocol
    tier: Tier
    domain_bytes: float
    """Bytes that the busiest GPU sends (and receives) inside its domain."""
    fabric_bytes: float
    """Bytes that the busiest NIC sends (and receives)."""
    bus_gb_per_s: float
    """Traffic of the ideal algorithm on one GPU over the duration, as nccl-tests prints it; GB/s."""
    bridge_bytes: float = 0.0
    """Bytes that all groups together move over the bridge of a domain, in each direction."""
    uplink_bytes: float = 0.0
    """Bytes that leave the leaf of a group, for each NIC of the leaf."""


@dataclass(frozen=True)
class _SharedLinks:
    """How a group and its siblings, which do the same at the same time, cross the links that they share."""

    bridge: Crossing | None
    uplink: Departure

    def uplink_bytes(self, plan: Plan) -> float:
        """What leaves the leaf for each of its NICs."""
        exchanges = plan.algorithm == Algorithm.EXCHANGE
        return plan.fabric_bytes * (self.uplink.exchanged if exchanges else self.uplink.passing)

    def bridge_bytes(self, plan: Plan) -> float:
        """What crosses the bridge; a measured line of one group holds the crossing of that one."""
        if self.bridge is None or plan.domain_bytes == 0:
            return 0.0
        moved = plan.domain_bytes
        members = self.bridge.near + self.bridge.far
        if plan.algorithm == Algorithm.EXCHANGE and members > 2:
            # Every member of one side sends to every one of the other; domain_bytes is what it sends to all others.
            moved *= self.bridge.near * self.bridge.far / (members - 1)
        return self.bridge.groups * moved


class CollectiveCost:
    """Durations of communication operations on a machine."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self._measured = {
            (row.communication, row.tier, row.group_size): row
            for row in reversed(profile.measured_collectives)
        }

    def duration_ns(
        self,
        communication: Communication,
        message_bytes: float,
        ranks: tuple[int, ...],
        algorithm: Algorithm | None = None,
        protocol: Protocol | None = None,
        exchange: ExchangeShape | None = None,
    ) -> CollectiveEstimate:
        """Duration of one collective or send from when its last member has arrived.

        Args:
            communication: what is done.
            message_bytes: the unsharded buffer of a gather, scatter, reduction or all-to-all on one rank, the
                payload of a send; bytes.
            ranks: global ranks of the members. A send between more than two takes the slowest pair of neighbours,
                the last and the first being neighbours in a ``SEND_RECEIVE`` only.
            algorithm: only this one, by its formula even where the profile holds a measured line; None for any.
            protocol: the same of the protocol.
            exchange: how an all-to-all travels that does not send each pair of ranks a part of its own.

        Returns:
            The cheapest algorithm and protocol; the first in the order of this module where two tie.

        Raises:
            ValueError: if the communication cannot be costed, the size is negative, the ranks are no group, or the
                algorithm or protocol does not do this communication in this group.
        """
        if message_bytes < 0:
            raise ValueError(
                f"{communication.name} has a message of {message_bytes} bytes; it must be 0 or more"
            )
        if communication not in RING_PASSES.keys() | SENDS | EXCHANGES:
            known = sorted(c.name for c in RING_PASSES.keys() | SENDS | EXCHANGES)
            raise ValueError(
                f"communication {communication.name} cannot be costed; known are {', '.join(known)}"
            )
        placement = self._placement(communication, ranks)
        tier = placement.tier
        if tier == Tier.SELF:
            return CollectiveEstimate(0, Algorithm.NONE, Protocol.NONE, tier, 0.0, 0.0, 0.0)
        size = 0.0 if communication == Communication.BARRIER else float(message_bytes)
        shared = self._shared_links(ranks, is_send=communication in SENDS)
        measured = self._measured_line(communication, placement)
        if measured is not None and algorithm is None and protocol is None:
            return self._measured_estimate(measured, communication, size, placement, shared, exchange)
        best: tuple[float, Protocol, Plan] | None = None
        for plan in plans(self.profile.network.multicast, communication, size, placement, exchange):
            for handing in plan.protocols:
                if algorithm not in (None, plan.algorithm) or protocol not in (None, handing):
                    continue
                time_ns = self._time_ns(plan, handing, communication in SENDS, shared)
                if best is None or time_ns < best[0]:
                    best = (time_ns, handing, plan)
        if best is None:
            asked = " ".join(part.value for part in (algorithm, protocol) if part)
            raise ValueError(
                f"{asked} does no {communication.name} among {placement.size} ranks in {placement.domains} domains"
            )
        return self._estimate(best[0], best[2], best[1], communication, size, placement, shared)

    def durations_ns(self, graph: OpGraph) -> Int64:
        """Duration of every communication row of a graph, nanoseconds; 0 for compute rows.

        Raises:
            ValueError: as :meth:`duration_ns`, with the name of the first operation that is refused.
        """
        operations = graph.operations
        durations = np.zeros(len(operations), dtype=np.int64)
        rows = np.flatnonzero(graph.is_communication())
        if not len(rows):
            return durations
        columns = ("communication", "communication_bytes", "group", "shape")
        first, inverse = distinct_rows([getattr(operations, column)[rows] for column in columns])
        times = [self._row_duration_ns(graph, int(row)) for row in rows[first]]
        durations[rows] = np.array(times, dtype=np.int64)[inverse]
        return durations

    def estimate_row(self, graph: OpGraph, row: int) -> CollectiveEstimate:
        """What :meth:`duration_ns` says of one communication row of a graph."""
        operations = graph.operations
        index, number = int(operations.group[row]), int(operations.shape[row])
        shape = graph.shapes[number] if number >= 0 else None
        return self.duration_ns(
            Communication(int(operations.communication[row])),
            float(operations.communication_bytes[row]),
            graph.groups[index].ranks if index >= 0 else (),
            exchange=shape if isinstance(shape, ExchangeShape) else None,
        )

    def _row_duration_ns(self, graph: OpGraph, row: int) -> int:
        operations = graph.operations
        index = int(operations.group[row])
        group = graph.groups[index] if index >= 0 else CommunicationGroup("")
        try:
            return self.estimate_row(graph, row).time_ns
        except ValueError as error:
            name = graph.strings[operations.name[row]]
            raise ValueError(f"operation {name!r} in group {group.name!r}: {error}") from None

    def _measured_line(self, communication: Communication, placement: Placement) -> MeasuredCollective | None:
        name = "p2p" if communication in SENDS else communication.name.lower()
        tier = placement.tier.value
        of_this_size = self._measured.get((name, tier, placement.size))
        return of_this_size or self._measured.get((name, tier, 0))

    def _placement(self, communication: Communication, ranks: tuple[int, ...]) -> Placement:
        gpus_per_domain = self.profile.network.gpus_per_domain
        placement = Placement.of(ranks, gpus_per_domain)
        if communication not in SENDS or placement.size <= 2:
            return placement
        neighbours = list(pairwise(ranks))
        if communication == Communication.SEND_RECEIVE:
            neighbours.append((ranks[-1], ranks[0]))
        crosses = any(a // gpus_per_domain != b // gpus_per_domain for a, b in neighbours)
        return Placement(2, 2, 1, 1) if crosses else Placement(2, 1, 2, 2)

    def _time_ns(self, plan: Plan, protocol: Protocol, is_send: bool, shared: _SharedLinks) -> float:
        network = self.profile.network
        steps_us = (
            plan.domain_steps * network.domain.latency_us + plan.fabric_steps * network.fabric.latency_us
        )
        latency_us = network.collective_base_us + steps_us * PROTOCOL_LATENCY[protocol]
        domain_ns = plan.domain_bytes / (_rate(network.domain, is_send) * plan.domain_share)
        fabric_ns = plan.fabric_bytes / _rate(network.fabric, is_send) if plan.fabric_bytes else 0.0
        slowest_ns = (
            max(domain_ns, fabric_ns, self._shared_ns(plan, shared, is_send)) / PROTOCOL_BANDWIDTH[protocol]
        )
        return latency_us * NANOSECONDS_PER_MICROSECOND + slowest_ns

    def _shared_links(self, ranks: tuple[int, ...], *, is_send: bool) -> _SharedLinks:
        network = self.profile.network
        return _SharedLinks(
            crossing(ranks, network, is_send=is_send), departure(ranks, network, is_send=is_send)
        )

    def _shared_ns(self, plan: Plan, shared: _SharedLinks, is_send: bool) -> float:
        """Time of what crosses the links that sibling groups share."""
        network = self.profile.network
        uplink = shared.uplink_bytes(plan) * network.oversubscription / _rate(network.fabric, is_send)
        bridge = shared.bridge_bytes(plan)
        return max(uplink, bridge / network.bridge_gb_per_s if bridge else 0.0)

    def _measured_estimate(
        self,
        row: MeasuredCollective,
        communication: Communication,
        size: float,
        placement: Placement,
        shared: _SharedLinks,
        exchange: ExchangeShape | None = None,
    ) -> CollectiveEstimate:
        plan = next(plans(self.profile.network.multicast, communication, size, placement, exchange))
        network = self.profile.network
        domain_rate = network.domain.bandwidth_gb_per_s
        domain_rate *= row.efficiency if placement.tier == Tier.DOMAIN else network.domain.efficiency
        fabric_ns = plan.fabric_bytes / (network.fabric.bandwidth_gb_per_s * row.efficiency)
        latency_us = row.fixed_us + row.per_step_us * (placement.size - 1)
        slowest_ns = max(
            plan.domain_bytes / domain_rate, fabric_ns, self._shared_ns(plan, shared, communication in SENDS)
        )
        time_ns = latency_us * NANOSECONDS_PER_MICROSECOND + slowest_ns
        measured = Plan(Algorithm.MEASURED, 0, 0, plan.domain_bytes, plan.fabric_bytes)
        return self._estimate(time_ns, measured, Protocol.NONE, communication, size, placement, shared)

    def _estimate(
        self,
        time_ns: float,
        plan: Plan,
        protocol: Protocol,
        communication: Communication,
        size: float,
        placement: Placement,
        shared: _SharedLinks,
    ) -> CollectiveEstimate:
        whole_ns = max(1, round(time_ns))
        return CollectiveEstimate(
            time_ns=whole_ns,
            algorithm=plan.algorithm,
            protocol=protocol,
            tier=placement.tier,
            domain_bytes=plan.domain_bytes,
            fabric_bytes=plan.fabric_bytes,
            bus_gb_per_s=traffic_factor(communication, placement.size) * size / whole_ns,
            bridge_bytes=shared.bridge_bytes(plan),
            uplink_bytes=shared.uplink_bytes(plan),
        )


def _rate(link: LinkFigures, is_send: bool) -> float:
    """Bandwidth in B/ns that large messages reach."""
    efficiency = link.p2p_efficiency if is_send and link.p2p_efficiency else link.efficiency
    return link.bandwidth_gb_per_s * efficiency
