"""What a replay takes from a measured timeline: its device slices, launches, matched communication and delays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
from tracesim.analysis.causes import Causes, find_causes, stream_predecessors
from tracesim.analysis.clocks import ClockOffsets, align_clocks, estimate_offsets
from tracesim.analysis.matching import match_communication
from tracesim.analysis.transfers import Transfers, split_transfers

LATE_NS = 3_000
"""A slice that starts later than this after its stream and its launch allow has another reason."""
_MOST_DELAY_NS = 100_000
_MOST_END_SPREAD_NS = 1_000_000
_NEVER = np.iinfo(np.int64).min // 4


def on_threads(timeline: Timeline) -> bool:
    """Whether the devices of a timeline are the threads of a run on CPU (:mod:`tracesim.analysis.cpu_runs`)."""
    return timeline.properties.get("devices") == "threads"


def declares_operations(timeline: Timeline) -> bool:
    """Whether the rows of a timeline are operations of a known program, as in traces of micro-operations."""
    return timeline.properties.get("format") == "micro-operations"


@dataclass(frozen=True)
class Measured:
    """A timeline on one clock, with the columns that rebuilding needs; columns have the shape [slices]."""

    timeline: Timeline
    clocks: ClockOffsets
    transfers: Transfers
    causes: Causes
    device: Int64
    """Device slices."""
    rank: Int64
    start: Int64
    end: Int64
    before: Int64
    """The slice before on the stream, -1 for none."""
    launch: Int64
    """The launching host slice, -1 where not known."""
    first_of_launch: Bool
    """Whether a slice is the first of its launching call (others belong to the same graph)."""
    communication: Bool
    operation: Int64
    """Number of the matched communication, -1 for none."""

    @property
    def host(self) -> Bool:
        """Which slices of host tracks launched something."""
        launching = np.zeros(len(self.start), dtype=np.bool_)
        launching[self.launch[self.launch >= 0]] = True
        return launching & ~self.causes.on_device


@dataclass(frozen=True)
class Delays:
    """Ordinary delays of the machine, in nanoseconds: medians over a trace."""

    launch: int
    """From the return of the launching call to the start on an empty stream; may be negative."""
    graph: int
    """From the start of a graph launch to a slice of the graph that is not its first."""
    queue: int
    """Between two slices of one stream that were both launched long before."""
    event: int
    """From the end of a slice to the start of the one on another stream that waited for it."""
    return_: int
    """From the end of a slice to the return of the host call that waited for it."""


def measure(timeline: Timeline) -> Measured:
    """Align the clocks of a timeline and find what its slices waited for."""
    matches = match_communication(timeline)
    clocks = estimate_offsets(timeline, matches)
    timeline = align_clocks(timeline, clocks)
    transfers = split_transfers(timeline, matches)
    causes = find_causes(timeline, transfers)
    slices = timeline.slices
    start, end = slices.start, slices.start + slices.duration
    device = np.flatnonzero(causes.on_device)
    launch = causes.launch
    launched = device[launch[device] >= 0]
    order = launched[np.lexsort((start[launched], launch[launched]))]
    first = np.zeros(len(start), dtype=np.bool_)
    if len(order):
        first[order[np.concatenate(([True], launch[order][1:] != launch[order][:-1]))]] = True
    operation = np.full(len(start), -1, dtype=np.int64)
    # Members that do not end together are not one operation, or their clocks cannot be compared.
    close = transfers.end_spread <= _MOST_END_SPREAD_NS
    close |= declares_operations(timeline) or on_threads(timeline)
    kept = close[matches.operation] if len(matches.operation) else np.zeros(0, dtype=np.bool_)
    operation[matches.row[kept]] = matches.operation[kept]
    return Measured(
        timeline=timeline,
        clocks=clocks,
        transfers=transfers,
        causes=causes,
        device=device,
        rank=timeline.slice_ranks().astype(np.int64),
        start=start,
        end=end,
        before=stream_predecessors(slices.track, start, end, device),
        launch=launch,
        first_of_launch=first,
        communication=(slices.kind == OpKind.COLLECTIVE) | (slices.kind == OpKind.P2P),
        operation=operation,
    )


def launch_moment(measured: Measured, rows: Int64) -> Int64:
    """Return of the launching call, or its start for the later slices of a graph; very small where not known."""
    launch = measured.launch[rows]
    moment = np.where(measured.first_of_launch[rows], measured.end[launch], measured.start[launch])
    return np.where(launch >= 0, moment, _NEVER)


def stream_free(measured: Measured, rows: Int64) -> Int64:
    """End of the slice before on the stream; very small for the first."""
    before = measured.before[rows]
    return np.where(before >= 0, measured.end[before], _NEVER)


def measure_delays(measured: Measured, event_waits: Int64, returns: Int64) -> Delays:
    """Median delays of a trace.

    Args:
        measured: the trace.
        event_waits: delays of slices that waited for another stream.
        returns: delays of host calls that waited for the device.
    """
    rows = measured.device
    moment, free = launch_moment(measured, rows), stream_free(measured, rows)
    first = measured.first_of_launch[rows]
    known = moment > _NEVER
    # An ordinary delay: the stream had been empty for a while, or the launch long done.
    empty = known & first & (free < measured.start[measured.launch[rows]])
    queued = (free > _NEVER) & (free > moment + 20_000) & (measured.start[rows] - free < _MOST_DELAY_NS)
    in_graph = known & ~first & (free < moment)
    return Delays(
        launch=_ordinary((measured.start[rows] - moment)[empty], 2_000),
        graph=_ordinary((measured.start[rows] - moment)[in_graph], 5_000),
        queue=_ordinary((measured.start[rows] - free)[queued], 1_000),
        event=_ordinary(event_waits, 3_000),
        return_=_ordinary(returns, 8_000),
    )


def _ordinary(delays: Int64, default: int) -> int:
    """The median of the delays that are delays at all; the default where there are too few."""
    delays = delays[np.abs(delays) < _MOST_DELAY_NS]
    return int(np.median(delays)) if len(delays) >= 3 else default
