"""The engine: when does every operation of a graph run.

An operation starts when its stream is free (streams are FIFO in row order), its dependencies have ended, and, if it
carries a rendezvous, when every member has reached it. Operations that become ready at the same time on one stream
cannot exist, since a stream's order is given; so equal input gives equal output, to the nanosecond.

Nothing is shared between streams here, so the result is the exact longest path, and it is computed as such: each
operation once, after everything it waits for. Two things make it fast. A *segment* whose operations all hang on its
first one is rigid: its inner times are computed once for its template and placed as a whole, if no stream it uses is
still busy when it needs it (that is checked each time; where it does not hold, the segment is run operation by
operation). And operations that only wait inside a rigid segment are never looked at one by one.

The engine knows no model, no schedule and no file format.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Stream

from .errors import SimulationError

_MAXIMUM_STUCK_LINES = 40


@dataclass(frozen=True)
class Execution:
    """Times of the operations of a graph, one entry a row, in nanoseconds from the start of the step."""

    start: Int64
    end: Int64
    wait: Int64
    """Time between an operation's own readiness and the start of its rendezvous; 0 without one."""
    waited_for: Int64
    """Row whose end let this one start; -1 for an operation that could start at once."""
    period_ns: int | None = None
    """From a step to the next where ranks do not meet in between (:mod:`tracesim.steady_state`), else None."""

    @property
    def iteration_ns(self) -> int:
        """Time of a step."""
        return int(self.end.max()) if self.period_ns is None else self.period_ns


def execute(
    graph: OpGraph,
    durations: Int64,
    *,
    gap_ns: int = 0,
    lags: Int64 | None = None,
    rank_starts: Sequence[int] | None = None,
) -> Execution:
    """Run a graph.

    Args:
        graph: what to run.
        durations: nanoseconds of each operation, one a row.
        gap_ns: idle time between two kernels queued back to back on a compute stream.
        lags: nanoseconds from the end of each dependency to the start it allows, one for each of
            ``graph.dependencies``; negative where an operation may start before its dependency ends. None for 0.
        rank_starts: when each rank of the graph begins, in nanoseconds; None for all at 0.

    Raises:
        ValueError: if a duration is negative, or their number is not the number of operations, or that of the lags
            not the number of dependencies, or that of the starts not the number of ranks.
        SimulationError: if operations are left that wait for each other; the message lists, for each stuck rank,
            the operation at the head of each stream and what it waits for.
    """
    check_durations(graph, durations)
    if lags is not None and len(lags) != len(graph.dependencies):
        raise ValueError(f"{len(lags)} lags for {len(graph.dependencies)} dependencies")
    starts = row_starts(graph, rank_starts)
    execution = _Run(graph, durations, gap_ns, lags, starts, rigid=True).run()
    if execution is None:
        # Stuck segments as wholes do not mean stuck operations: one may wait inside for what waits for its first row.
        stuck = _Run(graph, durations, gap_ns, lags, starts, rigid=False)
        execution = stuck.run()
        if execution is None:
            raise SimulationError(deadlock_report(graph, stuck.edges, np.array(stuck.end) >= 0))
    return execution


def row_starts(graph: OpGraph, rank_starts: Sequence[int] | None) -> list[int]:
    """When the rank of each operation begins.

    Raises:
        ValueError: if there are not as many starts as ranks.
    """
    if rank_starts is None:
        return [0] * len(graph.operations)
    if len(rank_starts) != len(graph.ranks):
        raise ValueError(f"{len(rank_starts)} starts for {len(graph.ranks)} ranks")
    found: list[int] = np.array(rank_starts, dtype=np.int64)[graph.operations.rank].tolist()
    return found


def check_durations(graph: OpGraph, durations: Int64) -> None:
    """Raise ValueError if a duration is negative or their number is not the number of operations."""
    if len(durations) != len(graph.operations):
        raise ValueError(f"{len(durations)} durations for {len(graph.operations)} operations")
    if len(durations) and durations.min() < 0:
        row = int(durations.argmin())
        raise ValueError(f"operation {_describe(graph, row)} has a negative duration of {durations[row]} ns")


@dataclass
class _Template:
    """Inner times of a rigid segment, relative to the start of its first operation."""

    end: Int64
    waited_for: Int64
    """Row inside the segment; -1 for the first."""


