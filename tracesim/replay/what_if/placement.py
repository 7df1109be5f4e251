"""What if communication ran beside compute, or not."""

from __future__ import annotations

import numpy as np

from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole
from tracesim.replay.what_if.selection import some
from tracesim.replay.what_if.streams import compute_lanes, requeued, slices_of_kind


def overlap(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``none``: all slices of a rank after each other; ``full``: compute never waits for communication."""
    if value == "none":
        return _one_stream(rebuilt)
    if value == "full":
        return _compute_goes_on(rebuilt)
    raise ScenarioError(f"overlap={value}: write overlap=none or overlap=full")


def overlap_kind(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``all_gather=none``: this kind in the queue of compute; ``=full``: nothing on another stream waits for it."""
    name, _, how = value.partition("=")
    chosen = slices_of_kind(rebuilt, name, "overlap.")
    if how == "none":
        return requeued(rebuilt, chosen, compute_lanes(rebuilt))
    if how != "full":
        raise ScenarioError(f"overlap.{name}={how}: write overlap.{name}=none or overlap.{name}=full")
    edges = rebuilt.edges
    between = (edges.kind == EdgeKind.EVENT) | (edges.kind == EdgeKind.ADMISSION)
    freed = between & chosen[edges.source] & ~chosen[edges.target]
    if not freed.any():
        raise ScenarioError(
            f"overlap.{name}=full: no slice of another stream waits for one of these {int(chosen.sum())}, so they are "
            f"hidden already, or in the queue of compute; take them out of it with stream.{name}=new"
        )
    return rebuilt.with_edges(edges.take(np.flatnonzero(~freed)))


def _one_stream(rebuilt: Rebuilt) -> Rebuilt:
    """Queue the slices of each rank in the order of their measured ends.

    Members of a communication end together, so that order is the same on all ranks, and nobody waits in a circle.
    """
    rows, edges = rebuilt.rows, rebuilt.edges
    device = some(rebuilt.on_device(), "overlap=none")
    rendezvous = rebuilt.graph.operations.rendezvous.astype(np.int64)
    end = rows.end.copy()
    last = np.zeros(int(rendezvous.max(initial=-1)) + 1, dtype=np.int64)
    met = rendezvous >= 0
    np.maximum.at(last, rendezvous[met], end[met])
    end[met] = last[rendezvous[met]]
    order = np.flatnonzero(device)
    order = order[np.lexsort((order, end[order], rows.rank[order]))]
    same = rows.rank[order][1:] == rows.rank[order][:-1]
    source, target = order[:-1][same], order[1:][same]
    queue = Edges(
        source,
        target,
        np.full(len(source), rebuilt.delays.queue),
        np.full(len(source), EdgeKind.QUEUE),
    )
    position = np.full(len(rows), -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    inside = (rows.role[edges.source] == RowRole.DEVICE) & (rows.role[edges.target] == RowRole.DEVICE)
    kept = ~inside | (position[edges.source] < position[edges.target])
    kept &= (edges.kind != EdgeKind.QUEUE) & (edges.kind != EdgeKind.ADMISSION)
    return rebuilt.with_edges(Edges.concatenate([edges.take(np.flatnonzero(kept)), queue]))


def _compute_goes_on(rebuilt: Rebuilt) -> Rebuilt:
    """Take away the waits of other slices for communication on another stream."""
    edges, communication = rebuilt.edges, rebuilt.graph.is_communication()
    between = (edges.kind == EdgeKind.EVENT) | (edges.kind == EdgeKind.ADMISSION)
    freed = between & communication[edges.source] & ~communication[edges.target]
    return rebuilt.with_edges(edges.take(np.flatnonzero(~freed)))
