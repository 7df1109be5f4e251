"""Waiting and transfer inside collectives, who arrives late, and at what rate data moves.

A communication kernel starts when its own rank reaches it and spins until the last rank has. With arrivals ``a`` and
ends ``e`` of the matched members, member ``i`` waits ``min(max(a) - a[i], e[i] - a[i])`` and transfers for the rest. A
simulated collective starts when the last member arrives; its wait lies before its start, in the column ``wait``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Float64, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication
from tracesim.analysis.matching import Matches, communication_rows

_BUS_FACTOR_ALL_REDUCE = 2.0
_SHARED = (
    Communication.ALL_GATHER,
    Communication.REDUCE_SCATTER,
    Communication.ALL_TO_ALL,
    Communication.GATHER,
    Communication.SCATTER,
)


@dataclass(frozen=True)
class Transfers:
    """Matched communication: columns of shape [members] beside :class:`Matches`, or of shape [operations]."""

    matches: Matches
    arrival: Int64
    """Nanoseconds at which each member reached the operation."""
    wait: Int64
    """Waiting of each member for the last one, inside its slice and before it."""
    wait_inside: Int64
    """The part of ``wait`` inside the slice."""
    transfer: Int64
    """Duration without waiting, of each member."""
    last_arrival: Int64
    """Shape [operations]."""
    last_member: Int64
    """Index of the member that arrived last; shape [operations]."""
    delay: Int64
    """By how much sooner the others had gone on had the last come with the one before it; shape [operations].

    The time between the last two arrivals, but no more than the longest wait.
    """
    end_spread: Int64
    """Last end minus first end; shape [operations]."""
    transfer_time: Int64
    """Shortest transfer of the members: the time the data needed; shape [operations]."""

    def by_slice(self, values: Int64, count: int, default: int = 0) -> Int64:
        """A column of shape [members] spread to all ``count`` slices."""
        spread = np.full(count, default, dtype=np.int64)
        spread[self.matches.row] = values
        return spread


def split_transfers(timeline: Timeline, matches: Matches) -> Transfers:
    """Wait and transfer of every matched communication slice."""
    slices = timeline.slices
    row, operation, count = matches.row, matches.operation, len(matches.method)
    start, duration = slices.start[row], slices.duration[row]
    arrival = start - slices.wait[row]
    lowest = np.iinfo(np.int64).min
    last_arrival = np.full(count, lowest, dtype=np.int64)
    np.maximum.at(last_arrival, operation, arrival)
    inside = np.clip(last_arrival[operation] - start, 0, duration)
    transfer = duration - inside
    order = np.lexsort((np.arange(len(row)), arrival, operation))
    stop = np.searchsorted(operation[order], np.arange(count), side="right")
    last_member, before = order[stop - 1], order[np.maximum(stop - 2, 0)]
    first_end = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    last_end = np.full(count, lowest, dtype=np.int64)
    np.minimum.at(first_end, operation, start + duration)
    np.maximum.at(last_end, operation, start + duration)
    shortest = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(shortest, operation, transfer)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, operation, inside + slices.wait[row])
    return Transfers(
        matches=matches,
        arrival=arrival,
        wait=inside + slices.wait[row],
        wait_inside=inside,
        transfer=transfer,
        last_arrival=last_arrival,
        last_member=last_member,
        delay=np.minimum(arrival[last_member] - arrival[before], longest),
        end_spread=last_end - first_end,
        transfer_time=shortest,
    )


@dataclass(frozen=True)
class Straggler:
    """How one rank stands to the others at their common collectives. Times in nanoseconds."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    operations: int
    last: int
    """Operations it arrived at after all others."""
    caused_wait: int
    """What the other members of those waited, summed over them."""
    delay: int
    """By how much sooner those could have gone on had it come with the one before it, summed."""
    waited: int
    """What it waited itself, summed."""
    median_wait: int


