"""A pair of a forward and a backward on one rank, from its kernels alone: DualPipe's, where a trace shows one rank.

Such a trace has no sends or receives, and one chunk's forward beside another's backward, which take turns.

- *Exchanges* of experts are on a stream of their own, with what prepares them (layout, notification).
- *Directions* are those of the reader where it knows them for all kernels (annotations). Else a kernel is backward by
  the autograd engine that launched it, or by its name, which for weight gradients may say no more than that it
  accumulates; it is forward by its name, unless it is a norm, which often runs again. The others are of the direction
  around them, in the order in which kernels start. A forward ends its turn where its exchange begins; one that seems to
  end without is recompute inside a backward. A backward ends its turn behind the last kernel that is told.
- *A pair* it is where both directions take turns and exchanges of each run beside compute of the other for
  :data:`LEAST_HIDDEN` of their time. Microbatches that follow each other take turns too, but their exchanges wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Dimension, OpKind, Phase
from schedules import Action, ActionKind
from schedules.actions import overlapped

from .analysis import Analysis, Window
from .analysis.breakdown import slice_dimensions
from .analysis.intervals import Intervals, intersect, union
from .recovered_flow import RankActions

LEAST_TURNS = 4
"""Changes between forward and backward of a pair, at least: two layers of each."""
LEAST_HIDDEN = 0.3
"""Part of the exchanges of each direction beside compute of the other."""

_BACKWARD_NAME = re.compile(r"bwd|backward|[dw]grad|_acc(um|\b|:)", re.IGNORECASE)
_FORWARD_NAME = re.compile(r"fwd|forward", re.IGNORECASE)
_PREPARES = re.compile(r"notify|layout|preprocess|prepare", re.IGNORECASE)
_FORWARD, _BACKWARD = 1, 2
_BACKWARD_PHASES = (int(Phase.BACKWARD_INPUT), int(Phase.BACKWARD_WEIGHT), int(Phase.RECOMPUTE))
_SIDE_KINDS = (OpKind.MEMCPY, OpKind.MEMSET, OpKind.OPTIMIZER, OpKind.HOST, OpKind.ANNOTATION)
_AT_ONCE_NS = 20_000
"""What waits for one kernel starts within this time of what follows it."""


@dataclass(frozen=True)
class KernelPair:
    """Kernels of a rank that are a forward and a backward interleaved. Rows of slices."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    forward: Int64
    backward: Int64
    forward_exchanges: Int64
    backward_exchanges: Int64

    def rows(self) -> Int64:
        """All of them."""
        found: Int64 = np.concatenate(
            [self.forward, self.backward, self.forward_exchanges, self.backward_exchanges]
        )
        return found

    def describe(self, timeline: Timeline) -> dict[str, float]:
        """Milliseconds of the pair, of compute and exchanges of both directions, and of exchanges beside compute."""
        start, end = _span(timeline, self.rows())
        computing = _times(timeline, np.concatenate([self.forward, self.backward]))
        found = {"time": float(end - start)}
        for name, compute, exchanges in (
            ("forward", self.forward, self.forward_exchanges),
            ("backward", self.backward, self.backward_exchanges),
        ):
            moving = _times(timeline, exchanges)
            found[f"{name}_compute"] = float(_times(timeline, compute).total)
            found[f"{name}_exchanges"] = float(moving.total)
            found[f"{name}_exchanges_hidden"] = float(intersect(moving, computing).total)
        return {name: value / 1e6 for name, value in found.items()}


def pair_of_one_rank(analysis: Analysis, step: int | None) -> tuple[KernelPair, Window] | None:
    """The pair in the first step of a trace, or in a given one; of several ranks that of the first that has one."""
    windows = [of.window for of in analysis.steps if step is None or of.window.step == step]
    for window in sorted(windows, key=lambda window: (window.rank, window.step)):
        pair = find_pair(analysis.timeline, window)
        if pair is not None:
            return pair, window
    return None


