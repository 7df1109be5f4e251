"""What if a module were recomputed in the backward pass, or no longer.

The slices of a module are those whose module path, layer (``layer 3``), name, or an annotation or ``nn.Module`` frame
around their launch matches. Its forward is copied in front of its own backward: slices, their launches and the host
work between them. That backward is known by microbatch and layer, or by the arrows that a profiler draws from forward
operators to their backwards. Taken away, recomputed slices and their launches last no time, and their communication
waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import FlowKind, OpKind, Phase, TrackRole
from tracesim.analysis.intervals import covered, union
from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Rebuilt, RowRole
from tracesim.replay.what_if.checkpoints import RESTORED, host_work, restoring, without_host_work
from tracesim.replay.what_if.communication import without_waiting
from tracesim.replay.what_if.insertion import (
    Insertion,
    inserted,
    launch_moments,
    launching_calls,
    measured_launches,
)
from tracesim.replay.what_if.memory import (
    NO_CURVE,
    Allocated,
    MemoryEffect,
    allocated_memory,
    gibibytes,
    unknown,
)
from tracesim.replay.what_if.selection import regular_expression, with_note

_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
LOOKED_FOR = (
    "looked in module paths, layers (layer 3), names, and annotations and nn.Module frames around launches"
)


@dataclass(frozen=True)
class Instance:
    """One pass through a module."""

    rows: Int64
    """Device rows in the order of their launches."""
    before: int
    """The first device row of its backward."""


def recompute_on(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``mlp``: the forward of what matches runs again in front of its backward."""
    what = f"recompute.on={value}"
    instances = _forwards(rebuilt, value, what)
    insertions, copies = [], 0
    for one in instances:
        restored = restoring(rebuilt, one.rows, one.before)
        insertions += [Insertion(one.rows, one.before), *restored]
        copies += len(restored)
    work = host_work(rebuilt, [(one.rows, one.before) for one in instances])
    changed = inserted(rebuilt, insertions, Phase.RECOMPUTE, work)
    count = sum(len(i.rows) for i in instances)
    says = f"{what}: {count} slices in {len(instances)} passes run again in front of their backwards"
    if work:
        says += f"; their checkpoints take the host {work[0].duration / 1e3:.0f} us in either direction"
    else:
        says += "; what the host does for checkpoints is not in, for the trace shows no launches of them"
    if copies:
        says += f"; the outputs of {copies} are copied to where they are read"
    return with_note(changed, says)


