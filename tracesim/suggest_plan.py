"""Parallel degrees and what is sharded, from the process groups and transfers of a measured trace."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, Dimension
from tracesim.analysis import group_dimension, slice_dimensions

_DEGREES = {Dimension.TP: "tp", Dimension.CP: "cp", Dimension.PP: "pp", Dimension.EP: "ep"}


def suggest_parallel(timeline: Timeline, layers: int) -> tuple[dict[str, int | bool], list[str]]:
    """Fields of ``parallel`` of a scenario, and in words what the trace does not tell.

    Args:
        timeline: of one rank or several.
        layers: layers that a rank runs, to tell shards that are gathered layer by layer from those gathered once.
    """
    sizes, unknown = _degrees(timeline)
    world = max(timeline.world_size, len(timeline.ranks), 1)
    dense = int(np.prod([size for key, size in sizes.items() if key != "ep"], dtype=np.int64))
    known = any(group_dimension(group.name) for group in timeline.groups)
    if world % dense:
        unknown.append(f"parallel.dp: a world of {world} is no multiple of {dense} ranks; 1 is assumed")
    sizes["dp"] = max(world // dense, 1) if world % dense == 0 else 1
    if world > 1 and not known:
        unknown.append(
            f"parallel: no process group tells its dimension; data parallel over {world} ranks is assumed"
        )
    found: dict[str, int | bool] = dict(sizes)
    found |= _sharding(timeline, sizes, layers, known, unknown)
    if sizes.get("pp", 1) > 1:
        unknown.append(
            "schedule, parallel.vpp: not looked for; `tracesim schedule` recovers what a trace executed"
        )
    return found, unknown


def _degrees(timeline: Timeline) -> tuple[dict[str, int], list[str]]:
    sizes: dict[str, int] = {}
    unknown = []
    for dimension, key in _DEGREES.items():
        groups = [group for group in timeline.groups if group_dimension(group.name) == dimension]
        size = max((group.size or len(group.ranks) for group in groups), default=1)
        if dimension == Dimension.PP:
            joined = _largest_joined(groups)
            if joined > size:
                # Groups of two are pairs of neighbours: those that share a rank are one pipeline.
                size = joined
                unknown.append(
                    f"parallel.pp: groups are pairs of stages; {size} of them hang together, there may be more"
                )
        if size > 1:
            sizes[key] = size
    return sizes, unknown


def _largest_joined(groups: Iterable[CommunicationGroup]) -> int:
    """Ranks of the largest set that groups with common ranks make together."""
    sets: list[set[int]] = []
    for group in groups:
        ranks = set(group.ranks)
        apart = [other for other in sets if not other & ranks]
        sets = [*apart, ranks.union(*(other for other in sets if other & ranks))]
    return max(map(len, sets), default=0)


def _sharding(
    timeline: Timeline, sizes: dict[str, int], layers: int, known: bool, unknown: list[str]
) -> dict[str, int | bool]:
    """``sp`` and ``zero``, from which transfers each dimension makes on the first rank."""
    slices = timeline.slices
    mine = np.flatnonzero(timeline.on_device() & (timeline.slice_ranks() == 0) & (slices.communication > 0))
    dimension = slice_dimensions(timeline)[mine]
    if not known:
        dimension = np.full(len(mine), Dimension.DP)

    def count(of: Dimension, transfer: Communication) -> int:
        return int(((dimension == of) & (slices.communication[mine] == transfer)).sum())

    found: dict[str, int | bool] = {}
    if sizes.get("tp", 1) > 1 and (dimension == Dimension.TP).any():
        found["sp"] = count(Dimension.TP, Communication.REDUCE_SCATTER) > 0
    elif sizes.get("tp", 1) > 1:
        unknown.append("parallel.sp: no transfer of tensor parallelism is shown; the default is used")
    if sizes["dp"] == 1:
        return found
    scattered = count(Dimension.DP, Communication.REDUCE_SCATTER)
    gathered = count(Dimension.DP, Communication.ALL_GATHER)
    steps = max(int((timeline.steps.rank == 0).sum()), 1)
    if scattered and gathered >= layers * steps > 1:
        found["zero"] = 3
    elif scattered:
        found["zero"] = 1
        unknown.append("parallel.zero: gradients are scattered once a bucket; 1 or 2")
    elif count(Dimension.DP, Communication.ALL_REDUCE):
        found["zero"] = 0
    else:
        unknown.append("parallel.zero: no transfer of gradients is shown; the default is used")
    return found
