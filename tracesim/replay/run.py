"""Replays a rebuilt run: its graph through the engine, and what comes out beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from tracesim.engine import execute
from tracesim.replay.graph import Rebuilt, RowRole


@dataclass(frozen=True)
class Replayed:
    """Times of the rows of a rebuilt run, in nanoseconds of its timeline; shape [rows]."""

    rebuilt: Rebuilt
    start: Int64
    """Communication starts when its own rank reaches it, as a profiler shows it."""
    end: Int64
    waited_for: Int64
    """Row whose end let this one start, -1 for none."""


def replay(rebuilt: Rebuilt, *, keep_unexplained: bool = True) -> Replayed:
    """Run a rebuilt graph.

    Raises:
        SimulationError: if rows wait for each other, which a changed graph may do.
    """
    lags = rebuilt.lags(keep_unexplained=keep_unexplained)
    execution = execute(rebuilt.graph, rebuilt.durations, lags=lags)
    start = execution.start - execution.wait + rebuilt.origin
    return Replayed(rebuilt, start, execution.end + rebuilt.origin, execution.waited_for)


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, in nanoseconds."""

    rank: int
    """Row of the timeline's ranks."""
    step: int
    """Number of the step, -1 if the trace has none."""
    measured: int
    replayed: int
    host_measured: int
    """Time of the step on the host; 0 where the trace has no steps."""
    host_replayed: int

    @property
    def error(self) -> float:
        """Replayed over measured, minus one."""
        return self.replayed / self.measured - 1 if self.measured else 0.0

    @property
    def host_error(self) -> float:
        """The same of the host."""
        return self.host_replayed / self.host_measured - 1 if self.host_measured else 0.0


def step_times(replayed: Replayed) -> list[StepTime]:
    """Every step of every rank, measured and replayed.

    A step runs from the first slice launched in it to the first slice launched in the next; the last one to the later
    of its last slice and its end on the host.
    """
    rows = replayed.rebuilt.rows
    steps = replayed.rebuilt.timeline.steps
    device = rows.role == RowRole.DEVICE
    found = []
    for rank in range(len(replayed.rebuilt.timeline.ranks)):
        numbers = steps.number[steps.rank == rank][np.argsort(steps.start[steps.rank == rank], kind="stable")]
        mine = np.flatnonzero(device & (rows.rank == rank))
        if not len(mine):
            continue
        marks = np.flatnonzero((rows.role == RowRole.MARK) & (rows.rank == rank))
        marks = marks[np.argsort(rows.start[marks], kind="stable")]
        if not len(numbers):
            whole = [int(e[mine].max() - s[mine].min()) for s, e in _both(replayed)]
            found.append(StepTime(rank, -1, whole[0], whole[1], 0, 0))
            continue
        device_times = [_windows(rows.step[mine], s[mine], e[mine], len(numbers)) for s, e in _both(replayed)]
        host_times = [_host_steps(rows.step[marks], s[marks], len(numbers)) for s, _ in _both(replayed)]
        found += [
            StepTime(rank, int(number), *(t[i] for t in device_times), *(t[i] for t in host_times))
            for i, number in enumerate(numbers.tolist())
            if device_times[0][i] > 0
        ]
    return found


def _both(replayed: Replayed) -> tuple[tuple[Int64, Int64], tuple[Int64, Int64]]:
    rows = replayed.rebuilt.rows
    return (rows.start, rows.end), (replayed.start, replayed.end)


def _windows(step: Int64, start: Int64, end: Int64, count: int) -> list[int]:
    """Length of the device window of each step; 0 for one without slices."""
    high = np.iinfo(np.int64).max
    begins, ends = np.full(count + 1, high, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    inside = step >= 0
    np.minimum.at(begins, step[inside], start[inside])
    np.maximum.at(ends, step[inside], end[inside])
    lengths = []
    for number in range(count):
        if begins[number] == high:
            lengths.append(0)
            continue
        stop = begins[number + 1] if begins[number + 1] < high else ends[number]
        lengths.append(int(stop - begins[number]))
    return lengths


def _host_steps(step: Int64, time: Int64, count: int) -> list[int]:
    """Time between the two marks of each step; 0 without them."""
    lengths = [0] * count
    for number in range(count):
        mine = np.sort(time[step == number])
        if len(mine) >= 2:
            lengths[number] = int(mine[1] - mine[0])
    return lengths
