"""The critical path: the one chain of work and waiting that made a step as long as it was.

It is walked backwards from the last end. Inside a slice the path runs to the slice's start; from there it goes to what
let it start (:mod:`.causes`): the slice before it on its stream, one on another stream, a peer, or its launch. On the
host it runs back to the last time the host had waited for the device (:mod:`.host_waits`), and from there to the slice
waited for. Across ranks a collective is entered from its end: back to the last arrival it is transfer, and the path
goes on at the rank that arrived last. On a single rank the time before the last arrival is ``communication_wait``; so
is the time since anything ran on the rank before a slice that waited for a peer.

Every instant of the step gets exactly one piece, so the pieces add up to the step.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.analysis.causes import EVENT_DELAY_NS, Cause, Causes
from tracesim.analysis.host_waits import find_host_waits
from tracesim.analysis.transfers import Transfers
from tracesim.analysis.windows import Window

PIECES = (
    "compute",
    "communication",
    "communication_wait",
    "memory",
    "host",
    "launch_delay",
    "queue",
    "event_delay",
    "unknown",
)
"""What a piece of the path is, in the order of their numbers."""
COMPUTE, COMMUNICATION, COMMUNICATION_WAIT, MEMORY, HOST, LAUNCH_DELAY, QUEUE, EVENT_DELAY, UNKNOWN = range(
    len(PIECES)
)

_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class CriticalPath:
    """Pieces of the path in order of time; each begins where the one before it ends."""

    window: Window
    """The step; ``rank`` is -1 if the path may change ranks."""
    start: Int64
    end: Int64
    piece: Int8
    """Index into :data:`PIECES`."""
    row: Int64
    """The slice the piece lies in, or whose start it delays; -1 for none."""
    rank: Int64
    """Row of :attr:`Timeline.ranks`, -1 for none."""

    def totals(self) -> dict[str, int]:
        """Nanoseconds by key of :data:`PIECES`."""
        length = self.end - self.start
        return {name: int(length[self.piece == number].sum()) for number, name in enumerate(PIECES)}


class CriticalPaths:
    """Walks critical paths of one timeline; what all walks need is computed once."""

    def __init__(self, timeline: Timeline, causes: Causes, transfers: Transfers) -> None:
        slices = timeline.slices
        self.timeline = timeline
        self.start, self.duration = slices.start, slices.duration
        self.ends = slices.start + slices.duration
        self.rank_of = timeline.slice_ranks()
        self.track = slices.track
        self.causes = causes
        self.device = np.flatnonzero(causes.on_device)
        self.device_by_end = self.device[np.argsort(causes.end_position[self.device], kind="stable")]
        self.rows_by_end = [
            self.device_by_end[self.rank_of[self.device_by_end] == rank]
            for rank in range(len(timeline.ranks))
        ]
        self.kind_piece = _piece_of_kind(timeline)
        count = len(slices)
        matches = transfers.matches
        operation = matches.operation
        self.last_arrival = transfers.by_slice(
            transfers.last_arrival[operation] if len(operation) else operation, count, _NEVER
        )
        self.last_member = transfers.by_slice(
            matches.row[transfers.last_member[operation]] if len(operation) else operation, count, -1
        )
        self.inside = transfers.by_slice(transfers.wait_inside, count)
        self.host_waits = {
            rank: (waits.end.tolist(), waits.row.tolist())
            for rank, waits in find_host_waits(timeline, causes).items()
        }

    def within(self, window: Window) -> CriticalPath:
        """The path of one rank's step."""
        return self._walk(window, across=False)

    def across(self, windows: list[Window]) -> CriticalPath:
        """The path of one step over all ranks, from the first start to the last end of their windows."""
        whole = Window(-1, windows[0].step, min(w.start for w in windows), max(w.end for w in windows))
        return self._walk(whole, across=True)

    def _walk(self, window: Window, across: bool) -> CriticalPath:
        walk = _Walk(window.start, window.end)
        row = self._last(window)
        if row >= 0 and self.ends[row] < window.end:
            tail = HOST if (self.causes.launch >= 0).any() else UNKNOWN
            walk.back_to(int(self.ends[row]), tail, -1, int(self.rank_of[row]))
        seen: set[int] = set()
        moment = walk.time
        while row >= 0 and walk.time > window.start:
            if walk.time < moment:
                moment, seen = walk.time, set()
            if row in seen:
                break
            seen.add(row)
            row = self._through(walk, row, across)
        rank = int(walk.rank[-1]) if walk.rank else window.rank
        walk.back_to(window.start, HOST if walk.on_host else UNKNOWN, -1, rank)
        return walk.path(window)

    def _last(self, window: Window) -> int:
        """The slice that ends last in a window, of those that run in it."""
        rows = self.device_by_end
        if window.rank >= 0:
            rows = rows[self.rank_of[rows] == window.rank]
        begun = (self.start[rows] < window.end) | (self.ends[rows] == window.end)
        rows = rows[begun & (self.ends[rows] > window.start)]
        # Of slices that run past the window the one that began last is what the window's end cut.
        return int(rows[np.lexsort((rows, np.minimum(self.ends[rows], window.end)))[-1]]) if len(rows) else -1

    def _through(self, walk: _Walk, row: int, across: bool) -> int:
        """Take the path through a slice and the delay before it; the slice it goes on with, or -1."""
        rank = int(self.rank_of[row])
        piece = int(self.kind_piece[row])
        start, arrival = int(self.start[row]), int(self.last_arrival[row])
        if self.inside[row] > 0 and arrival < walk.time:
            walk.back_to(arrival, piece, row, rank)
            peer = int(self.last_member[row])
            if across and peer != row:
                return self._before(walk, peer, across)
            piece = COMMUNICATION_WAIT
        elif self.inside[row] > 0:
            piece = COMMUNICATION_WAIT
        walk.back_to(start, piece, row, rank)
        return self._before(walk, row, across)

    def _before(self, walk: _Walk, row: int, across: bool) -> int:
        """The delay before a slice starts; the slice that let it start, or -1 at the end of what is known."""
        cause, source = int(self.causes.cause[row]), int(self.causes.row[row])
        rank = int(self.rank_of[row])
        if cause == Cause.NONE:
            return -1
        if cause == Cause.PEER and not across:
            return self._before_peer(walk, row)
        delay = (UNKNOWN, QUEUE, LAUNCH_DELAY, EVENT_DELAY, EVENT_DELAY)[cause]
        limit = EVENT_DELAY_NS if delay == EVENT_DELAY else self.causes.tolerance[row]
        if self.causes.late[row] > limit and self.timeline.slices.waited_for[row] < 0:
            delay = UNKNOWN
        walk.back_to(int(self.causes.time[row]), delay, row, rank)
        return self._host(walk, row, source) if cause == Cause.LAUNCH else source

    def _before_peer(self, walk: _Walk, row: int) -> int:
        """From a slice that waited for a peer to what its own rank did last before; -1 if nothing."""
        rank = int(self.rank_of[row])
        rows = self.rows_by_end[rank]
        at = int(np.searchsorted(self.ends[rows], self.start[row], side="right"))
        at = min(at, int(np.searchsorted(self.causes.end_position[rows], self.causes.end_position[row])))
        if not at:
            walk.back_to(walk.low, COMMUNICATION_WAIT, row, rank)
            return -1
        source = int(rows[at - 1])
        walk.back_to(int(self.ends[source]), COMMUNICATION_WAIT, row, rank)
        return source

    def _host(self, walk: _Walk, row: int, launch: int) -> int:
        """Along the host from a launch back to the last call that waited for the device."""
        rank = int(self.rank_of[row])
        walk.back_to(int(self.start[launch]), HOST, launch, rank)
        ends, targets = self.host_waits.get(rank, ([], []))
        limit = int(self.causes.end_position[row])
        at = bisect_right(ends, walk.time) - 1
        while at >= 0 and self.causes.end_position[targets[at]] >= limit:
            at -= 1
        walk.on_host = at < 0
        if at < 0:
            return -1
        walk.back_to(min(ends[at], walk.time), HOST, launch, rank)
        target: int = targets[at]
        walk.back_to(int(self.ends[target]), HOST, launch, rank)
        return target


