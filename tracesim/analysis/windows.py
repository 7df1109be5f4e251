"""Which stretch of device time belongs to which training step of which rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind


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
    the later of its end on the host and its last kernel. Simulated steps, and steps without launches, are their own
    windows. A rank without steps has one window: its device slices from first to last.
    """
    slices = timeline.slices
    row_rank = timeline.slice_ranks()
    launches = timeline.flows.take(np.nonzero(timeline.flows.kind == FlowKind.LAUNCH)[0])
    launch_time = slices.start[launches.source]
    launch_rank = row_rank[launches.source]
    device = timeline.on_device()
    found: list[Window] = []
    for rank in range(len(timeline.ranks)):
        steps = timeline.steps.take(np.nonzero(timeline.steps.rank == rank)[0])
        mine = device & (row_rank == rank)
        if not len(steps):
            found += _whole(rank, slices.start[mine], (slices.start + slices.duration)[mine])
            continue
        chosen = launch_rank == rank
        targets = launches.target[chosen]
        found += _windows_of_rank(
            rank,
            (steps.number, steps.start, steps.end),
            launch_time[chosen],
            slices.start[targets],
            (slices.start + slices.duration)[targets],
        )
    return found


def _whole(rank: int, start: Int64, end: Int64) -> list[Window]:
    return [Window(rank, -1, int(start.min()), int(end.max()))] if len(start) else []


def _windows_of_rank(
    rank: int, steps: tuple[Int64, Int64, Int64], launched: Int64, start: Int64, end: Int64
) -> list[Window]:
    """Windows of one rank from its steps (number, start, end) and its launches (time, kernel start, kernel end)."""
    order = np.argsort(launched, kind="stable")
    launched, start, end = launched[order], start[order], end[order]
    begins: list[int] = []
    ends: list[int] = []
    for step_start, step_end in zip(steps[1].tolist(), steps[2].tolist(), strict=True):
        first, last = np.searchsorted(launched, (step_start, step_end))
        kernels = slice(int(first), int(last))
        begin = int(start[kernels].min()) if last > first else step_start
        begins.append(max(begin, begins[-1]) if begins else begin)
        ends.append(max(step_end, int(end[kernels].max())) if last > first else step_end)
    windows = []
    for row, number in enumerate(steps[0].tolist()):
        follows = row + 1 < len(begins)
        # Steps may lie apart (a profiler schedule with pauses); then a step ends by itself.
        gap = follows and int(steps[1][row + 1]) > int(steps[2][row]) + _PAUSE_NS
        stop = begins[row + 1] if follows and not gap else ends[row]
        windows.append(Window(rank, number, begins[row], max(stop, begins[row])))
    return windows


_PAUSE_NS = 50_000_000
"""Host time between two steps above which the profiler is taken to have paused between them."""
