"""Why the steps of two runs differ in length: parts that add up to the difference, to the nanosecond.

Each side's step is divided among causes (:mod:`.claims`). What matched operations have on both sides is compared cause
by cause; what only one side has is unmatched, whatever it is; so is the rest of the device's time its own cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from op_graphs.columns import Float64, Int64
from tracesim.diff.alignment import Alignment, Entries
from tracesim.diff.claims import (
    BUBBLE,
    COMMUNICATION,
    COPIES,
    KERNELS,
    LAUNCH,
    OPTIMIZER,
    PEERS,
    STREAMS,
    UNEXPLAINED,
    Claimer,
    Claims,
)

PARTS = (
    "kernels",
    "optimizer",
    "copies",
    "exposed_communication",
    "waiting_for_peers",
    "bubble",
    "launch_gaps",
    "waiting_for_streams",
    "unexplained_idle",
    "unmatched_a",
    "unmatched_b",
)
"""Keys of the parts of a difference."""

_OF_CAUSE = {
    KERNELS: "kernels",
    OPTIMIZER: "optimizer",
    COPIES: "copies",
    COMMUNICATION: "exposed_communication",
    PEERS: "waiting_for_peers",
    BUBBLE: "bubble",
    LAUNCH: "launch_gaps",
    STREAMS: "waiting_for_streams",
    UNEXPLAINED: "unexplained_idle",
}


@dataclass(frozen=True)
class StepAttribution:
    """One step of one rank. Nanoseconds."""

    rank: int
    """Index into :attr:`Alignment.ranks`."""
    step_a: int
    step_b: int
    a: int
    """Length of the step of a."""
    b: int
    parts: Mapping[str, int]
    """By key of :data:`PARTS`; they add up to ``b - a``."""


@dataclass(frozen=True)
class Attribution:
    """The differences of all steps, and what each slice has of them."""

    steps: tuple[StepAttribution, ...]
    claimed: tuple[Float64, Float64]
    """Nanoseconds that each entry of a and of b has of a step: a mean over the steps of its rank, then over ranks."""
    claims: tuple[tuple[Claims, Claims], ...]
    """Both sides of every step."""


def attribute(alignment: Alignment, claimers: tuple[Claimer, Claimer]) -> Attribution:
    """Attribute the difference of every step pair of an alignment."""
    lookups = [
        _Lookup(entries, len(claimers[side].timeline.slices))
        for side, entries in enumerate(alignment.entries)
    ]
    steps, both = [], []
    segment = 0
    for number, rank in enumerate(alignment.ranks):
        for step in rank.steps:
            claims = claimers[0].step(step.a), claimers[1].step(step.b)
            assert (claims[0].total, claims[1].total) == (step.a.length, step.b.length)
            parts = dict.fromkeys(PARTS, 0)
            weight = 1 / len(rank.steps) / len(alignment.ranks)
            for side, sign in ((0, -1), (1, 1)):
                _add(parts, claims[side], lookups[side].matched(segment, claims[side], weight), side, sign)
            assert sum(parts.values()) == step.difference
            steps.append(
                StepAttribution(number, step.a.step, step.b.step, step.a.length, step.b.length, parts)
            )
            both.append(claims)
            segment += 1
    return Attribution(tuple(steps), (lookups[0].claimed, lookups[1].claimed), tuple(both))


class _Lookup:
    """Entries of one side by slice, in the segment at hand."""

    def __init__(self, entries: Entries, slices: int) -> None:
        self.entries = entries
        self.claimed = np.zeros(len(entries.row), dtype=np.float64)
        self.place = np.full(slices, -1, dtype=np.int64)
        self.place[entries.row] = np.arange(len(entries.row))

    def matched(self, segment: int, claims: Claims, weight: float) -> Int64:
        """1 for each claim of a matched slice, else 0; adds up what each entry has, times a weight."""
        low, high = np.searchsorted(self.entries.segment, (segment, segment + 1))
        self.place[self.entries.row[low:high]] = np.arange(low, high)
        at = self.place[claims.row]
        np.add.at(self.claimed, at[at >= 0], weight * claims.time[at >= 0])
        return np.where(at >= 0, self.entries.matched[at], False).astype(np.int64)


def _add(parts: dict[str, int], claims: Claims, matched: Int64, side: int, sign: int) -> None:
    sums = np.zeros((2, 9), dtype=np.int64)
    np.add.at(sums, (matched, claims.cause), claims.time)
    for cause, key in _OF_CAUSE.items():
        parts[key] += sign * int(sums[1, cause] + claims.idle[cause])
    parts["unmatched_b" if side else "unmatched_a"] += sign * int(sums[0].sum())


def mean_parts(steps: Sequence[StepAttribution]) -> dict[str, Any]:
    """Means over the steps of each rank, then over ranks, as whole nanoseconds whose parts still add up.

    Returns:
        ``step_a_ns``, ``step_b_ns``, ``difference_ns`` and ``parts_ns``; ``difference_ns`` is the rounded mean, and of
        the rounded parts those with the largest remainders are rounded up until they add up to it.
    """
    by_rank: dict[int, list[StepAttribution]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)

    def mean(values: Mapping[int, int]) -> Fraction:
        return sum((Fraction(v, len(by_rank[r])) for r, v in values.items()), Fraction(0)) / max(
            len(by_rank), 1
        )

    exact = {key: mean({r: sum(s.parts[key] for s in mine) for r, mine in by_rank.items()}) for key in PARTS}
    difference = round(sum(exact.values(), Fraction(0)))
    parts = {key: value.numerator // value.denominator for key, value in exact.items()}
    by_remainder = sorted(PARTS, key=lambda key: (parts[key] - exact[key], PARTS.index(key)))
    for key in by_remainder[: difference - sum(parts.values())]:
        parts[key] += 1
    a = round(mean({r: sum(s.a for s in mine) for r, mine in by_rank.items()}))
    return {"step_a_ns": a, "step_b_ns": a + difference, "difference_ns": difference, "parts_ns": parts}
