"""Small operation graphs for tests, made by hand, and a naive engine to judge the real one by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from op_graphs.columns import StringTable
from op_graphs.graph import OPERATION_DEFAULTS, Buffers, Operations, OpGraph, Segments
from op_graphs.vocabulary import MemoryCategory, Stream


def graph_of(
    operations: Iterable[Mapping[str, Any]],
    segments: Iterable[tuple[int, int, int]] = (),
    buffers: Iterable[Mapping[str, Any]] = (),
    ranks: Sequence[int] | None = None,
) -> OpGraph:
    """A graph from one dict an operation.

    ``rank`` and ``stream`` (default 0, compute), ``after``: rows it waits for, ``rendezvous``, ``name`` (default:
    ``a``, ``b``, ... by row). Segments are (begin, end, template).
    """
    rows = [dict(row) for row in operations]
    strings = StringTable()
    after = [list(row.pop("after", ())) for row in rows]
    for number, row in enumerate(rows):
        row["name"] = strings.intern(row.get("name", letter(number)))
    table = Operations.from_rows(rows, **OPERATION_DEFAULTS)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([len(sources) for sources in after])
    held = [
        {
            "rank": 0,
            "allocate": -1,
            "release": -1,
            "category": MemoryCategory.ACTIVATIONS,
            "pool": 0,
            **buffer,
        }
        for buffer in buffers
    ]
    for number, buffer in enumerate(held):
        buffer["name"] = strings.intern(buffer.get("name", f"buffer_{number}"))
    world = int(table.rank.max()) + 1 if len(table) else 0
    return OpGraph(
        strings=tuple(strings.strings()),
        ranks=np.array(range(world) if ranks is None else ranks),
        operations=table,
        dependency_offsets=offsets,
        dependencies=np.array([s for sources in after for s in sources], dtype=np.int64),
        segments=Segments.from_rows(
            {
                "begin": begin,
                "end": end,
                "template": template,
                "name": 0,
                "rank": int(table.rank[begin]),
                "stage": 0,
                "microbatch": 0,
            }
            for begin, end, template in segments
        ),
        buffers=Buffers.from_rows(held),
    )


def letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"op{number}"


def naive_times(graph: OpGraph, durations: Sequence[int], gap_ns: int = 0) -> list[tuple[int, int]] | None:
    """(start, end) of every row by relaxing every rule until nothing changes; None if operations wait in a circle.

    The rules, each written out as an inequality: an operation starts no earlier than the end of each dependency,
    than the end of the row before it on its rank and stream (plus the gap on a compute stream), and than every
    member of its rendezvous.
    """
    operations = graph.operations
    rows = range(len(operations))
    lanes = list(zip(operations.rank.tolist(), operations.stream.tolist(), strict=True))
    before: dict[tuple[int, int], int] = {}
    waits: list[list[tuple[int, int]]] = []
    for row in rows:
        rules = [(int(source), 0) for source in graph.dependencies_of(row)]
        if lanes[row] in before:
            rules.append((before[lanes[row]], gap_ns if lanes[row][1] == Stream.COMPUTE else 0))
        before[lanes[row]] = row
        waits.append(rules)
    identifier = operations.rendezvous.tolist()
    meets = [
        [other for other in rows if identifier[other] == identifier[row]] if identifier[row] >= 0 else [row]
        for row in rows
    ]

    def relax(lengths: Sequence[int]) -> list[int] | None:
        start = [0] * len(rows)
        # Without a circle the longest chain has as many links as there are operations.
        for _ in range(len(rows) + 2):
            relaxed = [
                max(
                    (
                        start[source] + lengths[source] + lag
                        for member in meets[row]
                        for source, lag in waits[member]
                    ),
                    default=0,
                )
                for row in rows
            ]
            if relaxed == start:
                return start
            start = relaxed
        return None

    if relax([1] * len(rows)) is None:
        return None
    start = relax(durations)
    assert start is not None
    return [(begin, begin + length) for begin, length in zip(start, durations, strict=True)]


def bytes_by_name(graph, rows=None):
    """Bytes of buffers by name, those of one name summed; ``rows`` are which buffers, all by default."""
    buffers = graph.buffers if rows is None else graph.buffers.take(rows)
    found = Counter()
    for name, size in zip(buffers.name, buffers.size, strict=True):
        found[graph.strings[name]] += int(size)
    return found