def find_pair(timeline: Timeline, window: Window) -> KernelPair | None:
    """The pair that the kernels of a rank in a window are; None if they are none."""
    slices = timeline.slices
    middle = slices.start + slices.duration // 2
    inside = (timeline.slice_ranks() == window.rank) & (middle >= window.start) & (middle < window.end)
    device = timeline.on_device() & inside & (slices.duration > 0)
    communicates = np.isin(slices.kind, (OpKind.COLLECTIVE, OpKind.P2P))
    compute = np.flatnonzero(device & ~communicates & ~np.isin(slices.kind, _SIDE_KINDS))
    exchanges = np.flatnonzero(device & communicates & (slice_dimensions(timeline) == Dimension.EP))
    if not len(compute) or not len(exchanges):
        return None
    beside = _on_streams_of(timeline, compute, exchanges)
    exchanges = _by_start(timeline, np.concatenate([exchanges, compute[beside]]))
    compute = _by_start(timeline, compute[~beside])
    begin = _exchange_begins(timeline, exchanges)
    backward = _directions(timeline, compute, np.unique(slices.start[begin]))
    if np.count_nonzero(np.diff(backward.astype(np.int8))) < LEAST_TURNS:
        return None
    behind = _carried(timeline, compute, backward, begin)
    pair = KernelPair(
        window.rank, compute[~backward], compute[backward], exchanges[~behind], exchanges[behind]
    )
    return pair if _take_turns(timeline, pair) else None


def actions_of_pair(pair: KernelPair, timeline: Timeline) -> RankActions:
    """The pair as the one action of its rank: a forward of the second microbatch beside a backward of the first."""
    start, end = _span(timeline, pair.rows())
    action = overlapped(Action(0, ActionKind.FORWARD, 1), Action(0, ActionKind.FULL_BACKWARD, 0))
    return RankActions(
        pair.rank, (action,), np.array([start], dtype=np.int64), np.array([end], dtype=np.int64)
    )


# -- exchanges -------------------------------------------------------------------------------------------------


def _on_streams_of(timeline: Timeline, compute: Int64, exchanges: Int64) -> Bool:
    """Kernels on the streams of exchanges, but for streams that compute for longer than they exchange."""
    slices = timeline.slices
    count = int(slices.track.max()) + 1
    busy, moving = (
        np.bincount(slices.track[rows], weights=slices.duration[rows], minlength=count)
        for rows in (compute, exchanges)
    )
    found: Bool = (moving > busy)[slices.track[compute]]
    return found


def _exchange_begins(timeline: Timeline, exchanges: Int64) -> Int64:
    """For each kernel of exchanges, in the order of their starts, the first of its exchange.

    It begins with what prepares it; where no exchange of the trace is prepared, each kernel is one.
    """
    slices = timeline.slices
    moves = np.isin(slices.kind[exchanges], (OpKind.COLLECTIVE, OpKind.P2P))
    named = [bool(_PREPARES.search(timeline.string(name))) for name in slices.name[exchanges].tolist()]
    prepares = ~moves | np.array(named, dtype=np.bool_)
    after_move = np.concatenate([[True], ~prepares[:-1]])
    first = after_move & (prepares if (prepares & moves).any() else True)
    first[0] = True
    found: Int64 = exchanges[np.maximum.accumulate(np.where(first, np.arange(len(exchanges)), 0))]
    return found


def _carried(timeline: Timeline, compute: Int64, backward: Bool, begin: Int64) -> Bool:
    """Of exchanges by their first kernels, those of a backward.

    By their phase; where that is not known a forward's exchange is the one that begins closest to the end of its turn.
    """
    slices = timeline.slices
    if (slices.phase[begin] != Phase.UNKNOWN).all():
        own: Bool = np.isin(slices.phase[begin], _BACKWARD_PHASES)
        return own
    begins = np.unique(slices.start[begin])
    ends = slices.start[compute[1:][backward[1:] & ~backward[:-1]]]
    closest = np.abs(begins[None, :] - ends[:, None]).argmin(axis=1)
    others: Bool = ~np.isin(slices.start[begin], begins[closest])
    return others


