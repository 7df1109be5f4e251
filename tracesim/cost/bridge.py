"""The bridge inside a fast domain: two halves that each switch at full rate, joined by one link that all share.

Servers with PCIe cards have two sockets or root complexes; what crosses between them shares one path, whichever card
it comes from. Ranks of a job do the same thing at the same time, so when one group crosses the bridge its sibling
groups do: with 8 cards, groups of every second card are two rings that cross, groups of every fourth are four.

Left out: the direction (both carry the same in a ring), switches below a root complex, and reads that a host does
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from hardware_profiles.profile import NetworkFigures


@dataclass(frozen=True)
class Crossing:
    """How a group crosses the bridge of a domain, in the domain where most of its members stand on both sides."""

    near: int
    """Members on one side."""
    far: int
    """Members on the other."""
    groups: int
    """Groups that cross it at the same time, this one included."""


def crossing(ranks: tuple[int, ...], network: NetworkFigures, *, is_send: bool) -> Crossing | None:
    """How a group of global ranks crosses a bridge; None where it does not, or the machine has none.

    Args:
        ranks: the members.
        network: of the machine.
        is_send: whether neighbours among ``ranks`` send to each other; then all ranks at that distance do.
    """
    half = network.gpus_per_bridge_side
    if not half or len(ranks) < 2:
        return None
    domain = network.gpus_per_domain
    members = Counter(rank // domain for rank in ranks)
    near = Counter(rank // domain for rank in ranks if rank % domain < half)
    busiest = max(members, key=lambda one: min(near[one], members[one] - near[one]))
    sides = near[busiest], members[busiest] - near[busiest]
    if not min(sides):
        return None
    if is_send:
        distance = min(abs(b - a) for a, b in pairwise(ranks))
        return Crossing(*sides, groups=max(1, min(distance, half)))
    return Crossing(*sides, groups=max(1, domain // members[busiest]))