def stragglers(timeline: Timeline, transfers: Transfers) -> list[Straggler]:
    """One entry a rank that takes part in matched collectives, by rank.

    Sends and receives do not count: in a pipeline one side always waits, which is its bubble.
    """
    matches = transfers.matches
    directed = np.isin(
        timeline.slices.communication[matches.row], (Communication.SEND, Communication.RECEIVE)
    )
    if directed.all():
        return []
    rank = np.where(directed, -1, timeline.slice_ranks()[matches.row])
    total_wait = np.zeros(len(matches.method), dtype=np.int64)
    np.add.at(total_wait, matches.operation, transfers.wait)
    late = (transfers.delay > 0) & ~directed[transfers.last_member]
    last_rank = rank[transfers.last_member]
    found = []
    for number in np.unique(rank[~directed]).tolist():
        mine = rank == number
        caused = late & (last_rank == number)
        found.append(
            Straggler(
                rank=number,
                operations=int(mine.sum()),
                last=int(caused.sum()),
                caused_wait=int(total_wait[caused].sum()),
                delay=int(transfers.delay[caused].sum()),
                waited=int(transfers.wait[mine].sum()),
                median_wait=int(np.median(transfers.wait[mine])),
            )
        )
    return found


def bus_factor(communication: int, size: int) -> float:
    """Bytes that cross the busiest link of a rank over bytes of the full message, with ``size`` members.

    2 (n - 1) / n for an all-reduce, (n - 1) / n for gathers, scatters and all-to-all, else 1, as in nccl-tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    share = (size - 1) / size if size > 0 else 1.0
    if communication == Communication.ALL_REDUCE:
        return _BUS_FACTOR_ALL_REDUCE * share
    return share if communication in _SHARED else 1.0


@dataclass(frozen=True)
class Bandwidth:
    """Operations of one transfer, group and size. Rates are medians over them, in GB/s (10^9 bytes)."""

    communication: Communication
    group: int
    """Index into :attr:`Timeline.groups`, -1 if none."""
    members: int
    """Ranks of the group, 0 if not known."""
    message: int
    """Bytes of the full message."""
    count: int
    transfer: int
    """Median nanoseconds of transfer; of the whole slice where ``matched`` is False."""
    algorithm: float
    bus: float
    matched: bool
    """False where only one rank shows the operation: its duration may hold waiting, so the rates are lower bounds."""


def bandwidths(timeline: Timeline, transfers: Transfers) -> list[Bandwidth]:
    """Rates of all communication whose size is known, by transfer, group and size."""
    slices = timeline.slices
    matches = transfers.matches
    rows = communication_rows(timeline)
    alone = np.setdiff1d(rows, matches.row)
    row = np.concatenate((matches.row[matches.first], alone))
    time = np.concatenate((transfers.transfer_time, slices.duration[alone]))
    matched: Bool = np.arange(len(row)) < len(matches.method)
    present = np.bincount(matches.operation, minlength=len(matches.method))
    members = np.concatenate((present, np.zeros(len(alone), dtype=np.int64)))
    size = slices.communication_bytes[row]
    kept = (size > 0) & (time > 0)
    row, time, matched, members, size = row[kept], time[kept], matched[kept], members[kept], size[kept]
    group = slices.group[row].astype(np.int64)
    sizes = np.array([g.size or len(g.ranks) for g in timeline.groups] + [0], dtype=np.int64)
    members = np.where(sizes[group] > 0, sizes[group], members)
    what = slices.communication[row].astype(np.int64)
    key = np.stack([what, group, members, size, matched.astype(np.int64)])
    distinct, label = np.unique(key, axis=1, return_inverse=True)
    label = label.ravel()
    rate: Float64 = size / time
    found = []
    for number in range(distinct.shape[1]):
        here = label == number
        communication, of_group, count, message, is_matched = distinct[:, number].tolist()
        algorithm = float(np.median(rate[here]))
        found.append(
            Bandwidth(
                communication=Communication(communication),
                group=of_group,
                members=count,
                message=message,
                count=int(here.sum()),
                transfer=int(np.median(time[here])),
                algorithm=algorithm,
                bus=algorithm * bus_factor(communication, count),
                matched=bool(is_matched),
            )
        )
    return found
