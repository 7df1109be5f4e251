"""What operations that run at the same time on one device share, and at which rate each then advances.

An operation has a *demand*: the SMs it takes from others, how it slows when SMs are taken from it, and how much of each
shared resource (memory bandwidth, a direction of a link) it uses in a nanosecond when it runs alone. Operations with
equal demands are one class; rates depend on the classes that run, so they are computed once for each combination.

- SMs: a kernel of ``blocks`` thread blocks needs ``ceil(blocks / SMs)`` waves, so with ``t`` of ``S`` SMs taken it
  advances at ``ceil(blocks / S) / ceil(blocks / (S - t))``; one that streams memory at ``(S - t) / S``. One whose
  blocks just fit at once needs another wave for those that then do not; one that leaves SMs free loses the rest only.
- Resources: max-min fair. Who asks for less than an equal share gets what it asks; the others share the rest equally.
  An operation advances at the smallest share of its demand that it gets of any resource.
- Stalls: a kernel beside a collective in transfer takes a fixed time longer, whatever its length.

A kernel whose blocks were issued before a communication kernel came keeps its SMs: it is not slowed by it.

Max-min fairness: Bertsekas and Gallager, "Data Networks", section 6.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from op_graphs.columns import Int64


@dataclass(frozen=True)
class Demand:
    """What one operation takes while it runs alone."""

    sms_taken: int = 0
    """SMs that are gone for others while it waits or runs."""
    blocks: int = 0
    """Thread blocks, of which one runs on an SM at a time; 0 where it does not slow by waves."""
    sms: int = 0
    """SMs that it was launched on, where it leaves the others free on purpose; 0 for all."""
    linear: bool = False
    """It slows with the share of SMs that is left."""
    second_wave: float = 0.0
    """For a kernel launched with just as many blocks as fit at once: what each further wave takes of its duration."""
    last_wave: float = 1.0
    """Part of its duration in which its last blocks run; before that no kernel of another stream is admitted."""
    uses: tuple[tuple[int, float], ...] = ()
    """(resource, units a nanosecond); a use beyond the resource's capacity counts as all of it."""
    stall_ns: float = 0.0
    """What each kernel beside it takes longer while it transfers, beyond SMs and resources."""
    kernel_ns: float = 0.0
    """For one that stalls of others hold up: the time of each of its kernels by itself."""


@dataclass(frozen=True)
class SharingPolicy:
    """What the operations of a graph share. Rows of one rank share; ranks do not.

    Raises:
        ValueError: if a class has no demand, a resource no capacity, or no SM would be left beside one operation.
    """

    classes: Int64
    """Index into :attr:`demands` of each operation."""
    demands: tuple[Demand, ...]
    capacities: tuple[float, ...] = ()
    """Units a nanosecond of each resource of a device."""
    sms: int = 1
    admission: bool = True
    """A ready kernel does not start before the kernel on the compute stream has issued its last blocks."""
    _known: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.classes) and not 0 <= self.classes.min() <= self.classes.max() < len(self.demands):
            raise ValueError(f"classes of operations must lie between 0 and {len(self.demands) - 1}")
        if self.capacities and min(self.capacities) <= 0:
            raise ValueError(f"capacities {self.capacities} must be above 0")
        for demand in self.demands:
            if not 0 <= demand.sms_taken < max(self.sms, 1):
                raise ValueError(f"an operation takes {demand.sms_taken} of {self.sms} SMs; one must be left")
            if not 0 <= demand.sms <= self.sms:
                raise ValueError(f"an operation runs on {demand.sms} of {self.sms} SMs")
            if not 0 < demand.last_wave <= 1:
                raise ValueError(
                    f"a last wave of {demand.last_wave} of a duration is not above 0 and at most 1"
                )
            wrong = [use for use in demand.uses if not 0 <= use[0] < len(self.capacities) or use[1] < 0]
            if wrong:
                raise ValueError(f"uses {wrong} name no resource of {len(self.capacities)}, or are negative")

    def rates(self, running: Sequence[int], waiting_sms: int = 0) -> tuple[float, ...]:
        """Rates, 1 alone, at which operations of one device advance.

        Args:
            running: their classes, in the order in which they were admitted.
            waiting_sms: SMs taken by operations that wait for their peers; they were admitted before all of ``running``
                that can still be slowed.
        """
        key = (waiting_sms, *running)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compute_rates(running, waiting_sms)
        return found

    def _compute_rates(self, running: Sequence[int], waiting_sms: int) -> tuple[float, ...]:
        demands = [self.demands[number] for number in running]
        rates = []
        taken = waiting_sms
        total = waiting_sms + sum(demand.sms_taken for demand in demands)
        for demand in demands:
            rates.append(self.sm_rate(demand, taken if self.admission else total - demand.sms_taken))
            taken += demand.sms_taken
        shares = [1.0] * len(demands)
        for resource, capacity in enumerate(self.capacities):
            wanted = [
                min(capacity, sum(units for number, units in demand.uses if number == resource)) * rate
                for demand, rate in zip(demands, rates, strict=True)
            ]
            for number, share in enumerate(max_min_shares(wanted, capacity)):
                shares[number] = min(shares[number], share)
        return tuple(
            _stalled(rate * share, demand, demands)
            for rate, share, demand in zip(rates, shares, demands, strict=True)
        )

    def sm_rate(self, demand: Demand, taken: int) -> float:
        """Rate of an operation of which ``taken`` SMs are gone."""
        alone = demand.sms or self.sms
        left = max(1, min(alone, self.sms - taken))
        if left == alone:
            return 1.0
        if demand.second_wave:
            return 1 / (1 + demand.second_wave * (-(-alone // left) - 1))
        if demand.blocks:
            return -(-demand.blocks // alone) / -(-demand.blocks // left)
        return left / alone if demand.linear else 1.0


def _stalled(rate: float, demand: Demand, running: Sequence[Demand]) -> float:
    """The rate of an operation whose every kernel takes longer by the longest stall of what runs beside it."""
    stall = max((other.stall_ns for other in running if other is not demand), default=0.0)
    return rate if not stall or not demand.kernel_ns else 1 / (1 / rate + stall / demand.kernel_ns)


def max_min_shares(wanted: Sequence[float], capacity: float) -> list[float]:
    """The part of its demand that each of several users of a resource gets."""
    if sum(wanted) <= capacity:
        return [1.0] * len(wanted)
    shares = [1.0] * len(wanted)
    left = capacity
    order = np.argsort(wanted, kind="stable").tolist()
    for position, number in enumerate(order):
        given = min(wanted[number], left / (len(order) - position))
        if wanted[number] > 0:
            shares[number] = given / wanted[number]
        left -= given
    return shares
