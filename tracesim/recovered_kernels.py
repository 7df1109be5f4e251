"""The actions of a pipeline from kernels alone, where a trace has neither pipeline tracks nor annotations.

Of all ranks of a trace those of one pipeline are taken: the ones that sends and receives join with the first rank, or,
where none are matched, one rank of each pipeline coordinate. Their kernels are cut into stretches
(``tracesim.recovered_bursts``), and these get stage and microbatch (``tracesim.recovered_flow``). A rank by itself may
show a pair of a forward and a backward (``tracesim.recovered_pair``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind
from schedules import Action
from schedules.actions import overlapped

from .analysis import Analysis, Window
from .analysis.breakdown import slice_dimensions
from .errors import TraceError
from .recovered_bursts import RankBursts, find_bursts
from .recovered_flow import RankActions, follow_flow, partners, without_transfers
from .recovered_pair import actions_of_pair, pair_of_one_rank
from .recovered_words import BACKWARD, FORWARD, Burst


def actions_from_kernels(
    analysis: Analysis, step: int | None
) -> tuple[list[RankActions], dict[int, Window]] | None:
    """The actions of each pipeline rank in one step, and its windows by rank; None where nothing tells a pipeline.

    Raises:
        TraceError: if the step is not there, or what was sent and received does not make a pipeline.
    """
    timeline = analysis.timeline
    partner = partners(analysis.transfers)
    joined = _joined_ranks(timeline, partner)
    members = joined or _ranks_by_coordinate(timeline)
    if len(members) < 2:
        alone = pair_of_one_rank(analysis, step)
        if alone is None:
            return None
        pair, window = alone
        return [actions_of_pair(pair, timeline)], {pair.rank: window}
    windows = _windows(analysis, members, step)
    dimensions = slice_dimensions(timeline)
    bursts = find_bursts(timeline, dimensions, [windows[rank] for rank in members], partner)
    if len(bursts) < len(members):
        return None
    if joined:
        _check_all_matched(timeline, partner, bursts)
    found = follow_flow(timeline, partner, bursts) if joined else without_transfers(bursts)
    rows = [_row(of.rank, row) for of, row in zip(bursts, found, strict=True)]
    rows.sort(key=lambda row: min(part.stage for action in row.actions for part in action.parts))
    return rows, windows


def _check_all_matched(timeline: Timeline, partner: Mapping[int, int], bursts: Sequence[RankBursts]) -> None:
    """Refuse transfers whose other end is not in the trace: the stages would be counted wrong."""
    for of in bursts:
        for name, rows in (("sends", of.sends), ("receives", of.receives)):
            missing = [row for row in rows.tolist() if row not in partner]
            if missing:
                peers = sorted({int(timeline.slices.peer[row]) for row in missing} - {-1})
                told = f" (with rank {', '.join(map(str, peers))})" if peers else ""
                raise TraceError(
                    f"rank {timeline.ranks.rank[of.rank]} has {len(missing)} of {len(rows)} {name} whose other end the "
                    f"trace does not show{told}; give the files of all pipeline ranks, or another step"
                )


def _joined_ranks(timeline: Timeline, partner: Mapping[int, int]) -> list[int]:
    """Ranks that matched sends join with the lowest rank that sends, ascending."""
    rank, kind = timeline.slice_ranks(), timeline.slices.kind
    pairs = {(int(rank[row]), int(rank[other])) for row, other in partner.items() if kind[row] == OpKind.P2P}
    if not pairs:
        return []
    members = {min(min(pair) for pair in pairs)}
    while more := {other for one, other in pairs if one in members} - members:
        members |= more
    return sorted(members)


def _ranks_by_coordinate(timeline: Timeline) -> list[int]:
    """The first rank of each pipeline coordinate, in their order; none where coordinates are not known."""
    place = timeline.ranks.pp.tolist()
    first: dict[int, int] = {}
    for rank, at in enumerate(place):
        first.setdefault(at, rank)
    whole = sorted(first) == list(range(len(first)))
    return [first[at] for at in sorted(first)] if whole else []


def _windows(analysis: Analysis, members: Sequence[int], step: int | None) -> dict[int, Window]:
    by_step: dict[int, dict[int, Window]] = {}
    for of in analysis.steps:
        if of.window.rank in members:
            by_step.setdefault(of.window.step, {})[of.window.rank] = of.window
    whole = sorted(number for number, found in by_step.items() if len(found) == len(members))
    if not whole:
        raise TraceError("no step of the trace is there on all ranks that send to each other")
    if step is not None and step not in whole:
        raise TraceError(
            f"step {step} is not a whole step of the trace; choose one of {', '.join(map(str, whole))}"
        )
    return by_step[whole[0] if step is None else step]


def _row(rank: int, found: Sequence[tuple[Action, Burst]]) -> RankActions:
    """The actions of a rank; a forward and a backward that run interleaved are one."""
    actions: list[Action] = []
    starts: list[int] = []
    ends: list[int] = []
    letters: list[str] = []
    for action, burst in found:
        if actions and burst.start < ends[-1] and {burst.letter, letters[-1]} == {FORWARD, BACKWARD}:
            pair = (action, actions[-1]) if burst.letter == FORWARD else (actions[-1], action)
            actions[-1], ends[-1], letters[-1] = overlapped(*pair), max(ends[-1], burst.end), ""
            continue
        actions.append(action)
        starts.append(burst.start)
        ends.append(burst.end)
        letters.append(burst.letter)
    return RankActions(rank, tuple(actions), np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64))