def recompute_off(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``mlp``: what matches is no longer run again in the backward pass."""
    what = f"recompute.off={value}"
    rows = _recomputed(rebuilt, value, what)
    rebuilt = _without_checkpoints(rebuilt, rows, value)
    alone = without_waiting(rebuilt, rows & rebuilt.graph.is_communication())
    call = launching_calls(rebuilt)
    calls = np.unique(call[rows & (call >= 0)])
    gone = rows.copy()
    gone[calls] = True
    gaps = calls[calls > 0] - 1
    gone[gaps[rebuilt.rows.role[gaps] == RowRole.GAP]] = True
    edges = rebuilt.edges
    # A slice that is not there keeps nothing waiting.
    close = gone[edges.target] & np.isin(edges.kind, (EdgeKind.QUEUE, EdgeKind.LAUNCH))
    close |= gone[edges.source] & (edges.kind == EdgeKind.EVENT)
    changed = alone.with_edges(edges.with_columns(lag=np.where(close, np.minimum(edges.lag, 0), edges.lag)))
    changed = replace(
        changed,
        durations=np.where(gone, 0, changed.durations),
        unexplained=np.where(gone, 0, changed.unexplained),
    )
    return with_note(changed, f"{what}: {int(rows.sum())} recomputed slices are gone, with their launches")


def _without_checkpoints(rebuilt: Rebuilt, rows: Bool, pattern: str) -> Rebuilt:
    """Without what the host does for the checkpoints of recomputed rows."""
    passes, call = list(_passes(rebuilt, rows)), launching_calls(rebuilt)
    last = np.array([int(call[own].max()) for own in passes], dtype=np.int64)
    forward = np.array(_last_of_forwards(rebuilt, passes, pattern), dtype=np.int64)
    calls = np.where(forward >= 0, call[forward], -1)
    return without_host_work(rebuilt, last[last >= 0], calls[calls >= 0])


# -- memory ------------------------------------------------------------------------------------------------------------


def on_memory(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """What the forward of the module allocated is free until its backward; its output only where that is copied."""
    instances = _forwards(rebuilt, value, f"recompute.on={value}")
    moment = launch_moments(rebuilt)
    spans = [
        _Span(
            i.rows,
            int(moment[i.rows[-1]]) + 1,
            int(moment[i.before]),
            -1.0,
            output=bool(restoring(rebuilt, i.rows, i.before)),
        )
        for i in instances
    ]
    return _effect(rebuilt, spans, "fewer activations")


def off_memory(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """What recomputing allocated is kept from the forward on."""
    rows = _recomputed(rebuilt, value, f"recompute.off={value}")
    passes = list(_passes(rebuilt, rows))
    forwards = _last_of_forwards(rebuilt, passes, value)
    if min(forwards) < 0:
        return unknown(
            f"more activations are kept; of {sum(row < 0 for row in forwards)} of {len(passes)} recomputed passes "
            "the forward is not found, by name, layer and microbatch"
        )
    moment = launch_moments(rebuilt)
    spans = [
        _Span(rows, int(moment[last]) + 1, int(moment[rows[0]]), 1.0, output=True)
        for rows, last in zip(passes, forwards, strict=True)
    ]
    return _effect(rebuilt, spans, "more activations")


@dataclass(frozen=True)
class _Span:
    """Memory that is there, or not, for a time."""

    rows: Int64
    """The slices that allocate it."""
    begin: int
    end: int
    sign: float
    output: bool
    """Whether what the last of the slices writes counts."""


def _effect(rebuilt: Rebuilt, spans: list[_Span], says: str) -> MemoryEffect:
    """The change of the peak if what some slices allocated is there, or not, for a time."""
    moment = launch_moments(rebuilt)
    curves: dict[int, Allocated] = {}
    changes: dict[int, list[tuple[int, int, float]]] = {}
    for span in spans:
        rank, rows = int(rebuilt.rows.rank[span.rows[0]]), span.rows
        if rank not in curves:
            curve = allocated_memory(rebuilt.timeline, rank)
            if curve is None:
                return unknown(f"{says}; how much is not known: {NO_CURVE}")
            curves[rank] = curve
        # Memory is taken before the launch that writes it.
        last = int(moment[rows[-1]]) if span.output or len(rows) == 1 else int(moment[rows[-2]])
        grown = max(curves[rank].at(last) - curves[rank].at(int(moment[rows[0]]) - 1), 0.0)
        changes.setdefault(rank, []).append((span.begin, span.end, span.sign * grown))
    peaks = {rank: round(curves[rank].peak_with(own) - curves[rank].peak) for rank, own in changes.items()}
    most = max(peaks.values(), key=abs)
    total = max(sum(abs(size) for _, _, size in own) for own in changes.values())
    return MemoryEffect(
        f"{says}: at most {gibibytes(total)} over all passes of a rank, {gibibytes(most)} at the peak, which is what "
        "the trace allocates in them; less where an output is needed elsewhere",
        peaks,
    )


def _last_of_forwards(rebuilt: Rebuilt, passes: list[Int64], pattern: str) -> list[int]:
    """The last device row of the forward of each recomputed pass; -1 where none is found.

    It is the last forward slice before, of the name of the last slice of the pass and of its layer and microbatch, that
    no other pass has taken: backwards come in the reverse order of forwards.
    """
    rows, operations = rebuilt.rows, rebuilt.graph.operations
    moment = launch_moments(rebuilt)
    chosen = rebuilt.on_device() & (operations.phase == Phase.FORWARD)
    named = chosen & _matching(rebuilt, pattern)
    # Frames of a checkpoint may be around what runs again only.
    forward = np.flatnonzero(named if named.any() else chosen)
    forward = forward[np.argsort(moment[forward], kind="stable")]
    columns = (rows.rank, rows.step, operations.layer, operations.microbatch, operations.name)
    left: dict[tuple[int, ...], list[int]] = {}
    for row in forward.tolist():
        left.setdefault(tuple(int(column[row]) for column in columns), []).append(row)
    found = []
    for own in passes:
        # The copy of what was made again has no forward.
        made = own[operations.kind[own] != OpKind.MEMCPY]
        last = int((made if len(made) else own)[-1])
        candidates = left.get(tuple(int(column[last]) for column in columns), [])
        while candidates and moment[candidates[-1]] > moment[own[0]]:
            candidates.pop()
        found.append(candidates.pop() if candidates else -1)
    return found


# -- which slices ------------------------------------------------------------------------------------------------------


def _matching(rebuilt: Rebuilt, pattern: str) -> Bool:
    """Device rows that belong to a module, by any of its names."""
    compiled = regular_expression(pattern, f"recompute={pattern}")
    graph, operations = rebuilt.graph, rebuilt.graph.operations
    texts = (text.removesuffix(RESTORED) for text in graph.strings)
    strings = np.array([*(bool(compiled.search(text)) for text in texts), False], dtype=np.bool_)
    layers = np.unique(operations.layer[operations.layer >= 0]).tolist()
    layered = [layer for layer in layers if compiled.search(f"layer {layer}")]
    found = strings[operations.name] | strings[operations.module] | np.isin(operations.layer, layered)
    found |= _launched_inside(rebuilt, strings)
    matching: Bool = found & rebuilt.on_device() & (operations.kind != OpKind.P2P)
    return matching


def _launched_inside(rebuilt: Rebuilt, wanted: Bool) -> Bool:
    """Rows launched while a host slice or annotation with a wanted name was open on their thread."""
    timeline, rows = rebuilt.timeline, rebuilt.rows
    slices, tracks = timeline.slices, timeline.tracks
    role = timeline.slice_roles()
    around = np.flatnonzero(wanted[slices.name] & ((role == TrackRole.HOST) | (role == TrackRole.ANNOTATION)))
    call, measured = launching_calls(rebuilt), measured_launches(rebuilt)
    launched = np.flatnonzero(call >= 0)
    inside = np.zeros(len(rows), dtype=np.bool_)
    thread = np.stack([tracks.rank, tracks.stream]).astype(np.int64)
    own = thread[:, slices.track[around]]
    calling = thread[:, rows.track[call[launched]]]
    for rank, stream in np.unique(own, axis=1).T.tolist():
        here = around[(own[0] == rank) & (own[1] == stream)]
        mine = launched[(calling[0] == rank) & (calling[1] == stream)]
        moment = measured[mine]
        span = union(slices.start[here], slices.start[here] + slices.duration[here])
        inside[mine] = covered(span, moment, moment + 1) > 0
    return inside


def _passes(rebuilt: Rebuilt, chosen: Bool) -> Iterator[Int64]:
    """Chosen rows of each rank and step that were launched after one another, of one layer and microbatch."""
    rows, operations = rebuilt.rows, rebuilt.graph.operations
    moment = launch_moments(rebuilt)
    device = np.flatnonzero(rebuilt.on_device() & (operations.kind != OpKind.P2P))
    order = device[np.lexsort((device, moment[device], rows.step[device], rows.rank[device]))]
    columns = (rows.rank, rows.step, operations.layer, operations.microbatch)
    key = np.stack([column[order].astype(np.int64) for column in columns])
    inside = chosen[order]
    # Communication on its own stream may come between without ending a pass.
    counts = inside | ~rebuilt.graph.is_communication()[order]
    position = np.flatnonzero(counts)
    own, key = inside[position], key[:, position]
    opens = own & np.concatenate(([True], ~own[:-1] | (key[:, 1:] != key[:, :-1]).any(axis=0)))
    number = np.cumsum(opens) - 1
    taken = order[position[own]]
    if len(taken):
        yield from np.split(taken, np.flatnonzero(np.diff(number[own])) + 1)


def _recomputed(rebuilt: Rebuilt, pattern: str, what: str) -> Bool:
    again = rebuilt.on_device() & (rebuilt.graph.operations.phase == Phase.RECOMPUTE)
    if not again.any():
        raise ScenarioError(
            f"{what}: nothing is recomputed in the trace; looked for checkpoint frames and backwards, forward "
            "operators inside a backward, and the phases of simulated runs"
        )
    rows: Bool = again & _matching(rebuilt, pattern)
    if not rows.any():
        raise ScenarioError(f"{what}: none of {int(again.sum())} recomputed slices match; {LOOKED_FOR}")
    return rows


def _forwards(rebuilt: Rebuilt, pattern: str, what: str) -> list[Instance]:
    """The passes through a module that can be recomputed, each with the first slice of its backward."""
    chosen = _matching(rebuilt, pattern) & (rebuilt.graph.operations.phase == Phase.FORWARD)
    if not chosen.any():
        raise ScenarioError(f"{what}: no slice of a forward pass matches; {LOOKED_FOR}")
    found = []
    backward = _Backward(rebuilt, pattern)
    for rows in _passes(rebuilt, chosen):
        before = backward.of(rows)
        if before >= 0:
            found.append(Instance(rows, before))
    if not found:
        raise ScenarioError(
            f"{what}: {int(chosen.sum())} slices of forward passes match, but nothing ties them to their backward; "
            "looked for backward slices of the same layer and microbatch, and for fwdbwd arrows"
        )
    return found


class _Backward:
    """Finds where the backward of a pass begins."""

    def __init__(self, rebuilt: Rebuilt, pattern: str) -> None:
        self.rebuilt = rebuilt
        operations, device = rebuilt.graph.operations, rebuilt.on_device()
        self.moment, self.call = launch_moments(rebuilt), launching_calls(rebuilt)
        self.measured = measured_launches(rebuilt)
        self.backward = np.flatnonzero(device & np.isin(operations.phase, _BACKWARD))
        self.backward = self.backward[np.argsort(self.moment[self.backward], kind="stable")]
        matching = _matching(rebuilt, pattern)
        self.own = self.backward[matching[self.backward]]
        timeline = rebuilt.timeline
        flows = timeline.flows.take(np.flatnonzero(timeline.flows.kind == FlowKind.FORWARD_BACKWARD))
        self.forward_track = timeline.slices.track[flows.source]
        self.forward_start = timeline.slices.start[flows.source]
        self.backward_start = timeline.slices.start[flows.target]

    def of(self, rows: Int64) -> int:
        """The first device row of the backward of a pass; -1 where nothing tells it."""
        table, operations = self.rebuilt.rows, self.rebuilt.graph.operations
        first = int(rows[0])
        if operations.layer[first] >= 0 or operations.microbatch[first] >= 0:
            same = self.own if len(self.own) else self.backward
            for column in (table.rank, table.step, operations.layer, operations.microbatch):
                same = same[column[same] == column[first]]
            same = same[self.moment[same] > self.moment[int(rows[-1])]]
            if len(same):
                return int(same[0])
        return self._by_arrows(rows)

    def _by_arrows(self, rows: Int64) -> int:
        """By the earliest backward operator that an arrow leads to from an operator of the pass."""
        table = self.rebuilt.rows
        calls = self.call[rows]
        if (calls < 0).any():
            return -1
        low, high = int(self.measured[rows].min()), int(self.measured[rows].max())
        thread = table.track[calls[0]]
        # An operator begins before its launches: the arrow of the first one starts behind the launch before it.
        earlier = np.flatnonzero((self.call >= 0) & (self.measured < low))
        earlier = earlier[table.track[self.call[earlier]] == thread]
        low = int(self.measured[earlier].max()) + 1 if len(earlier) else int(table.start.min())
        inside = (self.forward_track == thread) & (self.forward_start >= low) & (self.forward_start <= high)
        if not inside.any():
            return -1
        begin = int(self.backward_start[inside].min())
        later = self.backward[(table.rank[self.backward] == table.rank[rows[0]])]
        later = later[self.measured[later] >= begin]
        return int(later[0]) if len(later) else -1
