"""How the host feeds the device: launch calls, the delay of kernels behind them, tiny kernels, and the queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind
from tracesim.analysis.windows import Window

TINY_NS = 10_000
"""Kernels below this are tiny: launching one takes the host about as long."""


@dataclass(frozen=True)
class LaunchStatistics:
    """Launches of one rank whose kernels start in a window. Times in nanoseconds, quantiles as (p5, p50, p95)."""

    kernels: int
    """Device slices that start in the window."""
    launched: int
    """Those whose launch is known."""
    tiny: int
    """Device slices shorter than :data:`TINY_NS`."""
    tiny_total: int
    launch_calls: int
    launch_total: int
    """Host time inside the launching calls."""
    launch_call: tuple[int, int, int]
    graph_launches: int
    """Launching calls with more than one kernel."""
    graph_kernels: int
    delay: tuple[int, int, int]
    """From the start of the call to the start of the kernel."""
    before_launch: int
    """Kernels that start before their launching call: the clocks of host and device disagree."""
    before_launch_worst: int
    most_outstanding: int
    """Most kernels launched and not yet ended at one time."""


def launch_statistics(timeline: Timeline, window: Window) -> LaunchStatistics:
    """The launches of a window."""
    slices = timeline.slices
    rank = timeline.slice_ranks()
    inside = timeline.on_device() & (rank == window.rank)
    inside &= (slices.start >= window.start) & (slices.start < window.end)
    tiny = inside & (slices.duration < TINY_NS)
    flows = timeline.flows
    chosen = (flows.kind == FlowKind.LAUNCH) & inside[flows.target]
    source, target = flows.source[chosen], flows.target[chosen]
    calls, kernels = np.unique(source, return_counts=True)
    delay = slices.start[target] - slices.start[source]
    early = delay < 0
    return LaunchStatistics(
        kernels=int(inside.sum()),
        launched=len(target),
        tiny=int(tiny.sum()),
        tiny_total=int(slices.duration[tiny].sum()),
        launch_calls=len(calls),
        launch_total=int(slices.duration[calls].sum()),
        launch_call=_quantiles(slices.duration[calls]),
        graph_launches=int((kernels > 1).sum()),
        graph_kernels=int(kernels[kernels > 1].sum()),
        delay=_quantiles(delay),
        before_launch=int(early.sum()),
        before_launch_worst=int(-delay.min()) if early.any() else 0,
        most_outstanding=_most_outstanding(
            slices.start[source], slices.start[target] + slices.duration[target]
        ),
    )


def _quantiles(values: Int64) -> tuple[int, int, int]:
    if not len(values):
        return 0, 0, 0
    p5, p50, p95 = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return round(p5), round(p50), round(p95)


def _most_outstanding(launched: Int64, ended: Int64) -> int:
    """Most intervals ``[launched, ended)`` that cover one instant."""
    if not len(launched):
        return 0
    time = np.concatenate((ended, np.minimum(launched, ended)))
    change = np.concatenate((np.full(len(ended), -1), np.full(len(launched), 1)))
    order = np.lexsort((change, time))
    return int(np.cumsum(change[order]).max())
