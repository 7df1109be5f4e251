"""Which stretch of device time belongs to which training step of which rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, OpKind


@dataclass(frozen=True)
class Window:
    """Device time ``[start, end)`` in nanoseconds of one step of one rank."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    step: int
    """Step number, -1 where the trace has no steps and the window is the whole span."""
    start: int
    end: int

    @property
    def length(self) -> int:
        """Nanoseconds from start to end."""
        return self.end - self.start


def step_windows(timeline: Timeline) -> list[Window]:
    """The windows of all steps, rank after rank, in order of time.

    A measured step is marked on the host, but its kernels run later. Where launches are known, the window of a step
    runs from the first kernel launched in it to the first kernel launched in the next step; that of the last step to
    the later of its end on the host and its last kernel. Where the host is ahead of the device, a copy of the next
    batch runs on a stream of its own long before the rest of its step: so a step does not begin before the busiest
    compute stream is done with what was launched before it. Simulated steps, and steps without launches, are their own
    windows. A rank without steps has one window: its device slices from first to last.
    """
    slices = timeline.slices
    row_rank = timeline.slice_ranks()
    device = timeline.on_device()
    # A launch from a device track, as of a run on CPU, is no launch ahead of the device.
    launched = (timeline.flows.kind == FlowKind.LAUNCH) & ~device[timeline.flows.source]
    launches = timeline.flows.take(np.flatnonzero(launched))
    launch_time = slices.start[launches.source]
    launch_rank = row_rank[launches.source]
    found: list[Window] = []
    for rank in range(len(timeline.ranks)):
        steps = timeline.steps.take(np.nonzero(timeline.steps.rank == rank)[0])
        mine = np.flatnonzero(device & (row_rank == rank))
        if not len(steps):
            found += _whole(rank, slices.start[mine], (slices.start + slices.duration)[mine])
            continue
        chosen = launch_rank == rank
        targets = launches.target[chosen]
        main = mine[slices.track[mine] == busiest_track(timeline, mine)]
        kernels = _Launched.build(
            launch_time[chosen],
            slices.start[targets],
            (slices.start + slices.duration)[targets],
            np.isin(targets, main),
        )
        stream = _Stream.build(slices.start[main], (slices.start + slices.duration)[main])
        found += _windows_of_rank(rank, (steps.number, steps.start, steps.end), kernels, stream)
    return found


def busiest_track(timeline: Timeline, rows: Int64) -> int:
    """The track on which most of the time of some device slices is, communication not counted; -1 without slices."""
    if not len(rows):
        return -1
    slices = timeline.slices
    communicates = np.isin(slices.kind[rows], (OpKind.COLLECTIVE, OpKind.P2P))
    weights = np.where(communicates, 0, slices.duration[rows])
    return int(np.bincount(slices.track[rows], weights, len(timeline.tracks)).argmax())


@dataclass(frozen=True)
class _Launched:
    """The kernels of a rank whose launch is known, in order of launch. Nanoseconds."""

    time: Int64
    start: Int64
    end: Int64
    on_main: Bool

    @classmethod
    def build(cls, time: Int64, start: Int64, end: Int64, on_main: Bool) -> _Launched:
        order = np.argsort(time, kind="stable")
        return cls(time[order], start[order], end[order], on_main[order])


@dataclass(frozen=True)
class _Stream:
    """What runs on the busiest compute stream of a rank, in order of start. Nanoseconds."""

    start: Int64
    reach: Int64
    """The latest end of all that start up to here."""

    @classmethod
    def build(cls, start: Int64, end: Int64) -> _Stream:
        order = np.argsort(start, kind="stable")
        return cls(start[order], np.maximum.accumulate(end[order]))

    def done_before(self, time: int) -> int | None:
        """When all that starts before an instant has ended, at most that instant; None if there is nothing."""
        at = int(np.searchsorted(self.start, time))
        return min(int(self.reach[at - 1]), time) if at else None


def _whole(rank: int, start: Int64, end: Int64) -> list[Window]:
    return [Window(rank, -1, int(start.min()), int(end.max()))] if len(start) else []


def _windows_of_rank(
    rank: int, steps: tuple[Int64, Int64, Int64], kernels: _Launched, stream: _Stream
) -> list[Window]:
    """Windows of one rank from its steps (number, start, end) and what was launched in them."""
    begins: list[int] = []
    ends: list[int] = []
    for step_start, step_end in zip(steps[1].tolist(), steps[2].tolist(), strict=True):
        first, last = (int(at) for at in np.searchsorted(kernels.time, (step_start, step_end)))
        begin = _begin(kernels, stream, first, last) if last > first else step_start
        begins.append(max(begin, begins[-1]) if begins else begin)
        ends.append(max(step_end, int(kernels.end[first:last].max())) if last > first else step_end)
    windows = []
    for row, number in enumerate(steps[0].tolist()):
        follows = row + 1 < len(begins)
        # Steps may lie apart (a profiler schedule with pauses); then a step ends by itself.
        gap = follows and int(steps[1][row + 1]) > int(steps[2][row]) + _PAUSE_NS
        stop = begins[row + 1] if follows and not gap else ends[row]
        windows.append(Window(rank, number, begins[row], max(stop, begins[row])))
    return windows


def _begin(kernels: _Launched, stream: _Stream, first: int, last: int) -> int:
    """When the device begins with the kernels ``first`` to ``last`` of a step."""
    start, on_main = kernels.start[first:last], kernels.on_main[first:last]
    begin = int(start.min())
    done = stream.done_before(int(start[on_main].min())) if on_main.any() else None
    return begin if done is None else max(begin, done)


_PAUSE_NS = 50_000_000
"""Host time between two steps above which the profiler is taken to have paused between them."""
