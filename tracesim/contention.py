"""The engine with sharing: operations that run at the same time on one device slow each other.

Order and waiting are those of :mod:`tracesim.engine`: streams are first in, first out, dependencies end first, members
of a rendezvous start together. What differs is how long an operation takes: it advances at a rate that depends on what
else runs on its device (:mod:`tracesim.sharing`), constant between two events. Members of a rendezvous advance
together, at the rate of the slowest. Where nothing is shared, times are those of the engine, to the nanosecond.

Admission: a kernel that becomes ready beside a kernel of the compute stream starts when that one has issued its last
blocks. A communication kernel that waits for its peers is there already: it takes its SMs.

The event loop is a heap of (time, serial number); what is due at one instant is handled in the order in which it was
planned, so equal input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from op_graphs.columns import Int32, Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Stream

from . import engine
from .engine import Edges, Execution, check_durations, deadlock_report, row_starts
from .errors import SimulationError
from .sharing import SharingPolicy

_READY, _PROGRESS = 0, 1
_UNPLANNED = 0
_STREAMS_WITHOUT_SM = (Stream.HOST, Stream.COPY_TO_HOST, Stream.COPY_TO_DEVICE)
"""Copy engines and the processor of the host."""
_EPSILON = 1e-6
"""Nanoseconds of work below which an operation is done: far below the clock, far above rounding."""


def execute(
    graph: OpGraph,
    durations: Int64,
    *,
    gap_ns: int = 0,
    lags: Int64 | None = None,
    sharing: SharingPolicy | None = None,
    rank_starts: Sequence[int] | None = None,
) -> Execution:
    """Run a graph.

    Args:
        graph: what to run.
        durations: nanoseconds of each operation while it runs alone, one a row.
        gap_ns: idle time between two kernels queued back to back on a compute stream.
        lags: as of :func:`tracesim.engine.execute`. A dependency with a lag counts from its start, as long after it as
            it would be if it ran alone: so a launch that follows another does not wait for a slowed kernel.
        sharing: what operations share; None for nothing, which is the exact longest path.
        rank_starts: as of :func:`tracesim.engine.execute`.

    Raises:
        ValueError: if a duration is negative, their number or that of the classes is not the number of operations, or
            that of the lags not the number of dependencies.
        SimulationError: if operations are left that wait for each other.
    """
    if sharing is None:
        return engine.execute(graph, durations, gap_ns=gap_ns, lags=lags, rank_starts=rank_starts)
    check_durations(graph, durations)
    if len(sharing.classes) != len(durations):
        raise ValueError(f"{len(sharing.classes)} classes for {len(durations)} operations")
    if lags is not None and len(lags) != len(graph.dependencies):
        raise ValueError(f"{len(lags)} lags for {len(graph.dependencies)} dependencies")
    return _Run(graph, durations, gap_ns, lags, sharing, row_starts(graph, rank_starts)).run()


@dataclass
class _Device:
    """What runs on a rank."""

    running: list[int] = field(default_factory=list)
    """Rows in the order in which they were admitted."""
    waiting_sms: int = 0
    """SMs taken by operations that wait for their peers."""
    blocked: list[int] = field(default_factory=list)
    """Rows that wait to be admitted."""
    kernel: int = -1
    """The row that runs on the compute stream."""


class _Run:
    def __init__(
        self,
        graph: OpGraph,
        durations: Int64,
        gap_ns: int,
        lags: Int64 | None,
        sharing: SharingPolicy,
        starts: list[int],
    ) -> None:
        self.starts = starts
        self.graph, self.sharing = graph, sharing
        self.edges = Edges.of(graph, gap_ns, lags)
        operations = graph.operations
        self.duration: list[int] = durations.tolist()
        self.rendezvous: list[int] = operations.rendezvous.tolist()
        self.device_of = operations.rank.tolist()
        self.is_kernel = (operations.stream == Stream.COMPUTE).tolist()
        self.needs_no_sm = np.isin(operations.stream, _STREAMS_WITHOUT_SM).tolist()
        self.classes: list[int] = sharing.classes.tolist()
        self.taken: list[int] = [demand.sms_taken for demand in sharing.demands]
        self.last_wave: list[float] = [demand.last_wave for demand in sharing.demands]
        rows = len(durations)
        self.members = _members(operations.rendezvous)
        self.pending = np.diff(np.array(self.edges.offsets)).tolist()
        from_start = ~self.edges.is_stream & (self.edges.lag != 0)
        self.behind_end = _Followers(self.edges, np.flatnonzero(~from_start), rows)
        self.behind_start = _Followers(self.edges, np.flatnonzero(from_start), rows)
        self.from_start: list[bool] = from_start.tolist()
        self.sources, self.lags = self.edges.source.tolist(), self.edges.lag.tolist()
        self.devices = [_Device() for _ in range(len(graph.ranks))]
        self.start, self.end = [-1] * rows, [-1] * rows
        self.waited_for, self.wait = [-1] * rows, [0] * rows
        self.reached = [-1] * rows
        self.left = [float(length) for length in self.duration]
        self.rate = [1.0] * rows
        self.since = [0] * rows
        self.plan = [0] * rows
        """Serial number of the event that is valid for a running row."""
        self.to_come = {row: len(group) for group in self.members.values() for row in group[:1]}
        self.heap: list[tuple[int, int, int, int]] = []
        self.serial = 0
        self.changed: set[int] = set()

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> Execution:
        for row, count in enumerate(self.pending):
            if not count:
                self._push(self.starts[row], _READY, row)
        done = 0
        heap = self.heap
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                _, serial, kind, row = heapq.heappop(heap)
                if kind == _READY:
                    self._become_ready(row, now)
                elif self.plan[row] == serial:
                    done += self._progress(row, now)
            self._replan(now)
        if done < len(self.duration):
            raise SimulationError(deadlock_report(self.graph, self.edges, np.array(self.end) >= 0))
        return Execution(
            np.array(self.start, dtype=np.int64),
            np.array(self.end, dtype=np.int64),
            np.array(self.wait, dtype=np.int64),
            np.array(self.waited_for, dtype=np.int64),
        )

    def _push(self, time: int, kind: int, row: int) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (time, self.serial, kind, row))

    def _progress(self, row: int, now: int) -> int:
        """A running row is done, or comes to its last blocks; how many rows ended."""
        self._advance(row, now)
        if self.left[row] <= _EPSILON:
            self._finish(row, now)
            return 1
        device = self.devices[self.device_of[row]]
        if device.kernel == row and self._is_in_last_wave(row):
            self._admit_blocked(device, now)
        self.plan[row] = _UNPLANNED
        self.changed.add(self.device_of[row])
        return 0

    def _advance(self, row: int, now: int) -> None:
        self.left[row] -= (now - self.since[row]) * self.rate[row]
        self.since[row] = now

    # -- starting and ending ---------------------------------------------------------------------------------

    def _become_ready(self, row: int, now: int) -> None:
        device = self.devices[self.device_of[row]]
        if self.is_kernel[row] or self.needs_no_sm[row] or not self._must_wait(device, now):
            self._admit(row, now)
        else:
            device.blocked.append(row)
            self.changed.add(self.device_of[row])

    def _must_wait(self, device: _Device, now: int) -> bool:
        """Whether the kernel of the compute stream has blocks left to issue."""
        kernel = device.kernel
        if not self.sharing.admission or kernel < 0:
            return False
        self._advance(kernel, now)
        return not self._is_in_last_wave(kernel)

    def _is_in_last_wave(self, kernel: int) -> bool:
        return self.left[kernel] <= self.duration[kernel] * self.last_wave[self.classes[kernel]] + _EPSILON

    def _admit_blocked(self, device: _Device, now: int) -> None:
        blocked, device.blocked = device.blocked, []
        for row in blocked:
            self._admit(row, now)

    def _admit(self, row: int, now: int) -> None:
        """A row reaches its place: it starts, or waits there for the other members of its rendezvous."""
        self.reached[row] = now
        identifier = self.rendezvous[row]
        if identifier < 0:
            self._begin(row, now)
            return
        group = self.members[identifier]
        self.to_come[group[0]] -= 1
        number = self.device_of[row]
        self.devices[number].waiting_sms += self.taken[self.classes[row]]
        self.changed.add(number)
        if self.to_come[group[0]]:
            return
        last = max(group, key=lambda member: (self.reached[member], member))
        for member in group:
            self.devices[self.device_of[member]].waiting_sms -= self.taken[self.classes[member]]
            self.wait[member] = now - self.reached[member]
            if self.reached[member] != now:
                self.waited_for[member] = self.waited_for[last]
            self._begin(member, now)

    def _begin(self, row: int, now: int) -> None:
        self.start[row] = self.since[row] = now
        self._release(self.behind_start, row, now)
        if not self.duration[row]:
            # Takes nothing and no time; it still ends behind what is already due now.
            self.serial += 1
            self.plan[row] = self.serial
            heapq.heappush(self.heap, (now, self.serial, _PROGRESS, row))
            return
        number = self.device_of[row]
        device = self.devices[number]
        device.running.append(row)
        if self.is_kernel[row]:
            device.kernel = row
        self.changed.add(number)

    def _finish(self, row: int, now: int) -> None:
        self.end[row] = now
        number = self.device_of[row]
        device = self.devices[number]
        if self.duration[row]:
            device.running.remove(row)
            self.changed.add(number)
            # A partner that has more to do is held back by this one no longer.
            for partner in self.members.get(self.rendezvous[row], ()):
                self.changed.add(self.device_of[partner])
        if device.kernel == row:
            device.kernel = -1
            self._admit_blocked(device, now)
        self._release(self.behind_end, row, now)

    def _release(self, behind: _Followers, row: int, now: int) -> None:
        """Count a row off what its followers wait for."""
        for position in range(behind.offsets[row], behind.offsets[row + 1]):
            follower = behind.rows[position]
            self.pending[follower] -= 1
            if not self.pending[follower]:
                self._plan_ready(follower, now)

    def _plan_ready(self, row: int, now: int) -> None:
        moment, cause = self.starts[row], -1
        for position in range(self.edges.offsets[row], self.edges.offsets[row + 1]):
            source = self.sources[position]
            alone = self.start[source] + self.duration[source]
            allowed = (alone if self.from_start[position] else self.end[source]) + self.lags[position]
            if allowed >= moment:
                moment, cause = allowed, source
        self.waited_for[row] = cause
        self._push(max(moment, now), _READY, row)

    # -- rates -----------------------------------------------------------------------------------------------

    def _replan(self, now: int) -> None:
        """New rates on the devices on which something began or ended, and when their rows are due."""
        if not self.changed:
            return
        touched: set[int] = set()
        for number in sorted(self.changed):
            device = self.devices[number]
            rates = self.sharing.rates([self.classes[row] for row in device.running], device.waiting_sms)
            for row, rate in zip(device.running, rates, strict=True):
                if self.rendezvous[row] >= 0:
                    touched.add(self.rendezvous[row])
                else:
                    self._set_rate(row, rate, now)
            if device.kernel >= 0 and device.blocked:
                self._due(device.kernel, now)
        for identifier in sorted(touched):
            self._couple(self.members[identifier], now)
        self.changed.clear()

    def _set_rate(self, row: int, rate: float, now: int) -> None:
        if rate != self.rate[row] or self.plan[row] == _UNPLANNED:
            self._advance(row, now)
            self.rate[row] = rate
            self._due(row, now)

    def _couple(self, group: list[int], now: int) -> None:
        """Members that still run advance at the rate of the slowest."""
        alive = [row for row in group if self.end[row] < 0]
        slowest = min(self._own_rate(row) for row in alive)
        for row in alive:
            self._set_rate(row, slowest, now)

    def _own_rate(self, row: int) -> float:
        """The rate that a row's own device gives it."""
        device = self.devices[self.device_of[row]]
        if row not in device.running:
            return 1.0
        rates = self.sharing.rates([self.classes[other] for other in device.running], device.waiting_sms)
        return float(rates[device.running.index(row)])

    def _due(self, row: int, now: int) -> None:
        """Plan the end of a row, or the moment of its last blocks where somebody waits for that."""
        work = self.left[row]
        device = self.devices[self.device_of[row]]
        if device.kernel == row and device.blocked:
            before = work - self.duration[row] * self.last_wave[self.classes[row]]
            work = before if before > _EPSILON else work
        self.serial += 1
        self.plan[row] = self.serial
        lasts = max(0, -int(-(work - _EPSILON) // self.rate[row]))
        heapq.heappush(self.heap, (now + lasts, self.serial, _PROGRESS, row))


class _Followers:
    """The targets of some edges by their source."""

    def __init__(self, edges: Edges, chosen: Int64, rows: int) -> None:
        chosen = chosen[np.argsort(edges.source[chosen], kind="stable")]
        self.rows: list[int] = edges.target[chosen].tolist()
        self.offsets: list[int] = np.searchsorted(edges.source[chosen], np.arange(rows + 1)).tolist()


def _members(rendezvous: Int32) -> dict[int, list[int]]:
    """Rows of each rendezvous."""
    members: dict[int, list[int]] = {}
    for row in np.flatnonzero(rendezvous >= 0).tolist():
        members.setdefault(int(rendezvous[row]), []).append(row)
    return members
