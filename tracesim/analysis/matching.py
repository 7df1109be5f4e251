"""Which communication slices of different ranks are one operation.

In this order: the flows of the timeline (simulated runs, and readers that know); the sequence numbers of the process
group, which PyTorch writes since 2026 (``Seq``, https://github.com/pytorch/kineto/pull/1296); the order of the
operations in each process group, aligned from the end where the counts differ (a profiler starts on all ranks at about
the same time, but a collective that is under way is on some of them only); the time of the ends, where the orders
contradict each other.
Communication without a group counts as one group a stream, or as one group if the ranks use different streams. Sends
pair with receives in the order of the two ranks where the trace says who they are (``Dst Rank``, ``Src Rank``, or a
group of two), else with the receives of the same group and size whose ends lie nearest. Sequence numbers do not help
there: each rank counts its own sends and receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int32, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind

METHODS = ("flow", "sequence number", "order", "order from the end", "end time")
"""How operations were matched, by number in :attr:`Matches.method`."""
_FLOW, _SEQUENCE, _ORDER, _ORDER_FROM_END, _END_TIME = range(5)

_LEAST_AGREEMENT = 0.9
_END_TOLERANCE_NS = 1_000_000


@dataclass(frozen=True)
class Matches:
    """Communication slices on several ranks, sorted by operation, then rank."""

    row: Int64
    """Slice; shape [members]."""
    operation: Int64
    """Consecutive numbers of the operations, in order of their last end; shape [members]."""
    method: Int64
    """Index into :data:`METHODS`; shape [operations]."""
    unmatched: Mapping[str, int]
    """Slices left alone, counted by reason."""

    @property
    def first(self) -> Int64:
        """Index into ``row`` of the first member of each operation."""
        return np.searchsorted(self.operation, np.arange(len(self.method))).astype(np.int64)


def communication_rows(timeline: Timeline) -> Int64:
    """Device slices that move data between ranks."""
    kind = timeline.slices.kind
    return np.flatnonzero(timeline.on_device() & ((kind == OpKind.COLLECTIVE) | (kind == OpKind.P2P)))


def match_communication(timeline: Timeline) -> Matches:
    """The operations of a timeline that at least two of its ranks show."""
    return _Matcher(timeline).matches()


class _Matcher:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.slices = timeline.slices
        self.rows = communication_rows(timeline)
        self.rank = timeline.slice_ranks()
        self.end = self.slices.start + self.slices.duration
        self.found: list[tuple[Int64, Int64, int]] = []
        """Member rows, a number for each member that is equal within an operation, and the method."""
        self.unmatched: dict[str, int] = {}

    def matches(self) -> Matches:
        left = self.rows
        if len(self.timeline.ranks) > 1 and len(left):
            left = self._by_flows(left)
            directed = np.isin(self.slices.communication[left], (Communication.SEND, Communication.RECEIVE))
            self._by_end_pairs(self._by_peers(left[directed]))
            left = left[~directed]
            for rows in self._groups(left):
                self._by_order(self._by_sequence(rows))
        return self._collect()

    def _skip(self, reason: str, count: int) -> None:
        if count:
            self.unmatched[reason] = self.unmatched.get(reason, 0) + count

    def _by_flows(self, rows: Int64) -> Int64:
        """Match the ends of flows; returns the rows that no flow touches."""
        flows = self.timeline.flows
        joined = (flows.kind == FlowKind.P2P) | (flows.kind == FlowKind.COLLECTIVE)
        source, target = flows.source[joined].astype(np.int64), flows.target[joined].astype(np.int64)
        of_interest = np.zeros(len(self.slices), dtype=np.bool_)
        of_interest[rows] = True
        kept = of_interest[source] & of_interest[target]
        source, target = source[kept], target[kept]
        label = np.arange(len(self.slices), dtype=np.int64)
        while True:
            lowest = np.minimum(label[source], label[target])
            before = label.copy()
            np.minimum.at(label, source, lowest)
            np.minimum.at(label, target, lowest)
            label = label[label]
            if np.array_equal(before, label):
                break
        touched = np.unique(np.concatenate((source, target)))
        self.found.append((touched, label[touched], _FLOW))
        of_interest[touched] = False
        return rows[of_interest[rows]]

    def _groups(self, rows: Int64) -> list[Int64]:
        """Rows by process group, each list sorted by start; groups whose members are not known are left out."""
        rows = rows[np.lexsort((rows, self.slices.start[rows]))]
        group = self.slices.group[rows]
        found: list[Int64] = []
        for number in np.unique(group[group >= 0]).tolist():
            mine = rows[group == number]
            described = self.timeline.groups[number]
            present = len(np.unique(self.rank[mine]))
            if not described.ranks and 0 < described.size < present:
                self._skip("several groups of one name, members not known", len(mine))
            else:
                found.append(mine)
        unnamed = rows[group < 0]
        streams = self.timeline.tracks.stream[self.slices.track[unnamed]]
        used = [
            set(streams[self.rank[unnamed] == r].tolist()) for r in np.unique(self.rank[unnamed]).tolist()
        ]
        if used and all(streams_of_rank == used[0] for streams_of_rank in used):
            found += [unnamed[streams == stream] for stream in sorted(used[0])]
        elif len(unnamed):
            found.append(unnamed)
        return found

    def _by_sequence(self, rows: Int64) -> Int64:
        """Match by sequence number, and by order the slices of a coalesced call, which share one.

        Returns the rows without a number; all of them if the numbers of the ranks do not tell of the same operations
        (a group made anew starts again at 0).
        """
        sequence = self.slices.sequence[rows]
        numbered = rows[sequence >= 0]
        if not len(numbered):
            return rows
        label = self._sequence_labels(numbered)
        several = np.bincount(label) > 1
        agrees = self._label_agrees(numbered, label)
        if not several.any() or agrees[several].mean() < _LEAST_AGREEMENT:
            return rows
        kept = (several & agrees)[label]
        self.found.append((numbered[kept], label[kept], _SEQUENCE))
        self._skip("sequence number on one rank only", int((~several[label]).sum()))
        self._skip("differ in what they do", int((several & ~agrees)[label].sum()))
        return rows[sequence < 0]

    def _sequence_labels(self, rows: Int64) -> Int64:
        """A number for each row, sorted by start within a rank, that its counterparts on other ranks have too."""
        sequence, rank = self.slices.sequence[rows], self.rank[rows].astype(np.int64)
        order = np.lexsort((np.arange(len(rows)), sequence, rank))
        begins = np.append(True, (np.diff(sequence[order]) != 0) | (np.diff(rank[order]) != 0))
        place = np.arange(len(rows))
        occurrence = np.empty(len(rows), dtype=np.int64)
        occurrence[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
        _, label = np.unique(np.stack([sequence, occurrence]), axis=1, return_inverse=True)
        return label.ravel().astype(np.int64)

    def _label_agrees(self, rows: Int64, label: Int64) -> Bool:
        """For each label, whether all its rows do the same transfer, as in :meth:`_agree`."""
        what = self.slices.communication[rows].astype(np.int64)
        size = self.slices.communication_bytes[rows]
        same: Bool = _constant(what, label) & (
            _constant(size, label) | (_lowest(what, label) == Communication.ALL_TO_ALL)
        )
        return same

    def _by_order(self, rows: Int64) -> None:
        if not len(rows):
            return
        ranks = np.unique(self.rank[rows])
        if len(ranks) < 2:
            self._skip("on one rank only", len(rows))
            return
        lists = [rows[self.rank[rows] == rank] for rank in ranks.tolist()]
        shortest = min(len(mine) for mine in lists)
        table = np.stack([mine[len(mine) - shortest :] for mine in lists])
        agrees = self._agree(table)
        if agrees.mean() < _LEAST_AGREEMENT:
            self._by_end_time(lists)
            return
        method = _ORDER if all(len(mine) == shortest for mine in lists) else _ORDER_FROM_END
        kept = table[:, agrees]
        numbers = np.broadcast_to(np.arange(kept.shape[1]), kept.shape)
        self.found.append((kept.ravel(), numbers.ravel().astype(np.int64), method))
        self._skip("before the first on all ranks", sum(len(mine) for mine in lists) - table.size)
        self._skip("differ in what they do", table.size - kept.size)

    def _agree(self, table: Int64) -> Bool:
        """For each column of rows of several ranks, whether all do the same transfer."""
        what = self.slices.communication[table]
        size = self.slices.communication_bytes[table]
        same: Bool = (what == what[0]).all(axis=0) & (
            ((size == size[0]) | (what == Communication.ALL_TO_ALL) | (size == 0)).all(axis=0)
        )
        return same

    def _by_end_time(self, lists: list[Int64]) -> None:
        """Match to the rank with the fewest: members are each other's nearest end, for the same transfer."""
        reference = min(lists, key=len)
        number = {int(row): i for i, row in enumerate(reference)}
        members: list[Int64] = [reference]
        labels: list[Int64] = [np.arange(len(reference))]
        for mine in lists:
            if mine is reference:
                continue
            for what in np.unique(self.slices.communication[reference]).tolist():
                ours = reference[self.slices.communication[reference] == what]
                theirs = mine[self.slices.communication[mine] == what]
                near, other = self._mutually_nearest(ours, theirs)
                members.append(other)
                labels.append(np.array([number[int(row)] for row in near], dtype=np.int64))
        self._keep_pairs(np.concatenate(members), np.concatenate(labels), sum(map(len, lists)))

    def _keep_pairs(self, rows: Int64, labels: Int64, total: int) -> None:
        several = np.bincount(labels, minlength=int(labels.max()) + 1 if len(labels) else 0)[labels] > 1
        self.found.append((rows[several], labels[several], _END_TIME))
        self._skip("no end near it on another rank", total - int(several.sum()))

    def _mutually_nearest(self, a: Int64, b: Int64) -> tuple[Int64, Int64]:
        a, b = a[np.argsort(self.end[a], kind="stable")], b[np.argsort(self.end[b], kind="stable")]
        if not len(a) or not len(b):
            return a[:0], b[:0]
        to_b, to_a = _nearest(self.end[a], self.end[b]), _nearest(self.end[b], self.end[a])
        mutual = to_a[to_b] == np.arange(len(a))
        close = np.abs(self.end[a] - self.end[b[to_b]]) <= _END_TOLERANCE_NS
        return a[mutual & close], b[to_b[mutual & close]]

    def _by_peers(self, rows: Int64) -> Int64:
        """Pair sends and receives of which both ends are known, in the order of the two ranks; returns the others.

        NCCL and gloo deliver what one rank sends another in the order of the calls.
        """
        rows = rows[np.lexsort((rows, self.slices.start[rows]))]
        numbers = self.timeline.ranks.rank.astype(np.int64)
        own, peer = numbers[self.rank[rows]], self._peers(rows)
        sends = self.slices.communication[rows] == Communication.SEND
        absent = (peer >= 0) & ~np.isin(peer, numbers)
        self._skip("sent to or received from a rank that is not in the trace", int(absent.sum()))
        known = np.flatnonzero((peer >= 0) & ~absent)
        left = [rows[peer < 0]]
        ends = np.stack([np.where(sends, own, peer), np.where(sends, peer, own), self.slices.group[rows]])
        _, label = np.unique(ends[:, known], axis=1, return_inverse=True)
        for number in range(int(label.max(initial=-1)) + 1):
            here = known[label.ravel() == number]
            sent, received = rows[here[sends[here]]], rows[here[~sends[here]]]
            count = min(len(sent), len(received))
            pairs = np.stack([sent[len(sent) - count :], received[len(received) - count :]])
            size = self.slices.communication_bytes[pairs]
            if not count or ((size[0] != size[1]) & (size > 0).all(axis=0)).any():
                left.append(rows[here])
                continue
            method = _ORDER if len(sent) == len(received) else _ORDER_FROM_END
            self.found.append((pairs.ravel(), np.tile(np.arange(count), 2), method))
            self._skip("before the first on both ranks", len(here) - 2 * count)
        return np.concatenate(left)

    def _peers(self, rows: Int64) -> Int64:
        """Global rank at the other end of some sends and receives, -1 where neither they nor a group of two say it."""
        own = self.timeline.ranks.rank[self.rank[rows]].astype(np.int64)
        pairs = np.full((len(self.timeline.groups) + 1, 2), -1, dtype=np.int64)
        for number, group in enumerate(self.timeline.groups):
            if len(group.ranks) == 2:
                pairs[number] = group.ranks
        pair = pairs[self.slices.group[rows]]
        other = np.where(pair[:, 0] == own, pair[:, 1], np.where(pair[:, 1] == own, pair[:, 0], -1))
        said = self.slices.peer[rows].astype(np.int64)
        return np.where(said >= 0, said, other)

    def _by_end_pairs(self, rows: Int64) -> None:
        """Pair sends with receives of another rank, the same group and the same size."""
        if not len(rows):
            return
        key = np.stack([self.slices.group[rows].astype(np.int64), self.slices.communication_bytes[rows]])
        _, label = np.unique(key, axis=1, return_inverse=True)
        sends = self.slices.communication[rows] == Communication.SEND
        members: list[Int64] = [np.zeros(0, dtype=np.int64)]
        for number in np.unique(label).tolist():
            here = label.ravel() == number
            ranks = np.unique(self.rank[rows[here]]).tolist()
            for sender in ranks:
                ours = rows[here & sends & (self.rank[rows] == sender)]
                theirs = rows[here & ~sends & (self.rank[rows] != sender)]
                near, other = self._mutually_nearest(ours, theirs)
                members.append(np.stack([near, other], axis=1).ravel())
        pairs = np.concatenate(members).reshape(-1, 2)
        # A receive may be the nearest of two senders: it belongs to the nearer one.
        pairs = pairs[np.argsort(np.abs(self.end[pairs[:, 0]] - self.end[pairs[:, 1]]), kind="stable")]
        _, first = np.unique(pairs[:, 1], return_index=True)
        pairs = pairs[np.sort(first)]
        self._keep_pairs(pairs.ravel(), np.repeat(np.arange(len(pairs)), 2), len(rows))

    def _collect(self) -> Matches:
        none = np.zeros(0, dtype=np.int64)
        rows = np.concatenate([none, *(found[0] for found in self.found)])
        part = np.concatenate([none, *(np.full(len(f[0]), i) for i, f in enumerate(self.found))])
        label = np.concatenate([none, *(found[1] for found in self.found)])
        if not len(rows):
            return Matches(none, none, none, dict(self.unmatched))
        _, number = np.unique(np.stack([part, label]), axis=1, return_inverse=True)
        number = number.ravel()
        last = np.zeros(int(number.max()) + 1, dtype=np.int64)
        np.maximum.at(last, number, self.end[rows])
        lowest = np.full(len(last), len(self.slices), dtype=np.int64)
        np.minimum.at(lowest, number, rows)
        place = np.empty(len(last), dtype=np.int64)
        place[np.lexsort((lowest, last))] = np.arange(len(last))
        method = np.empty(len(last), dtype=np.int64)
        method[place[number]] = np.array([found[2] for found in self.found])[part]
        order = np.lexsort((rows, self.rank[rows], place[number]))
        return Matches(rows[order], place[number][order], method, dict(self.unmatched))


def _lowest(values: Int64, label: Int64) -> Int64:
    found = np.full(int(label.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(found, label, values)
    return found


def _highest(values: Int64, label: Int64) -> Int64:
    found = np.full(int(label.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(found, label, values)
    return found


def _constant(values: Int64, label: Int64) -> Bool:
    """For each label, whether its values are equal."""
    same: Bool = _lowest(values, label) == _highest(values, label)
    return same


def _nearest(times: Int64, sorted_times: Int64) -> Int32:
    """Index of the nearest of ``sorted_times`` for each time; the lower one if two are equally near."""
    right = np.clip(np.searchsorted(sorted_times, times), 1, max(len(sorted_times) - 1, 1))
    right = np.minimum(right, len(sorted_times) - 1)
    left = np.maximum(right - 1, 0)
    nearer = np.abs(times - sorted_times[left]) <= np.abs(sorted_times[right] - times)
    return np.where(nearer, left, right).astype(np.int32)
