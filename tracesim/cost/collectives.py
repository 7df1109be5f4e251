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

Sibling groups share the bridge of a domain that has one (:mod:`.bridge`).

Left out: congestion above the NICs, contention between groups that share other links, PAT, in-network reduction in
InfiniBand switches, and the slower pairs of a mesh without a switch. Sources: Hu et al., "Demystifying NCCL"
(arXiv:2507.04786), for protocols and steps; Thakur et al. (2005) for the traffic of the algorithms; Sanders et al.
(2009) for the two trees. ``docs/collective_cost.md`` holds formulas and residuals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from hardware_profiles.profile import HardwareProfile, LinkFigures, MeasuredCollective
from op_graphs.columns import Int64
from op_graphs.graph import ExchangeShape, OpGraph
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication

from .bridge import Crossing, bridge_ns, crossing
from .distinct import distinct_rows

NANOSECONDS_PER_MICROSECOND = 1e3


class Algorithm(Enum):
    """How a collective moves its data."""

    NONE = "none"
    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    NVLS_TREE = "nvls_tree"
    EXCHANGE = "exchange"
    MEASURED = "measured"


class Protocol(Enum):
    """How two GPUs hand over a chunk."""

    NONE = "none"
    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class Tier(Enum):
    """The slowest part of the network that a group crosses."""

    SELF = "self"
    DOMAIN = "domain"
    FABRIC = "fabric"


PROTOCOL_BANDWIDTH: dict[Protocol, float] = {Protocol.LL: 0.375, Protocol.LL128: 0.95, Protocol.SIMPLE: 1.0}
"""Share of a link's rate. LL sends a 4-byte flag with every 4 bytes and reaches 25 to 50 % (the middle is taken),
LL128 carries 120 of 128 bytes, Simple is unhampered (arXiv:2507.04786, table of protocols)."""

PROTOCOL_LATENCY: dict[Protocol, float] = {Protocol.LL: 0.5, Protocol.LL128: 1.0, Protocol.SIMPLE: 3.0}
"""Latency of a step over the one of LL128, which is what a profile's ``latency_us`` holds. The same table gives
about 1, 2 and 6 us a hop: a flag beside the data arrives with it, a memory fence has to be waited for."""

NVLS_EFFICIENCY = 0.85
"""Rate of multicast loads and stores over that of plain ones: with it, eight GPUs that reach 365 GB/s in a ring
reach the 480 GB/s of bus bandwidth that public runs of nccl-tests show on HGX H100 with NVLS."""

NVLS_STEPS: dict[Communication, int] = {
    Communication.ALL_REDUCE: 3,
    Communication.ALL_GATHER: 2,
    Communication.REDUCE_SCATTER: 2,
}
"""Synchronisations of all members: arrive, reduce, multicast."""

PEERS_IN_FLIGHT = 8
"""Peers with which a rank exchanges at a time; further peers wait a step. An assumption."""

RING_PASSES: dict[Communication, int] = {
    Communication.ALL_REDUCE: 2,
    Communication.ALL_GATHER: 1,
    Communication.REDUCE_SCATTER: 1,
    Communication.BROADCAST: 1,
    Communication.REDUCE: 1,
    Communication.BARRIER: 2,
}
"""Times a chunk travels around the ring."""

SENDS = frozenset({Communication.SEND, Communication.RECEIVE, Communication.SEND_RECEIVE})
EXCHANGES = frozenset({Communication.ALL_TO_ALL, Communication.GATHER, Communication.SCATTER})


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


