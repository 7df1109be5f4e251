"""Copies of rows of a run at another place of it: slices, their launches, and the host work in front of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Int64, StringTable
from op_graphs.graph import Operations
from op_graphs.vocabulary import OpKind, Phase
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole, Rows
from tracesim.replay.run import replay
from tracesim.replay.what_if.queues import queue_again


@dataclass(frozen=True)
class Insertion:
    """Device rows that run again."""

    rows: Int64
    """In the order of their launches."""
    before: int
    """The device row that they stand in front of, and that waits for them."""
    made: Made | None = None
    """What their copies are instead of what they were."""


@dataclass(frozen=True)
class Made:
    """What a copied device row is made into."""

    name: str
    kind: OpKind
    duration: int
    """Nanoseconds."""


@dataclass(frozen=True)
class HostWork:
    """Work of a thread that launches nothing."""

    call: int
    """A call of the thread."""
    before: int
    """The row of the thread that it stands in front of; one past the last of the thread for its end."""
    name: str
    duration: int
    """Nanoseconds."""


def launching_calls(rebuilt: Rebuilt) -> Int64:
    """The call that launched each row; -1 for none."""
    launches = rebuilt.edges.kind == EdgeKind.LAUNCH
    call = np.full(len(rebuilt.rows), -1, dtype=np.int64)
    call[rebuilt.edges.target[launches]] = rebuilt.edges.source[launches]
    return call


def launch_moments(rebuilt: Rebuilt) -> Int64:
    """When each row was launched, else when it started."""
    call, start = launching_calls(rebuilt), rebuilt.rows.start
    return np.where(call >= 0, start[call], start)


def measured_launches(rebuilt: Rebuilt) -> Int64:
    """When each row was launched in the trace, also where a what-if has moved it; its start where that is not known.

    Frames and arrows of the trace keep their times, so what is inside them is found by these.
    """
    call, slices = launching_calls(rebuilt), rebuilt.timeline.slices
    row = rebuilt.rows.slice_row[np.where(call >= 0, call, np.arange(len(call)))]
    return np.where(row >= 0, slices.start[np.maximum(row, 0)], rebuilt.rows.start)


def pauses(rebuilt: Rebuilt) -> Int64:
    """The rows of host work in front of launching calls."""
    before_launch = np.isin(np.arange(1, len(rebuilt.rows)), launching_calls(rebuilt))
    return np.flatnonzero((rebuilt.rows.role[:-1] == RowRole.GAP) & before_launch)


def inserted(
    rebuilt: Rebuilt, insertions: Sequence[Insertion], phase: Phase, work: Sequence[HostWork] = ()
) -> Rebuilt:
    """The run with copies of rows, and work of the host, inserted; they are of the given phase.

    On each device queue they stand before the first row that was launched no earlier than ``before``; their launches
    stand right before that of ``before``; what is inserted at one place keeps the order it is given in, the host's work
    behind all calls. They keep what they wait for among each other. Rows get the times of the
    changed run as their measured ones.
    """
    return _Inserted(rebuilt, insertions, work).finish(phase)


class _Inserted:
    def __init__(self, rebuilt: Rebuilt, insertions: Sequence[Insertion], work: Sequence[HostWork]) -> None:
        self.rebuilt, self.insertions, self.work = rebuilt, insertions, work
        self.rows = rebuilt.rows
        self.lane = rebuilt.graph.operations.rank.astype(np.int64)
        self.call, self.moment = launching_calls(rebuilt), launch_moments(rebuilt)
        device = np.flatnonzero(rebuilt.on_device())
        self.queues = {
            lane: device[self.lane[device] == lane] for lane in np.unique(self.lane[device]).tolist()
        }
        self.copied: list[Int64] = []
        """Old rows of each insertion: device rows, then calls and the pauses before them. Last what ``work`` has."""
        self.place: list[Int64] = []
        """For each of them the old row it stands before."""
        self.on: list[Int64] = []
        """The queue of each of them."""
        for insertion in insertions:
            self._add(insertion)
        calls = np.array([one.call for one in work], dtype=np.int64)
        self.copied.append(calls)
        self.place.append(np.array([one.before for one in work], dtype=np.int64))
        self.on.append(self.lane[calls])

    def _add(self, insertion: Insertion) -> None:
        rows, before = insertion.rows, insertion.before
        place = np.array([self._next_on(int(self.lane[row]), before) for row in rows.tolist()])
        copied, places, lanes = [rows], [place], [self.lane[rows]]
        calls = np.unique(self.call[rows][self.call[rows] >= 0])
        caller = int(self.call[before])
        if caller >= 0 and len(calls):
            gaps = calls - 1
            gaps = gaps[self.rows.role[gaps] == RowRole.GAP]
            host = np.sort(np.concatenate((gaps, calls)))
            copied.append(host)
            # Behind the pause before that call: the host first has to come there.
            places.append(np.full(len(host), caller))
            lanes.append(np.full(len(host), self.lane[caller]))
        self.copied.append(np.concatenate(copied))
        self.place.append(np.concatenate(places))
        self.on.append(np.concatenate(lanes))

    def _next_on(self, lane: int, before: int) -> int:
        """The first row of a queue that was launched no earlier than another one; one past its last if none was."""
        queue = self.queues[lane]
        if self.lane[before] == lane:
            return before
        later = queue[self.moment[queue] >= self.moment[before]]
        return int(later[0]) if len(later) else int(queue[-1]) + 1

    def finish(self, phase: Phase) -> Rebuilt:
        rebuilt, count = self.rebuilt, len(self.rows)
        copied, place = np.concatenate(self.copied), np.concatenate(self.place)
        source = np.concatenate((np.arange(count), copied))
        lane = np.concatenate((self.lane, np.concatenate(self.on)))
        stands = np.concatenate((np.arange(count), place))
        is_copy = np.arange(len(source)) >= count
        order = np.lexsort((np.arange(len(source)), ~is_copy, stands, lane))
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        strings, operations, rows = self._made(source, lane, phase)
        graph = replace(
            rebuilt.graph,
            strings=strings,
            operations=operations.take(order),
            dependency_offsets=np.zeros(len(order) + 1, dtype=np.int64),
            dependencies=np.zeros(0, dtype=np.int64),
        )
        unexplained = np.where(is_copy, 0, rebuilt.unexplained[source])
        part = replace(
            rebuilt,
            graph=graph,
            durations=self._durations(source)[order],
            rows=rows.take(order),
            unexplained=unexplained[order],
        )
        part = part.with_edges(self._edges(number, source[order], part))
        replayed = replay(part)
        return replace(part, rows=part.rows.with_columns(start=replayed.start, end=replayed.end))

    def _made(self, source: Int64, lane: Int64, phase: Phase) -> tuple[tuple[str, ...], Operations, Rows]:
        """Strings, operations and rows, in the order of ``source``; copies are what they are made into."""
        rebuilt, count = self.rebuilt, len(self.rows)
        operations, rows = rebuilt.graph.operations.take(source), self.rows.take(source)
        strings = StringTable(rebuilt.graph.strings)
        is_copy = np.arange(len(source)) >= count
        again = np.where(is_copy & (rows.role == RowRole.DEVICE), phase, operations.phase)
        name, kind = operations.name.copy(), operations.kind.copy()
        role, slice_row, step = rows.role.copy(), rows.slice_row.copy(), rows.step.copy()
        at = count
        for insertion, copied in zip(self.insertions, self.copied[:-1], strict=True):
            device = slice(at, at + len(insertion.rows))
            if insertion.made is not None:
                name[device], kind[device] = strings.intern(insertion.made.name), insertion.made.kind
            step[at : at + len(copied)] = self.rows.step[insertion.before]
            at += len(copied)
        work = slice(at, len(source))
        name[work] = [strings.intern(one.name) for one in self.work]
        again[work], role[work], slice_row[work] = phase, RowRole.GAP, -1
        operations = operations.with_columns(
            rank=lane, phase=again, name=name, kind=kind, rendezvous=self._rendezvous(source)
        )
        rows = rows.with_columns(role=role, slice_row=slice_row, step=step)
        return strings.strings(), operations, rows

    def _durations(self, source: Int64) -> Int64:
        """Durations of old rows and copies; the first pause of a copy is an ordinary one, whatever came before it."""
        rows, durations = self.rows, self.rebuilt.durations
        found: Int64 = durations[source]
        usual = np.median(durations[gaps]) if len(gaps := pauses(self.rebuilt)) else np.inf
        at = len(rows)
        for insertion, copied in zip(self.insertions, self.copied[:-1], strict=True):
            first = at + len(insertion.rows)
            if insertion.made is not None:
                found[at:first] = insertion.made.duration
            at += len(copied)
            if first < at and rows.role[source[first]] == RowRole.GAP:
                longest = np.inf if insertion.made is not None else float(found[first])
                found[first] = round(min(longest, float(usual)))
        found[at:] = [one.duration for one in self.work]
        return found

    def _rendezvous(self, source: Int64) -> Int64:
        """Copies of one meeting meet, where all its members were copied as often."""
        old = self.rebuilt.graph.operations.rendezvous.astype(np.int64)
        count, found = len(self.rows), old[source].copy()
        copies = source[count:]
        seen: dict[int, int] = {}
        which = np.zeros(len(copies), dtype=np.int64)
        for at, row in enumerate(copies.tolist()):
            which[at] = seen.get(row, 0)
            seen[row] = int(which[at]) + 1
        key = np.stack([old[copies], which])
        _, label, members = np.unique(key, axis=1, return_inverse=True, return_counts=True)
        label = label.ravel()
        wanted = np.bincount(old[old >= 0], minlength=1)
        meets = (old[copies] >= 0) & (members[label] == wanted[np.maximum(old[copies], 0)])
        found[count:] = np.where(meets, int(old.max(initial=-1)) + 1 + label, -1)
        ids: Int64 = found
        return ids

    def _edges(self, number: Int64, old: Int64, part: Rebuilt) -> Edges:
        """Old dependencies, those among copies, those of what waits for them, and the queues anew."""
        edges, count = self.rebuilt.edges, len(self.rows)
        kept = edges.take(np.flatnonzero(edges.kind != EdgeKind.QUEUE))
        # A thread hands over when the work behind its last call is done.
        over = number.copy()
        for at, one in enumerate(self.work, len(number) - len(self.work)):
            if one.before > one.call:
                over[one.call] = number[at]
        source = np.where(kept.kind == EdgeKind.HANDOVER, over[kept.source], number[kept.source])
        found = [kept.with_columns(source=source, target=number[kept.target])]
        local = np.full(count, -1, dtype=np.int64)
        base = count
        for insertion, copied in zip(self.insertions, self.copied[:-1], strict=True):
            local[copied] = base + np.arange(len(copied))
            inner = np.flatnonzero((local[kept.source] >= base) & (local[kept.target] >= base))
            inner = inner[kept.kind[inner] != EdgeKind.ADMISSION]
            own = kept.take(inner)
            found.append(own.with_columns(source=number[local[own.source]], target=number[local[own.target]]))
            lanes = self.lane[insertion.rows]
            other = [insertion.rows[lanes == lane][-1] for lane in np.unique(lanes).tolist()]
            last = np.array(
                [row for row in other if self.lane[row] != self.lane[insertion.before]], dtype=np.int64
            )
            awaited = np.full(len(last), number[insertion.before])
            lag = np.full(len(last), self.rebuilt.delays.event)
            found.append(Edges(number[local[last]], awaited, lag, np.full(len(last), EdgeKind.EVENT)))
            base += len(copied)
        found.append(queue_again(self.rebuilt, old, part))
        return Edges.concatenate(found)
