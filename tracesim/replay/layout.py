"""The rows of a rebuilt graph: which there are, in which queue, in which order, and of which step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64, StringTable
from op_graphs.graph import OPERATION_DEFAULTS, Buffers, Operations, OpGraph, Segments
from op_graphs.vocabulary import OpKind, Stream
from tracesim.replay.declared import OPERATION_CLOCK_NS
from tracesim.replay.graph import RowRole, Rows
from tracesim.replay.host import BLOCKING, MARK, HostPoints
from tracesim.replay.measured import Measured, declares_operations

_OF_SLICE = (
    "kind",
    "phase",
    "layer",
    "module",
    "chunk",
    "microbatch",
    "communication",
    "communication_bytes",
    "group",
    "flops",
)
"""Columns of an operation that a device slice has too."""
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Layout:
    """Rows sorted by queue, then time; the first row of each queue is its anchor."""

    rows: Rows
    lane: Int64
    """Queue of each row: one for each stream and thread, more where slices of one stream overlap."""
    row_of_slice: Int64
    """Row of each device slice; -1 for other slices."""
    gap_row: Int64
    """Row of the pause before each host point."""
    call_row: Int64
    """Row of each host point."""
    return_row: Int64
    """Row of the end of each blocking call; -1 for other points."""
    origin: int


@dataclass
class _Draft:
    """Rows before they are sorted."""

    item: Int64
    """Slice of a device row, point of a host row, -1 for an anchor."""
    role: Int64
    lane: Int64
    start: Int64
    end: Int64

    def ordered(self) -> _Draft:
        """By queue: the anchor, then in order of time; of one host point the gap, the call, the return."""
        device = self.role == RowRole.DEVICE
        stage = np.select([self.role == RowRole.GAP, self.role == RowRole.RETURN], [0, 2], 1)
        time, tie = np.where(device, self.start, 0), np.where(device, self.end, self.item)
        order = np.lexsort((self.item, stage, tie, time, self.role != RowRole.ANCHOR, self.lane))
        lane = np.unique(self.lane[order], return_inverse=True)[1].ravel()
        return _Draft(self.item[order], self.role[order], lane, self.start[order], self.end[order])


def lay_out(measured: Measured, points: HostPoints) -> Layout:
    """Number the rows of a trace."""
    first_start = int(measured.start[measured.device].min())
    origin = int(min(first_start, points.start.min(initial=_NEVER)))
    draft = _with_anchors(_draft(measured, points, origin), measured, origin).ordered()
    rows = _rows(draft, measured, points)
    position = np.arange(len(rows))
    device = draft.role == RowRole.DEVICE
    row_of_slice = np.full(len(measured.start), -1, dtype=np.int64)
    row_of_slice[draft.item[device]] = position[device]

    def of_points(*roles: RowRole) -> Int64:
        found = np.full(len(points.track), -1, dtype=np.int64)
        chosen = np.isin(draft.role, roles)
        found[draft.item[chosen]] = position[chosen]
        return found

    return Layout(
        rows=rows,
        lane=draft.lane,
        row_of_slice=row_of_slice,
        gap_row=of_points(RowRole.GAP),
        call_row=of_points(RowRole.CALL, RowRole.MARK),
        return_row=of_points(RowRole.RETURN),
        origin=origin,
    )


def _draft(measured: Measured, points: HostPoints, origin: int) -> _Draft:
    device = measured.device
    lane = _device_lanes(measured)
    host_lane = len(measured.timeline.tracks) + int(lane.max()) + 1 + points.track
    index, before = np.arange(len(points.track)), points.before
    blocking = points.what == BLOCKING
    began = np.where(before >= 0, points.end[before], origin)
    # A blocking call is its own work, then the wait; what it does after the wait belongs to the wait.
    call_end = np.where(blocking, points.start + points.staged, points.end)
    call_role = np.where(points.what == MARK, RowRole.MARK, RowRole.CALL)
    parts = (
        (device, RowRole.DEVICE, lane, measured.start[device], measured.end[device]),
        (index, RowRole.GAP, host_lane, began, points.start),
        (index, call_role, host_lane, points.start, call_end),
        (index[blocking], RowRole.RETURN, host_lane[blocking], call_end[blocking], points.end[blocking]),
    )
    item, lanes, start, end = (np.concatenate([part[i] for part in parts]) for i in (0, 2, 3, 4))
    role = np.concatenate([np.broadcast_to(part[1], len(part[0])) for part in parts])
    return _Draft(item, role, lanes, start, end)


def _with_anchors(draft: _Draft, measured: Measured, origin: int) -> _Draft:
    """Begin each queue with an anchor, which lasts until the first slice of a queue whose launch is not known."""
    lanes, lane_of = np.unique(draft.lane, return_inverse=True)
    device = draft.role == RowRole.DEVICE
    first = np.full(len(lanes), _NEVER, dtype=np.int64)
    np.minimum.at(first, lane_of, np.where(device, draft.start, origin))
    launched = device & (measured.launch[np.where(device, draft.item, 0)] >= 0)
    leads = np.zeros(len(lanes), dtype=np.bool_)
    leads[lane_of[launched & (draft.start == first[lane_of])]] = True
    count = len(lanes)
    return _Draft(
        item=np.concatenate((np.full(count, -1), draft.item)),
        role=np.concatenate((np.full(count, RowRole.ANCHOR), draft.role)),
        lane=np.concatenate((lanes, draft.lane)),
        start=np.concatenate((np.full(count, origin), draft.start)),
        end=np.concatenate((np.where(leads, origin, first), draft.end)),
    )


def _device_lanes(measured: Measured) -> Int64:
    """Queue of each device slice: its track, or one of its own where slices of one stream overlap."""
    device, tracks = measured.device, measured.timeline.slices.track
    start, end = measured.start[device], measured.end[device]
    lane = tracks[device].astype(np.int64)
    order = np.lexsort((device, end, start, lane))
    track = lane[order]
    slack = OPERATION_CLOCK_NS if declares_operations(measured.timeline) else 0
    overlaps = (track[1:] == track[:-1]) & (start[order][1:] < end[order][:-1] - slack)
    unused = len(measured.timeline.tracks)
    for number in np.unique(track[1:][overlaps]).tolist():
        mine = order[track == number]
        lanes, until = [number], [-1]
        for at, begin, stop in zip(mine.tolist(), start[mine].tolist(), end[mine].tolist(), strict=True):
            place = next((i for i, busy in enumerate(until) if busy - slack <= begin), len(lanes))
            if place == len(lanes):
                lanes.append(unused)
                until.append(stop)
                unused += 1
            until[place] = stop
            lane[at] = lanes[place]
    return lane


def _rows(draft: _Draft, measured: Measured, points: HostPoints) -> Rows:
    timeline, role = measured.timeline, draft.role
    device, anchor = role == RowRole.DEVICE, role == RowRole.ANCHOR
    host = ~device & ~anchor
    track = np.zeros(len(role), dtype=np.int64)
    track[device] = timeline.slices.track[draft.item[device]]
    track[host] = points.track[draft.item[host]]
    anchors = np.flatnonzero(anchor)
    track[anchors] = track[anchors + 1]
    slice_row = np.where(device, draft.item, -1)
    called = (role == RowRole.CALL) | (role == RowRole.RETURN)
    slice_row[called] = points.slice_row[draft.item[called]]
    rank = timeline.tracks.rank[track].astype(np.int64)
    # On a thread that is a device, host work is what a pause between two calls is on other threads.
    work = device & (timeline.slices.kind[np.maximum(slice_row, 0)] == OpKind.HOST)
    return Rows(
        role=np.where(work, RowRole.GAP, role).astype(np.int8),
        slice_row=slice_row,
        track=track,
        rank=rank,
        step=_steps(draft, measured, rank),
        start=draft.start,
        end=draft.end,
    )


def _steps(draft: _Draft, measured: Measured, rank: Int64) -> Int64:
    """Position of the step of each row: of its launch for the device, by time for the host."""
    steps, role = measured.timeline.steps, draft.role
    step = np.full(len(role), -1, dtype=np.int64)
    device = role == RowRole.DEVICE
    launch = np.where(device, measured.launch[np.where(device, draft.item, 0)], -1)
    # A gap belongs to the call behind it.
    moment = np.where(role == RowRole.GAP, draft.end, draft.start)
    moment = np.where(launch >= 0, measured.start[launch], moment)
    for number in np.unique(steps.rank).tolist():
        begins = np.sort(steps.start[steps.rank == number])
        mine = rank == number
        step[mine] = np.searchsorted(begins, moment[mine], side="right") - 1
    unlaunched, launched = device & (launch < 0), device & (launch >= 0)
    if launched.any():
        # Slices without a launch belong to the step of the one before on their queue; before the first launch known
        # there, they were launched before the recording began.
        place = np.maximum.accumulate(np.where(launched, np.arange(len(role)), -1))
        near: Bool = unlaunched & (place >= 0)
        near &= draft.lane[np.maximum(place, 0)] == draft.lane
        step[unlaunched & ~near & np.isin(draft.lane, draft.lane[launched])] = -1
        step[near] = step[place[near]]
    return step


def graph_of(layout: Layout, measured: Measured) -> OpGraph:
    """The operations of the rows, without dependencies; every queue is a rank of its own."""
    rows, timeline = layout.rows, measured.timeline
    slices = timeline.slices
    strings = StringTable(timeline.strings)
    host_work, mark = strings.intern("host work"), strings.intern("step mark")
    known = rows.slice_row >= 0
    row = np.where(known, rows.slice_row, 0)
    device = rows.role == RowRole.DEVICE
    columns = {c: np.full(len(rows), default) for c, default in OPERATION_DEFAULTS.items()}
    for column in _OF_SLICE:
        columns[column] = np.where(device, getattr(slices, column)[row], OPERATION_DEFAULTS[column])
    columns["kind"] = np.where(device, columns["kind"], OpKind.HOST)
    columns["bytes_read"] = np.where(device, slices.bytes[row], 0)
    columns["rank"] = layout.lane
    of_device = np.zeros(int(layout.lane.max()) + 1, dtype=np.bool_)
    of_device[layout.lane[device]] = True
    columns["stream"] = np.where(of_device[layout.lane], Stream.COMPUTE, Stream.HOST)
    columns["rendezvous"] = np.where(device, measured.operation[row], -1)
    unnamed = np.where(rows.role == RowRole.MARK, mark, host_work)
    firsts = np.unique(layout.lane, return_index=True)[1]
    return OpGraph(
        strings=strings.strings(),
        ranks=timeline.ranks.rank[rows.rank[firsts]].astype(np.int64),
        operations=Operations(name=np.where(known, slices.name[row], unnamed), **columns),
        dependency_offsets=np.zeros(len(rows) + 1, dtype=np.int64),
        dependencies=np.zeros(0, dtype=np.int64),
        segments=Segments.empty(),
        buffers=Buffers.empty(),
        groups=timeline.groups,
    )
