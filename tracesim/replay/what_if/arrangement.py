"""A run put together anew from its pieces: in another order, some of them several times.

Rows of a piece keep what they wait for among each other. A wait for another piece is a wait for the same rows where
both belong to one microbatch, or for what frames the step; else it is for all that was queued before on the stream or
thread it was for, as an event or a synchronisation is. Queues are put together again; the host goes from piece to
piece. What one stage needs of another comes through transfers, each a row of its own that waits for nothing but what
it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Bool, Int64
from schedules import Action
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole
from tracesim.replay.what_if.program import NOTHING, Program
from tracesim.replay.what_if.queues import queue_again

_CALLS = (RowRole.CALL, RowRole.RETURN, RowRole.MARK)


@dataclass(frozen=True)
class Placed:
    """A piece in its new place."""

    piece: int
    action: Action | None
    """What it does there; None for a frame."""
    yields: Action | None = None
    """The action that has ended with it; None for the first half of one, and for a frame."""


class Arrangement:
    """Where the rows of each placed piece are in the changed run.

    Args:
        rebuilt: the run.
        program: its pieces.
        orders: pieces of each rank (row of the timeline's ranks) in their new order.
    """

    def __init__(self, rebuilt: Rebuilt, program: Program, orders: Sequence[Sequence[Placed]]) -> None:
        self.rebuilt, self.program = rebuilt, program
        self.rows, self.lane = rebuilt.rows, rebuilt.graph.operations.rank.astype(np.int64)
        self.placed = [one for order in orders for one in order]
        self.position = np.array([at for order in orders for at in range(len(order))], dtype=np.int64)
        self.members = _rows_by_piece(program)
        self.host = _Host(rebuilt, program, self.members)
        self.local = np.zeros(len(self.rows), dtype=np.int64)
        for members in self.members:
            self.local[members] = np.arange(len(members))
        sizes = np.array([len(self.members[one.piece]) for one in self.placed], dtype=np.int64)
        self.base = np.concatenate(([0], np.cumsum(sizes)))
        anchors = np.flatnonzero(program.of_row == NOTHING)
        copied = [self.members[one.piece] for one in self.placed]
        self.source = np.concatenate([anchors, *copied]).astype(np.int64)
        self.copy = np.concatenate((np.full(len(anchors), -1), np.repeat(np.arange(len(self.placed)), sizes)))
        self.anchors = anchors
        order_in_rank = np.where(self.copy >= 0, np.append(self.position, -1)[self.copy], -1)
        order = np.lexsort((self.source, order_in_rank, self.lane[self.source]))
        self.number = np.empty(len(order), dtype=np.int64)
        """New row of each entry of ``source``."""
        self.number[order] = np.arange(len(order))
        self.old, self.copy_of = self.source[order], self.copy[order]
        """Old row and copy of each new row."""
        self.stride = int(self.position.max(initial=0)) + 2
        self.queue_key = self.lane[self.old] * self.stride + order_in_rank[order] + 1

    # -- rows ------------------------------------------------------------------------------------------------

    def new_row(self, copy: int, old: Int64) -> Int64:
        """New rows of old rows of a copy."""
        found: Int64 = self.number[len(self.anchors) + self.base[copy] + self.local[old]]
        return found

    def last_before(self, copy: int, lanes: Int64) -> Int64:
        """The last row of each queue in the copies before a copy; -1 if there is none."""
        key = lanes * self.stride + self.position[copy] + 1
        at = np.searchsorted(self.queue_key, key) - 1
        row = np.maximum(at, 0)
        fits = (at >= 0) & (self.lane[self.old[row]] == lanes) & (self.copy_of[row] >= 0)
        return np.where(fits, row, -1)

    def first_copy(self, old: int) -> int:
        """The first new row of an old one; -1 if it is not placed."""
        found = np.flatnonzero(self.old == old)
        return int(found[0]) if len(found) else -1

    def anchor_of(self, lane: int) -> int:
        """The new row of the beginning of a queue; -1 if there is none."""
        found = np.flatnonzero((self.copy_of < 0) & (self.lane[self.old] == lane))
        return int(found[0]) if len(found) else -1

    def put_together(self) -> Rebuilt:
        """The changed run, but for what stages send to each other."""
        part = self._as_rows(Edges.concatenate([*self._inner(), *self._crossing(), *self._host()]))
        queues = queue_again(self.rebuilt, self.old, part)
        return part.with_edges(Edges.concatenate([part.edges, queues]))

    def _as_rows(self, edges: Edges) -> Rebuilt:
        graph, old = self.rebuilt.graph, self.old
        lanes, lane = np.unique(self.lane[old], return_inverse=True)
        operations = graph.operations.take(old).with_columns(rank=lane.ravel(), rendezvous=self._rendezvous())
        operations = operations.with_columns(microbatch=self._microbatches())
        graph = replace(
            graph,
            ranks=graph.ranks[lanes],
            operations=operations,
            dependency_offsets=np.zeros(len(old) + 1, dtype=np.int64),
            dependencies=np.zeros(0, dtype=np.int64),
        )
        part = replace(
            self.rebuilt,
            graph=graph,
            durations=self.host.durations[old],
            rows=self.rows.take(old),
            unexplained=self.rebuilt.unexplained[old],
        )
        return part.with_edges(edges)

    def _microbatches(self) -> Int64:
        """The microbatch of each new row; rows that had none get none."""
        known = self.rebuilt.graph.operations.microbatch[self.old].astype(np.int64)
        own = [-1 if one.action is None else one.action.microbatch for one in self.placed]
        number = np.append(np.array(own, dtype=np.int64), -1)[self.copy_of]
        return np.where((known >= 0) & (number >= 0), number, known)

    def _rendezvous(self) -> Int64:
        """Meetings of copies of one microbatch; members that lack others meet nobody."""
        old = self.rebuilt.graph.operations.rendezvous.astype(np.int64)
        own = [-1 if one.action is None else one.action.microbatch for one in self.placed]
        label = np.append(np.array(own, dtype=np.int64), -1)[self.copy_of]
        key = np.stack([old[self.old], label])
        _, number, count = np.unique(key, axis=1, return_inverse=True, return_counts=True)
        wanted = np.bincount(old[old >= 0], minlength=1)
        meets = (old[self.old] >= 0) & (count[number.ravel()] == wanted[np.maximum(old[self.old], 0)])
        return np.where(meets, number.ravel(), -1)

    # -- edges -----------------------------------------------------------------------------------------------

    def _inner(self) -> list[Edges]:
        """Dependencies between rows of one piece, for each of its copies."""
        edges, of_row = self.rebuilt.edges, self.program.of_row
        own = np.flatnonzero((of_row[edges.source] == of_row[edges.target]) & (of_row[edges.target] >= 0))
        own = own[(edges.kind[own] != EdgeKind.QUEUE) & ~self._handed(own)]
        by_piece = _split(own, of_row[edges.target[own]], len(self.program.pieces))
        found = []
        for copy, one in enumerate(self.placed):
            mine = by_piece[one.piece]
            source, target = self.new_row(copy, edges.source[mine]), self.new_row(copy, edges.target[mine])
            found.append(Edges(source, target, edges.lag[mine], edges.kind[mine]))
        return found

    def _handed(self, edges: Int64) -> Bool:
        """Which dependencies are those of pauses that :class:`_Host` makes anew."""
        table = self.rebuilt.edges
        handed: Bool = (table.kind[edges] == EdgeKind.HANDOVER) & self.host.opens[table.target[edges]]
        return handed

    def _crossing(self) -> list[Edges]:
        """Dependencies on rows of other pieces."""
        edges, of_row = self.rebuilt.edges, self.program.of_row
        other = (of_row[edges.source] != of_row[edges.target]) & (of_row[edges.target] >= 0)
        other &= (of_row[edges.source] >= NOTHING) & ~np.isin(
            edges.kind, (EdgeKind.QUEUE, EdgeKind.ADMISSION)
        )
        crossing = np.flatnonzero(other)
        crossing = crossing[~self._handed(crossing)]
        by_piece = _split(crossing, of_row[edges.target[crossing]], len(self.program.pieces))
        of_key = {
            self._key(self.program.pieces[one.piece].rank, one): at for at, one in enumerate(self.placed)
        }
        anchor = np.full(len(self.rows), -1, dtype=np.int64)
        anchor[self.anchors] = self.number[: len(self.anchors)]
        found = []
        for copy, one in enumerate(self.placed):
            mine = by_piece[one.piece]
            if not len(mine):
                continue
            source = self.last_before(copy, self.lane[edges.source[mine]])
            begins = of_row[edges.source[mine]] == NOTHING
            source[begins] = anchor[edges.source[mine][begins]]
            for number in np.unique(of_row[edges.source[mine]][~begins]).tolist():
                same = self._same_rows(copy, number, of_key)
                rows = np.flatnonzero(of_row[edges.source[mine]] == number)
                if same >= 0 and self.position[same] < self.position[copy]:
                    source[rows] = self.new_row(same, edges.source[mine][rows])
            kept = source >= 0
            target = self.new_row(copy, edges.target[mine])
            found.append(Edges(source[kept], target[kept], edges.lag[mine][kept], edges.kind[mine][kept]))
        return found

    def _key(self, rank: int, one: Placed) -> tuple[int, int, int, str, int]:
        """Where a copy is to be found: rank, step, stage, kind and microbatch, or its own piece for a frame."""
        piece = self.program.pieces[one.piece]
        if one.action is None:
            return (rank, piece.step, -1, "", one.piece)
        return (rank, piece.step, one.action.stage, one.action.kind.value, one.action.microbatch)

    def _same_rows(self, copy: int, piece: int, of_key: dict[tuple[int, int, int, str, int], int]) -> int:
        """The copy that holds, for a copy, what its piece had in another one; -1 if that is not any one piece."""
        one, other = self.placed[copy], self.program.pieces[piece]
        own = self.program.pieces[one.piece]
        if other.action is None:
            return of_key.get((other.rank, other.step, -1, "", piece), -1)
        if one.action is None or own.action is None or own.step != other.step:
            return -1
        if (own.action.stage, own.action.microbatch) != (other.action.stage, other.action.microbatch):
            return -1
        action = other.action
        found = of_key.get((own.rank, own.step, action.stage, action.kind.value, one.action.microbatch), -1)
        return found if found >= 0 and self.placed[found].piece == piece else -1

    def _host(self) -> list[Edges]:
        """The host begins a piece when it has done the one before, and goes on from thread to thread inside."""
        host, source, target = self.host, [], []
        previous = -1
        for copy, one in enumerate(self.placed):
            if self.position[copy] == 0:
                previous = -1
            members = self.members[one.piece]
            opening = members[host.opens[members]]
            inside = host.inside[opening]
            own = inside >= 0
            source.append(self.new_row(copy, inside[own]))
            target.append(self.new_row(copy, opening[own]))
            if previous >= 0:
                last = np.full(int((~own).sum()), host.last[self.placed[previous].piece])
                source.append(self.new_row(previous, last))
                target.append(self.new_row(copy, opening[~own]))
            if host.last[one.piece] >= 0:
                previous = copy
        ends, begins = np.concatenate(source), np.concatenate(target)
        at_once = np.zeros(len(ends), dtype=np.int64)
        return [Edges(ends, begins, at_once, np.full(len(ends), EdgeKind.HANDOVER))]


class _Host:
    """How the host goes from piece to piece, for the old rows.

    The first pause of a thread in a piece is what the host did since it was done with the piece before, or since
    another thread had done its part of this one.
    """

    def __init__(self, rebuilt: Rebuilt, program: Program, members: Sequence[Int64]) -> None:
        rows = rebuilt.rows
        lane = rebuilt.graph.operations.rank.astype(np.int64)
        self.opens = np.zeros(len(rows), dtype=np.bool_)
        gaps = np.flatnonzero((rows.role == RowRole.GAP) & (program.of_row >= 0))
        self.opens[gaps] = (program.of_row[gaps] != program.of_row[gaps - 1]) | (lane[gaps] != lane[gaps - 1])
        self.inside = np.full(len(rows), -1, dtype=np.int64)
        """For such a pause the row of another thread in its piece that it follows; -1 for the end of that before."""
        self.last = np.full(len(members), -1, dtype=np.int64)
        """The last host row of each piece; -1 for none."""
        self.durations = rebuilt.durations.copy()
        before, rank = -1, -1
        for piece, own in enumerate(members):
            host = own[np.isin(rows.role[own], _CALLS)]
            if program.pieces[piece].rank != rank:
                before, rank = -1, program.pieces[piece].rank
            if not len(host):
                continue
            host = host[np.lexsort((host, rows.end[host]))]
            reached = int(rows.end[before]) if before >= 0 else int(np.iinfo(np.int64).min)
            for gap in own[self.opens[own]].tolist():
                until = int(rows.end[gap])
                other = host[
                    (lane[host] != lane[gap]) & (rows.end[host] <= until) & (rows.start[host] < until)
                ]
                if len(other) and int(rows.end[other[-1]]) >= reached:
                    self.inside[gap] = other[-1]
                    self.durations[gap] = until - int(rows.end[other[-1]])
                elif before >= 0:
                    self.durations[gap] = max(until - reached, 0)
            self.last[piece] = before = int(host[-1])


def _rows_by_piece(program: Program) -> list[Int64]:
    rows = np.flatnonzero(program.of_row >= 0)
    return _split(rows, program.of_row[rows], len(program.pieces))


def _split(items: Int64, piece: Int64, count: int) -> list[Int64]:
    """The items of each piece, in their order."""
    order = np.argsort(piece, kind="stable")
    return np.split(items[order], np.searchsorted(piece[order], np.arange(1, count)))
