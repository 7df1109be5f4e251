"""The heuristic of Qi et al. 2023 (arXiv:2401.10241, section 3.1) for one stage a rank, run in rounds.

Before the first backward each rank takes as many forwards as memory holds and the wait for that backward has room for.
Then each round gives every rank a forward, first rank first, and a backward for the input, last rank first. Backwards
for the weight fill the gaps before both, and make room where memory is full; what is left of them runs last. A gap too
short for one is filled all the same if leaving it would make the rank the one that idled longest: ranks need not end
together, so only the longest idle time counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from .actions import Action, backward_input, backward_weight, forward
from .costs import ActionCosts

_TOLERANCE = 1e-9
"""Of sums of costs and of memory, relative to numbers around 1."""


class RoundRule(NamedTuple):
    """What the heuristic does where the paper leaves a choice."""

    delays_first_input: bool
    """Whether a rank takes one forward more before its first backward than the wait for it has room for."""
    holds_forwards: bool
    """Whether a rank lets the forward of a round go that would delay its next backward."""
    fills_short_gaps: bool
    """Whether every gap too short for a backward for the weight is filled."""


ROUND_RULES = tuple(RoundRule(*choices) for choices in product((False, True), repeat=3))


@dataclass
class RoundRank:
    """Where a rank stands."""

    stage: int
    forward_cost: float
    input_cost: float
    weight_cost: float
    clock: float = 0.0
    """When its last action ends."""
    began: float = 0.0
    idle: float = 0.0
    """Time it waited since it began."""
    held: float = 0.0
    """Memory it holds, in activations of one microbatch."""
    weights: int = 0
    """Backwards for the weight that have run."""
    forward_ends: list[float] = field(default_factory=list)
    input_ends: list[float] = field(default_factory=list)
    row: list[Action] = field(default_factory=list)

    @property
    def waiting_weights(self) -> int:
        """Backwards for the weight that may run."""
        return len(self.input_ends) - self.weights


def run_rounds(
    pp: int, microbatches: int, memory_limit: float, weight_memory: float, costs: ActionCosts, rule: RoundRule
) -> list[RoundRank]:
    """The ranks when all is done.

    Args:
        pp: pipeline ranks, each with one stage.
        microbatches: microbatches of a step.
        memory_limit: most memory of a rank, in activations of one microbatch; at least 1.
        weight_memory: share of an activation that is kept between its backward for the input and for the weight.
        costs: times of F, I, W and transfers.
        rule: the choices.
    """
    return _Rounds(pp, microbatches, memory_limit, weight_memory, costs, rule).run()


class _Rounds:
    def __init__(
        self,
        pp: int,
        microbatches: int,
        memory_limit: float,
        weight_memory: float,
        costs: ActionCosts,
        rule: RoundRule,
    ) -> None:
        self.microbatches = microbatches
        self.memory_limit = memory_limit + _TOLERANCE
        self.weight_memory = weight_memory
        self.transfer = costs.transfer
        self.rule = rule
        self.most_idle = 0.0
        """Longest time that a rank has waited."""
        self.ranks = [
            RoundRank(
                stage,
                costs.of(forward(stage, 0)),
                costs.of(backward_input(stage, 0)),
                costs.of(backward_weight(stage, 0)),
            )
            for stage in range(pp)
        ]

    def run(self) -> list[RoundRank]:
        for rank in self.ranks:
            self._forward(rank)
        self._fill_warm_up()
        for rank in reversed(self.ranks):
            self._input(rank)
        for microbatch in range(1, self.microbatches):
            for rank in self.ranks:
                self._forward_of_round(rank, microbatch)
            for rank in reversed(self.ranks):
                self._fill_gap(rank, self._input_arrives(rank, microbatch))
                if rank.stage == 0 and len(rank.forward_ends) == self.microbatches:
                    # Nobody waits for what the first rank does now.
                    self._weights(rank, rank.waiting_weights)
                self._input(rank)
        for rank in self.ranks:
            self._weights(rank, rank.waiting_weights)
        return self.ranks

    def _fill_warm_up(self) -> None:
        """Further forwards before the first backward; no rank takes as many as the one before it."""
        extra = [0] * len(self.ranks)
        arrives = self.ranks[-1].clock + self.ranks[-1].input_cost + self.transfer
        for rank in reversed(self.ranks[:-1]):
            room = min(self.microbatches, int(self.memory_limit)) - 1
            end = rank.clock
            while extra[rank.stage] < room:
                delays = end + rank.forward_cost > arrives + _TOLERANCE
                if delays and not (self.rule.delays_first_input and end < arrives - _TOLERANCE):
                    break
                extra[rank.stage] += 1
                end += rank.forward_cost
            arrives = max(end, arrives) + rank.input_cost + self.transfer
        for rank in self.ranks:
            if rank.stage:
                extra[rank.stage] = min(extra[rank.stage], max(0, extra[rank.stage - 1] - 1))
            for _ in range(extra[rank.stage]):
                self._forward(rank)

    def _forward_of_round(self, rank: RoundRank, microbatch: int) -> None:
        """The forward of a round, where the rank has one left, may take it and wants to."""
        done = len(rank.forward_ends)
        if done == self.microbatches:
            return
        needed = done <= microbatch
        before = self.ranks[rank.stage - 1] if rank.stage else None
        if not needed and (
            (before is not None and len(before.forward_ends) <= done)
            or rank.held - rank.waiting_weights * self.weight_memory + 1 > self.memory_limit
            or (self.rule.holds_forwards and self._holds_forward(rank))
        ):
            return
        self._weights(rank, self._weights_to_make_room(rank))
        if before is not None:
            self._fill_gap(rank, before.forward_ends[done] + self.transfer)
        self._forward(rank)

    def _holds_forward(self, rank: RoundRank) -> bool:
        """Whether a forward would delay the next backward of the rank, and waiting for that costs the step nothing.

        The next rank must have a forward of this one in store, for it is not to wait for one.
        """
        if rank is self.ranks[-1]:
            return False
        after = self.ranks[rank.stage + 1]
        if len(rank.forward_ends) < len(after.forward_ends) + 2:
            return False
        arrives = after.clock + after.forward_cost + after.input_cost + self.transfer
        if rank.clock >= arrives:
            return True
        room = self._weights_to_make_room(rank) * rank.weight_cost
        if rank.clock + room + rank.forward_cost <= arrives:
            return False
        return self._may_idle(rank, arrives - rank.clock)

    def _may_idle(self, rank: RoundRank, time: float) -> bool:
        return rank.idle + time <= self.most_idle

    def _idle(self, rank: RoundRank, time: float) -> None:
        rank.idle += time
        self.most_idle = max(self.most_idle, rank.idle)

    def _weights_to_make_room(self, rank: RoundRank) -> int:
        """Backwards for the weight after which a forward fits; all that wait if it never does."""
        count, held = 0, rank.held + 1
        while held > self.memory_limit and count < rank.waiting_weights:
            count += 1
            held -= self.weight_memory
        return count

    def _input_arrives(self, rank: RoundRank, microbatch: int) -> float:
        if rank is self.ranks[-1]:
            return rank.clock
        return self.ranks[rank.stage + 1].input_ends[microbatch] + self.transfer

    def _fill_gap(self, rank: RoundRank, until: float) -> None:
        while rank.waiting_weights and rank.clock + rank.weight_cost <= until + _TOLERANCE:
            self._weights(rank, 1)
        gap = until - rank.clock
        if rank.waiting_weights and gap > 0 and (self.rule.fills_short_gaps or not self._may_idle(rank, gap)):
            self._weights(rank, 1)

    def _forward(self, rank: RoundRank) -> None:
        microbatch = len(rank.forward_ends)
        start = rank.clock
        if rank.stage:
            start = max(start, self.ranks[rank.stage - 1].forward_ends[microbatch] + self.transfer)
        if microbatch:
            self._idle(rank, start - rank.clock)
        else:
            rank.began = start
        rank.clock = start + rank.forward_cost
        rank.forward_ends.append(rank.clock)
        rank.held += 1
        rank.row.append(forward(rank.stage, microbatch))

    def _input(self, rank: RoundRank) -> None:
        microbatch = len(rank.input_ends)
        start = max(rank.clock, self._input_arrives(rank, microbatch))
        self._idle(rank, start - rank.clock)
        rank.clock = start + rank.input_cost
        rank.input_ends.append(rank.clock)
        rank.held -= 1 - self.weight_memory
        rank.row.append(backward_input(rank.stage, microbatch))

    def _weights(self, rank: RoundRank, count: int) -> None:
        for _ in range(count):
            rank.row.append(backward_weight(rank.stage, rank.weights))
            rank.weights += 1
            rank.clock += rank.weight_cost
            rank.held -= self.weight_memory