# -- directions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turn:
    """Kernels between the first and the last that are told in a turn of one direction."""

    way: int
    first: int
    last: int


def _directions(timeline: Timeline, compute: Int64, begins: Int64) -> Bool:
    """Of kernels in the order of their starts, those that are backward; ``begins`` are the starts of exchanges."""
    slices = timeline.slices
    known: Bool = np.isin(slices.phase[compute], _BACKWARD_PHASES)
    if (slices.phase[compute] != Phase.UNKNOWN).all():
        return known
    names = slices.name[compute].tolist()
    by_name = {name: _told_by_name(timeline.string(name)) for name in set(names)}
    told = np.array([by_name[name] for name in names], dtype=np.int8)
    told[(told == _FORWARD) & (slices.kind[compute] == OpKind.NORM)] = 0
    told[known] = _BACKWARD
    starts = slices.start[compute]
    turns = _turns(told, starts, begins)
    bounds = [0]
    for before, after in pairwise(turns):
        ends = _exchange_between(starts, before.last, after.first, begins)
        bounds.append(before.last + 1 if after.way == _FORWARD or ends is None else ends)
    backward = np.zeros(len(compute), dtype=np.bool_)
    for turn, (first, last) in zip(turns, pairwise([*bounds, len(compute)]), strict=True):
        backward[first:last] = turn.way == _BACKWARD
    return backward


def _told_by_name(name: str) -> int:
    if _BACKWARD_NAME.search(name):
        return _BACKWARD
    return _FORWARD if _FORWARD_NAME.search(name) else 0


def _turns(told: Int8, starts: Int64, begins: Int64) -> list[_Turn]:
    """Turns of the two directions, without a forward in front of a backward whose exchange does not begin there."""
    found: list[_Turn] = []
    for way, group in groupby(np.flatnonzero(told).tolist(), key=lambda place: int(told[place])):
        places = list(group)
        turn = _Turn(way, places[0], places[-1])
        if (
            way == _BACKWARD
            and len(found) > 1
            and _exchange_between(starts, found[-1].last, turn.first, begins) is None
        ):
            found.pop()
            turn = _Turn(way, found.pop().first, turn.last)
        found.append(turn)
    return found


def _exchange_between(starts: Int64, before: int, after: int, begins: Int64) -> int | None:
    """The first kernel beside the last exchange that begins between two kernels; None if none does."""
    bounds = [starts[before], starts[after] + _AT_ONCE_NS]
    first, last = np.searchsorted(begins, bounds, side="right").tolist()
    if last <= first:
        return None
    place = int(np.searchsorted(starts, begins[last - 1] - _AT_ONCE_NS, side="left"))
    return min(max(place, before + 1), after)


# -- times -----------------------------------------------------------------------------------------------------


def _take_turns(timeline: Timeline, pair: KernelPair) -> bool:
    """Whether exchanges of each direction run beside compute of the other."""
    for exchanges, other in (
        (pair.forward_exchanges, pair.backward),
        (pair.backward_exchanges, pair.forward),
    ):
        moving, computing = _times(timeline, exchanges), _times(timeline, other)
        if not moving.total or intersect(moving, computing).total < LEAST_HIDDEN * moving.total:
            return False
    return True


def _by_start(timeline: Timeline, rows: Int64) -> Int64:
    return rows[np.lexsort((rows, timeline.slices.start[rows]))]


def _times(timeline: Timeline, rows: Int64) -> Intervals:
    start = timeline.slices.start[rows]
    return union(start, start + timeline.slices.duration[rows])


def _span(timeline: Timeline, rows: Int64) -> tuple[int, int]:
    start = timeline.slices.start[rows]
    return int(start.min()), int((start + timeline.slices.duration[rows]).max())
