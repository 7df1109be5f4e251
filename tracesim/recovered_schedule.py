"""The pipeline schedule that a run really executed, recovered from its trace, and what each of its bubbles waited for.

Actions come from pipeline tracks of tracesim, from ``PP:0F1`` annotations of ``torch.distributed.pipelining``, or from
compute that knows its microbatch (traces of micro-operations), else from kernels, sends and receives alone
(``tracesim.recovered_kernels``). Of each pipeline rank one replica is taken.

A bubble is a stretch of the pipeline's time in which a rank runs no action. Up to the end of the action on another rank
whose output it waits for, it is

- ``warm_up`` before the rank's first backward, ``cool_down`` after its last forward: every schedule has these;
- else ``stage_imbalance``, as far as the rank with the longest actions needs more time on average for the actions that
  this rank has run since its first backward, less what earlier bubbles have used up of that;
- else ``late_peer``.

What is left of it is ``exposed_communication`` while the rank's communication runs, ``host`` where the rank waits for
launches, and ``other`` beyond that (gaps between kernels, what no record explains). Bubbles and actions of a rank add
up to the pipeline's time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import yaml

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, Phase
from schedules import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    UnitTimes,
    build_schedule,
    without_communication,
)
from schedules.actions import overlapped
from schedules.order import requirements

from .analysis import Analysis, Window
from .analysis.breakdown import slice_dimensions
from .analysis.idle import HOST
from .analysis.intervals import Intervals, intersect, subtract, union
from .analysis.pipeline import Actions, find_actions
from .errors import TraceError
from .recovered_flow import RankActions
from .recovered_kernels import actions_from_kernels
from .recovered_names import matching_names, with_two_copies
from .recovered_pair import find_pair

BUBBLE_CAUSES = (
    "warm_up",
    "cool_down",
    "stage_imbalance",
    "late_peer",
    "exposed_communication",
    "host",
    "other",
)
"""What a bubble waited for; see the module."""

_NANOSECONDS_PER_MILLISECOND = 1e6
_ANNOTATION = re.compile(r"^PP:(\d+)([FBIW])(\d+)")
_DRAWN = re.compile(r"^([FBIW])(\d+)$")
_NO_INTERVALS = Intervals.empty()


@dataclass(frozen=True)
class Bubble:
    """A part of a bubble with one cause. Times in milliseconds from the first action of any rank."""

    rank: int
    """Pipeline rank."""
    start: float
    end: float
    cause: str
    """One of :data:`BUBBLE_CAUSES`."""
    before: str
    """The action that follows, empty behind the last."""
    waited_for: str
    """The action on another rank whose output it needs, with that rank; empty if there is none."""


@dataclass(frozen=True)
class RecoveredSchedule:
    """A schedule as executed. Times in milliseconds."""

    times: UnitTimes
    """The executed actions with their times; named after the trace."""
    ranks: tuple[int, ...]
    """Global rank that was looked at for each pipeline rank."""
    step: int
    method: str
    """``pipeline tracks``, ``annotations``, ``compute slices`` or ``kernels``."""
    bubbles: tuple[Bubble, ...]
    matches: tuple[str, ...]
    """Names of schedules with the same order of actions on every rank."""
    pair: dict[str, float] | None = None
    """Of a rank by itself that shows one pair of a forward and a backward, milliseconds (``KernelPair.describe``)."""

    def totals(self) -> tuple[dict[str, float], ...]:
        """Milliseconds of bubble by cause, for each pipeline rank."""
        totals: list[dict[str, float]] = [dict.fromkeys(BUBBLE_CAUSES, 0.0) for _ in self.ranks]
        for bubble in self.bubbles:
            totals[bubble.rank][bubble.cause] += bubble.end - bubble.start
        return tuple(totals)


def recover_schedule(analysis: Analysis, step: int | None = None) -> RecoveredSchedule:
    """The schedule of one step of an analyzed timeline.

    Args:
        analysis: of the trace.
        step: number of the step; by default the first that all pipeline ranks show.

    Raises:
        TraceError: if the trace shows no pipeline actions, not all ranks of a pipeline, or no such step.
    """
    timeline = analysis.timeline
    intended = _intended_by_scenario(timeline)
    rows, window_of, method = _rows_of_step(analysis, intended, step)
    schedule = _as_schedule(timeline, rows, intended)
    matches = matching_names(schedule)
    if copies := [known for name in matches if (known := with_two_copies(name, schedule)) is not None]:
        # That its stages are those of two copies of the model the order of actions tells.
        schedule = replace(copies[0], name=schedule.name)
    low = min(int(row.start.min()) for row in rows)
    high = max(int(row.end.max()) for row in rows)
    times = UnitTimes(
        schedule,
        tuple(tuple(((row.start - low) / _NANOSECONDS_PER_MILLISECOND).tolist()) for row in rows),
        tuple(tuple(((row.end - low) / _NANOSECONDS_PER_MILLISECOND).tolist()) for row in rows),
    )
    return RecoveredSchedule(
        times=times,
        ranks=tuple(timeline.ranks.rank[[row.rank for row in rows]].tolist()),
        step=window_of[rows[0].rank].step,
        method=method,
        bubbles=tuple(_Bubbles(analysis, schedule, rows, window_of, (low, high)).all()),
        matches=matches,
        pair=_pair_alone(timeline, rows, window_of, method),
    )


def _pair_alone(
    timeline: Timeline, rows: Sequence[RankActions], windows: dict[int, Window], method: str
) -> dict[str, float] | None:
    if method != "kernels" or len(rows) > 1:
        return None
    pair = find_pair(timeline, windows[rows[0].rank])
    return pair.describe(timeline) if pair is not None else None


def _rows_of_step(
    analysis: Analysis, intended: Schedule | None, step: int | None
) -> tuple[list[RankActions], dict[int, Window], str]:
    """Actions of each pipeline rank, their windows by rank, and where the actions come from."""
    timeline = analysis.timeline
    found = find_actions(timeline, slice_dimensions(timeline))
    if found is None or not len(found.rank):
        from_kernels = actions_from_kernels(analysis, step)
        if from_kernels is None:
            raise TraceError(
                "the trace shows no pipeline actions: it needs pipeline tracks, PP: annotations "
                "(torch.distributed.pipelining under a profiler), compute that knows its microbatch, the kernels of at "
                "least two ranks that send to each other, or of one rank that runs a forward and a backward in turns"
            )
        return (*from_kernels, "kernels")
    replica = _one_replica(timeline, found)
    windows = _windows_of_step([of.window for of in analysis.steps], replica, found, step)
    rows = [_row(timeline, found, rank, place, windows[rank], intended) for place, rank in enumerate(replica)]
    if (found.name < 0).all():
        return rows, windows, "compute slices"
    return rows, windows, "annotations" if _is_annotated(timeline, found) else "pipeline tracks"


def _is_annotated(timeline: Timeline, found: Actions) -> bool:
    return any(_ANNOTATION.match(timeline.string(int(name))) for name in np.unique(found.name))


# -- which actions ---------------------------------------------------------------------------------------------


def _one_replica(timeline: Timeline, found: Actions) -> list[int]:
    """Rows of :attr:`Timeline.ranks`, one a pipeline rank in its order."""
    present = np.unique(found.rank).tolist()
    place = timeline.ranks.pp[present].tolist()
    if min(place) < 0:
        # Annotations name the stage: ranks follow each other as their first stages do.
        first = {rank: _first_stage(timeline, found, rank) for rank in present}
        ordered = sorted(present, key=lambda rank: (first[rank], rank))
        return list({first[rank]: rank for rank in reversed(ordered)}.values())[::-1]
    chosen: dict[int, int] = {}
    for rank, at in zip(present, place, strict=True):
        chosen.setdefault(at, rank)
    missing = sorted(set(range(max(chosen) + 1)) - set(chosen))
    if missing:
        raise TraceError(
            f"the trace shows no rank of pipeline rank {missing[0]}; a schedule needs one rank of each of "
            f"0 to {max(chosen)}: give their files too"
        )
    return [chosen[at] for at in sorted(chosen)]


def _first_stage(timeline: Timeline, found: Actions, rank: int) -> int:
    names = np.unique(found.name[found.rank == rank])
    stages = [int(match[1]) for name in names if (match := _ANNOTATION.match(timeline.string(int(name))))]
    return min(stages, default=int(timeline.ranks.rank[rank]))


def _windows_of_step(
    windows: Sequence[Window], replica: Sequence[int], found: Actions, step: int | None
) -> dict[int, Window]:
    """The window of the step on each rank of the replica."""
    by_step: dict[int, dict[int, Window]] = {}
    middle = (found.start + found.end) // 2
    for window in windows:
        inside = (found.rank == window.rank) & (middle >= window.start) & (middle < window.end)
        if window.rank in replica and inside.any():
            by_step.setdefault(window.step, {})[window.rank] = window
    whole = sorted(number for number, of in by_step.items() if len(of) == len(replica))
    if not whole:
        raise TraceError("no step has pipeline actions on all pipeline ranks of the trace")
    if step is not None and step not in whole:
        shown = ", ".join(map(str, whole[:12])) + (", ..." if len(whole) > 12 else "")
        raise TraceError(f"step {step} is not a whole step of the trace; choose one of {shown}")
    return by_step[whole[0] if step is None else step]


def _row(
    timeline: Timeline, found: Actions, rank: int, place: int, window: Window, intended: Schedule | None
) -> RankActions:
    middle = (found.start + found.end) // 2
    rows = np.flatnonzero((found.rank == rank) & (middle >= window.start) & (middle < window.end))
    rows = rows[np.lexsort((rows, found.start[rows]))]
    stages = intended.rank_stages[place] if intended is not None else ()
    pp = len(np.unique(timeline.ranks.pp)) if intended is None else intended.pp
    fits = intended is not None and len(intended.actions[place]) == len(rows)
    planned = intended.actions[place] if intended is not None and fits else (None,) * len(rows)
    actions = tuple(
        _action(timeline, found, row, place, pp, stages, plan)
        for row, plan in zip(rows.tolist(), planned, strict=True)
    )
    return RankActions(rank, actions, found.start[rows], found.end[rows])


def _action(
    timeline: Timeline,
    found: Actions,
    row: int,
    place: int,
    pp: int,
    stages: Sequence[int],
    planned: Action | None,
) -> Action:
    name = timeline.string(int(found.name[row]))
    if annotated := _ANNOTATION.match(name):
        return Action(int(annotated[1]), ActionKind(annotated[2]), int(annotated[3]))
    chunk = max(0, int(found.chunk[row]))
    stage = stages[chunk] if chunk < len(stages) else chunk * pp + place
    parts = [match for part in name.split("+") if (match := _DRAWN.match(part))]
    if planned is not None and planned.sub_actions and len(parts) == len(planned.sub_actions):
        # A drawn pair has one chunk; the plan knows both stages.
        named = zip(parts, planned.sub_actions, strict=True)
        return overlapped(*(Action(of.stage, ActionKind(p[1]), int(p[2])) for p, of in named))
    drawn = [Action(stage, ActionKind(part[1]), int(part[2])) for part in parts]
    if drawn:
        return drawn[0] if len(drawn) == 1 else overlapped(*drawn)
    kind = ActionKind.FORWARD if found.phase[row] == Phase.FORWARD else ActionKind.FULL_BACKWARD
    return Action(stage, kind, int(found.microbatch[row]))


def _as_schedule(timeline: Timeline, rows: Sequence[RankActions], intended: Schedule | None) -> Schedule:
    actions = _dense([row.actions for row in rows])
    name = timeline.name or "trace"
    if intended is not None:
        return replace(intended, name=name, actions=actions)
    placement: dict[int, int] = {}
    for place, row in enumerate(actions):
        for action in row:
            for part in action.parts:
                placement.setdefault(part.stage, place)
    stages = max(placement) + 1
    lacking = sorted(set(range(stages)) - set(placement))
    if lacking:
        raise TraceError(
            f"the trace shows no action of stage {lacking[0]}; give the files of all pipeline ranks"
        )
    parts = [part for row in actions for action in row for part in action.parts]
    return Schedule(
        name=name,
        pp=len(rows),
        stages=stages,
        microbatches=max(part.microbatch for part in parts) + 1,
        actions=actions,
        stage_ranks=tuple(placement[stage] for stage in range(stages)),
        forward_only=all(part.kind is ActionKind.FORWARD for part in parts),
    )


def _dense(rows: Sequence[tuple[Action, ...]]) -> tuple[tuple[Action, ...], ...]:
    """Microbatches renumbered from 0: some traces count them on over steps."""
    seen = sorted({part.microbatch for row in rows for action in row for part in action.parts})
    number = {microbatch: position for position, microbatch in enumerate(seen)}

    def moved(action: Action) -> Action:
        if action.sub_actions:
            return action._replace(sub_actions=tuple(map(moved, action.sub_actions)))
        return action._replace(microbatch=number[action.microbatch])

    return tuple(tuple(map(moved, row)) for row in rows)


def _intended_by_scenario(timeline: Timeline) -> Schedule | None:
    """The schedule that the scenario of a simulated trace names; None if it does not say."""
    text = timeline.properties.get("scenario")
    if not text:
        return None
    try:
        scenario = yaml.safe_load(text)
        parallel, training = scenario["parallel"], scenario["training"]
        sizes = parallel["pp"], parallel["vpp"], training["num_microbatches"]
        return without_communication(build_schedule(scenario["schedule"], *sizes))
    except (yaml.YAMLError, KeyError, TypeError, ScheduleError, OSError):
        return None


_Piece = tuple[int, int, str]
"""Start and end in nanoseconds of a part of a bubble, and its cause."""


# -- bubbles -----------------------------------------------------------------------------------------------------


class _Bubbles:
    """Finds the bubbles of every row and splits them by cause."""

    def __init__(
        self,
        analysis: Analysis,
        schedule: Schedule,
        rows: Sequence[RankActions],
        windows: dict[int, Window],
        span: tuple[int, int],
    ) -> None:
        self.schedule, self.rows, self.span = schedule, rows, span
        self.position: dict[Action, tuple[int, int]] = {}
        """Pipeline rank and step of each action and each part of one."""
        self.start = [row.start.tolist() for row in rows]
        self.end = [row.end.tolist() for row in rows]
        for place, actions in enumerate(schedule.actions):
            for step, action in enumerate(actions):
                for part in (action, *action.sub_actions):
                    self.position[part] = place, step
        self.mean = [_mean_times(row) for row in rows]
        self.slowest = self.mean[
            max(range(len(rows)), key=lambda place: int((rows[place].end - rows[place].start).sum()))
        ]
        self.communication = [_communication(analysis.timeline, row.rank) for row in rows]
        self.host: list[Intervals] = []
        for row in rows:
            of = [s for s in analysis.steps if s.window == windows[row.rank]]
            self.host.append(of[0].idle.of(HOST) if of else _NO_INTERVALS)

    def all(self) -> list[Bubble]:
        return [bubble for place in range(len(self.rows)) for bubble in self._of_rank(place)]

    def _of_rank(self, place: int) -> list[Bubble]:
        row, actions = self.rows[place], self.schedule.actions[place]
        kinds = [{part.kind for part in action.parts} for action in actions]
        first_backward = next((i for i, of in enumerate(kinds) if of - {ActionKind.FORWARD}), len(kinds))
        last_forward = max((i for i, of in enumerate(kinds) if ActionKind.FORWARD in of), default=-1)
        found: list[Bubble] = []
        clock, credit = self.span[0], 0
        for step, (action, start, end) in enumerate(
            zip(actions, row.start.tolist(), row.end.tolist(), strict=True)
        ):
            if start > clock:
                part = "warm_up" if step <= first_backward else "cool_down" if step > last_forward else ""
                pieces = self._split(place, (clock, start), action, part, credit)
                credit -= sum(stop - begin for begin, stop, cause in pieces if cause == "stage_imbalance")
                found += [self._bubble(place, action, piece) for piece in pieces]
            clock = max(clock, end)
            if step >= first_backward:
                own = self.mean[place][_kinds(action)]
                credit += max(0, round(self.slowest.get(_kinds(action), own) - own))
        if self.span[1] > clock:
            found.append(self._bubble(place, None, (clock, self.span[1], "cool_down")))
        return found

    def _bubble(self, place: int, action: Action | None, piece: _Piece) -> Bubble:
        producer, (peer, _) = self._producer(place, action) if action is not None else (None, (place, 0))
        start, end, cause = piece
        low = self.span[0]
        return Bubble(
            place,
            (start - low) / _NANOSECONDS_PER_MILLISECOND,
            (end - low) / _NANOSECONDS_PER_MILLISECOND,
            cause,
            str(action) if action is not None else "",
            f"{producer} on rank {peer}" if producer is not None else "",
        )

    def _split(
        self, place: int, bubble: tuple[int, int], action: Action, part: str, credit: int
    ) -> list[_Piece]:
        """Pieces of the bubble before an action; ``credit``: what stage imbalance may explain of it, nanoseconds."""
        start, end = bubble
        producer, (peer, step) = self._producer(place, action)
        done = min(self.end[peer][step], end) if producer is not None else start
        found: list[_Piece] = []
        if done > start and part:
            found.append((start, done, part))
        elif done > start:
            balanced = min(done, start + credit)
            found += [(start, balanced, "stage_imbalance"), (balanced, done, "late_peer")]
        rest = union(np.array([max(start, done)]), np.array([end]))
        moving = intersect(rest, self.communication[place])
        rest = subtract(rest, moving)
        on_host = intersect(rest, self.host[place])
        causes = (("exposed_communication", moving), ("host", on_host), ("other", subtract(rest, on_host)))
        for cause, pieces in causes:
            found += [(a, b, cause) for a, b in zip(pieces.start.tolist(), pieces.end.tolist(), strict=True)]
        return sorted(piece for piece in found if piece[1] > piece[0])

    def _producer(self, place: int, action: Action) -> tuple[Action | None, tuple[int, int]]:
        """The last action to end on another rank whose output an action needs, and its rank and step."""
        best: tuple[Action | None, tuple[int, int]] = (None, (place, 0))
        latest = -1
        for need in requirements(action, self.schedule):
            for produced in self._made_by(need.peer if need.is_receive else need):
                peer, step = self.position.get(produced, (place, 0))
                if peer != place and self.end[peer][step] > latest:
                    best, latest = (produced, (peer, step)), self.end[peer][step]
        return best

    def _made_by(self, source: Action) -> tuple[Action, ...]:
        """The compute actions that may have made what a send sends."""
        if not source.is_send:
            return (source,)
        if source.kind is ActionKind.SEND_F:
            return (Action(source.stage, ActionKind.FORWARD, source.microbatch),)
        kinds = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT)
        return tuple(Action(source.stage, kind, source.microbatch) for kind in kinds)


def _kinds(action: Action) -> tuple[str, ...]:
    return tuple(sorted(part.kind.value for part in action.parts))


def _mean_times(row: RankActions) -> dict[tuple[str, ...], float]:
    """Mean nanoseconds of each kind of action of a rank."""
    times: dict[tuple[str, ...], list[int]] = {}
    for action, length in zip(row.actions, (row.end - row.start).tolist(), strict=True):
        times.setdefault(_kinds(action), []).append(length)
    return {kinds: sum(listed) / len(listed) for kinds, listed in times.items()}


def _communication(timeline: Timeline, rank: int) -> Intervals:
    """When communication kernels of a rank run."""
    slices = timeline.slices
    mine = timeline.on_device() & (timeline.slice_ranks() == rank)
    rows = np.flatnonzero(mine & ((slices.kind == OpKind.COLLECTIVE) | (slices.kind == OpKind.P2P)))
    return union(slices.start[rows], slices.start[rows] + slices.duration[rows])