class _Run:
    def __init__(
        self,
        graph: OpGraph,
        durations: Int64,
        gap_ns: int,
        lags: Int64 | None,
        starts: list[int],
        *,
        rigid: bool,
    ) -> None:
        self.graph = graph
        self.starts = starts
        """When the rank of each row begins."""
        self.durations = durations
        self.rows = len(durations)
        edges = Edges.of(graph, gap_ns, lags)
        self.edges = edges
        self.segments = self._rigid_segments() if rigid else {}
        self.node_of_row, self.members = self._nodes()
        self._link_nodes()
        self.end: list[int] = [-1] * self.rows
        self.waited_for: list[int] = [-1] * self.rows
        self.wait: dict[int, int] = {}

    # -- preparation -----------------------------------------------------------------------------------------

    def _rigid_segments(self) -> dict[int, tuple[int, int, _Template]]:
        """Segments that can be placed as a whole, by their first row: (begin, end, template)."""
        segments = self.graph.segments
        inner = _inside(self.graph, self.edges)
        found: dict[int, tuple[int, int, _Template]] = {}
        templates: dict[tuple[int, bytes], _Template | None] = {}
        rendezvous = self.graph.operations.rendezvous >= 0
        joins_before = np.concatenate([[0], np.cumsum(rendezvous)])
        # Rows inside a segment, other than its first, that wait by dependency for something outside of it.
        outside = ~inner & ~self.edges.is_stream
        pierced = np.zeros(self.rows + 1, dtype=np.int64)
        np.add.at(pierced, self.edges.target[outside] + 1, 1)
        pierced = np.cumsum(pierced)
        for begin, end, template in zip(
            segments.begin.tolist(), segments.end.tolist(), segments.template.tolist(), strict=True
        ):
            if template < 0 or end - begin < 2 or joins_before[end] > joins_before[begin]:
                continue
            if pierced[end] > pierced[begin + 1]:
                continue
            # Copies of a template may differ in duration: in a replay, or with jitter.
            key = template, self.durations[begin:end].tobytes()
            if key not in templates:
                templates[key] = self._inner_times(begin, end)
            known = templates[key]
            if known is not None:
                found[begin] = (begin, end, known)
        return found

    def _inner_times(self, begin: int, end: int) -> _Template | None:
        """Times of a segment that starts at 0 with all its streams free; None if not all hangs on its first row."""
        size = end - begin
        pending = [0] * size
        followers: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for target in range(begin, end):
            for source, lag in self.edges.into(target):
                if begin <= source < end:
                    followers[source - begin].append((target - begin, lag))
                    pending[target - begin] += 1
        if [row for row in range(size) if not pending[row]] != [0]:
            return None
        ends = [-1] * size
        ready = [0] * size
        waited = [-1] * size
        queue = deque([0])
        durations = self.durations[begin:end].tolist()
        while queue:
            row = queue.popleft()
            ends[row] = ready[row] + durations[row]
            for follower, lag in followers[row]:
                if ends[row] + lag >= ready[follower]:
                    ready[follower], waited[follower] = ends[row] + lag, row
                pending[follower] -= 1
                if not pending[follower]:
                    queue.append(follower)
        if min(ends) < 0:
            return None
        return _Template(np.array(ends, dtype=np.int64), np.array(waited, dtype=np.int64))

    def _nodes(self) -> tuple[Int64, dict[int, list[int]]]:
        """Node of each row (named by one of its rows), and the rows of each rendezvous."""
        node = np.arange(self.rows, dtype=np.int64)
        for begin, end, _ in self.segments.values():
            node[begin:end] = begin
        members: dict[int, list[int]] = {}
        rendezvous = self.graph.operations.rendezvous
        joined = np.flatnonzero(rendezvous >= 0)
        order = joined[np.argsort(rendezvous[joined], kind="stable")]
        boundaries = np.flatnonzero(np.diff(rendezvous[order])) + 1
        for group in np.split(order, boundaries) if len(order) else []:
            rows = group.tolist()
            members[rows[0]] = rows
            node[group] = rows[0]
        return node, members

    def _link_nodes(self) -> None:
        """Keep, for each node, the edges that come from other nodes, and count them."""
        edges, node = self.edges, self.node_of_row
        source_node, target_node = node[edges.source], node[edges.target]
        # Members of a rendezvous that wait for each other can never meet: their edge stays, and is never satisfied.
        meets = self.graph.operations.rendezvous[edges.source] >= 0
        crossing = np.flatnonzero((source_node != target_node) | meets)
        by_target = crossing[np.argsort(target_node[crossing], kind="stable")]
        self.incoming = _Grouped(target_node[by_target], self.rows)
        self.incoming_source = edges.source[by_target].tolist()
        self.incoming_target = edges.target[by_target].tolist()
        self.incoming_lag = edges.lag[by_target].tolist()
        by_source = crossing[np.argsort(source_node[crossing], kind="stable")]
        self.outgoing = _Grouped(source_node[by_source], self.rows)
        self.outgoing_node = target_node[by_source].tolist()
        self.pending = np.bincount(target_node[crossing], minlength=self.rows).tolist()

    # -- running ---------------------------------------------------------------------------------------------

    def run(self) -> Execution | None:
        """Times of all operations; None if some can never start."""
        names = np.unique(self.node_of_row)
        queue = deque(name for name in names.tolist() if not self.pending[name])
        done = 0
        outgoing, outgoing_node, pending = self.outgoing.offsets, self.outgoing_node, self.pending
        while queue:
            name = queue.popleft()
            done += 1
            if name in self.segments:
                self._place_segment(*self.segments[name])
            elif name in self.members:
                self._join(name)
            else:
                self._run_row(name)
            for position in range(outgoing[name], outgoing[name + 1]):
                follower = outgoing_node[position]
                pending[follower] -= 1
                if not pending[follower]:
                    queue.append(follower)
        if done < len(names):
            return None
        end = np.array(self.end, dtype=np.int64)
        wait = np.zeros(self.rows, dtype=np.int64)
        if self.wait:
            wait[list(self.wait)] = list(self.wait.values())
        waited_for = np.array(self.waited_for, dtype=np.int64)
        return Execution(end - self.durations, end, wait, waited_for)

    def _incoming(self, name: int) -> Iterator[tuple[int, int, int]]:
        """(source row, target row, earliest start) of each edge into a node."""
        offsets = self.incoming.offsets
        for position in range(offsets[name], offsets[name + 1]):
            source = self.incoming_source[position]
            yield source, self.incoming_target[position], self.end[source] + self.incoming_lag[position]

    def _run_row(self, row: int) -> None:
        start, waited_for = self.starts[row], -1
        for source, _, ready in self._incoming(row):
            if ready >= start:
                start, waited_for = ready, source
        self.end[row] = start + int(self.durations[row])
        self.waited_for[row] = waited_for

    def _join(self, name: int) -> None:
        """Start the members of a rendezvous together, when the last has reached it."""
        ready = {row: self.starts[row] for row in self.members[name]}
        cause = dict.fromkeys(self.members[name], -1)
        for source, target, moment in self._incoming(name):
            if moment >= ready[target]:
                ready[target], cause[target] = moment, source
        last = max(ready, key=lambda row: (ready[row], row))
        start = ready[last]
        for row in self.members[name]:
            self.end[row] = start + int(self.durations[row])
            self.wait[row] = start - ready[row]
            self.waited_for[row] = cause[row] if ready[row] == start else cause[last]

    def _place_segment(self, begin: int, end: int, template: _Template) -> None:
        start, waited_for = self.starts[begin], -1
        late: list[tuple[int, int, int]] = []
        for source, target, ready in self._incoming(begin):
            if target == begin:
                if ready >= start:
                    start, waited_for = ready, source
            else:
                late.append((source, target, ready))
        inner_start = template.end - self.durations[begin:end]
        if any(ready > start + inner_start[target - begin] for _, target, ready in late):
            self._run_rows(begin, end)
            return
        self.end[begin:end] = (template.end + start).tolist()
        causes = np.where(template.waited_for >= 0, template.waited_for + begin, -1).tolist()
        causes[0] = waited_for
        self.waited_for[begin:end] = causes

    def _run_rows(self, begin: int, end: int) -> None:
        """Run a segment operation by operation: one of its streams is still busy when it needs it."""
        open_rows = set(range(begin, end))
        while open_rows:
            progressed = False
            for row in sorted(open_rows):
                sources = list(self.edges.into(row))
                if any(source in open_rows for source, _ in sources):
                    continue
                start, waited_for = self.starts[row], -1
                for source, lag in sources:
                    if self.end[source] + lag >= start:
                        start, waited_for = self.end[source] + lag, source
                self.end[row] = start + int(self.durations[row])
                self.waited_for[row] = waited_for
                open_rows.discard(row)
                progressed = True
            assert progressed, "a segment with inner times has no cycle inside"


