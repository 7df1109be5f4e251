"""What if communication kernels took another number of streaming multiprocessors (SMs).

Compute beside communication gets what it leaves of the device: with ``t`` of ``S`` SMs gone a kernel advances at ``(S
- t) / S``, also while the communication only waits for its peers (docs/contention.md). How much of each kernel ran
beside communication is measured; that much of it is taken to stay beside it. Products whose last wave has room lose
less than this, so the range also holds the case that compute does not notice.

A collective moves data in proportion to its SMs until its link is full, and a trace does not say whether that was
full: with fewer SMs it is taken to slow down in proportion, with more to stay, and the range holds the other case.
Sends and receives take two SMs whatever their grid, and stay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Float64
from op_graphs.vocabulary import OpKind
from tracesim.analysis.intervals import covered, union
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if.communication import fixed_time, transfer_part
from tracesim.replay.what_if.network import machine_of
from tracesim.replay.what_if.selection import some, whole_number, with_note

_COPIES = (OpKind.MEMCPY, OpKind.MEMSET)


def communication_sms(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``16``, ``24:16`` (from, to), or with a hardware profile in front of the latter."""
    return _changed(rebuilt, value, compute=True, link_bound=False)


def least_effect(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """The reading in which compute does not notice and collectives follow their SMs."""
    return _changed(rebuilt, value, compute=False, link_bound=False)


def link_bound(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """The reading in which collectives with fewer SMs still fill their link, and those with more get faster."""
    return _changed(rebuilt, value, compute=True, link_bound=True)


def _changed(rebuilt: Rebuilt, value: str, *, compute: bool, link_bound: bool) -> Rebuilt:
    *named, text = value.split(":")
    what = "communication.sms"
    profile = named.pop(0) if named and not named[0].isdecimal() else ""
    if len(named) > 1:
        raise ScenarioError(f"{what}={value}: write [PROFILE:][FROM:]TO, numbers of SMs")
    machine = machine_of(rebuilt, profile, what)
    before = whole_number(named[0], what, 1) if named else machine.network.collective_sms
    after = whole_number(text, what, 1)
    if max(before, after) >= machine.sm_count:
        raise ScenarioError(
            f"{what}={value}: a {machine.name} has {machine.sm_count} SMs, not more than that"
        )
    communication = rebuilt.on_device() & (rebuilt.graph.operations.kind == OpKind.COLLECTIVE)
    some(communication, f"{what}={value}")
    durations = rebuilt.durations
    if compute:
        share = _beside_communication(rebuilt)
        rate = (machine.sm_count - before) / (machine.sm_count - after)
        durations = np.rint(durations * (1 - share + share * rate)).astype(np.int64)
    follows = after < before if not link_bound else after > before
    if follows:
        moving = np.maximum(transfer_part(rebuilt) - fixed_time(rebuilt), 0)
        more = np.rint(moving * (before / after - 1)).astype(np.int64)
        durations = np.where(communication, durations + more, durations)
    changed = replace(rebuilt, durations=durations)
    if before == after:
        return changed
    return with_note(
        changed,
        f"{what}: collectives on {after} instead of {before} of {machine.sm_count} SMs ({machine.name}); the range "
        "goes from collectives that keep their rate to compute that does not notice",
    )


def _beside_communication(rebuilt: Rebuilt) -> Float64:
    """Share of each compute slice in which a collective of its rank ran; 0 for other rows."""
    rows, operations = rebuilt.rows, rebuilt.graph.operations
    device = rebuilt.on_device()
    collective = device & (operations.kind == OpKind.COLLECTIVE)
    compute = device & ~rebuilt.graph.is_communication() & ~np.isin(operations.kind, _COPIES)
    share = np.zeros(len(rows))
    for rank in np.unique(rows.rank[collective]).tolist():
        mine = collective & (rows.rank == rank)
        busy = union(rows.start[mine], rows.end[mine])
        own = np.flatnonzero(compute & (rows.rank == rank) & (rows.end > rows.start))
        inside = covered(busy, rows.start[own], rows.end[own])
        share[own] = inside / (rows.end - rows.start)[own]
    return share
