"""Everything tracesim finds out about a timeline, in one go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from tracesim.analysis.breakdown import Breakdown, StepParts, breakdowns, slice_dimensions, step_parts
from tracesim.analysis.causes import Causes, find_causes
from tracesim.analysis.clocks import ClockOffsets, align_clocks, estimate_offsets
from tracesim.analysis.cpu_runs import threads_as_devices
from tracesim.analysis.critical_path import CriticalPath, CriticalPaths
from tracesim.analysis.idle import IdlePieces, explain_gaps
from tracesim.analysis.intervals import Intervals, clip, intersect, join, subtract, union
from tracesim.analysis.launches import LaunchStatistics, launch_statistics
from tracesim.analysis.matching import match_communication
from tracesim.analysis.pipeline import StagePipeline, pipeline_stages
from tracesim.analysis.transfers import Transfers, split_transfers
from tracesim.analysis.windows import Window, step_windows


@dataclass(frozen=True)
class StreamIdle:
    """One device track in a step."""

    track: int
    """Row of :attr:`Timeline.tracks`."""
    slices: int
    busy: int
    """Nanoseconds in which a slice runs."""
    idle: Mapping[str, int]
    """Nanoseconds by key of :data:`~tracesim.analysis.idle.IDLE_CAUSES`."""


@dataclass(frozen=True)
class Stalls:
    """Launched slices that the device started late for no recorded reason, in a step."""

    count: int
    total: int
    """Nanoseconds."""
    longest: int


@dataclass(frozen=True)
class StepAnalysis:
    """One step of one rank. The parts of ``breakdown`` with ``idle`` in place of its idle time add up to the window."""

    breakdown: Breakdown
    parts: StepParts
    idle: IdlePieces
    exposed_wait: int
    """Nanoseconds of exposed communication in which a matched slice waits for its last member."""
    streams: tuple[StreamIdle, ...]
    stalls: Stalls
    launches: LaunchStatistics
    path: CriticalPath

    @property
    def window(self) -> Window:
        """Rank, step and extent."""
        return self.breakdown.window


@dataclass(frozen=True)
class Analysis:
    """What is found out about a timeline."""

    timeline: Timeline
    """The timeline that the figures are of: the given one, with clock offsets taken out where they are certain."""
    clocks: ClockOffsets
    transfers: Transfers
    causes: Causes
    steps: tuple[StepAnalysis, ...]
    paths: tuple[CriticalPath, ...]
    """Across ranks, one a step that at least two ranks show."""
    pipeline: tuple[StagePipeline, ...]


def analyze(timeline: Timeline) -> Analysis:
    """Analyze a timeline, simulated or measured; of a run on CPU its threads are the devices."""
    timeline = threads_as_devices(timeline)
    matches = match_communication(timeline)
    clocks = estimate_offsets(timeline, matches)
    timeline = align_clocks(timeline, clocks)
    transfers = split_transfers(timeline, matches)
    causes = find_causes(timeline, transfers)
    windows = step_windows(timeline)
    dimensions = slice_dimensions(timeline)
    walker = CriticalPaths(timeline, causes, transfers)
    waiting = _waiting(timeline, transfers)
    device, rank = np.flatnonzero(timeline.on_device()), timeline.slice_ranks()
    steps = []
    for found in breakdowns(timeline, windows):
        window = found.window
        rows = device[rank[device] == window.rank]
        parts = step_parts(timeline, rows, dimensions, window)
        exposed = join(*parts.exposed.values())
        steps.append(
            StepAnalysis(
                breakdown=found,
                parts=parts,
                idle=explain_gaps(timeline, causes, rows, parts.idle),
                exposed_wait=intersect(exposed, waiting[window.rank]).total,
                streams=_streams(timeline, causes, rows, window),
                stalls=_stalls(timeline, causes, window),
                launches=launch_statistics(timeline, window),
                path=walker.within(window),
            )
        )
    return Analysis(
        timeline=timeline,
        clocks=clocks,
        transfers=transfers,
        causes=causes,
        steps=tuple(steps),
        paths=tuple(walker.across(of_step) for of_step in _shared_steps(windows)),
        pipeline=tuple(pipeline_stages(timeline, windows, dimensions, transfers)),
    )


def _shared_steps(windows: list[Window]) -> list[list[Window]]:
    """Windows of the steps that at least two ranks show, step by step."""
    by_step: dict[int, list[Window]] = {}
    for window in windows:
        by_step.setdefault(window.step, []).append(window)
    return [found for found in by_step.values() if len({w.rank for w in found}) > 1]


def _waiting(timeline: Timeline, transfers: Transfers) -> list[Intervals]:
    """For each rank the instants at which a matched slice waits for its last member."""
    row = transfers.matches.row
    rank = timeline.slice_ranks()[row]
    start = timeline.slices.start[row]
    end = start + transfers.wait_inside
    return [union(start[rank == number], end[rank == number]) for number in range(len(timeline.ranks))]


def _streams(timeline: Timeline, causes: Causes, rows: Int64, window: Window) -> tuple[StreamIdle, ...]:
    slices = timeline.slices
    start, end = slices.start[rows], slices.start[rows] + slices.duration[rows]
    whole = union(np.array([window.start]), np.array([window.end]))
    track = slices.track[rows]
    everything = union(*clip(start, end, window.start, window.end))
    found = []
    for number in np.unique(track).tolist():
        mine = track == number
        busy = union(*clip(start[mine], end[mine], window.start, window.end))
        pieces = explain_gaps(timeline, causes, rows[mine], subtract(whole, busy), everything)
        inside = mine & (start < window.end) & (end > window.start)
        found.append(StreamIdle(number, int(inside.sum()), busy.total, pieces.totals()))
    return tuple(found)


def _stalls(timeline: Timeline, causes: Causes, window: Window) -> Stalls:
    start = timeline.slices.start
    rows = np.flatnonzero(causes.stalled & (start >= window.start) & (start < window.end))
    late = causes.late[rows[timeline.slice_ranks()[rows] == window.rank]]
    return Stalls(len(late), int(late.sum()), int(late.max()) if len(late) else 0)