class _Walk:
    """The pieces of a path, from the last to the first."""

    def __init__(self, low: int, time: int) -> None:
        self.low, self.time = low, time
        self.on_host = False
        self.start: list[int] = []
        self.end: list[int] = []
        self.piece: list[int] = []
        self.row: list[int] = []
        self.rank: list[int] = []

    def back_to(self, moment: int, piece: int, row: int, rank: int) -> None:
        """A piece from ``moment`` up to where the path has come; nothing if that lies later."""
        moment = max(moment, self.low)
        if moment >= self.time:
            return
        self.start.append(moment)
        self.end.append(self.time)
        self.piece.append(piece)
        self.row.append(row)
        self.rank.append(rank)
        self.time = moment

    def path(self, window: Window) -> CriticalPath:
        """What was walked, in order of time."""

        def column(values: list[int]) -> Int64:
            return np.array(values[::-1], dtype=np.int64)

        return CriticalPath(
            window,
            column(self.start),
            column(self.end),
            column(self.piece).astype(np.int8),
            column(self.row),
            column(self.rank),
        )


def _piece_of_kind(timeline: Timeline) -> Int8:
    """COMPUTE, COMMUNICATION, MEMORY or HOST (work of a thread that is a device) of each slice."""
    kind = timeline.slices.kind
    piece = np.full(len(kind), COMPUTE, dtype=np.int8)
    piece[(kind == OpKind.COLLECTIVE) | (kind == OpKind.P2P)] = COMMUNICATION
    on_stream = timeline.slice_roles() != TrackRole.COMPUTE
    piece[((kind == OpKind.MEMCPY) | (kind == OpKind.MEMSET)) & on_stream] = MEMORY
    piece[kind == OpKind.HOST] = HOST
    return piece
