"""What if collectives ran by another algorithm, on another network, or between more ranks.

Each collective is scaled by its modelled time after the change over its modelled time as it was measured
(:mod:`tracesim.cost.collectives`), so the machine's own efficiency stays in. A trace does not say which algorithm ran
(the name of an NCCL kernel is that of its entry, not of what it does): as measured means what the model takes for the
cheapest, unless the algorithm is given. Collectives without a size or a group in the trace stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hardware_profiles import HardwareProfile, load_profile, profile_for_device
from op_graphs.columns import Bool
from op_graphs.vocabulary import Communication, Dimension, Phase
from tracesim.analysis.breakdown import slice_dimensions
from tracesim.cost.collectives import Algorithm, CollectiveCost
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if.communication import scaled_transfers, without_waiting
from tracesim.replay.what_if.memory import MemoryEffect, unchanged, unknown
from tracesim.replay.what_if.selection import some, whole_number, with_note

_ALGORITHMS = {a.value: a for a in Algorithm if a not in (Algorithm.NONE, Algorithm.MEASURED)}
_SHARDED = (Communication.ALL_GATHER, Communication.REDUCE_SCATTER)


@dataclass(frozen=True)
class Collective:
    """What all occurrences of a collective in a run have in common."""

    communication: Communication
    size: int
    """Bytes of the full message."""
    ranks: tuple[int, ...]
    """Global ranks of the members."""


def algorithm(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``tree``, ``ring:tree`` (from, to), or with a hardware profile in front of either."""
    parts = value.split(":")
    profile = parts.pop(0) if parts[0] not in _ALGORITHMS and len(parts) > 1 else ""
    if len(parts) > 2 or any(part not in _ALGORITHMS for part in parts):
        raise ScenarioError(
            f"network.algorithm={value}: write [PROFILE:][FROM:]TO with algorithms out of {', '.join(_ALGORITHMS)}"
        )
    costs = CollectiveCost(machine_of(rebuilt, profile, "network.algorithm"))
    before = _ALGORITHMS[parts[0]] if len(parts) == 2 else None
    after = _ALGORITHMS[parts[-1]]

    def ratio(one: Collective) -> float:
        new = costs.duration_ns(one.communication, one.size, one.ranks, after).time_ns
        old = costs.duration_ns(one.communication, one.size, one.ranks, before).time_ns
        return new / old if old else 1.0

    what = f"network.algorithm={value}"
    return _rescaled(rebuilt, ratio, _communication(rebuilt, what), what)