class _Grouped:
    """Offsets of the runs of equal keys in a sorted array of keys below ``count``."""

    def __init__(self, keys: Int64, count: int) -> None:
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(keys, minlength=count), out=offsets[1:])
        self.offsets: list[int] = offsets.tolist()


@dataclass(frozen=True)
class Edges:
    """Everything a row waits for: its dependencies and its predecessor on the stream."""

    source: Int64
    target: Int64
    lag: Int64
    is_stream: Bool
    offsets: list[int]
    """Edges into row ``i`` are ``offsets[i]:offsets[i + 1]``."""

    @classmethod
    def of(cls, graph: OpGraph, gap_ns: int, lags: Int64 | None = None) -> Edges:
        """The edges of a graph, sorted by target; arguments as of :func:`execute`."""
        operations = graph.operations
        count = len(operations)
        stream = operations.rank.astype(np.int64) * len(Stream) + operations.stream
        # Few values in few bits sort in one pass over them.
        order = np.argsort(stream.astype(np.min_scalar_type(int(stream.max(initial=0)))), kind="stable")
        same = stream[order][1:] == stream[order][:-1]
        previous = np.full(count, -1, dtype=np.int64)
        previous[order[1:][same]] = order[:-1][same]
        has_previous = previous >= 0
        # The dependencies are sorted by target already; behind those of each row comes its predecessor.
        counts = np.diff(graph.dependency_offsets)
        offsets = np.concatenate([graph.dependency_offsets[:1], np.cumsum(counts + has_previous)])
        target = np.repeat(np.arange(count), counts + has_previous)
        is_stream = np.zeros(len(target), dtype=bool)
        is_stream[offsets[1:][has_previous] - 1] = True
        source = np.empty(len(target), dtype=np.int64)
        source[is_stream], source[~is_stream] = previous[has_previous], graph.dependencies
        lag = np.where(is_stream & (operations.stream[target] == Stream.COMPUTE), gap_ns, 0)
        if lags is not None:
            lag[~is_stream] = lags
        return cls(source, target, lag, is_stream, offsets.tolist())

    def into(self, row: int) -> Iterator[tuple[int, int]]:
        """(source row, lag) of each edge into a row."""
        begin, end = self.offsets[row], self.offsets[row + 1]
        return zip(self.source[begin:end].tolist(), self.lag[begin:end].tolist(), strict=True)


