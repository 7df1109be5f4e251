"""What the host did while the device waited for it.

Each gap is looked at on the thread that ended it, the one of the next launch: in a backward pass that is not the thread
of the forward pass. Each instant is given to the outermost host slice around it that launches only a few kernels, so to
a data loader or a node of the backward pass rather than to the whole forward or one addition inside, and to the call
of the driver it is in (``cudaMalloc``, ``cudaStreamSynchronize``).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from op_graphs.columns import Int32, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, TrackRole
from tracesim.analysis.intervals import Intervals
from tracesim.diff.alignment import Alignment
from tracesim.diff.attribution import Attribution
from tracesim.readers.nesting import Nesting

NOWHERE = "outside of operators"
"""Name of the time in which the thread is in nothing that was recorded."""
MOST_ROWS = 30

_NOT_AN_OPERATION = re.compile(r"^ProfilerStep|\.py\(\d+\)|^<built-in|^PyTorch Profiler")
_DRIVER = re.compile(r"^(cuda|hip|cu)[A-Z]")
_SERIAL = re.compile(r"#\d+|0x[0-9a-fA-F]+")
_FEW_LAUNCHES = 16


def host_in_gaps(
    alignment: Alignment, attribution: Attribution, largest: int = MOST_ROWS
) -> list[dict[str, Any]]:
    """What the host was in during launch gaps, by the size of the difference.

    Returns:
        One dict a name: ``name``, ``a_ns``, ``b_ns`` and ``difference_ns``, means over steps and ranks. Over all names
        they add up to the launch gaps of both sides, where the traces show host threads. ``>`` in a name stands
        before the call of the driver.
    """
    totals: dict[str, list[float]] = {}
    for side, timeline in enumerate((alignment.a, alignment.b)):
        segment = 0
        for rank in alignment.ranks:
            threads = _Threads(timeline, rank.b if side else rank.a)
            weight = 1 / len(rank.steps) / len(alignment.ranks)
            for claims in attribution.claims[segment : segment + len(rank.steps)]:
                for name, time in threads.inside(claims[side].gaps).items():
                    totals.setdefault(name, [0.0, 0.0])[side] += weight * time
            segment += len(rank.steps)
    ordered = sorted(totals.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0]))[:largest]
    return [
        {"name": name, "a_ns": round(a), "b_ns": round(b), "difference_ns": round(b) - round(a)}
        for name, (a, b) in ordered
    ]


class _Threads:
    """Host slices of one rank by thread."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.timeline = timeline
        slices, tracks = timeline.slices, timeline.tracks
        host = (tracks.rank == rank) & (tracks.role == TrackRole.HOST)
        # Annotations of a thread have a track of their own, with the number of the thread.
        noted = (tracks.rank == rank) & (tracks.role == TrackRole.ANNOTATION)
        host |= noted & np.isin(tracks.stream, tracks.stream[host])
        streams, number = np.unique(tracks.stream[host], return_inverse=True)
        self.thread_of_track: Int32 = np.full(len(tracks), -1, dtype=np.int32)
        self.thread_of_track[host] = number.ravel()
        self.count = len(streams)
        self._launches(rank)
        telling = np.array([not _NOT_AN_OPERATION.search(name) for name in timeline.strings], dtype=np.bool_)
        rows = np.flatnonzero(host[slices.track] & telling[slices.name])
        start, end = slices.start[rows], (slices.start + slices.duration)[rows]
        self.nesting = Nesting.build(self.thread_of_track[slices.track[rows]], start, end)
        self.rows = rows[self.nesting.order]
        self.chosen = self._outermost_of_few()
        thread = self.thread_of_track[slices.track[rows]]
        both = np.concatenate((start, end)), np.concatenate((thread, thread))
        self.edges = [np.sort(both[0][both[1] == t]) for t in range(self.count)]

    def _launches(self, rank: int) -> None:
        """Threads and times of all launches of the rank, and of the launch of each kernel in order of start."""
        timeline, slices = self.timeline, self.timeline.slices
        launch = timeline.flows.kind == FlowKind.LAUNCH
        source, target = timeline.flows.source[launch], timeline.flows.target[launch]
        mine = timeline.tracks.rank[slices.track[target]] == rank
        source, target = source[mine], target[mine]
        thread = self.thread_of_track[slices.track[source]]
        known = thread >= 0
        source, target, thread = source[known], target[known], thread[known]
        by_time = np.lexsort((slices.start[source], thread))
        self.launch_thread, self.launch_time = thread[by_time], slices.start[source][by_time]
        by_start = np.argsort(slices.start[target], kind="stable")
        self.kernel_start, self.kernel_thread = slices.start[target][by_start], thread[by_start]

    def _outermost_of_few(self) -> Int64:
        """For each position of the nesting the slice that an instant in it is given to, as a position."""
        slices = self.timeline.slices
        thread = self.thread_of_track[slices.track[self.rows]]
        launched = np.zeros(len(self.rows), dtype=np.int64)
        for number in range(self.count):
            mine = thread == number
            times = self.launch_time[self.launch_thread == number]
            start = slices.start[self.rows[mine]]
            end = start + slices.duration[self.rows[mine]]
            launched[mine] = np.searchsorted(times, end, side="right") - np.searchsorted(times, start)
        few = launched <= _FEW_LAUNCHES
        chosen = np.arange(len(self.rows))
        while True:
            above = self.nesting.parent[chosen]
            better = np.where((above >= 0) & few[above], above, chosen)
            if np.array_equal(better, chosen):
                return np.asarray(chosen, dtype=np.int64)
            chosen = better

    def inside(self, gaps: Intervals) -> dict[str, int]:
        """Nanoseconds of the gaps by what the host was in."""
        if not len(gaps) or not self.count or not len(self.kernel_start):
            return {}
        at = np.searchsorted(self.kernel_start, gaps.end)
        busiest = int(np.bincount(self.kernel_thread).argmax())
        thread = np.where(
            at < len(self.kernel_start),
            self.kernel_thread[np.minimum(at, len(self.kernel_start) - 1)],
            busiest,
        )
        found: dict[str, int] = {}
        for number in np.unique(thread).tolist():
            mine = thread == number
            start, end = self._pieces(number, gaps.start[mine], gaps.end[mine])
            middle = start + (end - start) // 2
            position = self.nesting.innermost(np.full(len(middle), number, dtype=np.int32), middle)
            names, time = self._names(position, end - start)
            for name, ns in zip(names, time, strict=True):
                found[name] = found.get(name, 0) + ns
        return found

    def _pieces(self, thread: int, start: Int64, end: Int64) -> tuple[Int64, Int64]:
        """The intervals, cut wherever a slice of the thread begins or ends."""
        edges = self.edges[thread]
        low, high = np.searchsorted(edges, start, side="right"), np.searchsorted(edges, end)
        cuts = np.concatenate([edges[x:y] for x, y in zip(low, high, strict=True)])
        starts = np.sort(np.concatenate((start, cuts)))
        return starts, np.sort(np.concatenate((cuts, end)))

    def _names(self, position: Int64, time: Int64) -> tuple[list[str], list[int]]:
        """Names of positions of the nesting, each once, and the sums of their times."""
        names = np.append(self.timeline.slices.name[self.rows].astype(np.int64), -1)
        outer = names[np.where(position >= 0, self.chosen[position], -1)] if len(self.rows) else position
        pairs, place = np.unique(np.stack([outer, names[position]]), axis=1, return_inverse=True)
        total = np.zeros(pairs.shape[1], dtype=np.int64)
        np.add.at(total, place.ravel(), time)
        return [self._name(*pair) for pair in pairs.T.tolist()], total.tolist()

    def _name(self, outer: int, inner: int) -> str:
        if outer < 0:
            return NOWHERE
        name, called = self.timeline.string(outer), self.timeline.string(inner)
        driver = f" > {called}" if inner != outer and _DRIVER.search(called) else ""
        return _SERIAL.sub("", name) + driver
