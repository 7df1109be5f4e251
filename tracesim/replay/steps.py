"""Cut a rebuilt run to one step, and put the durations of another step into its graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import OpKind
from tracesim.errors import TraceError
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole

_CLOCK_STEP_NS = 1_000
_ROOM_LAG_NS = 12_000
_ROOM_LENGTH_NS = 20_000


def cut_step(rebuilt: Rebuilt, step: int) -> Rebuilt:
    """The part of a run that was launched in one step (position among the steps of each rank).

    Every stream and thread begins with an anchor row that lasts as long as work from before the step kept it busy.

    Raises:
        TraceError: if the run has no such step.
    """
    rows, steps = rebuilt.rows, rebuilt.timeline.steps
    inside = (rows.step == step) & (rows.role != RowRole.ANCHOR)
    lane = rebuilt.graph.operations.rank.astype(np.int64)
    if not (inside & (rows.role == RowRole.DEVICE)).any():
        raise TraceError(f"step {step} launched nothing: the trace has {len(steps)} steps over all ranks")
    starts = [
        np.sort(steps.start[steps.rank == rank])[step : step + 1] for rank in np.unique(rows.rank[inside])
    ]
    origin = int(np.concatenate(starts).min())
    lanes = int(lane.max()) + 1
    used = np.zeros(lanes, dtype=np.bool_)
    used[lane[inside]] = True
    before = (rows.role != RowRole.ANCHOR) & (rows.step < step)
    # What ran before the step keeps its stream or thread busy until then.
    busy = np.full(lanes, origin, dtype=np.int64)
    np.maximum.at(busy, lane[before], rows.end[before])
    own_anchor = rows.role == RowRole.ANCHOR
    anchor = np.zeros(lanes, dtype=np.int64)
    anchor[lane[own_anchor]] = np.flatnonzero(own_anchor)
    kept = inside | (own_anchor & used[lane])
    edges = rebuilt.edges
    outside = inside[edges.target] & ~inside[edges.source] & (rows.role[edges.source] != RowRole.ANCHOR)
    outside &= used[lane[edges.source]] & (edges.kind != EdgeKind.QUEUE)
    # The wait for a row before the step becomes a wait for the anchor of its lane.
    source = np.where(outside, anchor[lane[edges.source]], edges.source)
    lag = np.where(
        outside, edges.lag + np.minimum(rows.end[edges.source] - busy[lane[edges.source]], 0), edges.lag
    )
    kind = np.where(outside, EdgeKind.BEFORE, edges.kind).astype(np.int8)
    valid = np.flatnonzero(kept[edges.target] & kept[source])
    durations, start, end = rebuilt.durations.copy(), rows.start.copy(), rows.end.copy()
    anchors = anchor[used]
    first_only = _unlaunched_first(rebuilt, inside, lane)
    busy[lane[first_only]] = np.maximum(busy[lane[first_only]], rows.start[first_only])
    durations[anchors], start[anchors], end[anchors] = busy[used] - origin, origin, busy[used]
    gaps = np.flatnonzero(inside & (rows.role == RowRole.GAP))
    # A pause that began before the step, and that nothing inside it ended, lasts for what is left of it.
    waiting = np.zeros(len(rows), dtype=np.bool_)
    waiting[edges.target[valid]] = True
    cut = gaps[~waiting[gaps] & (rows.start[gaps] < busy[lane[gaps]])]
    durations[cut] = np.maximum(rows.end[cut] - busy[lane[cut]], 0)
    part = replace(rebuilt, durations=durations, rows=rows.with_columns(start=start, end=end), origin=origin)
    return part.take(kept, Edges(source[valid], edges.target[valid], lag[valid], kind[valid]))


def _unlaunched_first(rebuilt: Rebuilt, inside: Bool, lane: Int64) -> Int64:
    """First device row of each lane, where nothing else in the step says when it may start."""
    device = np.flatnonzero(inside & (rebuilt.rows.role == RowRole.DEVICE))
    first = device[np.unique(lane[device], return_index=True)[1]]
    edges = rebuilt.edges
    led = np.zeros(len(rebuilt.rows), dtype=np.bool_)
    led[edges.target[inside[edges.source]]] = True
    return first[~led[first]]


def with_times_of(graph: Rebuilt, other: Rebuilt) -> Rebuilt:
    """The graph of one step with the durations and host gaps of another step of the same run.

    Rows correspond by track, role and name, in order; where the other step lacks one, its own time stays.
    """
    durations = graph.durations.copy()
    ours, theirs = _keys(graph), _keys(other)
    both = np.concatenate((ours, theirs), axis=1)
    label = np.unique(both, axis=1, return_inverse=True)[1].ravel()
    mine, found = label[: ours.shape[1]], label[ours.shape[1] :]
    order = np.argsort(found, kind="stable")
    at = np.minimum(np.searchsorted(found[order], mine), len(order) - 1)
    matched = found[order[at]] == mine
    durations[matched] = other.durations[order[at[matched]]]
    return replace(graph, durations=durations)


def _keys(part: Rebuilt) -> Int64:
    """Track, role, name, and the how many-th of these; shape [4, rows]."""
    return _numbered(part, np.zeros(len(part.rows), dtype=np.int64))


def _numbered(part: Rebuilt, block: Int64) -> Int64:
    """Track, role, name, and the how many-th of these in its block; shape [4, rows]."""
    rows, operations = part.rows, part.graph.operations
    name = operations.name.astype(np.int64)
    host = operations.kind == OpKind.HOST
    # A launch is known by what it launches, and the pause before it too.
    launched = np.full(len(rows), -1, dtype=np.int64)
    launches = np.flatnonzero(part.edges.kind == EdgeKind.LAUNCH)[::-1]
    launched[part.edges.source[launches]] = name[part.edges.target[launches]]
    behind = np.append(launched[1:], -1)
    gap = rows.role == RowRole.GAP
    name = np.where(host & (launched >= 0), launched, np.where(gap & (behind >= 0), behind, name))
    key = np.stack([rows.track, rows.role.astype(np.int64), name])
    label = np.unique(np.vstack([key, block]), axis=1, return_inverse=True)[1].ravel()
    order = np.argsort(label, kind="stable")
    first = np.searchsorted(label[order], np.arange(label.max() + 1))
    number = np.empty(len(label), dtype=np.int64)
    number[order] = np.arange(len(label)) - first[label[order]]
    return np.vstack([key, number])


def learn_waits(
    rebuilt: Rebuilt, *, without: int | None = None, least: int = 1, admission: bool = True
) -> Rebuilt:
    """Compare the waits for events between steps: drop those that another step refutes, share those seen often.

    The program queues the same waits in every step, but one is seen only where it made a slice late, and what ended
    last before a late slice may not be what it waited for. A wait is refuted if in more steps than it was seen in its
    slice started before its source had ended; where a long source had ended just before, the slice had waited for room
    on the device instead. A wait seen in ``least`` steps, and never refuted, holds in all steps.

    Args:
        rebuilt: a run of several steps.
        without: a step (position) to learn nothing from.
        least: steps in which a wait must have been seen to be shared.
        admission: whether refuted waits may become waits for room.
    """
    places = _Places(rebuilt)
    edges, step = rebuilt.edges, rebuilt.rows.step
    inside = np.flatnonzero(
        (edges.kind == EdgeKind.EVENT)
        & (step[edges.source] == step[edges.target])
        & (step[edges.target] >= 0)
    )
    pair = np.stack([places.of_row[edges.source[inside]], places.of_row[edges.target[inside]]])
    known, label = np.unique(pair, axis=1, return_inverse=True)
    label = label.ravel()
    seen, against = np.zeros((2, known.shape[1]), dtype=np.int64)
    source, target = edges.source[inside], edges.target[inside]
    for number in places.steps:
        if number == without:
            continue
        here = np.unique(label[step[target] == number])
        seen[here] += 1
        s, t = places.rows_in(known, number)
        against += (s >= 0) & (t >= 0) & ~_allowed(rebuilt, s, t)
    refuted = against > seen
    kept = np.ones(len(edges), dtype=np.bool_)
    wrong = inside[refuted[label]]
    kept[wrong] = False
    lag = rebuilt.rows.start[edges.target[wrong]] - rebuilt.rows.end[edges.source[wrong]]
    full = (lag <= _ROOM_LAG_NS) & (rebuilt.durations[edges.source[wrong]] >= _ROOM_LENGTH_NS) & admission
    room = edges.take(wrong[full])
    parts = [
        edges.take(np.flatnonzero(kept)),
        room.with_columns(kind=np.full(len(room), EdgeKind.ADMISSION)),
    ]
    present = np.unique(source * len(step) + target)
    for number in places.steps:
        s, t = places.rows_in(known[:, (seen >= least) & (against == 0)], number)
        fresh = (s >= 0) & (t >= 0) & _allowed(rebuilt, s, t) & ~np.isin(s * len(step) + t, present)
        s, t = s[fresh], t[fresh]
        lag = np.minimum(rebuilt.delays.event, rebuilt.rows.start[t] - rebuilt.rows.end[s])
        parts.append(Edges(s, t, lag, np.full(len(lag), EdgeKind.EVENT)))
    return rebuilt.with_edges(Edges.concatenate(parts))


def _allowed(rebuilt: Rebuilt, source: Int64, target: Int64) -> Bool:
    """Whether the measured order lets one row wait for the other."""
    rows = rebuilt.rows
    allowed: Bool = rows.end[source] <= rows.start[target] + _CLOCK_STEP_NS
    return allowed & (rows.end[source] < rows.end[target])


class _Places:
    """Which rows of different steps are the same operation of the program."""

    def __init__(self, rebuilt: Rebuilt) -> None:
        step = rebuilt.rows.step
        self.steps: list[int] = np.unique(step[step >= 0]).tolist()
        key = np.unique(_numbered(rebuilt, step), axis=1, return_inverse=True)[1].ravel()
        self.of_row: Int64 = key.astype(np.int64)
        self._stride = int(step.max(initial=-1)) + 2
        combined = self.of_row * self._stride + step + 1
        self._order = np.argsort(combined, kind="stable")
        self._key = combined[self._order]

    def rows_in(self, places: Int64, step: int) -> tuple[Int64, Int64]:
        """The rows of pairs of places in a step, -1 where it lacks one."""
        found = []
        for wanted in places * self._stride + step + 1:
            at = np.minimum(np.searchsorted(self._key, wanted), len(self._key) - 1)
            found.append(np.where(self._key[at] == wanted, self._order[at], -1))
        return found[0], found[1]
