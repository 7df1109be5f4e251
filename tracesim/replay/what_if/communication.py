"""What if communication were faster, slower, or not there.

The transfer of an operation is taken as a fixed time plus size over bandwidth. The fixed time is that of the quickest
operation of the same kind and group, 30 us at most. Without sizes to tell them apart this is coarse; it is exact
where messages are large.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Int64
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if.selection import device_names_matching, factor, scaled, some

_MOST_FIXED_NS = 30_000


def bandwidth(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the bandwidth: what is not fixed takes that much less."""
    by = factor(value, "network.bandwidth")
    rows, fixed = _communication(rebuilt, "network.bandwidth"), _fixed_time(rebuilt)
    moving = (rebuilt.durations - fixed) / by if by else np.zeros(len(fixed))
    changed = fixed + np.rint(moving).astype(np.int64)
    return replace(rebuilt, durations=np.where(rows, changed, rebuilt.durations))


def latency(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the fixed time."""
    rows, fixed = _communication(rebuilt, "network.latency"), _fixed_time(rebuilt)
    more = np.rint(fixed * (factor(value, "network.latency") - 1)).astype(np.int64)
    return replace(rebuilt, durations=np.where(rows, rebuilt.durations + more, rebuilt.durations))


def scale(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``value`` times the transfer time; 0 also takes away waiting for peers."""
    rows, by = _communication(rebuilt, "communication"), factor(value, "communication")
    return scaled(rebuilt, rows, by) if by else _without(rebuilt, rows)


def drop(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Communication whose name matches takes no time and waits for no peer; its launch stays."""
    rows = device_names_matching(rebuilt, value, "drop") & rebuilt.graph.is_communication()
    return _without(rebuilt, some(rows, f"drop={value}"))


def _without(rebuilt: Rebuilt, rows: Bool) -> Rebuilt:
    operations = rebuilt.graph.operations
    # All members leave: a peer that still came would wait for nobody.
    gone = rows | (np.isin(operations.rendezvous, operations.rendezvous[rows]) & (operations.rendezvous >= 0))
    alone = operations.with_columns(rendezvous=np.where(gone, -1, operations.rendezvous))
    changed = replace(rebuilt, durations=np.where(gone, 0, rebuilt.durations))
    return replace(changed, graph=replace(changed.graph, operations=alone))


def _communication(rebuilt: Rebuilt, what: str) -> Bool:
    return some(rebuilt.on_device() & rebuilt.graph.is_communication(), what)


def _fixed_time(rebuilt: Rebuilt) -> Int64:
    """The part of each duration that does not depend on the size of the message."""
    operations = rebuilt.graph.operations
    key = np.stack([operations.communication.astype(np.int64), operations.group.astype(np.int64)])
    label = np.unique(key, axis=1, return_inverse=True)[1].ravel()
    least = np.full(int(label.max(initial=0)) + 1, _MOST_FIXED_NS, dtype=np.int64)
    rows = rebuilt.on_device() & rebuilt.graph.is_communication() & (rebuilt.durations > 0)
    np.minimum.at(least, label[rows], rebuilt.durations[rows])
    return np.minimum(least[label], rebuilt.durations)
