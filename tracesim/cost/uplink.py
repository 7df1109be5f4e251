"""Links above the NICs: domains under one leaf exchange at full rate, and share the uplinks of the leaf to the others.

A leaf is what connects ``domains_per_leaf`` domains without a common bottleneck: the switch at the top of one or a few
racks, or, in a rail-optimised fabric, the switches of all rails of a scalable unit (libraries hand data on inside a
domain to the GPU whose NIC sits on the right rail, so nothing changes rails on the fabric). Its uplinks carry what its
NICs could send, divided by ``oversubscription``.

Ranks of a job do the same thing at the same time, so the siblings of a group fill its leaf, and each NIC has an equal
part of the uplinks. What a group moves is given for each of its busiest NICs; this module says which part of it leaves
the leaf, for each NIC of the leaf: a ring leaves it once, however many of its domains lie there; an exchange sends to
every rank outside; of the sends over one distance as many leave as ranks sit close enough to the border.

Left out: leaves that are filled by other jobs, hashing of flows onto uplinks (a fabric without adaptive routing is
slower), and more than one level above the leaves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from hardware_profiles.profile import NetworkFigures


@dataclass(frozen=True)
class Departure:
    """Part of the bytes of a group's busiest NIC that leaves a leaf, for each NIC of the leaf; at most 1."""

    passing: float = 0.0
    """Where chunks travel from domain to domain: rings and trees."""
    exchanged: float = 0.0
    """Where every rank sends to every other, or a rank to its neighbour."""


def departure(ranks: tuple[int, ...], network: NetworkFigures, *, is_send: bool) -> Departure:
    """How much of what a group of global ranks moves leaves a leaf; nothing where it has one leaf, or there are none.

    Args:
        ranks: the members.
        network: of the machine.
        is_send: whether neighbours among ``ranks`` send to each other; then all ranks at that distance do.
    """
    leaf = network.domains_per_leaf * network.gpus_per_domain
    if not leaf or len({rank // leaf for rank in ranks}) < 2:
        return Departure()
    if is_send:
        crossing = [abs(b - a) for a, b in pairwise(ranks) if a // leaf != b // leaf]
        share = min(1.0, max(crossing, default=0) / leaf)
        return Departure(share, share)
    in_domain = min(Counter(rank // network.gpus_per_domain for rank in ranks).values())
    in_leaf = min(Counter(rank // leaf for rank in ranks).values())
    members = len(ranks)
    return Departure(
        passing=min(1.0, in_domain / in_leaf), exchanged=(members - in_leaf) / (members - in_domain)
    )
