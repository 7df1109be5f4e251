"""Timeline -> graph: what every device slice and host call of a measured run waited for.

Rows are device slices, host calls that touch the device, and the host work between them. A device slice waits for the
slice before it on its stream, its launch, and the waits between streams of :mod:`.waits`; the host waits where
:mod:`.host` says; communication matched across ranks meets, and transfers for the shortest time any member needed.
Delays are constants of the trace. What a slice started later than all that is kept, and reported as unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from tracesim.analysis.cpu_runs import threads_as_devices
from tracesim.errors import TraceError
from tracesim.replay.buffers import with_buffers
from tracesim.replay.declared import NO_DELAYS, declared_waits
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole
from tracesim.replay.host import host_points, returns_after
from tracesim.replay.layout import graph_of, lay_out
from tracesim.replay.measured import (
    LATE_NS,
    Delays,
    Measured,
    declares_operations,
    launch_moment,
    measure,
    measure_delays,
    on_threads,
    stream_free,
)
from tracesim.replay.run import recorded_apart
from tracesim.replay.steps import learn_waits
from tracesim.replay.waits import (
    NO_WAITS,
    Waits,
    admission_waits,
    all_waits,
    communication_waits,
    event_waits,
)

_ADMISSION_SHARE = 0.98


@dataclass(frozen=True)
class Rules:
    """Which rules are used; all of them unless other rule sets are to be compared."""

    waits: str = "measured"
    """``measured``, ``none`` (no waits between streams) or ``all`` (wait for everything that had ended)."""
    admission: bool = True
    unexplained: bool = True
    """Whether lateness without a cause is kept."""
    learn: bool = True
    """Whether the waits of the steps are compared (:func:`learn_waits`)."""


def rebuild(timeline: Timeline, rules: Rules = Rules()) -> Rebuilt:
    """The graph of a measured timeline; of a run on CPU its threads are the devices.

    Raises:
        TraceError: if the timeline shows no device.
    """
    timeline = threads_as_devices(timeline)
    check_replayable(timeline)
    if timeline.simulated:
        timeline = as_profiled(timeline)
    return _Builder(measure(timeline), rules).build()


def check_replayable(timeline: Timeline) -> None:
    """Refuse what cannot be replayed, with the reason."""
    name = timeline.name or "the trace"
    device = int(timeline.on_device().sum())
    if not device:
        raise TraceError(
            f"{name}: no kernels or copies in {len(timeline.slices)} slices, so there is nothing to replay. "
            "Record with ProfilerActivity.CUDA."
        )


def as_profiled(timeline: Timeline) -> Timeline:
    """A simulated timeline as a profiler shows a run: a slice that waits for peers has begun already."""
    slices = timeline.slices
    return replace(
        timeline,
        slices=slices.with_columns(
            start=slices.start - slices.wait,
            duration=slices.duration + slices.wait,
            wait=np.zeros(len(slices), dtype=np.int64),
        ),
    )


class _Builder:
    def __init__(self, measured: Measured, rules: Rules) -> None:
        self.measured = measured
        self.timeline = measured.timeline
        self.rules = rules
        self.points = host_points(measured)
        self.layout = lay_out(measured, self.points)
        self.rows = self.layout.rows
        self.notes: list[str] = []
        self.declared = declares_operations(self.timeline)

    def build(self) -> Rebuilt:
        waits, admission = self._find_waits()
        edges = self._edges(waits, admission)
        rebuilt = Rebuilt(
            timeline=self.timeline,
            graph=graph_of(self.layout, self.measured),
            durations=self._durations(),
            edges=Edges.empty(),
            rows=self.rows,
            unexplained=np.zeros(len(self.rows), dtype=np.int64),
            origin=self.layout.origin,
            admission_share=self.admission_share,
            delays=self.delays,
        ).with_edges(self._without_contradictions(edges))
        if self.rules.waits == "measured" and self.rules.learn and not self.declared:
            rebuilt = learn_waits(rebuilt, admission=self.rules.admission)
        if self.rules.unexplained:
            rebuilt = with_unexplained(rebuilt)
        return with_buffers(replace(rebuilt, notes=tuple(self.notes)))

    # -- waits -----------------------------------------------------------------------------------------------

    def _find_waits(self) -> tuple[Waits, Waits]:
        """Waits for events, and for room, between streams; sets the delays."""
        measured = self.measured
        if self.declared:
            self.delays, self.admission_share = NO_DELAYS, _ADMISSION_SHARE
            declared = {"measured": declared_waits, "all": all_waits}.get(self.rules.waits)
            return declared(measured) if declared else NO_WAITS, NO_WAITS
        none = np.zeros(0, dtype=np.int64)
        self.delays = measure_delays(measured, none, returns_after(measured, self.points))
        device = measured.device
        ready = np.full(len(measured.start), np.iinfo(np.int64).max, dtype=np.int64)
        ready[device] = self._ready(device)
        waits, admission = NO_WAITS, NO_WAITS
        found = event_waits(measured, ready)
        room = admission_waits(measured, ready, found.row)
        delay = measured.start[found.row] - measured.end[found.source]
        self.delays = measure_delays(measured, delay, returns_after(measured, self.points))
        length = measured.end[room.source] - measured.start[room.source]
        share = (measured.start[room.row] - measured.start[room.source]) / np.maximum(length, 1)
        self.admission_share = float(np.median(share)) if len(share) >= 3 else _ADMISSION_SHARE
        if on_threads(self.timeline):
            self.delays = self._delays_of_threads()
        if self.rules.waits == "measured":
            waits = found.joined(communication_waits(measured))
        elif self.rules.waits == "all":
            waits = all_waits(measured)
        # A thread does not wait for room on a device.
        if self.rules.admission and not on_threads(self.timeline):
            admission = room
        return waits, admission

    def _delays_of_threads(self) -> Delays:
        """Only gloo starts with a delay, when its thread wakes up: on a thread host work fills what lies between."""
        measured = self.measured
        launched = measured.device[measured.launch[measured.device] >= 0]
        delay = measured.start[launched] - measured.end[measured.launch[launched]]
        return replace(NO_DELAYS, launch=int(np.median(delay)) if len(delay) else 0)

    def _ready(self, rows: Int64) -> Int64:
        """When stream and launch allowed each slice to start; its own start where neither is known."""
        measured, delays = self.measured, self.delays
        after_launch = np.where(measured.first_of_launch[rows], delays.launch, delays.graph)
        ready = np.maximum(
            launch_moment(measured, rows) + after_launch, stream_free(measured, rows) + delays.queue
        )
        known = (measured.before[rows] >= 0) | (measured.launch[rows] >= 0)
        return np.where(known, ready, measured.start[rows])

    # -- edges -----------------------------------------------------------------------------------------------

    def _edges(self, waits: Waits, admission: Waits) -> Edges:
        measured, delays, layout = self.measured, self.delays, self.layout
        row, device = layout.row_of_slice, measured.device
        queued = device[measured.before[device] >= 0]
        launched = device[measured.launch[device] >= 0]
        call = self._calls()[measured.launch[launched]]
        delay = measured.start[waits.row] - measured.end[waits.source]
        event = self._with_time_between_steps(waits, np.minimum(delay, delays.event))
        parts = [
            (row[measured.before[queued]], row[queued], self._queue_lags(queued), EdgeKind.QUEUE),
            (call, row[launched], self._launch_lags(launched, call), EdgeKind.LAUNCH),
            (row[waits.source], row[waits.row], event, EdgeKind.EVENT),
            (row[admission.source], row[admission.row], np.zeros(len(admission.row)), EdgeKind.ADMISSION),
            *self._host_edges(),
        ]
        source, target, lag = (np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(3))
        kind = np.concatenate([np.full(len(part[0]), part[3]) for part in parts])
        return Edges(source, target, lag, kind)

    def _with_time_between_steps(self, waits: Waits, lag: Int64) -> Int64:
        """Lags, with the time between steps where those were recorded apart: it is no delay of the run."""
        if not recorded_apart(self.timeline):
            return lag
        row, steps, rows = self.layout.row_of_slice, self.timeline.steps, self.rows
        target, source = row[waits.row], row[waits.source]
        begin = np.zeros(len(target), dtype=np.int64)
        for rank in np.unique(steps.rank).tolist():
            begins = np.sort(steps.start[steps.rank == rank])
            mine = (rows.rank[target] == rank) & (rows.step[target] >= 0)
            begin[mine] = begins[rows.step[target[mine]]]
        return np.where(rows.step[target] != rows.step[source], begin - rows.end[source], lag)

    def _host_edges(self) -> list[tuple[Int64, Int64, Int64, EdgeKind]]:
        """What the host waits for: source, target and lag."""
        measured, points, layout = self.measured, self.points, self.layout
        row = layout.row_of_slice
        blocking = np.flatnonzero(points.source >= 0)
        tail = np.where(points.tight[blocking], self.delays.return_, 0)
        polled = np.flatnonzero(points.gap_slice >= 0)
        poll = points.start[polled] - measured.end[points.gap_slice[polled]]
        usual = np.full(len(polled), int(np.median(poll)) if len(poll) else 0)
        handed = self._handed()
        source = points.gap_point[handed]
        returned = layout.return_row[source]
        handing = np.where(returned >= 0, returned, layout.call_row[source])
        at_once = np.zeros(len(handed), dtype=np.int64)
        return [
            (row[points.source[blocking]], layout.return_row[blocking], tail, EdgeKind.RETURN),
            (row[points.gap_slice[polled]], layout.gap_row[polled], usual, EdgeKind.POLL),
            (handing, layout.gap_row[handed], at_once, EdgeKind.HANDOVER),
        ]

    def _handed(self) -> Int64:
        """Points before which another thread handed over."""
        return np.flatnonzero((self.points.gap_point >= 0) & (self.points.gap_slice < 0))

    def _calls(self) -> Int64:
        """Row of the call of each host slice; -1 for others."""
        called = np.full(len(self.measured.start), -1, dtype=np.int64)
        known = self.points.slice_row >= 0
        called[self.points.slice_row[known]] = self.layout.call_row[known]
        # On a thread that is a device the call is a slice of its own.
        own = self.layout.row_of_slice >= 0
        called[own] = self.layout.row_of_slice[own]
        return called

    def _queue_lags(self, rows: Int64) -> Int64:
        """The ordinary distance on a stream, or the measured one where it is less."""
        measured = self.measured
        gap = measured.start[rows] - measured.end[measured.before[rows]]
        lag: Int64 = np.minimum(gap, self.delays.queue)
        return lag

    def _launch_lags(self, rows: Int64, call: Int64) -> Int64:
        """From the end of the row of the call: the ordinary delay, or the measured one where that is much less."""
        measured = self.measured
        delay = measured.start[rows] - launch_moment(measured, rows)
        ordinary = np.where(measured.first_of_launch[rows], self.delays.launch, self.delays.graph)
        delay = np.where(delay < ordinary - LATE_NS, delay, ordinary)
        # The row of a blocking call ends before the call does, that of a nested one later.
        blocking = self.rows.end[call] < measured.end[measured.launch[rows]]
        late = np.minimum(self.delays.launch, measured.start[rows] - self.rows.end[call])
        return np.where(blocking, late, delay + launch_moment(measured, rows) - self.rows.end[call])

    def _without_contradictions(self, edges: Edges) -> Edges:
        """Leave out inferred waits whose source ends after what they let go on, in the order of measured ends."""
        key = np.where(self.rows.role == RowRole.CALL, self.rows.start, self.rows.end)
        launches = edges.take(np.flatnonzero(edges.kind == EdgeKind.LAUNCH))
        np.maximum.at(key, launches.target, key[launches.source])
        structural = (edges.kind == EdgeKind.LAUNCH) | (edges.kind == EdgeKind.QUEUE)
        kept = structural | (key[edges.source] <= key[edges.target])
        dropped = int((~kept).sum())
        if dropped:
            self.notes.append(f"{dropped} inferred waits left out: they contradict the measured order")
        return edges.take(np.flatnonzero(kept))

    # -- costs -----------------------------------------------------------------------------------------------

    def _durations(self) -> Int64:
        """Time each row takes by itself: without what it waits for."""
        measured, points, rows, layout = self.measured, self.points, self.rows, self.layout
        durations = (rows.end - rows.start).copy()
        matched = np.flatnonzero(rows.role == RowRole.DEVICE)
        operation = measured.operation[rows.slice_row[matched]]
        matched, operation = matched[operation >= 0], operation[operation >= 0]
        durations[matched] = measured.transfers.transfer_time[operation]
        if on_threads(self.timeline):
            # Members go on when their own thread runs again, which the operating system decides.
            transfers = measured.transfers.by_slice(measured.transfers.transfer, len(measured.start))
            durations[matched] = transfers[rows.slice_row[matched]]
        handed = self._handed()
        durations[layout.gap_row[handed]] = points.start[handed] - points.end[points.gap_point[handed]]
        durations[layout.gap_row[points.gap_slice >= 0]] = 0
        durations[layout.return_row[points.tight]] = 0
        at_least: Int64 = np.maximum(durations, 0)
        return at_least


def with_unexplained(rebuilt: Rebuilt) -> Rebuilt:
    """The run with what each device slice started later than its dependencies allow."""
    edges, rows = rebuilt.edges, rebuilt.rows
    known = replace(rebuilt, unexplained=np.zeros(len(rows), dtype=np.int64))
    allowed = np.full(len(rows), rebuilt.origin, dtype=np.int64)
    np.maximum.at(allowed, edges.target, rows.end[edges.source] + known.lags())
    if declares_operations(rebuilt.timeline):
        allowed = _when_all_have_come(rebuilt, allowed)
    late = rows.start - allowed
    targeted = np.zeros(len(rows), dtype=np.bool_)
    targeted[edges.target] = True
    slices = (rows.role == RowRole.DEVICE) | ((rows.role == RowRole.GAP) & (rows.slice_row >= 0))
    kept = slices & (late > LATE_NS) & targeted
    return replace(rebuilt, unexplained=np.where(kept, late, 0))


def _when_all_have_come(rebuilt: Rebuilt, allowed: Int64) -> Int64:
    """The latest of the members of each communication: such a trace shows its start, not when each rank came to it."""
    operation = rebuilt.graph.operations.rendezvous.astype(np.int64)
    matched = operation >= 0
    latest = np.full(int(operation.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(latest, operation[matched], allowed[matched])
    return np.where(matched, latest[operation], allowed)
