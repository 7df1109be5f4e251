"""What if the host never waited for the device allocator."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.vocabulary import TrackRole
from tracesim.analysis.intervals import covered, union
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt, RowRole

_ALLOCATE = re.compile(
    r"^(cuda|hip)(Malloc|Free)(Async|Host|Managed)?$|^cuMem(Alloc|Free|Create|Release|Map|Unmap)"
)


def without_allocator(rebuilt: Rebuilt) -> Rebuilt:
    """Calls that get device memory from the driver, or give it back, take no time.

    PyTorch's allocator makes them while it grows, and when it is full: it then frees what it had cached, which waits
    for the device, and allocates again.

    Raises:
        ScenarioError: if the trace shows no such call.
    """
    time = allocator_time(rebuilt)
    if not time.any():
        raise ScenarioError("the trace shows no call of the device allocator (cudaMalloc, cudaFree)")
    return replace(rebuilt, durations=np.maximum(rebuilt.durations - time, 0))


def allocator_time(rebuilt: Rebuilt) -> Int64:
    """Nanoseconds of each row of host work that lie in calls of the allocator; shape [rows]."""
    timeline, rows = rebuilt.timeline, rebuilt.rows
    slices = timeline.slices
    named = np.array([bool(_ALLOCATE.search(name)) for name in timeline.strings], dtype=np.bool_)
    calls = np.flatnonzero(named[slices.name] & (timeline.slice_roles() == TrackRole.HOST))
    time = np.zeros(len(rows), dtype=np.int64)
    host = (rows.role == RowRole.GAP) | (rows.role == RowRole.CALL)
    for track in np.unique(slices.track[calls]).tolist():
        mine = calls[slices.track[calls] == track]
        busy = union(slices.start[mine], slices.start[mine] + slices.duration[mine])
        there = np.flatnonzero(host & (rows.track == track))
        time[there] = covered(busy, rows.start[there], rows.end[there])
    # Of work that waited for something only what it does itself counts.
    return np.minimum(time, rebuilt.durations)
