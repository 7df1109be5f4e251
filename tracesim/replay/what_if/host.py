"""What if the host were faster, or did not get in the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool
from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Rebuilt, RowRole
from tracesim.replay.measured import on_threads
from tracesim.replay.what_if.allocator import without_allocator
from tracesim.replay.what_if.selection import factor, scaled

STALL_NS = 200_000
"""Host time between two calls from which on it is a stall and not the cost of launching."""


def scale(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Calls and host work last ``value`` times as long."""
    return scaled(rebuilt, _host(rebuilt, "host"), factor(value, "host"))


def remove(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Take one thing away that holds the device up.

    ``launch-gaps``: calls, and host work below 200 us between them, take no time, as with CUDA graphs. ``host-stalls``:
    host work above that takes none. ``allocator``: calls of the device allocator take none. ``host-waits``: the host
    never waits for the device. ``unexplained``: nothing starts late without a cause.
    """
    if value == "unexplained":
        return replace(rebuilt, unexplained=np.zeros(len(rebuilt.rows), dtype=np.int64))
    if value == "host-waits":
        edges = rebuilt.edges
        kept = (edges.kind != EdgeKind.RETURN) & (edges.kind != EdgeKind.POLL)
        _host(rebuilt, "remove=host-waits")
        return rebuilt.with_edges(edges.take(np.flatnonzero(kept)))
    if value == "allocator":
        return without_allocator(rebuilt)
    if value not in ("launch-gaps", "host-stalls"):
        raise ScenarioError(
            f"remove={value}: write launch-gaps, host-stalls, host-waits, allocator or unexplained behind remove="
        )
    rows = _host(rebuilt, f"remove={value}")
    # By the measured time, so that a scaling asked for as well does not decide what a stall is.
    stall = (rebuilt.rows.role == RowRole.GAP) & (rebuilt.rows.end - rebuilt.rows.start >= STALL_NS)
    return scaled(rebuilt, rows & (stall if value == "host-stalls" else ~stall), 0.0)


def _host(rebuilt: Rebuilt, what: str) -> Bool:
    role = rebuilt.rows.role
    rows: Bool = (role == RowRole.CALL) | (role == RowRole.GAP) | (role == RowRole.RETURN)
    if not (role == RowRole.CALL).any() and not on_threads(rebuilt.timeline):
        raise ScenarioError(f"{what}: the trace has no launches, so nothing of the host can be changed")
    return rows
