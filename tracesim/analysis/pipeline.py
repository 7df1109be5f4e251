"""Pipeline stages: how long their forwards and backwards take, and how much of the pipeline's time is bubble.

Actions come from pipeline tracks, else from ``PP:0F1`` annotations (those on the device, else the device time of what
was launched under those on the host), else from compute slices that know their microbatch, where ranks send to each
other. The pipeline's time runs from the first start to the last end of any action of a step, on any rank. The bubble of
a rank is the part in which it neither computes nor transfers anything: idle time, and waiting inside sends and
receives. The wait inside a measured transfer is known once it is matched; one that is not counts as bubble altogether.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int32, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Dimension, FlowKind, OpKind, Phase, TrackRole
from tracesim.analysis.intervals import clip, union
from tracesim.analysis.transfers import Transfers
from tracesim.analysis.windows import Window

_ANNOTATION = re.compile(r"^PP:\d+([FBIW])\d+")
_PHASES = {
    "F": Phase.FORWARD,
    "B": Phase.BACKWARD_INPUT,
    "I": Phase.BACKWARD_INPUT,
    "W": Phase.BACKWARD_WEIGHT,
}
_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)


@dataclass(frozen=True)
class Actions:
    """Pipeline actions; columns of one length."""

    rank: Int32
    start: Int64
    end: Int64
    phase: Int8
    name: Int32
    """String id as drawn or annotated (``F0``, ``PP:0F0``); -1 for actions put together from compute slices."""
    chunk: Int32
    microbatch: Int32
    """-1 where only the name says it."""


@dataclass(frozen=True)
class StagePipeline:
    """One rank in the pipeline of one step. Times in nanoseconds."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    step: int
    span: int
    """The pipeline's time, the same for all ranks of a step."""
    bubble: int
    forwards: int
    forward: int
    """Mean time of a forward."""
    backwards: int
    backward: int
    """Mean time of a backward (of its parts, where they are actions of their own)."""
    active: int
    """Time in which an action of the rank runs."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time."""
        return self.bubble / self.span if self.span else 0.0


def pipeline_stages(
    timeline: Timeline, windows: Sequence[Window], dimensions: Int8, transfers: Transfers
) -> list[StagePipeline]:
    """Every rank that has pipeline actions, for each step; empty where the trace shows no pipeline.

    Args:
        timeline: where the slices are.
        windows: of all ranks and steps.
        dimensions: of all slices, as :func:`~tracesim.analysis.breakdown.slice_dimensions` gives them.
        transfers: the matched communication.
    """
    actions = find_actions(timeline, dimensions)
    if actions is None:
        return []
    busy = _Busy(timeline, dimensions, transfers)
    found: list[StagePipeline] = []
    for step in dict.fromkeys(window.step for window in windows):
        of_step = [window for window in windows if window.step == step]
        inside = [(w, _inside(actions, w)) for w in of_step]
        inside = [(w, rows) for w, rows in inside if rows.any()]
        if not inside:
            continue
        low = min(int(actions.start[rows].min()) for _, rows in inside)
        high = max(int(actions.end[rows].max()) for _, rows in inside)
        for window, rows in inside:
            forward, backward = (
                rows & (actions.phase == Phase.FORWARD),
                rows & np.isin(actions.phase, _BACKWARD),
            )
            length = actions.end - actions.start
            found.append(
                StagePipeline(
                    rank=window.rank,
                    step=step,
                    span=high - low,
                    bubble=high - low - busy.within(window.rank, low, high),
                    forwards=int(forward.sum()),
                    forward=int(length[forward].mean()) if forward.any() else 0,
                    backwards=int(backward.sum()),
                    backward=int(length[backward].mean()) if backward.any() else 0,
                    active=union(actions.start[rows], actions.end[rows]).total,
                )
            )
    return found


def longest_stage(stages: Sequence[StagePipeline]) -> tuple[int, float] | None:
    """The rank whose actions take longest over all steps, and that time over the median of all ranks.

    None unless at least two ranks have actions.
    """
    active: dict[int, int] = {}
    for stage in stages:
        active[stage.rank] = active.get(stage.rank, 0) + stage.active
    if len(active) < 2:
        return None
    rank = max(active, key=lambda r: (active[r], -r))
    middle = float(np.median(list(active.values())))
    return rank, active[rank] / middle if middle else 1.0


def _inside(actions: Actions, window: Window) -> Bool:
    middle = (actions.start + actions.end) // 2
    inside: Bool = (
        (actions.rank == window.rank)
        & (middle >= window.start)
        & (middle < max(window.end, window.start + 1))
    )
    return inside


class _Busy:
    """When ranks compute or move data, without the waiting in their sends and receives."""

    def __init__(self, timeline: Timeline, dimensions: Int8, transfers: Transfers) -> None:
        slices = timeline.slices
        self.rows = np.flatnonzero(timeline.on_device())
        self.rank = timeline.slice_ranks()
        self.start = slices.start.copy()
        self.end = slices.start + slices.duration
        pipeline = (slices.kind == OpKind.P2P) | (dimensions == Dimension.PP)
        matched = np.zeros(len(slices), dtype=np.bool_)
        matched[transfers.matches.row] = True
        waiting = transfers.by_slice(transfers.wait_inside, len(slices))
        self.start = np.where(pipeline, slices.start + waiting, slices.start)
        if not timeline.simulated:
            self.start = np.where(pipeline & ~matched, self.end, self.start)

    def within(self, rank: int, low: int, high: int) -> int:
        """Nanoseconds of ``[low, high)`` in which a rank is busy."""
        rows = self.rows[self.rank[self.rows] == rank]
        return union(*clip(self.start[rows], self.end[rows], low, high)).total