def topology(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``FROM:TO``, two hardware profiles: their networks, all else as measured."""
    first, _, second = value.rpartition(":")
    before = machine_of(rebuilt, first, "network.topology")
    after = load_profile(second)
    what = f"network.topology={value}"
    return _rescaled(rebuilt, _between(before, after), _communication(rebuilt, what), what)


def domain(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``16`` GPUs joined by the fast links, or ``PROFILE:16``."""
    profile, _, size = value.rpartition(":")
    before = machine_of(rebuilt, profile, "network.domain")
    number = whole_number(size, "network.domain", 1)
    after = replace(before, network=replace(before.network, gpus_per_domain=number))
    what = f"network.domain={value}"
    changed = _rescaled(rebuilt, _between(before, after), _communication(rebuilt, what), what)
    return with_note(
        changed,
        f"{what}: ranks lie in domains of {number} in the order of their numbers, before in domains of "
        f"{before.network.gpus_per_domain} ({before.name})",
    )


def _between(before: HardwareProfile, after: HardwareProfile) -> Callable[[Collective], float]:
    costs = CollectiveCost(before), CollectiveCost(after)

    def ratio(one: Collective) -> float:
        old, new = (c.duration_ns(one.communication, one.size, one.ranks).time_ns for c in costs)
        return new / old if old else 1.0

    return ratio


# -- data parallel degree --------------------------------------------------------------------------------------------


def data_parallel(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``16`` data-parallel ranks, or ``PROFILE:16``: each as those of the trace, with the same batch of its own."""
    profile, _, text = value.rpartition(":")
    what = f"dp={value}"
    degree = whole_number(text, "dp", 1)
    rows = data_parallel_rows(rebuilt, what)
    groups = _groups(rebuilt, rows)
    measured = _degree(rebuilt, rows, groups, what)
    if degree == measured:
        return rebuilt
    if degree == 1:
        alone = without_waiting(rebuilt, rows)
        return with_note(alone, f"{what}: no data-parallel communication is left of {measured} ranks")
    costs = CollectiveCost(machine_of(rebuilt, profile, "dp"))

    def ratio(one: Collective) -> float:
        members = len(one.ranks) * degree
        if members % measured:
            raise ScenarioError(
                f"{what}: a data-parallel group of {len(one.ranks)} ranks beside one of {measured} would get "
                f"{members / measured:g} ranks; take a multiple of {measured // np.gcd(measured, len(one.ranks))}"
            )
        old = costs.duration_ns(one.communication, one.size, one.ranks).time_ns
        wider = _spread(one.ranks, members // measured)
        new = costs.duration_ns(one.communication, one.size, wider).time_ns
        return new / old if old else 1.0

    changed = _rescaled(rebuilt, ratio, rows, what)
    return with_note(
        changed,
        f"{what}: {degree} data-parallel ranks instead of {measured}, each with the batch it has, so the global batch "
        f"is {degree / measured:g} times as large; waiting for the slowest of more ranks is not added",
    )


def data_parallel_memory(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """Sharded states shrink with the degree; the trace does not say how large they are."""
    rows = data_parallel_rows(rebuilt, f"dp={value}")
    sharded = np.isin(rebuilt.graph.operations.communication[rows], _SHARDED)
    if sharded.any():
        return unknown(
            "what is sharded over data-parallel ranks (optimizer states, with full sharding weights and gradients "
            "too) changes inversely to their number, and the trace does not say how large it is"
        )
    return unchanged(rebuilt, value)


def data_parallel_rows(rebuilt: Rebuilt, what: str) -> Bool:
    """Collectives between data-parallel ranks: by the name of the group, else by the synchronisation of gradients."""
    operations, device = rebuilt.graph.operations, rebuilt.on_device()
    of_slice = slice_dimensions(rebuilt.timeline)
    slices = rebuilt.rows.slice_row
    dimension = np.where(slices >= 0, of_slice[np.maximum(slices, 0)], Dimension.NONE)
    communication = device & rebuilt.graph.is_communication()
    rows = communication & np.isin(dimension, (Dimension.DP, Dimension.EDP))
    if not rows.any():
        rows = communication & (dimension == Dimension.NONE)
        rows &= np.isin(operations.phase, (Phase.GRADIENT_SYNC, Phase.PARAM_SYNC))
    if not rows.any():
        raise ScenarioError(
            f"{what}: no data-parallel communication found; looked for process groups with a name such as dp, fsdp or "
            "DATA_PARALLEL_GROUP and for communication launched by the accumulation of gradients"
        )
    return rows


def _degree(rebuilt: Rebuilt, rows: Bool, groups: list[tuple[int, ...]], what: str) -> int:
    """Members of the group that data-parallel communication takes most time in."""
    time: dict[int, int] = {}
    for row in np.flatnonzero(rows).tolist():
        members = len(groups[int(rebuilt.graph.operations.group[row])])
        time[members] = time.get(members, 0) + int(rebuilt.durations[row])
    time.pop(0, None)
    if not time:
        raise ScenarioError(
            f"{what}: the trace does not say how many ranks its data-parallel groups have; looked for process groups, "
            "the world size and the ranks of matched collectives"
        )
    return max(time, key=lambda members: (time[members], members))


def _spread(ranks: tuple[int, ...], members: int) -> tuple[int, ...]:
    """A group of another size with the distance between neighbours that it has."""
    ordered = sorted(ranks)
    stride = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    return tuple(ordered[0] + stride * number for number in range(members))


# -- collectives of a run --------------------------------------------------------------------------------------------


def _rescaled(rebuilt: Rebuilt, ratio: Callable[[Collective], float], rows: Bool, what: str) -> Rebuilt:
    """The run with each collective scaled by a ratio; those that cannot be modelled stay, and are counted."""
    operations = rebuilt.graph.operations
    groups = _groups(rebuilt, rows)
    factors = np.ones(len(operations))
    chosen = np.flatnonzero(rows)
    columns = ("communication", "communication_bytes", "group")
    key = np.stack([getattr(operations, column)[chosen].astype(np.int64) for column in columns])
    distinct, label = np.unique(key, axis=1, return_inverse=True)
    label = label.ravel()
    count = np.bincount(label, minlength=distinct.shape[1])
    unsized, refused, why = 0, 0, ""
    for number, (communication, size, group) in enumerate(distinct.T.tolist()):
        members = groups[group]
        if len(members) < 2 or (size <= 0 and communication != Communication.BARRIER):
            unsized += int(count[number])
            continue
        try:
            factors[chosen[label == number]] = ratio(Collective(Communication(communication), size, members))
        except ScenarioError:
            raise
        except ValueError as error:
            refused, why = refused + int(count[number]), str(error)
    if unsized + refused == len(chosen):
        raise ScenarioError(
            f"{what}: none of {len(chosen)} communication slices can be modelled; "
            + (
                why
                or "looked for the size of their messages and the ranks of their groups, which newer traces hold"
            )
        )
    changed = scaled_transfers(rebuilt, rows, factors)
    if unsized:
        changed = with_note(
            changed,
            f"{what}: {unsized} of {len(chosen)} communication slices have no size or group in the trace and stay",
        )
    if refused:
        changed = with_note(
            changed, f"{what}: {refused} of {len(chosen)} communication slices stay, as {why}"
        )
    return changed


def _groups(rebuilt: Rebuilt, rows: Bool) -> list[tuple[int, ...]]:
    """Members of each group; the last entry is for operations without one. Empty where not known.

    Ranks that the trace does not list are taken to follow one another, or to be those that meet in a collective.
    """
    timeline, operations = rebuilt.timeline, rebuilt.graph.operations
    found = [g.ranks or tuple(range(g.size)) for g in timeline.groups]
    world = timeline.world_size if timeline.world_size > 1 else 0
    met = rows & (operations.group < 0) & (operations.rendezvous >= 0)
    members = np.unique(operations.rendezvous[met], return_counts=True)[1] if met.any() else np.zeros(1, int)
    return [*found, tuple(range(max(world, int(members.max()))))]


def _communication(rebuilt: Rebuilt, what: str) -> Bool:
    return some(rebuilt.on_device() & rebuilt.graph.is_communication(), what)


def machine_of(rebuilt: Rebuilt, name: str, what: str) -> HardwareProfile:
    """The profile of a name, else that of the device of the trace.

    Raises:
        ScenarioError: if none is named and none is known for the device.
        ProfileError: if there is no such profile.
    """
    device = rebuilt.timeline.device
    found = name or profile_for_device(device)
    if not found:
        raise ScenarioError(
            f"{what}: no hardware profile is known for {device or 'the device, which the trace does not name'}; "
            f"write one in front, as in {what}=a100-sxm-80g:... (`tracesim hardware` lists them)"
        )
    return load_profile(found)
