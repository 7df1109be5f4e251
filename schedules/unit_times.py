"""A small simulator of a schedule alone: fixed cost a kind of action and a transfer, nothing shared.

It finds deadlocks, widths for the drawings and the bubble of a schedule in units of one forward. What a step
really costs is for the engine; this knows neither operators nor hardware.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .actions import Action, ActionKind, Schedule, ScheduleError
from .costs import ActionCosts
from .grid import step_grid, time_grid
from .order import requirements


@dataclass(frozen=True)
class UnitTimes:
    """When each action of a schedule runs, in units of the costs given."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    """One row a rank, as :attr:`Schedule.actions`."""
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @property
    def rank_busy(self) -> tuple[float, ...]:
        """Time each rank is not idle."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def rank_spans(self) -> tuple[float, ...]:
        """Time from the first start to the last end on each rank."""
        return tuple(
            ends[-1] - starts[0] if starts else 0.0
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def longest_rank(self) -> float:
        """Longest of the ranks' spans: what the zero-bubble papers compare, as ranks need not end together."""
        return max(self.rank_spans)

    @property
    def rank_bubble_fractions(self) -> tuple[float, ...]:
        """Idle share of the makespan on each rank."""
        return tuple(1.0 - busy / self.makespan if self.makespan else 0.0 for busy in self.rank_busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, (p - 1) / (m + p - 1) for 1F1B with equal stages.

        This is idle over total time; some papers divide by the busy time instead.
        """
        return sum(self.rank_bubble_fractions) / self.schedule.pp

    def grid(self, width: int = 160) -> str:
        """The schedule drawn over time."""
        return time_grid(self.schedule, self.starts, self.ends, width)


def simulate_unit_times(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    backward_input: float | None = None,
    backward_weight: float | None = None,
) -> UnitTimes:
    """Run a schedule with fixed costs and free communication; each rank executes its row in order.

    Args:
        schedule: compute-only or with communication. Sends do not block; a receive is posted where it stands, and what
            consumes it waits for its send.
        forward: cost of a forward of one stage.
        backward: cost of a full backward.
        backward_input: cost of a backward for the input; half of ``backward`` if not given.
        backward_weight: cost of a backward for the weight; the rest of ``backward`` if not given.

    Raises:
        ScheduleError: if ranks wait for each other or for an action that never comes; the message holds the
            grid with the step of each stuck rank marked and what it waits for.
    """
    for_input = backward / 2 if backward_input is None else backward_input
    for_weight = backward - for_input if backward_weight is None else backward_weight
    return simulate_costs(schedule, ActionCosts(forward, for_input, for_weight))


def simulate_costs(schedule: Schedule, costs: ActionCosts) -> UnitTimes:
    """Run a schedule with given costs; each rank executes its row in order, and transfers hold up who reads them alone.

    Raises:
        ScheduleError: as :func:`simulate_unit_times`, and if the costs name another number of stages.
    """
    costs.check_stages(schedule.stages)
    run = _Run(schedule, costs)
    run.advance_all()
    stuck = {rank: need for rank, need in run.waits_for.items() if need is not None}
    if stuck:
        raise ScheduleError(_deadlock_report(schedule, [len(row) for row in run.ends], stuck))
    return UnitTimes(schedule, tuple(map(tuple, run.starts)), tuple(map(tuple, run.ends)))


class _Run:
    """State of one simulation: how far each rank has come, and who waits for what."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self.schedule = schedule
        self.costs = costs
        self.starts: list[list[float]] = [[] for _ in range(schedule.pp)]
        self.ends: list[list[float]] = [[] for _ in range(schedule.pp)]
        self.ended: dict[Action, float] = {}
        self.waits_for: dict[int, Action | None] = {}

    def advance_all(self) -> None:
        """Run every rank as far as it comes; a rank is looked at again only when what it waits for has ended."""
        waiting: dict[Action, list[int]] = defaultdict(list)
        ready = deque(range(self.schedule.pp))
        while ready:
            rank = ready.popleft()
            for action in self._advance(rank):
                ready += waiting.pop(action, [])
            need = self.waits_for[rank]
            if need is not None:
                waiting[need].append(rank)

    def _advance(self, rank: int) -> list[Action]:
        """Run one rank until it must wait; the actions that ended."""
        starts, ends = self.starts[rank], self.ends[rank]
        finished: list[Action] = []
        self.waits_for[rank] = None
        clock = ends[-1] if ends else 0.0
        for action in self.schedule.actions[rank][len(ends) :]:
            start = clock
            # A receive is only posted at its place; who consumes it waits for the send.
            for need in () if action.is_receive else requirements(action, self.schedule):
                source = need.peer if need.is_receive and need in self.ended else need
                if source not in self.ended:
                    self.waits_for[rank] = source
                    return finished
                crosses = self.schedule.stage_rank(source.stage) != rank
                start = max(start, self.ended[source] + (self.costs.transfer if crosses else 0.0))
            clock = start + self.costs.of(action)
            starts.append(start)
            ends.append(clock)
            for done in (action, *action.sub_actions):
                self.ended[done] = clock
                finished.append(done)
        return finished


def _deadlock_report(schedule: Schedule, heads: list[int], stuck: Mapping[int, Action]) -> str:
    done, total = sum(heads), sum(len(row) for row in schedule.actions)
    lines = [
        f"schedule {schedule.name}: deadlock, {done} of {total} actions can run and then every rank waits:"
    ]
    for rank, need in sorted(stuck.items()):
        lines.append(
            f"  rank {rank} at step {heads[rank]} ({schedule.actions[rank][heads[rank]]}) waits for {need}, "
            f"{_whereabouts(schedule, need, rank, heads)}"
        )
    marked = [(rank, heads[rank]) for rank in sorted(stuck)]
    return "\n".join([*lines, step_grid(schedule, marked)])


def _whereabouts(schedule: Schedule, need: Action, rank: int, heads: list[int]) -> str:
    if need not in schedule.positions:
        return "which no rank has"
    other, step = schedule.positions[need]
    if other == rank:
        return f"which comes later on the same rank (step {step}): put it first"
    if step == heads[other]:
        return f"at which rank {other} stands"
    return f"which is step {step} of rank {other}, now at step {heads[other]}"


def peak_activations(schedule: Schedule, weight_memory: float = 1.0) -> tuple[float, ...]:
    """Most (stage, microbatch) pairs whose activations each rank holds at once.

    A pair is held from its forward to the end of its full backward, or of its backward for the weight; between its
    backward for the input and the one for the weight a share ``weight_memory`` of it is. Without backwards nothing is
    kept beyond the forward itself. Whole numbers where the share is 1.
    """
    if schedule.forward_only:
        return tuple(min(len(row), 1) for row in schedule.actions)
    return tuple(max(activations_held(row, weight_memory), default=0) for row in schedule.actions)


def activations_held(row: Sequence[Action], weight_memory: float = 1.0) -> list[float]:
    """How many pairs a rank holds while it runs each action of its row; see :func:`peak_activations`."""
    forwards, waiting = 0, 0
    counts: list[float] = []
    for action in row:
        kinds = [part.kind for part in action.parts]
        forwards += kinds.count(ActionKind.FORWARD)
        held = forwards + waiting
        counts.append(held if weight_memory == 1 or not waiting else forwards + waiting * weight_memory)
        for_input, for_weight = (
            kinds.count(ActionKind.BACKWARD_INPUT),
            kinds.count(ActionKind.BACKWARD_WEIGHT),
        )
        forwards -= kinds.count(ActionKind.FULL_BACKWARD) + for_input
        waiting += for_input - for_weight
    return counts