def find_actions(timeline: Timeline, dimensions: Int8) -> Actions | None:
    """The pipeline actions of a timeline; None where it shows none."""
    slices, role, rank = timeline.slices, timeline.slice_roles(), timeline.slice_ranks()
    end = slices.start + slices.duration
    staged = (role == TrackRole.PIPELINE) & (slices.microbatch >= 0)
    if staged.any():
        return Actions(
            rank[staged],
            slices.start[staged],
            end[staged],
            slices.phase[staged],
            slices.name[staged],
            slices.chunk[staged],
            slices.microbatch[staged],
        )
    annotated = _annotations(timeline)
    if annotated is not None:
        return annotated
    communicates = (slices.kind == OpKind.P2P) | (slices.kind == OpKind.COLLECTIVE)
    sends = timeline.on_device() & (
        (slices.kind == OpKind.P2P) | (communicates & (dimensions == Dimension.PP))
    )
    computes = timeline.on_device() & ~communicates & (slices.microbatch >= 0)
    computes &= (slices.phase == Phase.FORWARD) | np.isin(slices.phase, _BACKWARD)
    if not sends.any() or not computes.any():
        return None
    return _per_microbatch(timeline, np.flatnonzero(computes))


def _per_microbatch(timeline: Timeline, rows: Int64) -> Actions:
    """Compute slices of one rank, chunk, microbatch and direction that follow one another as one action."""
    slices = timeline.slices
    rank = timeline.slice_ranks()[rows]
    forward = slices.phase[rows] == Phase.FORWARD
    order = np.lexsort((rows, slices.start[rows], rank))
    rows, rank, forward = rows[order], rank[order], forward[order]
    key = np.stack([rank, slices.chunk[rows], slices.microbatch[rows], forward])
    opens = np.concatenate(([True], (key[:, 1:] != key[:, :-1]).any(axis=0)))
    first = np.flatnonzero(opens)
    return Actions(
        rank[first],
        slices.start[rows][first],
        np.maximum.reduceat(slices.start[rows] + slices.duration[rows], first),
        np.where(forward[first], Phase.FORWARD, Phase.BACKWARD_INPUT).astype(np.int8),
        np.full(len(first), -1, dtype=np.int32),
        slices.chunk[rows][first],
        slices.microbatch[rows][first],
    )


def _annotations(timeline: Timeline) -> Actions | None:
    """Actions of ``PP:`` annotations in device time."""
    slices, tracks = timeline.slices, timeline.tracks
    letters = [match[1] if (match := _ANNOTATION.match(name)) else "" for name in timeline.strings]
    named = np.array([bool(letter) for letter in letters], dtype=np.bool_)
    rows = np.flatnonzero((timeline.slice_roles() == TrackRole.ANNOTATION) & named[slices.name])
    if not len(rows):
        return None
    rank = timeline.slice_ranks()[rows]
    phase = np.array([_PHASES.get(letter, Phase.UNKNOWN) for letter in letters], dtype=np.int8)[
        slices.name[rows]
    ]
    is_device = (tracks.role >= TrackRole.COMPUTE) & (tracks.role <= TrackRole.DEVICE)
    streams = set(zip(tracks.rank[is_device].tolist(), tracks.stream[is_device].tolist(), strict=True))
    of_device = np.array(
        [(r, s) in streams for r, s in zip(tracks.rank.tolist(), tracks.stream.tolist(), strict=True)],
        dtype=np.bool_,
    )[slices.track[rows]]
    start, end = slices.start[rows], slices.start[rows] + slices.duration[rows]
    if of_device.any():
        kept = of_device
    elif timeline.properties.get("devices") == "threads":
        kept = np.ones(len(rows), dtype=np.bool_)
    else:
        start, end, kept = _launched_within(timeline, rank, start, end)
    unknown = np.full(int(kept.sum()), -1, dtype=np.int32)
    return Actions(rank[kept], start[kept], end[kept], phase[kept], slices.name[rows][kept], unknown, unknown)


def _launched_within(timeline: Timeline, rank: Int32, start: Int64, end: Int64) -> tuple[Int64, Int64, Bool]:
    """First start and last end on the device of what each span of host time launched, and whether it did."""
    slices = timeline.slices
    flows = timeline.flows.take(np.flatnonzero(timeline.flows.kind == FlowKind.LAUNCH))
    begin, stop = start.copy(), end.copy()
    launched = np.zeros(len(start), dtype=np.bool_)
    of_rank = timeline.slice_ranks()[flows.source]
    for number in np.unique(rank).tolist():
        mine = flows.take(np.flatnonzero(of_rank == number))
        mine = mine.take(np.argsort(slices.start[mine.source], kind="stable"))
        moments = slices.start[mine.source]
        for action in np.flatnonzero(rank == number).tolist():
            low, high = np.searchsorted(moments, (start[action], end[action]))
            kernels = mine.target[low:high]
            if len(kernels):
                launched[action] = True
                begin[action] = slices.start[kernels].min()
                stop[action] = (slices.start[kernels] + slices.duration[kernels]).max()
    return begin, stop, launched