@dataclass(frozen=True)
class Placement:
    """How the members of a group spread over fast domains."""

    size: int
    domains: int
    fewest_in_a_domain: int
    most_in_a_domain: int

    @classmethod
    def of(cls, ranks: tuple[int, ...], gpus_per_domain: int) -> Placement:
        """Placement of global ranks, in any order.

        Raises:
            ValueError: if there are none, one is negative, or one occurs twice.
        """
        if not ranks:
            raise ValueError("a communication group has no ranks; give the global rank of each member")
        if min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"ranks {_abridged(ranks)} hold a negative or a repeated rank; each member occurs once"
            )
        members = Counter(rank // gpus_per_domain for rank in ranks).values()
        return cls(len(ranks), len(members), min(members), max(members))

    @property
    def tier(self) -> Tier:
        """The slowest tier inside the group."""
        if self.size == 1:
            return Tier.SELF
        return Tier.DOMAIN if self.domains == 1 else Tier.FABRIC


@dataclass(frozen=True)
class _Plan:
    """What an algorithm asks of the network: steps on each tier, and bytes through each link."""

    algorithm: Algorithm
    domain_steps: int
    fabric_steps: int
    domain_bytes: float
    fabric_bytes: float
    protocols: tuple[Protocol, ...] = (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)
    domain_share: float = 1.0


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
        crossed = crossing(ranks, self.profile.network, is_send=communication in SENDS)
        measured = self._measured_line(communication, placement)
        if measured is not None and algorithm is None and protocol is None:
            return self._measured_estimate(measured, communication, size, placement, crossed, exchange)
        best: tuple[float, Protocol, _Plan] | None = None
        for plan in self._plans(communication, size, placement, exchange):
            for handing in plan.protocols:
                if algorithm not in (None, plan.algorithm) or protocol not in (None, handing):
                    continue
                time_ns = self._time_ns(plan, handing, communication in SENDS, crossed)
                if best is None or time_ns < best[0]:
                    best = (time_ns, handing, plan)
        if best is None:
            asked = " ".join(part.value for part in (algorithm, protocol) if part)
            raise ValueError(
                f"{asked} does no {communication.name} among {placement.size} ranks in {placement.domains} domains"
            )
        return self._estimate(best[0], best[2], best[1], communication, size, placement)

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

    def _plans(
        self,
        communication: Communication,
        size: float,
        placement: Placement,
        exchange: ExchangeShape | None = None,
    ) -> Iterator[_Plan]:
        if communication in SENDS:
            yield _send_plan(size, placement)
        elif exchange is not None:
            yield _forwarded_exchange_plan(exchange, placement)
        elif communication in EXCHANGES:
            yield _exchange_plan(size, placement)
        else:
            yield _ring_plan(communication, size, placement)
            if communication in (Communication.ALL_REDUCE, Communication.BARRIER) and placement.domains > 1:
                yield _tree_plan(size, placement)
            if self.profile.network.multicast and placement.fewest_in_a_domain > 1:
                yield from _multicast_plans(communication, size, placement)

    def _time_ns(self, plan: _Plan, protocol: Protocol, is_send: bool, crossed: Crossing | None) -> float:
        network = self.profile.network
        steps_us = (
            plan.domain_steps * network.domain.latency_us + plan.fabric_steps * network.fabric.latency_us
        )
        latency_us = network.collective_base_us + steps_us * PROTOCOL_LATENCY[protocol]
        domain_ns = plan.domain_bytes / (_rate(network.domain, is_send) * plan.domain_share)
        fabric_ns = plan.fabric_bytes / _rate(network.fabric, is_send) if plan.fabric_bytes else 0.0
        slowest_ns = max(domain_ns, fabric_ns, self._bridge_ns(plan, crossed)) / PROTOCOL_BANDWIDTH[protocol]
        return latency_us * NANOSECONDS_PER_MICROSECOND + slowest_ns

    def _bridge_ns(self, plan: _Plan, crossed: Crossing | None) -> float:
        """Time of what crosses the bridge of a domain; a measured line of one group holds the crossing of that one."""
        if crossed is None or plan.domain_bytes == 0:
            return 0.0
        moved = plan.domain_bytes
        if plan.algorithm == Algorithm.EXCHANGE and crossed.near + crossed.far > 2:
            # Every member of one side sends to every one of the other; domain_bytes is what it sends to all others.
            members = crossed.near + crossed.far
            moved *= crossed.near * crossed.far / (members - 1)
        return bridge_ns(crossed, moved, self.profile.network)

    def _measured_estimate(
        self,
        row: MeasuredCollective,
        communication: Communication,
        size: float,
        placement: Placement,
        crossed: Crossing | None,
        exchange: ExchangeShape | None = None,
    ) -> CollectiveEstimate:
        plan = next(self._plans(communication, size, placement, exchange))
        network = self.profile.network
        domain_rate = network.domain.bandwidth_gb_per_s
        domain_rate *= row.efficiency if placement.tier == Tier.DOMAIN else network.domain.efficiency
        fabric_ns = plan.fabric_bytes / (network.fabric.bandwidth_gb_per_s * row.efficiency)
        latency_us = row.fixed_us + row.per_step_us * (placement.size - 1)
        slowest_ns = max(plan.domain_bytes / domain_rate, fabric_ns, self._bridge_ns(plan, crossed))
        time_ns = latency_us * NANOSECONDS_PER_MICROSECOND + slowest_ns
        measured = _Plan(Algorithm.MEASURED, 0, 0, plan.domain_bytes, plan.fabric_bytes)
        return self._estimate(time_ns, measured, Protocol.NONE, communication, size, placement)

    def _estimate(
        self,
        time_ns: float,
        plan: _Plan,
        protocol: Protocol,
        communication: Communication,
        size: float,
        placement: Placement,
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
        )


def traffic_factor(communication: Communication, size: int) -> float:
    """Share of the message that one of ``size`` GPUs must send at least, with the definitions of nccl-tests."""
    if communication == Communication.ALL_REDUCE:
        return 2.0 * (size - 1) / size
    if communication in SENDS or communication in (Communication.BROADCAST, Communication.REDUCE):
        return 1.0
    return (size - 1) / size


def _ring_plan(communication: Communication, size: float, placement: Placement) -> _Plan:
    members, domains = placement.size, placement.domains
    passes = RING_PASSES[communication]
    # The slowest chunk skips one edge of the ring, an inner one where there is any.
    crossings = 0 if domains == 1 else min(domains, members - 1)
    traffic = traffic_factor(communication, members) * size
    return _Plan(
        Algorithm.RING,
        domain_steps=passes * (members - 1 - crossings),
        fabric_steps=passes * crossings,
        domain_bytes=traffic if placement.most_in_a_domain > 1 else 0.0,
        fabric_bytes=traffic / placement.fewest_in_a_domain if domains > 1 else 0.0,
    )


def _tree_plan(size: float, placement: Placement) -> _Plan:
    chain = placement.most_in_a_domain - 1
    return _Plan(
        Algorithm.TREE,
        domain_steps=2 * chain,
        fabric_steps=2 * _tree_depth(placement),
        domain_bytes=2.0 * size if chain else 0.0,
        fabric_bytes=_tree_traffic(placement) * size / placement.fewest_in_a_domain,
    )


def _multicast_plans(communication: Communication, size: float, placement: Placement) -> Iterator[_Plan]:
    # An all-reduce loads the whole buffer out of each GPU and stores one shard; the others do one of the two.
    reduces = communication in (Communication.ALL_REDUCE, Communication.BARRIER)
    if not reduces and communication not in NVLS_STEPS:
        return
    steps = NVLS_STEPS[Communication.ALL_REDUCE if reduces else communication]
    traffic = size * (1 + 1 / placement.fewest_in_a_domain) if reduces else size
    if placement.domains == 1:
        yield _Plan(Algorithm.NVLS, steps, 0, traffic, 0.0, (Protocol.SIMPLE,), NVLS_EFFICIENCY)
    elif reduces:
        yield _Plan(
            Algorithm.NVLS_TREE,
            steps,
            2 * _tree_depth(placement),
            traffic,
            _tree_traffic(placement) * size / placement.fewest_in_a_domain,
            (Protocol.SIMPLE,),
            NVLS_EFFICIENCY,
        )


def _exchange_plan(size: float, placement: Placement) -> _Plan:
    members = placement.size
    rounds = -(-(members - 1) // PEERS_IN_FLIGHT)
    crosses = placement.domains > 1
    return _Plan(
        Algorithm.EXCHANGE,
        domain_steps=0 if crosses else rounds,
        fabric_steps=rounds if crosses else 0,
        domain_bytes=size * (placement.most_in_a_domain - 1) / members,
        fabric_bytes=size * (members - placement.fewest_in_a_domain) / members if crosses else 0.0,
        protocols=(Protocol.LL, Protocol.SIMPLE),
    )


def _forwarded_exchange_plan(exchange: ExchangeShape, placement: Placement) -> _Plan:
    """A token crosses to each domain once, to the rank of the sender's place there, which hands it to the others."""
    members, domains = placement.size, placement.domains
    sent = exchange.token_bytes * exchange.most
    to_ranks = members * exchange.chance(members) * sent
    crosses = domains > 1
    return _Plan(
        Algorithm.EXCHANGE,
        domain_steps=1 if placement.most_in_a_domain > 1 else 0,
        fabric_steps=1 if crosses else 0,
        domain_bytes=to_ranks * (1 - 1 / placement.most_in_a_domain),
        fabric_bytes=(domains - 1) * exchange.chance(domains) * sent if crosses else 0.0,
        protocols=(Protocol.SIMPLE,),
    )


def _send_plan(size: float, placement: Placement) -> _Plan:
    crosses = placement.domains > 1
    return _Plan(
        Algorithm.EXCHANGE,
        domain_steps=0 if crosses else 1,
        fabric_steps=1 if crosses else 0,
        domain_bytes=0.0 if crosses else size,
        fabric_bytes=size if crosses else 0.0,
        protocols=(Protocol.LL, Protocol.SIMPLE),
    )


def _tree_depth(placement: Placement) -> int:
    """Levels of a binary tree over the domains: ceil(log2(domains))."""
    return (placement.domains - 1).bit_length()


def _tree_traffic(placement: Placement) -> float:
    """Messages that a domain receives: one up and one down; each half goes one way only between two domains."""
    return 1.0 if placement.domains == 2 else 2.0


def _rate(link: LinkFigures, is_send: bool) -> float:
    """Bandwidth in B/ns that large messages reach."""
    efficiency = link.p2p_efficiency if is_send and link.p2p_efficiency else link.efficiency
    return link.bandwidth_gb_per_s * efficiency


def _abridged(ranks: tuple[int, ...]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"({', '.join(map(str, ranks[:8]))}, ... {len(ranks)} in all)"
