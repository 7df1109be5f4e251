"""Exposed communication as plain data: ranked classes with what hiding each would save, and every stretch.

What hiding a class saves of a simulated step is found by running its graph again with the transfers of that class, and
the other ends of its sends and receives, taking no time: what waited for them then waits for something else. On a
measured trace it is an upper bound: what the rank with most of that class has of it exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import ROLE_DIMENSIONS, STREAM_ROLES, Phase, Stream

from .analysis import Analysis, slice_dimensions, step_windows
from .analysis.breakdown import DIMENSIONS, step_parts
from .analysis.exposed import (
    ExposedClass,
    ExposedStretches,
    SliceCauses,
    class_keys,
    exposed_classes,
    exposed_stretches,
)
from .engine import Execution

_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)
_STREAM_DIMENSIONS = {
    int(stream): ROLE_DIMENSIONS[role].name.lower() if role in ROLE_DIMENSIONS else DIMENSIONS[-1]
    for stream, role in STREAM_ROLES.items()
}
_REPORT_CLASSES = 16
_REPORT_OPERATIONS = 1_000_000
_CONTENTION_COST = 10
"""Time of the event loop over that of the longest path."""


@dataclass(frozen=True)
class ExposedCommunication:
    """The exposed communication of a timeline."""

    timeline: Timeline
    stretches: ExposedStretches
    classes: tuple[ExposedClass, ...]
    savings: tuple[int | None, ...]
    """Nanoseconds by which a step gets shorter if a class is hidden; None where only the bound is known."""

    def ranked(self) -> list[tuple[ExposedClass, int, bool]]:
        """(class, saving in nanoseconds, whether that is exact), the largest saving first."""
        pairs = [
            (found, found.bound if saving is None else saving, saving is not None)
            for found, saving in zip(self.classes, self.savings, strict=True)
        ]
        return sorted(pairs, key=lambda pair: (-pair[1], -pair[0].total, pair[0].name))


def exposed_in_simulation(
    timeline: Timeline,
    graph: OpGraph,
    execution: Execution,
    rerun: Callable[[Int64], Execution],
    durations: Int64,
    reruns: int | None = None,
) -> ExposedCommunication:
    """Exposed communication of a simulated step.

    Args:
        timeline: as :func:`~tracesim.simulated_timeline.build_timeline` makes it of the step.
        graph: what was run.
        execution: how it ran.
        rerun: runs the graph with other durations, nanoseconds a row.
        durations: of all operations, each by itself.
        reruns: how often the graph is run again at most: the savings of the largest classes are exact, of those behind
            them only the upper bound is given. None: as often as there are classes.
    """
    rows = _graph_rows(timeline, graph)
    ready = np.where(rows >= 0, inputs_ready(graph, execution)[rows], 0)
    slices = timeline.slices
    causes = SliceCauses(slices.waited_for.astype(np.int64), np.zeros(len(slices), dtype=np.int64), ready)
    stretches = _stretches(timeline, causes)
    classes = exposed_classes(timeline, stretches, 1)
    hidden = _class_rows(graph)
    time = execution.iteration_ns
    savings: list[int | None] = []
    for number, found in enumerate(classes):
        if reruns is not None and number >= reruns:
            savings.append(None)
            continue
        changed = durations.copy()
        changed[hidden[found.name, found.dimension, found.phase, found.layer_class]] = 0
        savings.append(time - rerun(changed).iteration_ns)
    return ExposedCommunication(timeline, stretches, tuple(classes), tuple(savings))


def affordable_reruns(graph: OpGraph, contention: bool) -> int:
    """How often a graph is run again for a report, so that this takes about as long as simulating the step."""
    operations = _REPORT_OPERATIONS // (_CONTENTION_COST if contention else 1)
    return max(2, min(_REPORT_CLASSES, operations // max(1, len(graph.operations))))


def exposed_in_trace(analysis: Analysis) -> ExposedCommunication:
    """Exposed communication of an analyzed timeline; savings are upper bounds."""
    timeline, transfers = analysis.timeline, analysis.transfers
    inside = transfers.by_slice(transfers.wait_inside, len(timeline.slices))
    causes = SliceCauses(analysis.causes.row, inside)
    parts = [(step.window, step.parts) for step in analysis.steps]
    stretches = exposed_stretches(timeline, causes, parts, slice_dimensions(timeline))
    steps = max(1, len({step.window.step for step in analysis.steps}))
    classes = exposed_classes(timeline, stretches, steps)
    return ExposedCommunication(timeline, stretches, tuple(classes), (None,) * len(classes))


def _stretches(timeline: Timeline, causes: SliceCauses) -> ExposedStretches:
    dimensions = slice_dimensions(timeline)
    device, rank = np.flatnonzero(timeline.on_device()), timeline.slice_ranks()
    parts = [
        (window, step_parts(timeline, device[rank[device] == window.rank], dimensions, window))
        for window in step_windows(timeline)
    ]
    return exposed_stretches(timeline, causes, parts, dimensions)


def inputs_ready(graph: OpGraph, execution: Execution) -> Int64:
    """When what each operation needs from outside its action had arrived; nanoseconds, shape [operations].

    Inside an action operations need each other in order, so an operation also needs what those before it do. A backward
    needs the forward of its microbatch, and an action of weight gradients the backward for the input.
    """
    segments, count = graph.segments, len(graph.operations)
    segment = np.full(count, -1, dtype=np.int64)
    for number, (begin, end) in enumerate(zip(segments.begin.tolist(), segments.end.tolist(), strict=True)):
        segment[begin:end] = number
    target = np.repeat(np.arange(count), np.diff(graph.dependency_offsets))
    source = graph.dependencies
    outside = (segment[source] != segment[target]) | (segment[target] < 0)
    ready = np.zeros(count, dtype=np.int64)
    np.maximum.at(ready, target[outside], execution.end[source[outside]])
    _need_earlier_passes(graph, execution, segment, ready)
    for begin, end in zip(segments.begin.tolist(), segments.end.tolist(), strict=True):
        np.maximum.accumulate(ready[begin:end], out=ready[begin:end])
    return ready


def _need_earlier_passes(graph: OpGraph, execution: Execution, segment: Int64, ready: Int64) -> None:
    """Raise ``ready`` of backwards to the end of the passes of their microbatch on the same rank and model chunk."""
    operations = graph.operations
    computes = (operations.stream == Stream.COMPUTE) & (operations.microbatch >= 0) & (operations.chunk >= 0)
    columns = np.stack([operations.rank, operations.chunk, operations.microbatch]).astype(np.int64)
    _, key = np.unique(columns, axis=1, return_inverse=True)
    key = key.ravel()
    phase = operations.phase
    for needed, needing in ((Phase.FORWARD, _BACKWARD), (Phase.BACKWARD_INPUT, (Phase.BACKWARD_WEIGHT,))):
        done = np.zeros(int(key.max()) + 1 if len(key) else 0, dtype=np.int64)
        rows = np.flatnonzero(computes & (phase == needed))
        np.maximum.at(done, key[rows], execution.end[rows])
        apart = ~np.isin(segment, segment[rows]) if needed == Phase.BACKWARD_INPUT else phase != needed
        rows = np.flatnonzero(computes & np.isin(phase, needing) & apart)
        ready[rows] = np.maximum(ready[rows], done[key[rows]])


def _graph_rows(timeline: Timeline, graph: OpGraph) -> Int64:
    """The operation of each slice of a timeline as a simulation builds it; -1 for drawn actions."""
    pieces = []
    for stage in timeline.ranks.pp.tolist():
        pieces.append(np.flatnonzero(graph.operations.rank == stage))
        pieces.append(np.full(int((graph.segments.rank == stage).sum()), -1))
    return np.concatenate(pieces).astype(np.int64)


def _class_rows(graph: OpGraph) -> dict[tuple[str, str, str, str], Int64]:
    """Operations by class, with the other ends of its sends and receives."""
    rows = np.flatnonzero(graph.is_communication())
    operations = graph.operations
    members: dict[tuple[str, str, str, str], list[int]] = {}
    keys = class_keys(operations, graph.strings, rows, simulated=True)
    for row, stream, (name, phase, layer) in zip(
        rows.tolist(), operations.stream[rows].tolist(), keys, strict=True
    ):
        members.setdefault((name, _STREAM_DIMENSIONS[stream], phase, layer), []).append(row)
    found = {}
    for key, listed in members.items():
        mine = np.array(listed)
        met = operations.rendezvous[mine]
        others = np.flatnonzero(np.isin(operations.rendezvous, met[met >= 0]))
        found[key] = np.union1d(mine, others)
    return found


# -- plain data --------------------------------------------------------------------------------------------------


def describe_classes(found: ExposedCommunication) -> list[dict[str, Any]]:
    """Ranked classes as plain data in milliseconds; the fields are documented in ``docs/overlap.md``."""
    return [
        {
            "name": c.name,
            "dimension": c.dimension,
            "phase": c.phase,
            "layer_class": c.layer_class,
            "count": c.stretches,
            "exposed_ms": c.total / 1e6,
            "waiting_ms": c.waiting / 1e6,
            "could_run_ms": c.could_run / 1e6,
            "waited_for": c.waited_for,
            "waited_by": c.waited_by,
            "could_run": c.runnable,
            "saving_ms": saving / 1e6,
            "saving": "exact" if exact else "upper_bound",
        }
        for c, saving, exact in found.ranked()
    ]


def describe_stretches(found: ExposedCommunication) -> list[dict[str, Any]]:
    """Every stretch as plain data, by step of a rank, dimension and time; nanoseconds."""
    timeline, s = found.timeline, found.stretches
    names = timeline.slices.name
    ranks = timeline.ranks.rank[s.rank].tolist()

    def called(rows: Int64) -> Sequence[str]:
        return [timeline.strings[names[row]] if row >= 0 else "" for row in rows.tolist()]

    columns = zip(
        ranks,
        s.step.tolist(),
        s.dimension.tolist(),
        called(s.row),
        s.start.tolist(),
        s.length.tolist(),
        s.waiting.tolist(),
        called(s.cause),
        called(s.waiter),
        s.waiter_known.tolist(),
        s.could_run.tolist(),
        called(s.could_run_row),
        strict=True,
    )
    keys = (
        "rank",
        "step",
        "dimension",
        "name",
        "start_ns",
        "exposed_ns",
        "waiting_ns",
        "waited_for",
        "waited_by",
        "waited_by_known",
        "could_run_ns",
        "could_run",
    )
    described = [dict(zip(keys, values, strict=True)) for values in columns]
    for entry in described:
        entry["dimension"] = DIMENSIONS[int(str(entry["dimension"]))]
    return described
