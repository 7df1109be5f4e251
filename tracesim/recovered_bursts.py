"""Stretches of compute of one pipeline action each, found in the kernels of a rank without any annotation.

The kernels of a rank stand in the order in which they were launched, where the trace says so, else in that of their
starts. They are cut

- where the direction changes (forward, backward; the reader knows it from the launching thread and function);
- where a send or receive was launched in between, or, without launches, where a kernel ends at the moment at which a
  send is ready, because what produces it ends there;
- inside a stretch whose kernels are those of shorter stretches of the rank one after another, and, where ranks have
  fewer stretches than others, into equal parts. These are patterns of layers.

Where a forward and a backward run interleaved, pieces of one direction that together are the kernels of a whole stretch
elsewhere are joined. Kernels are compared by name. The optimizer, and kernels of no direction, belong to no stretch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, Dimension, FlowKind, OpKind, Phase, TrackRole

from .analysis import Window
from .recovered_streams import cut_in_streams
from .recovered_words import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Burst,
    sends_shared,
    split_by_count,
    tails_moved,
)

_LETTERS = {
    Phase.FORWARD: FORWARD,
    Phase.BACKWARD_INPUT: BACKWARD,
    Phase.RECOMPUTE: BACKWARD,
    Phase.BACKWARD_WEIGHT: WEIGHT,
}
_LEAST_WEIGHTS = 3
"""Fewer weight gradients in a row are those of one linear or two inside a backward."""
_SHARE_OF_PRODUCTS = 0.45
_AT_ONCE_NS = 2_000
"""A send is ready when its producer ends, to within the resolution of a trace."""


@dataclass(frozen=True)
class RankBursts:
    """The stretches of a rank in order, and its transfers in the order in which they were posted."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    bursts: tuple[Burst, ...]
    sends: Int64
    receives: Int64
    """Rows of slices."""


def find_bursts(
    timeline: Timeline, dimensions: Int8, windows: Sequence[Window], partner: Mapping[int, int]
) -> list[RankBursts]:
    """The stretches of compute of one step, of every rank that has any.

    Args:
        timeline: where the slices are.
        dimensions: of all slices, as ``slice_dimensions`` gives them.
        windows: of the step, one a rank.
        partner: the other end of each matched send and receive.
    """
    kernels = [_Kernels(timeline, dimensions, window) for window in windows]
    readers = {
        partner[row]: letter
        for of in kernels
        for row, letter in of.reading_letters().items()
        if row in partner
    }
    found = []
    for window, of in zip(windows, kernels, strict=True):
        if len(of.compute):
            bursts = cut_in_streams(tails_moved(of.cut()))
            bursts = of.with_late_sends(sends_shared(bursts, timeline.slices.peer, readers))
            found.append(RankBursts(window.rank, tuple(bursts), of.sends, of.receives))
    return _with_equal_counts(found)


def _with_equal_counts(ranks: Sequence[RankBursts]) -> list[RankBursts]:
    """The same ranks, bursts that must hold several actions split: every rank has as many forwards and backwards."""
    counts = [Counter(burst.letter for burst in rank.bursts) for rank in ranks]
    needed = max((count[letter] for count in counts for letter in (FORWARD, BACKWARD)), default=0)
    return [replace(rank, bursts=tuple(split_by_count(list(rank.bursts), needed))) for rank in ranks]


