"""Replays a rebuilt run: its graph through the engine, and what comes out beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
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

    A step runs from the first slice launched in it to the first slice launched in the next. The last one, and one that
    the next recorded step did not follow, runs to the end of its last slice.
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
        followed = np.append(np.diff(numbers) == 1, False) & (not recorded_apart(replayed.rebuilt.timeline))
        device_times = [_windows(rows.step[mine], s[mine], e[mine], followed) for s, e in _both(replayed)]
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


def recorded_apart(timeline: Timeline) -> bool:
    """Whether the time between two steps of the file says nothing."""
    return timeline.properties.get("steps") == "recorded apart"


def _windows(step: Int64, start: Int64, end: Int64, followed: Bool) -> list[int]:
    """Length of the device window of each step; 0 for one without slices."""
    high, count = np.iinfo(np.int64).max, len(followed)
    begins, ends = np.full(count + 1, high, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    inside = step >= 0
    np.minimum.at(begins, step[inside], start[inside])
    np.maximum.at(ends, step[inside], end[inside])
    lengths = []
    for number in range(count):
        if begins[number] == high:
            lengths.append(0)
            continue
        stop = begins[number + 1] if followed[number] and begins[number + 1] < high else ends[number]
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


@dataclass(frozen=True)
class StreamDeviation:
    """How the slices of one device stream start in the replay against the measurement, in nanoseconds."""

    track: int
    """Row of the timeline's tracks."""
    slices: int
    same_order: bool
    """Whether its slices start in the measured order."""
    busy_measured: int
    busy_replayed: int
    start_error_median: int
    start_error_worst: int
    worst_row: int
    """Row of the graph that deviates most."""


def stream_deviations(replayed: Replayed) -> list[StreamDeviation]:
    """One entry a device stream. Starts are compared relative to the first slice of the rank in both runs."""
    rows = replayed.rebuilt.rows
    device = np.flatnonzero(rows.role == RowRole.DEVICE)
    found = []
    for track in np.unique(rows.track[device]).tolist():
        mine = device[rows.track[device] == track]
        measured = np.lexsort((mine, rows.end[mine], rows.start[mine]))
        ordered = mine[measured]
        error = replayed.start[ordered] - rows.start[ordered]
        worst = int(np.argmax(np.abs(error)))
        found.append(
            StreamDeviation(
                track=track,
                slices=len(mine),
                same_order=not _disordered(rows.start[ordered], rows.end[ordered], replayed.start[ordered]),
                busy_measured=int((rows.end[mine] - rows.start[mine]).sum()),
                busy_replayed=int((replayed.end[mine] - replayed.start[mine]).sum()),
                start_error_median=int(np.median(np.abs(error))),
                start_error_worst=int(error[worst]),
                worst_row=int(ordered[worst]),
            )
        )
    return found


def _disordered(start: Int64, end: Int64, replayed: Int64) -> bool:
    """Whether a slice starts before one that had ended before it in the measurement."""
    by_end = np.argsort(end, kind="stable")
    latest = np.maximum.accumulate(replayed[by_end])
    before = np.searchsorted(end[by_end], start, side="right")
    return bool((replayed[before > 0] < latest[before[before > 0] - 1]).any())


def step_duration(times: list[StepTime]) -> int:
    """Mean over the steps of the slowest rank's replayed time, in nanoseconds."""
    slowest: dict[int, int] = {}
    for time in times:
        slowest[time.step] = max(slowest.get(time.step, 0), time.replayed)
    return round(sum(slowest.values()) / len(slowest)) if slowest else 0


LIMITS = ("compute", "communication", "memory", "host", "delays", "unexplained")
"""What the critical path of a replay consists of."""


def limited_by(replayed: Replayed) -> dict[str, int]:
    """Nanoseconds of the longest chain of the replay by what they are, from its first to its last end."""
    rebuilt, rows = replayed.rebuilt, replayed.rebuilt.rows
    totals = dict.fromkeys(LIMITS, 0)
    device = np.flatnonzero(rows.role == RowRole.DEVICE)
    kind = rebuilt.graph.operations.kind
    row = int(device[np.argmax(replayed.end[device])])
    moment = int(replayed.end[row])
    while row >= 0:
        own = moment - int(replayed.end[row]) + int(rebuilt.durations[row])
        own = max(min(own, int(rebuilt.durations[row])), 0)
        if rows.role[row] != RowRole.DEVICE:
            what = "host"
        elif kind[row] in (OpKind.COLLECTIVE, OpKind.P2P):
            what = "communication"
        else:
            what = "memory" if kind[row] in (OpKind.MEMCPY, OpKind.MEMSET) else "compute"
        totals[what] += own
        begun = moment - own
        source = int(replayed.waited_for[row])
        ended = int(replayed.end[source]) if source >= 0 else rebuilt.origin
        lateness = max(begun - ended, 0)
        kept = min(int(rebuilt.unexplained[row]), lateness)
        totals["unexplained"] += kept
        totals["delays"] += lateness - kept
        moment, row = min(begun, ended), source
    return totals
