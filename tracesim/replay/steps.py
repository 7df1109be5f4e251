"""Cut a rebuilt run to one step, and put the durations of another step into its graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.vocabulary import OpKind
from tracesim.errors import TraceError
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole

_CLOCK_STEP_NS = 1_000


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
    starts = [np.sort(steps.start[steps.rank == rank])[step : step + 1] for rank in np.unique(rows.rank[inside])]
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
    lag = np.where(outside, edges.lag + np.minimum(rows.end[edges.source] - busy[lane[edges.source]], 0), edges.lag)
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
    part = replace(
        rebuilt, durations=durations, rows=rows.with_columns(start=start, end=end), origin=origin
    )
    return part.take(kept, Edges(source[valid], edges.target[valid], lag[valid], kind[valid]))


def _unlaunched_first(rebuilt: Rebuilt, inside: np.ndarray, lane: Int64) -> Int64:
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


def share_waits(rebuilt: Rebuilt, *, without: int | None = None, least: int = 2) -> Rebuilt:
    """Waits for events that were seen in some steps, in all steps whose measured order allows them.

    A wait is seen only where it made a slice late, but the program queues it in every step.

    Args:
        rebuilt: a run of several steps.
        without: a step (position) to learn nothing from.
        least: steps in which a wait must have been seen.
    """
    rows, edges = rebuilt.rows, rebuilt.edges
    place = np.unique(_numbered(rebuilt, rows.step), axis=1, return_inverse=True)[1].ravel().astype(np.int64)
    seen = edges.kind == EdgeKind.EVENT
    source, target = edges.source[seen], edges.target[seen]
    step = rows.step[target]
    inside = (rows.step[source] == step) & (step >= 0)
    pairs = np.unique(np.stack([place[source], place[target], step])[:, inside], axis=1)
    known, count = np.unique(pairs[:2][:, pairs[2] != (-1 if without is None else without)], axis=1, return_counts=True)
    known = known[:, count >= least]
    stride = int(rows.step.max()) + 2
    key = place * stride + rows.step + 1
    order = np.argsort(key, kind="stable")
    found_source, found_target = [source[:0]], [source[:0]]
    for number in np.unique(rows.step[rows.step >= 0]).tolist():
        both = []
        for wanted in known * stride + number + 1:
            at = np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)
            both.append(np.where(key[order[at]] == wanted, order[at], -1))
        s, t = both
        allowed = (s >= 0) & (t >= 0) & (rows.end[s] <= rows.start[t] + _CLOCK_STEP_NS) & (rows.end[s] < rows.end[t])
        found_source.append(s[allowed])
        found_target.append(t[allowed])
    new_source, new_target = np.concatenate(found_source), np.concatenate(found_target)
    fresh = ~np.isin(new_source * len(rows) + new_target, source * len(rows) + target)
    new_source, new_target = new_source[fresh], new_target[fresh]
    lag = np.minimum(rebuilt.delays.event, rows.start[new_target] - rows.end[new_source])
    more = Edges(new_source, new_target, lag, np.full(len(lag), EdgeKind.EVENT))
    return rebuilt.with_edges(Edges.concatenate([edges, more]))
