"""What if communication were faster, slower, or not there.

A slice matched across ranks lasts for its transfer; one that no other rank of the trace shows holds waiting too, and
the shortest of its kind, size and group stands for the transfer of all of them.

The transfer of an operation is taken as a fixed time plus size over bandwidth. The fixed time is that of the quickest
operation of the same kind and group, 30 us at most. Without sizes to tell them apart this is coarse; it is exact
where messages are large.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Float64, Int64
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if.selection import device_names_matching, factor, scaled, some

_MOST_FIXED_NS = 30_000


def bandwidth(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the bandwidth: what is not fixed takes that much less."""
    by = factor(value, "network.bandwidth")
    rows, fixed = _communication(rebuilt, "network.bandwidth"), fixed_time(rebuilt)
    transfer = transfer_part(rebuilt)
    moving = np.maximum(transfer - fixed, 0)
    less = np.rint(moving * ((1 / by if by else 0.0) - 1)).astype(np.int64)
    return replace(rebuilt, durations=np.where(rows, rebuilt.durations + less, rebuilt.durations))


def latency(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the fixed time."""
    rows, fixed = _communication(rebuilt, "network.latency"), fixed_time(rebuilt)
    more = np.rint(fixed * (factor(value, "network.latency") - 1)).astype(np.int64)
    return replace(rebuilt, durations=np.where(rows, rebuilt.durations + more, rebuilt.durations))


def scale(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the transfer time; 0 also takes away waiting for peers."""
    rows, by = _communication(rebuilt, "communication"), factor(value, "communication")
    return scaled(rebuilt, rows, by) if by else without_waiting(rebuilt, rows)


def drop(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Communication whose name matches takes no time and waits for no peer; its launch stays."""
    rows = device_names_matching(rebuilt, value, "drop") & rebuilt.graph.is_communication()
    return without_waiting(rebuilt, some(rows, f"drop={value}"))


def without_waiting(rebuilt: Rebuilt, rows: Bool) -> Rebuilt:
    """The run in which some communication takes no time and waits for no peer; its launches stay."""
    operations = rebuilt.graph.operations
    # All members leave: a peer that still came would wait for nobody.
    gone = rows | (np.isin(operations.rendezvous, operations.rendezvous[rows]) & (operations.rendezvous >= 0))
    alone = operations.with_columns(rendezvous=np.where(gone, -1, operations.rendezvous))
    changed = replace(rebuilt, durations=np.where(gone, 0, rebuilt.durations))
    return replace(changed, graph=replace(changed.graph, operations=alone))


def _communication(rebuilt: Rebuilt, what: str) -> Bool:
    return some(rebuilt.on_device() & rebuilt.graph.is_communication(), what)


def transfer_part(rebuilt: Rebuilt) -> Int64:
    """The part of each duration in which data moves; the duration itself of what is matched, or no communication."""
    operations = rebuilt.graph.operations
    rows = rebuilt.on_device() & rebuilt.graph.is_communication()
    alone = np.flatnonzero(rows & (operations.rendezvous < 0) & (rebuilt.durations > 0))
    if not len(alone):
        return rebuilt.durations
    columns = (operations.communication, operations.communication_bytes, operations.group, operations.name)
    key = np.stack([column[alone].astype(np.int64) for column in columns])
    label = np.unique(key, axis=1, return_inverse=True)[1].ravel()
    least = np.full(int(label.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, label, rebuilt.durations[alone])
    part: Int64 = rebuilt.durations.copy()
    # Without a size, a shorter one may simply be smaller: its waiting cannot be told apart.
    part[alone] = np.where(operations.communication_bytes[alone] > 0, least[label], part[alone])
    return part


def scaled_transfers(rebuilt: Rebuilt, rows: Bool, by: Float64) -> Rebuilt:
    """The run with the transfers of some communication multiplied; waiting for peers stays what it is."""
    more = np.rint(transfer_part(rebuilt) * (by - 1)).astype(np.int64)
    return replace(rebuilt, durations=np.where(rows, rebuilt.durations + more, rebuilt.durations))


def fixed_time(rebuilt: Rebuilt) -> Int64:
    """The part of each duration that does not depend on the size of the message."""
    operations = rebuilt.graph.operations
    key = np.stack([operations.communication.astype(np.int64), operations.group.astype(np.int64)])
    label = np.unique(key, axis=1, return_inverse=True)[1].ravel()
    least = np.full(int(label.max(initial=0)) + 1, _MOST_FIXED_NS, dtype=np.int64)
    rows = rebuilt.on_device() & rebuilt.graph.is_communication() & (rebuilt.durations > 0)
    np.minimum.at(least, label[rows], rebuilt.durations[rows])
    return np.minimum(least[label], rebuilt.durations)
