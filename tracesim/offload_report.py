"""What a rank moves between its device and the memory of its host, and what that costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import HostCopyShape, OpGraph
from op_graphs.vocabulary import OpKind, Phase, Stream

from .analysis.intervals import subtract, union
from .engine import Execution

_GIB = 2**30
OFFLOAD_STREAMS = (Stream.COPY_TO_HOST, Stream.COPY_TO_DEVICE, Stream.HOST)


def offload_figures(graph: OpGraph, execution: Execution, rank: int) -> dict[str, Any]:
    """``offload`` of a stage of the report: bytes each way, exposed time, memory of the host (``docs/report.md``)."""
    read, written = graph.operations.bytes_read, graph.operations.bytes_written
    sent, fetched = (_copies(graph, rank, to_host=direction) for direction in (True, False))
    return {
        "to_host_gib": float(read[sent].sum()) / _GIB,
        "to_device_gib": float(written[fetched].sum()) / _GIB,
        "exposed_ms": exposed_offload_ns(graph, execution, rank) / 1e6,
        "host_memory_gib": peak_host_bytes(graph, execution, rank) / _GIB,
    }


def _copies(graph: OpGraph, rank: int, *, to_host: bool) -> Int64:
    """Rows that copy in one direction."""
    wanted = [
        index
        for index, shape in enumerate(graph.shapes)
        if isinstance(shape, HostCopyShape) and shape.to_host == to_host
    ]
    found: Int64 = np.flatnonzero((graph.operations.rank == rank) & np.isin(graph.operations.shape, wanted))
    return found


def exposed_offload_ns(graph: OpGraph, execution: Execution, rank: int) -> int:
    """Time in which copies or updates on the host run and the rank neither computes nor communicates."""
    own = graph.operations.rank == rank
    # A wait of the host for the device moves nothing.
    moving = own & np.isin(graph.operations.stream, OFFLOAD_STREAMS) & (graph.operations.kind != OpKind.HOST)
    if not moving.any():
        return 0
    working = own & ~np.isin(graph.operations.stream, OFFLOAD_STREAMS)
    alone = subtract(
        union(execution.start[moving], execution.end[moving]),
        union(execution.start[working], execution.end[working]),
    )
    return int((alone.end - alone.start).sum())


def peak_host_bytes(graph: OpGraph, execution: Execution, rank: int) -> int:
    """Most bytes a rank has in the memory of the host at once: activations under way or there, and optimizer states."""
    operations = graph.operations
    sent, fetched = (
        rows[operations.phase[rows] != Phase.OPTIMIZER]
        for rows in (_copies(graph, rank, to_host=True), _copies(graph, rank, to_host=False))
    )
    time = np.concatenate([execution.start[sent], execution.end[fetched]])
    size = np.concatenate([operations.bytes_read[sent], -operations.bytes_written[fetched]])
    # What is fetched leaves its place to what comes at the same moment.
    order = np.lexsort((size >= 0, time))
    activations = int(np.cumsum(size[order]).max(initial=0.0))
    return activations + (graph.host_bytes[rank] if graph.host_bytes else 0)