class _Kernels:
    """Compute and pipeline transfers of a rank in a window, with the order in which they were posted."""

    def __init__(self, timeline: Timeline, dimensions: Int8, window: Window) -> None:
        slices = timeline.slices
        self.slices = slices
        self.end = slices.start + slices.duration
        middle = (slices.start + self.end) // 2
        inside = (timeline.slice_ranks() == window.rank) & (middle >= window.start) & (middle < window.end)
        device = timeline.on_device() & inside
        communicates = (slices.kind == OpKind.COLLECTIVE) | (slices.kind == OpKind.P2P)
        letters = np.isin(slices.phase, list(_LETTERS))
        # Reductions of the loss and host copies are no kernels of an action.
        self.compute = np.flatnonzero(device & ~communicates & letters & (slices.kind != OpKind.MEMCPY))
        other = np.isin(dimensions, (Dimension.TP, Dimension.CP, Dimension.EP, Dimension.DP))
        directed = np.isin(slices.communication, (Communication.SEND, Communication.RECEIVE))
        pipeline = device & communicates & ~other & (directed | (slices.kind == OpKind.P2P))
        self.posted, self.launched = _posted(timeline)
        self.compute = self._in_order(self.compute)
        self.transfers = self._in_order(np.flatnonzero(pipeline))
        self.sends = self.transfers[slices.communication[self.transfers] == Communication.SEND]
        self.receives = self.transfers[slices.communication[self.transfers] == Communication.RECEIVE]

    def _in_order(self, rows: Int64) -> Int64:
        return rows[np.lexsort((rows, self.slices.start[rows], self.posted[rows]))]

    def reading_letters(self) -> dict[int, str]:
        """Direction of the compute launched first behind each receive whose launch is known."""
        posted = self.posted[self.compute]
        places = np.searchsorted(posted, self.posted[self.receives], side="left").tolist()
        return {
            row: FORWARD if self.slices.phase[self.compute[place]] == Phase.FORWARD else BACKWARD
            for row, place in zip(self.receives.tolist(), places, strict=True)
            if self.launched[row] and place < len(self.compute)
        }

    def cut(self) -> list[Burst]:
        """Bursts between changes of direction and transfers; the last one before a send has it."""
        slices, compute = self.slices, self.compute
        cuts, sends = self._cuts()
        letters = self._directions(cuts)
        turns = (p for p in range(1, len(compute)) if letters[p] != letters[p - 1] or p in cuts)
        found = []
        for begin, end in pairwise((0, *turns, len(compute))):
            rows = compute[begin:end]
            starts, ends = slices.start[rows].tolist(), self.end[rows].tolist()
            word, made = tuple(slices.name[rows].tolist()), tuple(sends.get(end, ()))
            first = (0,) if begin in cuts or not begin else ()
            behind = (len(word),) * len(made)
            found.append(
                Burst(
                    letters[begin],
                    starts[0],
                    max(ends),
                    word,
                    tuple(ends),
                    tuple(starts),
                    made,
                    behind,
                    first,
                )
            )
        return self._weights_apart(found)

    def _directions(self, cuts: set[int]) -> list[str]:
        """Letter of each kernel; a weight gradient inside a backward is a part of it.

        Weight gradients alone are as many in a row as a forward has products: one for each. Two forwards in a row
        (neighbouring stages of one rank) count as one here.
        """
        letters = [_LETTERS[Phase(phase)] for phase in self.slices.phase[self.compute].tolist()]
        products = self._is_product()
        whole = pairwise(sorted({0, *cuts, len(letters)}))
        forwards = [
            int(products[begin:end].sum()) for begin, end in whole if set(letters[begin:end]) == {FORWARD}
        ]
        self.least = max(_LEAST_WEIGHTS, min(forwards, default=0) * _SHARE_OF_PRODUCTS)
        for letter, run in groupby(range(len(letters)), key=lambda place: letters[place]):
            places = list(run)
            if letter == WEIGHT and products[places].sum() < self.least:
                for place in places:
                    letters[place] = BACKWARD
        return letters

    def _is_product(self) -> Bool:
        products: Bool = np.isin(self.slices.kind[self.compute], (OpKind.GEMM, OpKind.GROUPED_GEMM))
        return products

    def _weights_apart(self, bursts: list[Burst]) -> list[Burst]:
        """Backward bursts of many products without attention or norms, where others have these, as ``W``."""
        products = self._is_product()
        inner = np.isin(self.slices.kind[self.compute], (OpKind.ATTENTION, OpKind.NORM))
        found, place, has_whole = [], 0, False
        for burst in bursts:
            rows = slice(place, place + len(burst.word))
            place += len(burst.word)
            is_plain = burst.letter == BACKWARD and not inner[rows].any() and not burst.sends
            has_whole |= burst.letter == BACKWARD and bool(inner[rows].any())
            found.append(is_plain and int(products[rows].sum()) >= self.least)
        return [
            replace(burst, letter=WEIGHT) if plain and has_whole else burst
            for plain, burst in zip(found, bursts, strict=True)
        ]

    def _cuts(self) -> tuple[set[int], dict[int, list[int]]]:
        """Places in front of which a transfer was posted, and the sends there."""
        cuts: set[int] = set()
        sends: dict[int, list[int]] = {}
        is_send = set(self.sends.tolist())
        posted, ends = self.posted[self.compute], self.end[self.compute]
        for row in self.transfers.tolist():
            if self.launched[row]:
                place = int(np.searchsorted(posted, self.posted[row], side="left"))
            elif row in is_send:
                place = int(np.searchsorted(ends, self.posted[row] + _AT_ONCE_NS, side="right"))
                if not place or abs(int(ends[place - 1]) - int(self.posted[row])) > _AT_ONCE_NS:
                    continue
            else:
                continue
            cuts.add(place)
            if row in is_send:
                sends.setdefault(place, []).append(row)
        return cuts, sends

    def with_late_sends(self, bursts: list[Burst]) -> list[Burst]:
        """Give each send that has no burst yet to the first before it of a kind that sends, in order."""
        given = {row for burst in bursts for row in burst.sends}
        peers = self.slices.peer
        senders: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for burst in bursts:
            for row in burst.sends:
                senders.setdefault((burst.letter, burst.word), set()).add(int(peers[row]))
        for row in self.sends.tolist():
            if row in given:
                continue
            for number, burst in enumerate(bursts):
                kinds = senders.get((burst.letter, burst.word), set())
                if burst.sends or int(peers[row]) not in kinds or burst.end > self.posted[row]:
                    continue
                bursts[number] = burst.sending((row,))
                break
        return bursts


def _posted(timeline: Timeline) -> tuple[Int64, Bool]:
    """When each slice was launched, else when it was ready; and whether its launch is known."""
    slices, flows = timeline.slices, timeline.flows
    posted = slices.start - slices.wait
    known = np.zeros(len(slices), dtype=np.bool_)
    rows = flows.kind == FlowKind.LAUNCH
    host = timeline.slice_roles()[flows.source[rows]] == TrackRole.HOST
    source, target = flows.source[rows][host], flows.target[rows][host]
    posted[target] = slices.start[source]
    known[target] = True
    return posted, known