def _inside(graph: OpGraph, edges: Edges) -> Bool:
    """Which edges join two rows of one segment."""
    segment = np.full(len(graph.operations), -1, dtype=np.int64)
    for number, (begin, end) in enumerate(
        zip(graph.segments.begin.tolist(), graph.segments.end.tolist(), strict=True)
    ):
        segment[begin:end] = number
    inside: Bool = (segment[edges.source] == segment[edges.target]) & (segment[edges.source] >= 0)
    return inside


# -- deadlock ----------------------------------------------------------------------------------------------------


def _describe(graph: OpGraph, row: int) -> str:
    operations = graph.operations
    parts = [graph.strings[operations.name[row]]]
    if operations.layer[row] >= 0:
        parts.append(f"layer {operations.layer[row]}")
    if operations.microbatch[row] >= 0:
        parts.append(f"microbatch {operations.microbatch[row]}")
    stream = Stream(operations.stream[row]).name.lower()
    return f"{' '.join(parts)} (rank {graph.ranks[operations.rank[row]]}, {stream})"


def _is_held_up(edges: Edges, done: Bool, row: int) -> bool:
    return any(not done[source] for source, _ in edges.into(row))


def deadlock_report(graph: OpGraph, edges: Edges, done: Bool) -> str:
    """For each stuck rank: the operation at the head of each stream, and what it waits for."""
    operations = graph.operations
    heads: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(~done).tolist():
        heads.setdefault((int(operations.rank[row]), int(operations.stream[row])), row)
    members: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(operations.rendezvous >= 0).tolist():
        members[int(operations.rendezvous[row])].append(row)
    lines = [f"deadlock: {int((~done).sum())} of {len(done)} operations can never start"]
    for (rank, stream), row in sorted(heads.items()):
        waits = [source for source, _ in edges.into(row) if not done[source]]
        meeting = members[int(operations.rendezvous[row])] if operations.rendezvous[row] >= 0 else []
        waits += [other for other in meeting if other != row and _is_held_up(edges, done, other)]
        reasons = (
            ", ".join(_describe(graph, source) for source in dict.fromkeys(waits)) or "nothing: it is ready"
        )
        lines.append(
            f"  rank {graph.ranks[rank]} {Stream(stream).name.lower()}: {_describe(graph, row)} waits for {reasons}"
        )
    if len(lines) > _MAXIMUM_STUCK_LINES:
        lines = [*lines[:_MAXIMUM_STUCK_LINES], f"  ... and {len(lines) - _MAXIMUM_STUCK_LINES} more streams"]
    return "\n".join(lines)
