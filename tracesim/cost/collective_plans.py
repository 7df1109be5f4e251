"""What each collective algorithm asks of the network: steps on each tier, and bytes through each link.

See :mod:`.collectives` for the algorithms; ``docs/collective_cost.md`` holds the formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from op_graphs.graph import ExchangeShape
from op_graphs.vocabulary import Communication


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
class Plan:
    """What an algorithm asks of the network: steps on each tier, and bytes through each link."""

    algorithm: Algorithm
    domain_steps: int
    fabric_steps: int
    domain_bytes: float
    fabric_bytes: float
    protocols: tuple[Protocol, ...] = (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)
    domain_share: float = 1.0


def plans(
    multicast: bool,
    communication: Communication,
    size: float,
    placement: Placement,
    exchange: ExchangeShape | None = None,
) -> Iterator[Plan]:
    """Every algorithm that does a communication in a group, in the order in which ties fall.

    Args:
        multicast: whether the switch of a domain reduces and multicasts.
        communication: what is done.
        size: message in bytes, as in :meth:`.collectives.CollectiveCost.duration_ns`.
        placement: of the group.
        exchange: how an all-to-all travels that does not send each pair of ranks a part of its own.
    """
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
        if multicast and placement.fewest_in_a_domain > 1:
            yield from _multicast_plans(communication, size, placement)


def traffic_factor(communication: Communication, size: int) -> float:
    """Share of the message that one of ``size`` GPUs must send at least, with the definitions of nccl-tests."""
    if communication == Communication.ALL_REDUCE:
        return 2.0 * (size - 1) / size
    if communication in SENDS or communication in (Communication.BROADCAST, Communication.REDUCE):
        return 1.0
    return (size - 1) / size


def _ring_plan(communication: Communication, size: float, placement: Placement) -> Plan:
    members, domains = placement.size, placement.domains
    passes = RING_PASSES[communication]
    # The slowest chunk skips one edge of the ring, an inner one where there is any.
    crossings = 0 if domains == 1 else min(domains, members - 1)
    traffic = traffic_factor(communication, members) * size
    return Plan(
        Algorithm.RING,
        domain_steps=passes * (members - 1 - crossings),
        fabric_steps=passes * crossings,
        domain_bytes=traffic if placement.most_in_a_domain > 1 else 0.0,
        fabric_bytes=traffic / placement.fewest_in_a_domain if domains > 1 else 0.0,
    )


def _tree_plan(size: float, placement: Placement) -> Plan:
    chain = placement.most_in_a_domain - 1
    return Plan(
        Algorithm.TREE,
        domain_steps=2 * chain,
        fabric_steps=2 * _tree_depth(placement),
        domain_bytes=2.0 * size if chain else 0.0,
        fabric_bytes=_tree_traffic(placement) * size / placement.fewest_in_a_domain,
    )


def _multicast_plans(communication: Communication, size: float, placement: Placement) -> Iterator[Plan]:
    # An all-reduce loads the whole buffer out of each GPU and stores one shard; the others do one of the two.
    reduces = communication in (Communication.ALL_REDUCE, Communication.BARRIER)
    if not reduces and communication not in NVLS_STEPS:
        return
    steps = NVLS_STEPS[Communication.ALL_REDUCE if reduces else communication]
    traffic = size * (1 + 1 / placement.fewest_in_a_domain) if reduces else size
    if placement.domains == 1:
        yield Plan(Algorithm.NVLS, steps, 0, traffic, 0.0, (Protocol.SIMPLE,), NVLS_EFFICIENCY)
    elif reduces:
        yield Plan(
            Algorithm.NVLS_TREE,
            steps,
            2 * _tree_depth(placement),
            traffic,
            _tree_traffic(placement) * size / placement.fewest_in_a_domain,
            (Protocol.SIMPLE,),
            NVLS_EFFICIENCY,
        )


def _exchange_plan(size: float, placement: Placement) -> Plan:
    members = placement.size
    rounds = -(-(members - 1) // PEERS_IN_FLIGHT)
    crosses = placement.domains > 1
    return Plan(
        Algorithm.EXCHANGE,
        domain_steps=0 if crosses else rounds,
        fabric_steps=rounds if crosses else 0,
        domain_bytes=size * (placement.most_in_a_domain - 1) / members,
        fabric_bytes=size * (members - placement.fewest_in_a_domain) / members if crosses else 0.0,
        protocols=(Protocol.LL, Protocol.SIMPLE),
    )


def _forwarded_exchange_plan(exchange: ExchangeShape, placement: Placement) -> Plan:
    """A token crosses to each domain once, to the rank of the sender's place there, which hands it to the others."""
    members, domains = placement.size, placement.domains
    sent = exchange.copy_bytes(domains) * exchange.most
    to_ranks = members * exchange.chance(members) * sent
    maps, most = exchange.map_bytes, placement.most_in_a_domain
    crosses = domains > 1
    return Plan(
        Algorithm.EXCHANGE,
        domain_steps=1 if placement.most_in_a_domain > 1 else 0,
        fabric_steps=1 if crosses else 0,
        domain_bytes=(to_ranks + members * maps) * (1 - 1 / most),
        fabric_bytes=(domains - 1) * (exchange.chance(domains) * sent + maps) if crosses else 0.0,
        protocols=(Protocol.SIMPLE,),
    )


def _send_plan(size: float, placement: Placement) -> Plan:
    crosses = placement.domains > 1
    return Plan(
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


def _abridged(ranks: tuple[int, ...]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"({', '.join(map(str, ranks[:8]))}, ... {len(ranks)} in all)"
