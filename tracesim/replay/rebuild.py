"""Timeline -> graph: what every device slice and host call of a measured run waited for.

Rows are device slices, host calls that touch the device, and the host work between them. A device slice waits for the
slice before it on its stream, its launch, and the waits between streams of :mod:`.waits`; the host waits where
:mod:`.host` says; communication matched across ranks meets, and transfers for the shortest time any member needed.
Delays are constants of the trace. What a slice started later than all that is kept, and reported as unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64, StringTable
from op_graphs.graph import OPERATION_DEFAULTS, Buffers, Operations, OpGraph, Segments
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, Stream
from tracesim.errors import TraceError
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole, Rows
from tracesim.replay.host import BLOCKING, MARK, HostPoints, host_points, returns_after
from tracesim.replay.measured import (
    LATE_NS,
    Delays,
    Measured,
    launch_moment,
    measure,
    measure_delays,
    stream_free,
)
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


def rebuild(timeline: Timeline, rules: Rules = Rules()) -> Rebuilt:  # noqa: B008
    """The graph of a measured timeline.

    Raises:
        TraceError: if the timeline is simulated or shows no device.
    """
    check_replayable(timeline)
    return _Builder(measure(timeline), rules).build()


def check_replayable(timeline: Timeline) -> None:
    """Refuse what cannot be replayed, with the reason."""
    name = timeline.name or "the trace"
    if timeline.simulated:
        raise TraceError(
            f"{name}: a simulated run is its own graph. Change the scenario and run it again instead of replaying it."
        )
    device = int(timeline.on_device().sum())
    if not device:
        raise TraceError(
            f"{name}: no kernels or copies in {len(timeline.slices)} slices, so there is nothing to replay. "
            "Record with ProfilerActivity.CUDA."
        )


class _Builder:
    def __init__(self, measured: Measured, rules: Rules) -> None:
        self.measured = measured
        self.timeline = measured.timeline
        self.rules = rules
        self.points = host_points(measured)
        self.notes: list[str] = []

    def build(self) -> Rebuilt:
        waits, admission = self._find_waits()
        self._lay_out_rows()
        edges = self._edges(waits, admission)
        durations = self._durations()
        rebuilt = Rebuilt(
            timeline=self.timeline,
            graph=self._graph(),
            durations=durations,
            edges=Edges.empty(),
            rows=self.rows,
            unexplained=np.zeros(len(self.rows), dtype=np.int64),
            origin=self.origin,
            admission_share=self.admission_share,
            delays=self.delays,
        ).with_edges(self._without_contradictions(edges))
        return self._with_unexplained(rebuilt)

    # -- waits -----------------------------------------------------------------------------------------------

    def _find_waits(self) -> tuple[Waits, Waits]:
        """Waits for events, and for room, between streams; sets the delays."""
        measured = self.measured
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
        if self.rules.waits == "measured":
            waits = found.joined(communication_waits(measured))
        elif self.rules.waits == "all":
            waits = all_waits(measured)
        if self.rules.admission:
            admission = room
        return waits, admission

    def _ready(self, rows: Int64) -> Int64:
        """When stream and launch allowed each slice to start; its own start where neither is known."""
        measured, delays = self.measured, self.delays
        after_launch = np.where(measured.first_of_launch[rows], delays.launch, delays.graph)
        ready = np.maximum(
            launch_moment(measured, rows) + after_launch, stream_free(measured, rows) + delays.queue
        )
        known = (measured.before[rows] >= 0) | (measured.launch[rows] >= 0)
        return np.where(known, ready, measured.start[rows])

    # -- rows ------------------------------------------------------------------------------------------------

    def _lay_out_rows(self) -> None:
        """Number the rows: lane after lane, in order of time; sets ``rows``, ``lane`` and where things are."""
        measured, points = self.measured, self.points
        device = measured.device
        lane = self._device_lanes(device)
        host_lane = len(self.timeline.tracks) + lane.max(initial=0) + 1 + points.track
        blocking = points.what == BLOCKING
        index = np.arange(len(points.track))
        before = points.before
        self.origin = int(min(measured.start[device].min(), points.start.min(initial=np.iinfo(np.int64).max)))
        began = np.where(before >= 0, points.end[before], self.origin)
        call_role = np.where(points.what == MARK, RowRole.MARK, RowRole.CALL)
        # A blocking call ends where it is told to go on; its own work is what comes before it waits.
        call_end = np.where(blocking, points.start + points.staged, points.end)
        parts = [
            (device, np.full(len(device), RowRole.DEVICE), lane, measured.start[device], measured.end[device]),
            (index, np.full(len(index), RowRole.GAP), host_lane, began, points.start),
            (index, call_role, host_lane, points.start, call_end),
            (index[blocking], np.full(int(blocking.sum()), RowRole.RETURN), host_lane[blocking], call_end[blocking], points.end[blocking]),
        ]  # fmt: skip
        item, role, lanes, start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
        names = np.unique(lanes)
        count = len(names)
        item = np.concatenate((np.full(count, -1), item))
        role = np.concatenate((np.full(count, RowRole.ANCHOR), role))
        first = np.full(int(names.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
        np.minimum.at(first, lanes, np.where(role[count:] == RowRole.DEVICE, start, self.origin))
        launched = np.zeros(len(first), dtype=np.bool_)
        of_first = start == first[lanes]
        has_launch = (role[count:] == RowRole.DEVICE) & (measured.launch[np.maximum(item[count:], 0)] >= 0)
        launched[lanes[of_first & has_launch]] = True
        anchor_end = np.where(launched[names], self.origin, first[names])
        lanes = np.concatenate((names, lanes))
        start = np.concatenate((np.full(count, self.origin), start))
        end = np.concatenate((anchor_end, end))
        is_device = role == RowRole.DEVICE
        # Anchor, then time; of one point the gap, the call, the return.
        stage = np.select([role == RowRole.GAP, role == RowRole.RETURN], [0, 2], 1)
        sort_time = np.where(is_device, start, 0)
        sort_item = np.where(is_device, end, item)
        order = np.lexsort((item, stage, sort_item, sort_time, role != RowRole.ANCHOR, lanes))
        self.item, role, lanes = item[order], role[order], lanes[order]
        self.lane = np.unique(lanes, return_inverse=True)[1].ravel()
        self.row_of_slice = np.full(len(measured.start), -1, dtype=np.int64)
        self.row_of = {r: np.full(len(index), -1, dtype=np.int64) for r in (RowRole.GAP, RowRole.CALL, RowRole.RETURN)}  # fmt: skip
        position = np.arange(len(order))
        self.row_of_slice[self.item[role == RowRole.DEVICE]] = position[role == RowRole.DEVICE]
        for wanted, table in self.row_of.items():
            chosen = (role == wanted) | ((role == RowRole.MARK) & (wanted == RowRole.CALL))
            table[self.item[chosen]] = position[chosen]
        self.rows = self._rows(role, start[order], end[order])

    def _rows(self, role: Int64, start: Int64, end: Int64) -> Rows:
        measured, points, timeline = self.measured, self.points, self.timeline
        device = role == RowRole.DEVICE
        point = np.where(device | (role == RowRole.ANCHOR), 0, self.item)
        of_slice = np.where(device, self.item, 0)
        track_of_point = points.track[point] if len(points.track) else np.zeros(len(role), dtype=np.int64)
        track = np.where(device, timeline.slices.track[of_slice], track_of_point)
        # An anchor stands before the first row of its lane.
        anchors = np.flatnonzero(role == RowRole.ANCHOR)
        track[anchors] = track[anchors + 1]
        call = (role == RowRole.CALL) | (role == RowRole.RETURN)
        slice_of_point = points.slice_row[point] if len(points.track) else point
        slice_row = np.where(device, self.item, np.where(call, slice_of_point, -1))
        rank = timeline.tracks.rank[track].astype(np.int64)
        return Rows(
            role=role.astype(np.int8),
            slice_row=slice_row,
            track=track,
            rank=rank,
            step=self._steps(role, rank, start, end),
            start=start,
            end=end,
        )

    def _device_lanes(self, device: Int64) -> Int64:
        """Lane of each device slice: its track, or a lane of its own where slices of one stream overlap."""
        measured, tracks = self.measured, self.timeline.slices.track
        lane = tracks[device].astype(np.int64)
        order = np.lexsort((device, measured.end[device], measured.start[device], lane))
        rows = device[order]
        overlaps = (tracks[rows][1:] == tracks[rows][:-1]) & (measured.start[rows][1:] < measured.end[rows][:-1])
        extra = len(self.timeline.tracks)
        for track in np.unique(tracks[rows][1:][overlaps]).tolist():
            mine = order[tracks[rows] == track]
            free: list[tuple[int, int]] = []
            for at, start, end in zip(mine.tolist(), measured.start[device[mine]].tolist(), measured.end[device[mine]].tolist(), strict=True):  # fmt: skip
                place = next((i for i, (_, until) in enumerate(free) if until <= start), len(free))
                if place == len(free):
                    free.append((track if not free else extra, 0))
                    extra += len(free) > 1
                free[place] = (free[place][0], end)
                lane[at] = free[place][0]
        return lane

    def _steps(self, role: Int64, rank: Int64, start: Int64, end: Int64) -> Int64:
        """Position of the step of each row: of its launch for the device, by time for the host."""
        steps, measured = self.timeline.steps, self.measured
        step = np.full(len(role), -1, dtype=np.int64)
        device = role == RowRole.DEVICE
        launch = np.where(device, measured.launch[np.where(device, self.item, 0)], -1)
        # A gap belongs to the call behind it.
        moment = np.where(device, np.where(launch >= 0, measured.start[launch], start), np.where(role == RowRole.GAP, end, start))  # fmt: skip
        for number in np.unique(steps.rank).tolist():
            begins = np.sort(steps.start[steps.rank == number])
            mine = rank == number
            step[mine] = np.searchsorted(begins, moment[mine], side="right") - 1
        # Slices without a launch belong where those around them on the stream do.
        unlaunched = device & (launch < 0)
        if unlaunched.any() and not unlaunched[device].all():
            place = np.maximum.accumulate(np.where(device & ~unlaunched, np.arange(len(role)), -1))
            near = unlaunched & (place >= 0)
            near &= self.lane[np.maximum(place, 0)] == self.lane
            # Before the first launch known on a stream: launched before the recording began.
            earlier = unlaunched & ~near & np.isin(self.lane, self.lane[device & ~unlaunched])
            step[earlier] = -1
            step[near] = step[place[near]]
        return step

    # -- edges -----------------------------------------------------------------------------------------------

    def _edges(self, waits: Waits, admission: Waits) -> Edges:
        measured, points, delays, row = self.measured, self.points, self.delays, self.row_of_slice
        device = measured.device
        queued = device[measured.before[device] >= 0]
        launched = device[measured.launch[device] >= 0]
        call_of = np.full(len(measured.start), -1, dtype=np.int64)
        call_of[points.slice_row[points.slice_row >= 0]] = self.row_of[RowRole.CALL][points.slice_row >= 0]
        blocking = np.flatnonzero(points.source >= 0)
        tight = points.tight[blocking]
        polled = np.flatnonzero(points.gap_slice >= 0)
        poll = points.start[polled] - measured.end[points.gap_slice[polled]]
        handed = np.flatnonzero((points.gap_point >= 0) & (points.gap_slice < 0))
        source_point = points.gap_point[handed]
        returned = self.row_of[RowRole.RETURN][source_point]
        handing = np.where(returned >= 0, returned, self.row_of[RowRole.CALL][source_point])
        gap = self.row_of[RowRole.GAP]
        parts = [
            (row[measured.before[queued]], row[queued], self._queue_lags(queued), EdgeKind.QUEUE),
            (call_of[measured.launch[launched]], row[launched], self._launch_lags(launched, call_of), EdgeKind.LAUNCH),
            (row[waits.source], row[waits.row], np.minimum(delays.event, measured.start[waits.row] - measured.end[waits.source]), EdgeKind.EVENT),
            (row[admission.source], row[admission.row], np.zeros(len(admission.row)), EdgeKind.ADMISSION),
            (row[points.source[blocking]], self.row_of[RowRole.RETURN][blocking], np.where(tight, delays.return_, 0), EdgeKind.RETURN),
            (row[points.gap_slice[polled]], gap[polled], np.full(len(polled), np.median(poll) if len(poll) else 0), EdgeKind.POLL),
            (handing, gap[handed], np.zeros(len(handed)), EdgeKind.HANDOVER),
        ]  # fmt: skip
        source, target, lag = (np.concatenate([part[i] for part in parts]) for i in range(3))
        kind = np.concatenate([np.full(len(part[0]), part[3]) for part in parts])
        return Edges(source.astype(np.int64), target.astype(np.int64), lag.astype(np.int64), kind)

    def _queue_lags(self, rows: Int64) -> Int64:
        """The ordinary distance on a stream, or the measured one where it is less."""
        measured = self.measured
        gap = measured.start[rows] - measured.end[measured.before[rows]]
        return np.minimum(gap, self.delays.queue)

    def _launch_lags(self, rows: Int64, call_of: Int64) -> Int64:
        """From the end of the row of the call: the ordinary delay, or the measured one where that is much less."""
        measured = self.measured
        delay = measured.start[rows] - launch_moment(measured, rows)
        ordinary = np.where(measured.first_of_launch[rows], self.delays.launch, self.delays.graph)
        delay = np.where(delay < ordinary - LATE_NS, delay, ordinary)
        # The row of a blocking call ends before the call does, that of a nested one later.
        call = call_of[measured.launch[rows]]
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
        measured, points, rows = self.measured, self.points, self.rows
        durations = (rows.end - rows.start).copy()
        matched = np.flatnonzero((rows.role == RowRole.DEVICE))
        operation = measured.operation[rows.slice_row[matched]]
        matched, operation = matched[operation >= 0], operation[operation >= 0]
        durations[matched] = measured.transfers.transfer_time[operation]
        # What ends a pause or a call is the wait; the rest is a delay of its edge, or work after it.
        handed = np.flatnonzero((points.gap_point >= 0) & (points.gap_slice < 0))
        gap, returned = self.row_of[RowRole.GAP], self.row_of[RowRole.RETURN]
        durations[gap[handed]] = points.start[handed] - points.end[points.gap_point[handed]]
        durations[gap[points.gap_slice >= 0]] = 0
        durations[returned[points.tight]] = 0
        return np.maximum(durations, 0)

    def _graph(self) -> OpGraph:
        rows, timeline, slices = self.rows, self.timeline, self.timeline.slices
        strings = StringTable(timeline.strings)
        host_work, mark = strings.intern("host work"), strings.intern("step mark")
        known = rows.slice_row >= 0
        row = np.where(known, rows.slice_row, 0)
        device = rows.role == RowRole.DEVICE
        name = np.where(known, slices.name[row], np.where(rows.role == RowRole.MARK, mark, host_work))
        of_slice = ("kind", "phase", "layer", "module", "chunk", "microbatch", "communication", "communication_bytes", "group", "flops")  # fmt: skip
        columns = {
            column: np.where(device, getattr(slices, column)[row], OPERATION_DEFAULTS[column])
            for column in of_slice
        }
        columns["kind"] = np.where(device, columns["kind"], OpKind.HOST)
        count = len(rows)
        rest = {
            column: np.full(count, default)
            for column, default in OPERATION_DEFAULTS.items()
            if column not in columns
        }
        rest["bytes_read"] = np.where(device, slices.bytes[row], 0)
        rest["rank"] = self.lane
        rest["stream"] = np.where(device, Stream.COMPUTE, Stream.HOST)
        on_lane = device | (rows.role == RowRole.ANCHOR)
        lane_device = np.zeros(int(self.lane.max()) + 1, dtype=np.bool_)
        lane_device[self.lane[device]] = True
        rest["stream"] = np.where(on_lane & lane_device[self.lane], Stream.COMPUTE, Stream.HOST)
        rest["rendezvous"] = np.where(device, self.measured.operation[row], -1)
        lanes = np.unique(self.lane, return_index=True)[1]
        return OpGraph(
            strings=strings.strings(),
            ranks=timeline.ranks.rank[rows.rank[lanes]].astype(np.int64),
            operations=Operations(name=name, **columns, **{**rest, "rank": self.lane}),
            dependency_offsets=np.zeros(count + 1, dtype=np.int64),
            dependencies=np.zeros(0, dtype=np.int64),
            segments=Segments.empty(),
            buffers=Buffers.empty(),
            groups=timeline.groups,
        )

    def _with_unexplained(self, rebuilt: Rebuilt) -> Rebuilt:
        """Find what each device slice started later than all its edges allow."""
        from dataclasses import replace

        edges, rows = rebuilt.edges, rebuilt.rows
        allowed = np.full(len(rows), self.origin, dtype=np.int64)
        np.maximum.at(allowed, edges.target, rows.end[edges.source] + rebuilt.lags())
        late = rows.start - allowed
        targeted = np.zeros(len(rows), dtype=np.bool_)
        targeted[edges.target] = True
        kept = (rows.role == RowRole.DEVICE) & (late > LATE_NS) & targeted
        unexplained = np.where(kept, late, 0) if self.rules.unexplained else np.zeros(len(rows), dtype=np.int64)
        return replace(rebuilt, unexplained=unexplained, notes=tuple(self.notes))


