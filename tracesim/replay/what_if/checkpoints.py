"""What a framework's checkpoints cost beside what they run again, by the rules of ``op_graphs.lower_checkpoint``.

A pass through a module that is to run again becomes a checkpoint:

- The host works twice more for it: behind its forward (the function, states of random generators), and behind what
  runs again (these states put back and forth, the gradient through a graph of its own). Each is one operation of the
  host, of which the trace says how long it takes.
- A pass of norms and elementwise kernels keeps nothing but its output, so a checkpoint of it frees that as well
  (Megatron-Core's ``CheckpointWithoutOutput``). What is made again is copied to where its readers look for it. The copy
  moves what the last kernel of the pass reads and writes, or less, and takes as long as that; less where the trace has
  bytes and its elementwise kernels move such sizes faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.vocabulary import OpKind, Phase
from tracesim.replay.graph import EdgeKind, Rebuilt, RowRole
from tracesim.replay.what_if.host import STALL_NS
from tracesim.replay.what_if.insertion import HostWork, Insertion, Made, launching_calls, pauses

RESTORED = " restored"
"""Behind the name of a kernel: the copy of what it made again."""
_ONLY_OUTPUT = (OpKind.NORM, OpKind.ELEMENTWISE, OpKind.CAST, OpKind.SOFTMAX, OpKind.REDUCTION)


def host_operation_ns(rebuilt: Rebuilt) -> int:
    """The host's time for one operation: a launching call with the work in front of it, the mean of the trace.

    Pauses that wait for a slice or another thread are no work, and long ones something else. 0 without launches.
    """
    edges = rebuilt.edges
    waiting = edges.target[np.isin(edges.kind, (EdgeKind.POLL, EdgeKind.HANDOVER, EdgeKind.RETURN))]
    rows = np.setdiff1d(pauses(rebuilt), waiting)
    # Between two calls; what is before the first one is not known.
    rows = rows[np.isin(rebuilt.rows.role[rows - 1], (RowRole.CALL, RowRole.RETURN))]
    taken = rebuilt.durations[rows] + rebuilt.durations[rows + 1]
    taken = taken[taken < STALL_NS]
    return round(float(np.mean(taken))) if len(taken) else 0


def host_work(rebuilt: Rebuilt, passes: Iterable[tuple[Int64, int]]) -> list[HostWork]:
    """The host's work for checkpoints of passes: device rows and the first device row of their backward."""
    taken, call, count = host_operation_ns(rebuilt), launching_calls(rebuilt), len(rebuilt.rows)
    lane = rebuilt.graph.operations.rank
    found = []
    for rows, before in passes:
        caller, calls = int(call[before]), call[rows][call[rows] >= 0]
        if not taken or caller < 0 or not len(calls):
            continue
        last = int(calls.max())
        behind = int(np.searchsorted(lane, lane[last], side="right")) if last + 1 == count else last + 1
        found.append(HostWork(last, behind, "checkpoint", taken))
        found.append(HostWork(caller, caller, "checkpoint again", taken))
    return found


def restoring(rebuilt: Rebuilt, rows: Int64, before: int) -> list[Insertion]:
    """The copy of the output of a pass that keeps nothing else; none for other passes."""
    operations = rebuilt.graph.operations
    kinds = operations.kind[rows]
    compute = rows[~np.isin(kinds, (OpKind.COLLECTIVE, OpKind.P2P))]
    if not len(compute) or not np.isin(operations.kind[compute], _ONLY_OUTPUT).all():
        return []
    last = int(compute[-1])
    name = rebuilt.graph.strings[operations.name[last]] + RESTORED
    made = Made(name, OpKind.MEMCPY, _copy_ns(rebuilt, last))
    return [Insertion(compute[-1:], before, made)]


def _copy_ns(rebuilt: Rebuilt, last: int) -> int:
    """Time to copy what a memory-bound row wrote."""
    operations, durations = rebuilt.graph.operations, rebuilt.durations
    own, size = int(durations[last]), operations.bytes_read[last]
    streaming = (
        (operations.kind == OpKind.ELEMENTWISE) & (operations.bytes_read >= size / 2) & (durations > 0)
    )
    if size <= 0 or not streaming.any():
        return own
    rate = float(np.median(operations.bytes_read[streaming] / durations[streaming]))
    return min(own, round(float(size) / rate))


def without_host_work(rebuilt: Rebuilt, calls: Int64, forwards: Int64) -> Rebuilt:
    """Without the host's work for checkpoints that are no longer.

    Where it was put in, it is gone; in a measured run it is in the pause behind, which shrinks by one operation, but
    not below the usual pause.

    Args:
        rebuilt: the run.
        calls: the last launching call of each pass that ran again.
        forwards: the last launching call of the forwards of these passes.
    """
    rows, operations, durations = rebuilt.rows, rebuilt.graph.operations, rebuilt.durations.copy()
    behind = np.unique(np.concatenate((calls, forwards))) + 1
    behind = behind[behind < len(rows)]
    behind = behind[operations.rank[behind] == operations.rank[behind - 1]]
    behind = behind[rows.role[behind] == RowRole.GAP]
    put_in = operations.phase[behind] == Phase.RECOMPUTE
    durations[behind[put_in]] = 0
    measured = behind[~put_in]
    if len(measured):
        before = durations[measured]
        usual = np.median(rebuilt.durations[pauses(rebuilt)])
        least = np.minimum(before, round(float(usual)))
        durations[measured] = np.maximum(before - host_operation_ns(rebuilt), least)
    return replace(rebuilt, durations=durations)
