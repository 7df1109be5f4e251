"""Execution traces, which hold operations and what they wait for but seldom when they ran, laid out in time.

Nodes of Chakra traces (:mod:`.chakra`) are placed by their dependencies and durations, nodes of PyTorch execution
traces (:mod:`.pytorch_execution_trace`) by their order and nesting. A quirk says so: such times are no measurement.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tracesim.kernel_kinds import (
    classify_kernels,
    classify_operators,
    is_computation,
    kind_of_communication,
    parse_communication,
)
from tracesim.readers.assembled import AssembledTimeline

UNIT_NS = 1000
"""Length drawn for an operation whose trace gives no duration."""

_LARGEST_NS = 1 << 60


@dataclass
class Node:
    """One operation."""

    identifier: int
    name: str
    dependencies: list[int] = field(default_factory=list)
    parent: int = -1
    start: int = 0
    """Nanoseconds; 0 if the trace does not say."""
    duration: int = 0
    on_device: bool = False
    stream: int = 0
    thread: int = 0
    communication: Communication = Communication.NONE
    communication_bytes: int = 0
    group: CommunicationGroup | None = None


def place_by_dependencies(
    built: AssembledTimeline, rank: int, nodes: Sequence[Node], **facts: object
) -> Timeline:
    """Each node starts when what it depends on has ended and its thread or stream is free."""
    timed = any(node.duration for node in nodes)
    if not timed:
        built.notes.add("no durations in the file, every operation is drawn 1 us long", len(nodes))
    built.notes.add("times computed from dependencies, not measured", len(nodes))
    tracks = [_track(built, rank, node) for node in nodes]
    limit = _LARGEST_NS // (len(nodes) + 1)
    lengths = [min(node.duration if timed else UNIT_NS, limit) for node in nodes]
    starts, circular = _starts(nodes, tracks, lengths)
    built.notes.add("circles of operations that wait for one another, cut", circular)
    for node, track, start, length, kind in zip(nodes, tracks, starts, lengths, _kinds(nodes), strict=True):
        _add(built, track, node, start, length, kind)
    return built.timeline(**facts)


def _starts(nodes: Sequence[Node], tracks: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], int]:
    """Start of each node, and how many circular dependencies had to be cut."""
    rows = {node.identifier: row for row, node in enumerate(nodes)}
    waiting = [0] * len(nodes)
    followers: list[list[int]] = [[] for _ in nodes]
    for row, node in enumerate(nodes):
        for needed in {rows[d] for d in node.dependencies if d in rows} - {row}:
            followers[needed].append(row)
            waiting[row] += 1
    heap = [(0, row) for row, count in enumerate(waiting) if not count]
    queued = [not count for count in waiting]
    starts, ready = [0] * len(nodes), [0] * len(nodes)
    free: dict[int, int] = {}
    circular = placed = first = 0
    while placed < len(nodes):
        if not heap:
            # All that is left waits for one another: the first of them is let go.
            while queued[first]:
                first += 1
            circular += 1
            queued[first] = True
            heap.append((ready[first], first))
        at, row = heapq.heappop(heap)
        starts[row] = max(at, free.get(tracks[row], 0))
        if starts[row] > at:
            heapq.heappush(heap, (starts[row], row))
            continue
        end = starts[row] + lengths[row]
        free[tracks[row]] = end
        placed += 1
        for after in followers[row]:
            ready[after] = max(ready[after], end)
            waiting[after] -= 1
            if not waiting[after] and not queued[after]:
                queued[after] = True
                heapq.heappush(heap, (ready[after], after))
    return starts, circular


def place_by_order(built: AssembledTimeline, rank: int, nodes: Sequence[Node], **facts: object) -> Timeline:
    """Each node spans its children; a node without children is drawn 1 us long."""
    built.notes.add("no times in the file, operations are drawn in their order, 1 us each", len(nodes))
    rows = {node.identifier: row for row, node in enumerate(nodes)}
    children: dict[int, list[int]] = {}
    for row in sorted(range(len(nodes)), key=lambda r: nodes[r].identifier):
        parent = rows.get(nodes[row].parent, -1)
        children.setdefault(parent if parent != row else -1, []).append(row)
    time = 0
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    stack = list(reversed(children.get(-1, [])))
    while stack:
        row = stack.pop()
        if row in starts:
            ends[row] = time
            continue
        starts[row] = time
        inner = children.get(row, [])
        stack.append(row)
        stack.extend(reversed(inner))
        if not inner:
            time += UNIT_NS
    kinds = _kinds(nodes)
    # A parent was met before its children, which puts it above them where they are equally long.
    for row, start in starts.items():
        _add(built, _track(built, rank, nodes[row]), nodes[row], start, ends[row] - start, kinds[row])
    built.notes.add("operations whose parents form a circle, left out", len(nodes) - len(starts))
    return built.timeline(**facts)


def _track(built: AssembledTimeline, rank: int, node: Node) -> int:
    if node.on_device:
        return built.track(rank, TrackRole.DEVICE, node.stream, f"stream {node.stream}")
    return built.track(rank, TrackRole.HOST, node.thread, f"thread {node.thread}")


def _kinds(nodes: Sequence[Node]) -> list[OpKind]:
    kernels, _ = classify_kernels([node.name for node in nodes])
    operators = classify_operators([node.name.partition("(")[0] for node in nodes])
    computes = is_computation(operators)
    found = []
    for node, kernel, operator, compute in zip(
        nodes, kernels.tolist(), operators.tolist(), computes.tolist(), strict=True
    ):
        if node.communication:
            found.append(kind_of_communication(int(node.communication)))
        elif node.on_device:
            found.append(OpKind(kernel))
        else:
            found.append(OpKind(operator) if operator and compute else OpKind.HOST)
    return found


def _add(built: AssembledTimeline, track: int, node: Node, start: int, length: int, kind: OpKind) -> None:
    columns: dict[str, int] = {"kind": kind, "phase": _phase(node.name), "communication": node.communication}
    if node.communication:
        columns["communication_bytes"] = min(max(node.communication_bytes, 0), _LARGEST_NS)
        columns["group"] = built.group(node.group) if node.group is not None else -1
    built.add(track, start, length, node.name, **columns)


def _phase(name: str) -> Phase:
    if name.startswith("Optimizer.step"):
        return Phase.OPTIMIZER
    return Phase.BACKWARD_INPUT if name.startswith("autograd::engine::evaluate_function") else Phase.UNKNOWN


def communication_of(name: str) -> Communication:
    """The transfer a collective's name means; NONE for waiting and for no name."""
    found = parse_communication(name[:200])
    return Communication.NONE if found == Communication.UNKNOWN and name in ("wait", "init") else found
