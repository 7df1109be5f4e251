"""An automatic schedule: greedy list scheduling from the times of F, I and W under a memory limit.

In the manner of the heuristic of Qi et al. 2023 (arXiv:2401.10241, section 3), with rules of its own: whenever a rank
is free it runs the backward for the input that is ready, else a forward that is ready and fits into memory; a backward
for the weight fills a gap that is long enough for it, or makes room for a forward. Which of two ready actions comes
first, whether too short gaps are filled, and how many forwards a rank takes ahead is tried in all combinations (for
large plans on fewer microbatches first). With one stage a rank the paper's own heuristic (:mod:`.greedy_rounds`) is
tried beside it, and the schedules of the papers that fit the limit are candidates too, so it is never worse than they.
Deterministic: ties go to the first candidate.

One stage a rank, two as a V, or more in a loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from math import inf, isfinite
from typing import NamedTuple

from .actions import (
    Action,
    Schedule,
    ScheduleError,
    backward_input,
    backward_weight,
    forward,
    v_placement,
)
from .costs import ActionCosts
from .greedy_rounds import ROUND_RULES, RoundRank, RoundRule, run_rounds
from .one_forward_one_backward import one_forward_one_backward
from .unit_times import peak_activations, simulate_costs
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v

_TOLERANCE = 1e-9
"""Of sums of shares of an activation."""
_HANDMADE = {1: (zb_h2, zb_h1, one_forward_one_backward), 2: (zb_v, v_half, v_min)}
_MOST_TRIED_IN_FULL = 4096
"""Microbatches times stages of a plan for which every combination of rules runs over all microbatches."""

_MOST_ROUNDS_IN_FULL = 16384
"""The same for the heuristic of the paper, which takes a quarter of the time."""


class Objective(str, Enum):
    """What the automatic schedule makes as short as it can; the other decides among equals."""

    MAKESPAN = "makespan"
    """The time until all ranks are done: the time of a step behind which all ranks meet."""
    LONGEST_RANK = "longest-rank"
    """The longest time of a rank from its first action to its last: the time of a step where ranks do not meet."""


def greedy(
    pp: int,
    chunks: int,
    microbatches: int,
    memory_limit: int | None = None,
    costs: ActionCosts | None = None,
    weight_memory: float = 1.0,
    objective: Objective = Objective.MAKESPAN,
) -> Schedule:
    """The best schedule found for ``pp`` ranks with ``chunks`` stages each.

    Args:
        pp: pipeline ranks.
        chunks: stages of a rank: 1, 2 (placed as a V), or more (in a loop).
        microbatches: microbatches of a step.
        memory_limit: most (stage, microbatch) pairs whose activations a rank may hold; ``pp * chunks``, the memory of
            1F1B, if not given.
        costs: times of F, I, W and transfers; all 1 and free transfers if not given.
        weight_memory: share of a pair's activations that its backward for the input leaves for the one for the
            weight; 1 if all of them are held until then.
        objective: what is to be short.

    Raises:
        ScheduleError: if the limit is below ``chunks`` (a microbatch must get through), the costs name another
            number of stages, or the share is not between 0 and 1.
    """
    limit = pp * chunks if memory_limit is None else memory_limit
    if limit < chunks:
        raise ScheduleError(
            f"greedy: a memory limit of {limit} activations is below {chunks}, one for each stage of a rank; "
            f"no microbatch could get through: allow at least {chunks}"
        )
    if not (isfinite(weight_memory) and 0 <= weight_memory <= 1):
        raise ScheduleError(
            f"greedy: weight_memory={weight_memory} must be a share of an activation, between 0 and 1"
        )
    times = costs or ActionCosts()
    times.check_stages(pp * chunks)
    placement = v_placement(pp) if chunks == 2 else tuple(stage % pp for stage in range(pp * chunks))
    search = _Search(placement, pp, limit, weight_memory, times, Objective(objective))
    handmade = (
        schedule
        for build in _HANDMADE.get(chunks, ())
        if max(peak_activations(schedule := build(pp, chunks, microbatches), weight_memory))
        <= limit + _TOLERANCE
    )
    candidates = [search.handmade(schedule) for schedule in handmade]
    candidates += search.listed(microbatches, _rules(pp, chunks, limit))
    if chunks == 1:
        candidates += search.in_rounds(microbatches)
    _, rows = min(candidates, key=lambda candidate: candidate[0])
    return Schedule("greedy", pp, pp * chunks, microbatches, rows, placement)


_Candidate = tuple[tuple[float, float], tuple[tuple[Action, ...], ...]]
"""Score, the lower the better, and rows."""


@dataclass(frozen=True)
class _Search:
    """The candidates of one plan."""

    placement: tuple[int, ...]
    pp: int
    limit: int
    weight_memory: float
    costs: ActionCosts
    objective: Objective

    def _score(self, makespan: float, longest_rank: float) -> tuple[float, float]:
        if self.objective is Objective.LONGEST_RANK:
            return longest_rank, makespan
        return makespan, longest_rank

    def handmade(self, schedule: Schedule) -> _Candidate:
        run = simulate_costs(schedule, self.costs)
        return self._score(run.makespan, run.longest_rank), schedule.actions

    def listed(self, microbatches: int, rules: Sequence[_Rule]) -> list[_Candidate]:
        if len(self.placement) * microbatches > _MOST_TRIED_IN_FULL:
            # The end of a step looks alike for any number of microbatches that fills the pipeline.
            few = min(microbatches, 2 * self.pp + 1)
            trials = {rule: self._listed(few, rule)[0] for rule in rules}
            rules = sorted(rules, key=lambda rule: trials[rule])[:2]
        return [self._listed(microbatches, rule) for rule in rules]

    def _listed(self, microbatches: int, rule: _Rule) -> _Candidate:
        """One run of the list scheduler."""
        ranks = _Listing(
            self.placement, self.pp, microbatches, self.limit, self.weight_memory, self.costs, rule
        ).run()
        return self._of_ranks(ranks)

    def in_rounds(self, microbatches: int) -> list[_Candidate]:
        rules = list(ROUND_RULES)
        if self.pp * microbatches > _MOST_ROUNDS_IN_FULL:
            few = min(microbatches, 4 * self.pp)
            trials = {rule: self._in_rounds(few, rule)[0] for rule in rules}
            rules = sorted(rules, key=lambda rule: trials[rule])[:2]
        return [self._in_rounds(microbatches, rule) for rule in rules]

    def _in_rounds(self, microbatches: int, rule: RoundRule) -> _Candidate:
        return self._of_ranks(
            run_rounds(self.pp, microbatches, self.limit, self.weight_memory, self.costs, rule)
        )

    def _of_ranks(self, ranks: Sequence[_RankState] | Sequence[RoundRank]) -> _Candidate:
        end = max(state.clock for state in ranks)
        longest = max(state.clock - state.began for state in ranks)
        return self._score(end, longest), tuple(tuple(state.row) for state in ranks)


def _rules(pp: int, chunks: int, limit: int) -> list[_Rule]:
    ahead_limits: tuple[tuple[int, ...], ...] = ((limit,) * pp,)
    if chunks == 1:
        # As many forwards without their backward as 1F1B takes, or as fill the pipeline until a backward returns.
        ahead_limits += (
            tuple(pp - rank for rank in range(pp)),
            tuple(2 * (pp - rank) - 1 for rank in range(pp)),
        )
    return [_Rule(*choices) for choices in product(ahead_limits, (False, True), (False, True))]


class _Rule(NamedTuple):
    """What the list scheduler does where it has a choice."""

    ahead_limits: tuple[int, ...]
    """Most forwards without their backward for the input, for each rank."""
    alternates: bool
    """Whether a ready forward comes before a ready backward that follows another backward."""
    fills_short_gaps: bool
    """Whether a backward for the weight may delay what arrives while it runs."""


@dataclass
class _RankState:
    """Where a rank stands."""

    stages: list[int]
    clock: float = 0.0
    """When its last action ends."""
    began: float = 0.0
    held: float = 0.0
    ahead: int = 0
    """Forwards whose backward for the input has not run."""
    ran_backward: bool = False
    waiting_weights: deque[tuple[int, int]] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


class _Listing:
    """One run of the list scheduler: ranks take turns by their clocks."""

    def __init__(
        self,
        placement: tuple[int, ...],
        pp: int,
        microbatches: int,
        limit: int,
        weight_memory: float,
        costs: ActionCosts,
        rule: _Rule,
    ) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.limit = limit + _TOLERANCE
        self.weight_memory = weight_memory
        self.rule = rule
        stages = range(len(placement))
        self.forward_cost = [costs.of(forward(stage, 0)) for stage in stages]
        self.input_cost = [costs.of(backward_input(stage, 0)) for stage in stages]
        self.weight_cost = [costs.of(backward_weight(stage, 0)) for stage in stages]
        # Between a stage and the one before it.
        self.transfer = [
            costs.transfer if stage and placement[stage] != placement[stage - 1] else 0.0 for stage in stages
        ]
        self.forward_ends: list[list[float]] = [[] for _ in stages]
        self.input_ends: list[list[float]] = [[] for _ in stages]
        self.ranks = [
            _RankState([stage for stage in stages if placement[stage] == rank]) for rank in range(pp)
        ]
        self.turns: list[tuple[float, int]] = []
        """(time, rank) at which a rank has something to decide."""

    def run(self) -> list[_RankState]:
        """The ranks when all is done."""
        for rank in range(len(self.ranks)):
            self._wake(rank, 0.0)
        while self.turns:
            now, rank = heapq.heappop(self.turns)
            # A rank that is busy by now takes its turn when it is done.
            if now >= self.ranks[rank].clock:
                self._take_turn(rank, now)
        return self.ranks

    def _wake(self, rank: int, time: float) -> None:
        heapq.heappush(self.turns, (max(time, self.ranks[rank].clock), rank))

    def _take_turn(self, rank: int, now: float) -> None:
        """Run what the rules choose at ``now``, or sleep until something may have changed."""
        state = self.ranks[rank]
        if not state.row:
            state.began = now
        state.clock = now
        input_time, input_stage = self._earliest_input(state)
        forward_time, forward_stage = self._earliest_forward(rank, state, self.limit)
        may_run_forward, may_run_input = forward_time <= now, input_time <= now
        arrival = min(input_time, forward_time)
        if may_run_input and not (self.rule.alternates and state.ran_backward and may_run_forward):
            self._run_input(rank, input_stage)
        elif may_run_forward:
            self._run_forward(rank, forward_stage)
        elif state.waiting_weights and self._weight_fits(rank, state, arrival):
            self._run_weight(state)
        else:
            if arrival < inf:
                self._wake(rank, arrival)
            return
        self._wake(rank, state.clock)

    def _weight_fits(self, rank: int, state: _RankState, arrival: float) -> bool:
        """Whether a backward for the weight fills a gap, or makes room for a forward that memory holds up."""
        gap = arrival - state.clock
        if self.rule.fills_short_gaps or gap >= self.weight_cost[state.waiting_weights[0][0]]:
            return True
        roomier = self.limit + len(state.waiting_weights) * self.weight_memory
        return self._earliest_forward(rank, state, roomier)[0] <= state.clock

    def _earliest_input(self, state: _RankState) -> tuple[float, int]:
        """When, and on which stage, the next backward for the input is ready as far as is known."""
        earliest, chosen = inf, -1
        for stage in reversed(state.stages):
            microbatch = len(self.input_ends[stage])
            if microbatch >= len(self.forward_ends[stage]):
                continue
            ready = max(self.forward_ends[stage][microbatch], state.clock)
            if stage + 1 < len(self.placement):
                ends = self.input_ends[stage + 1]
                arrives = ends[microbatch] + self.transfer[stage + 1] if microbatch < len(ends) else inf
                ready = max(ready, arrives)
            if ready < earliest:
                earliest, chosen = ready, stage
        return earliest, chosen

    def _earliest_forward(self, rank: int, state: _RankState, limit: float) -> tuple[float, int]:
        """The same for a forward that fits; earlier stages leave room for one of each later stage of the rank.

        Without that room microbatches could fill a rank before any of them can leave it.
        """
        earliest, chosen = inf, -1
        if state.ahead >= self.rule.ahead_limits[rank]:
            return earliest, chosen
        for later, stage in enumerate(reversed(state.stages)):
            microbatch = len(self.forward_ends[stage])
            if microbatch >= self.microbatches or state.held + later + 1 > limit:
                continue
            ready = state.clock
            if stage > 0:
                ends = self.forward_ends[stage - 1]
                arrives = ends[microbatch] + self.transfer[stage] if microbatch < len(ends) else inf
                ready = max(ready, arrives)
            if ready < earliest:
                earliest, chosen = ready, stage
        return earliest, chosen

    def _run_forward(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        state.row.append(forward(stage, len(self.forward_ends[stage])))
        state.clock += self.forward_cost[stage]
        self.forward_ends[stage].append(state.clock)
        state.held += 1
        state.ahead += 1
        state.ran_backward = False
        if stage + 1 < len(self.placement):
            self._wake(self.placement[stage + 1], state.clock + self.transfer[stage + 1])

    def _run_input(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        microbatch = len(self.input_ends[stage])
        state.row.append(backward_input(stage, microbatch))
        state.waiting_weights.append((stage, microbatch))
        state.clock += self.input_cost[stage]
        self.input_ends[stage].append(state.clock)
        state.held -= 1 - self.weight_memory
        state.ahead -= 1
        state.ran_backward = True
        if stage > 0:
            self._wake(self.placement[stage - 1], state.clock + self.transfer[stage])

    def _run_weight(self, state: _RankState) -> None:
        stage, microbatch = state.waiting_weights.popleft()
        state.row.append(backward_weight(stage, microbatch))
        state.clock += self.weight_cost[stage]
        state.held -= self.weight_memory
