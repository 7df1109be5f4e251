"""What a replay of a trace cannot say, and when a what-if on it is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracesim.replay.graph import EdgeKind, Rebuilt, RowRole
from tracesim.replay.measured import on_threads
from tracesim.replay.run import replay, step_duration, step_times

MOST_UNEXPLAINED = 0.2
"""Share of the step that may hang on unexplained lateness before what-ifs are refused."""
NOTED_UNEXPLAINED = 0.02
_MOST_LATE = 0.3
_SKEWED_SHARE = 0.05
_PART_OF_STEP = 0.1


@dataclass(frozen=True)
class Unexplained:
    """Lateness without a cause."""

    nanoseconds: dict[int, int]
    """Sum over the slices of each rank (row of the timeline's ranks)."""
    slices: int
    step_share: float
    """By what part the step gets shorter without it."""
    time_share: float
    """Sum over the span of the rank, on the worst rank."""


def unexplained(rebuilt: Rebuilt) -> Unexplained:
    """How much of a rebuilt run nothing explains."""
    rows = rebuilt.rows
    total = {
        rank: int(rebuilt.unexplained[rows.rank == rank].sum()) for rank in np.unique(rows.rank).tolist()
    }
    span = {rank: int(np.ptp(rows.end[rows.rank == rank])) for rank in total}
    with_it = step_duration(step_times(replay(rebuilt)))
    without = step_duration(step_times(replay(rebuilt, keep_unexplained=False)))
    return Unexplained(
        nanoseconds=total,
        slices=int((rebuilt.unexplained > 0).sum()),
        step_share=abs(1 - without / with_it) if with_it else 0.0,
        time_share=max((total[rank] / span[rank] for rank in total if span[rank]), default=0.0),
    )


def describe_limits(rebuilt: Rebuilt, lateness: Unexplained) -> list[str]:
    """What has to be said beside the figures of a replay."""
    timeline, rows = rebuilt.timeline, rebuilt.rows
    notes = list(rebuilt.notes)
    if timeline.simulated:
        notes.append(
            "a simulated run, from its trace: waits that were never the last are not in it; its scenario has them"
        )
    device = rows.role == RowRole.DEVICE
    launched = np.zeros(len(rows), dtype=np.bool_)
    launches = rebuilt.edges.kind == EdgeKind.LAUNCH
    launched[rebuilt.edges.target[launches]] = True
    unlaunched = int((device & ~launched).sum())
    if on_threads(timeline):
        notes.append(
            "no device in the trace: its threads are replayed as devices, with the operations of gloo between them"
        )
    elif unlaunched == int(device.sum()):
        notes.append(
            "no launches in the trace: the device is replayed alone, and nothing is said of the host"
        )
    elif unlaunched:
        notes.append(
            f"{unlaunched} of {int(device.sum())} device slices have no launch: measured gaps are kept"
        )
    if not len(timeline.steps):
        notes.append("no step marks: the whole span counts as one step")
    skewed = rows.start[rebuilt.edges.target[launches]] < rows.start[rebuilt.edges.source[launches]]
    if skewed.mean() > _SKEWED_SHARE if len(skewed) else False:
        notes.append(
            f"{int(skewed.sum())} of {len(skewed)} slices start before their launch: the clocks of host and device "
            "differ; delays between them are kept as they are"
        )
    notes += _cut_steps(rebuilt)
    notes += _missing_ranks(rebuilt)
    if lateness.step_share > NOTED_UNEXPLAINED:
        notes.append(
            f"{100 * lateness.step_share:.1f} % of the step hangs on lateness that nothing explains: what-ifs are "
            + ("refused" if lateness.step_share > MOST_UNEXPLAINED else "given as ranges")
        )
    if lateness.time_share > _MOST_LATE:
        notes.append(
            f"slices start late by {100 * lateness.time_share:.0f} % of the time of their rank without a cause: a "
            "device that is shared, or events that are missing from the trace"
        )
    return notes


def refusal(lateness: Unexplained) -> str:
    """Why what-ifs on this run are refused; empty if they are not."""
    if lateness.step_share > MOST_UNEXPLAINED:
        return (
            f"{100 * lateness.step_share:.0f} % of the step hangs on lateness that nothing in the trace explains, more "
            f"than the {100 * MOST_UNEXPLAINED:.0f} % up to which a what-if says something"
        )
    if lateness.time_share > _MOST_LATE:
        return (
            f"slices start late by {100 * lateness.time_share:.0f} % of the time without a cause, more than the "
            f"{100 * _MOST_LATE:.0f} % up to which a what-if says something; the trace may be sampled"
        )
    return ""


def _cut_steps(rebuilt: Rebuilt) -> list[str]:
    """Whether the trace holds parts of steps before its first mark or behind its last one."""
    rows, steps = rebuilt.rows, rebuilt.timeline.steps
    before = behind = 0
    cut = set()
    for rank in np.unique(steps.rank).tolist():
        mine, own = steps.rank == rank, (rows.rank == rank) & (rows.role != RowRole.ANCHOR)
        first, last = int(steps.start[mine].min()), int(steps.end[mine].max())
        shortest = _PART_OF_STEP * float(np.median(steps.end[mine] - steps.start[mine]))
        # A step that ended on the host may still run on the device: only what the host did tells.
        host = own & ((rows.role != RowRole.DEVICE) | on_threads(rebuilt.timeline))
        if not host.any():
            continue
        early = first - int(rows.end[host & (rows.step < 0)].min(initial=first))
        late = int(rows.start[host].max()) - last
        before, behind = max(before, early), max(behind, late)
        cut |= {rank} if max(early, late) > shortest else set()
    if not cut:
        return []
    return [
        f"{len(cut)} rank(s) were recorded in the middle of a step: for {before / 1e6:.1f} ms before the first step "
        f"mark, which counts for no step, and for {behind / 1e6:.1f} ms behind the last, which counts with that step"
    ]


def _missing_ranks(rebuilt: Rebuilt) -> list[str]:
    timeline = rebuilt.timeline
    present = len(timeline.ranks)
    world = max([timeline.world_size, *(max(g.size, len(g.ranks)) for g in timeline.groups)], default=0)
    if world <= present:
        return []
    operations = rebuilt.graph.operations
    alone = int((rebuilt.graph.is_communication() & (operations.rendezvous < 0)).sum())
    return [
        f"{present} of {world} ranks are given and stand for the others: {alone} communication slices without a "
        "partner keep their measured duration, waiting included"
    ]
