"""Two timelines compared: figures of both, alignment, and attribution of the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from op_graphs.timeline import Timeline
from tracesim.analysis import Breakdown, step_windows
from tracesim.analysis.clocks import align_clocks, estimate_offsets
from tracesim.analysis.cpu_runs import threads_as_devices
from tracesim.analysis.matching import match_communication
from tracesim.diff.alignment import Alignment, align_timelines
from tracesim.diff.attribution import Attribution, attribute, mean_parts
from tracesim.diff.claims import Claimer
from tracesim.diff.figures import (
    compare_figures,
    compare_kinds,
    kind_figures,
    mean,
    mean_kinds,
    step_figures,
    steps_by_rank,
)
from tracesim.diff.host import host_in_gaps
from tracesim.diff.matcher import MOVED, PIECE
from tracesim.diff.memory import compare_peaks
from tracesim.diff.pairing import pair_ranks
from tracesim.diff.ranking import ranked_operations, unmatched_operations
from tracesim.diff.words import summary

SCHEMA = "tracesim.diff/1"


@dataclass(frozen=True)
class Comparison:
    """Two timelines, what in them matches, and why their steps differ."""

    alignment: Alignment
    attribution: Attribution
    result: dict[str, Any]
    """The figures as plain data, ready for JSON; see :func:`diff_timelines`."""


def compare_timelines(a: Timeline, b: Timeline) -> Comparison:
    """Align two timelines and attribute the difference of their steps."""
    a, b = threads_as_devices(a), threads_as_devices(b)
    figures = _figures(a, b)
    (a, claims_a), (b, claims_b) = _prepared(a), _prepared(b)
    ranks = pair_ranks(a, b, step_windows(a), step_windows(b))
    alignment = align_timelines(a, b, ranks)
    attribution = attribute(alignment, (claims_a, claims_b))
    numbers = [(int(a.ranks.rank[rank.a]), int(b.ranks.rank[rank.b])) for rank in ranks]
    result = {
        **figures,
        "matched_fraction": alignment.matched_fraction(),
        "matched": {
            "fraction_a": alignment.matched_fraction(0),
            "fraction_b": alignment.matched_fraction(1),
            "pairs": len(alignment.how),
            "moved": int((alignment.how == MOVED).sum()),
            "pieces": int((alignment.how == PIECE).sum()),
            "outside_a_ns": alignment.outside(0),
            "outside_b_ns": alignment.outside(1),
        },
        "attribution": {
            **mean_parts(attribution.steps),
            "ranks": [
                {"rank": x, "rank_b": y, **mean_parts([s for s in attribution.steps if s.rank == number])}
                for number, (x, y) in enumerate(numbers)
            ],
            "steps": [
                {
                    "rank": numbers[step.rank][0],
                    "rank_b": numbers[step.rank][1],
                    "step_a": step.step_a,
                    "step_b": step.step_b,
                    "step_a_ns": step.a,
                    "step_b_ns": step.b,
                    "difference_ns": step.b - step.a,
                    "parts_ns": dict(step.parts),
                }
                for step in attribution.steps
            ],
        },
        "operations": ranked_operations(alignment, attribution),
        "unmatched": {"a": unmatched_operations(alignment, 0), "b": unmatched_operations(alignment, 1)},
        "host_in_launch_gaps": host_in_gaps(alignment, attribution),
        "memory": compare_peaks(a, b),
        "clocks": [
            {"rank": x, "rank_b": y, "offset_ns": c.offset, "spread_ns": c.spread, "anchors": c.anchors}
            for (x, y), c in zip(numbers, alignment.clocks, strict=True)
        ],
    }
    return Comparison(alignment, attribution, {**result, "summary": summary(result)})


def diff_timelines(a: Timeline, b: Timeline) -> dict[str, Any]:
    """Compare two timelines.

    Returns:
        A dict ready for JSON, described in ``docs/diff.md``. Without alignment: ``schema``; ``a`` and ``b`` (name,
        simulated, device, ranks, steps); ``averages`` and ``ranks[i]`` (ranks whose number both sides have) with
        ``metrics`` and ``kinds``, each figure as ``{"a", "b", "absolute", "relative"}``, times in ms a step,
        ``absolute = b - a``, ``relative = b / a - 1`` (None where ``a`` is 0). With it: ``matched_fraction``,
        ``attribution`` (``difference_ns`` and ``parts_ns``, which add up to it, as means, by rank and by step),
        ``operations``, ``unmatched``, ``host_in_launch_gaps``, ``memory``, ``clocks`` and ``summary`` (sentences).
    """
    return compare_timelines(a, b).result


def _prepared(timeline: Timeline) -> tuple[Timeline, Claimer]:
    matches = match_communication(timeline)
    timeline = align_clocks(timeline, estimate_offsets(timeline, matches))
    return timeline, Claimer(timeline, matches)


def _figures(a: Timeline, b: Timeline) -> dict[str, Any]:
    sides = [steps_by_rank(timeline) for timeline in (a, b)]
    metrics = [{rank: step_figures(found) for rank, found in side.items()} for side in sides]
    kinds = [{rank: kind_figures(found) for rank, found in side.items()} for side in sides]
    common = sorted(set(sides[0]) & set(sides[1]))
    return {
        "schema": SCHEMA,
        "a": _side(a, sides[0]),
        "b": _side(b, sides[1]),
        "averages": {
            "metrics": compare_figures(mean(metrics[0].values()), mean(metrics[1].values())),
            "kinds": compare_kinds(mean_kinds(kinds[0].values()), mean_kinds(kinds[1].values())),
        },
        "ranks": [
            {
                "rank": rank,
                "metrics": compare_figures(metrics[0][rank], metrics[1][rank]),
                "kinds": compare_kinds(kinds[0][rank], kinds[1][rank]),
            }
            for rank in common
        ],
    }


def _side(timeline: Timeline, by_rank: Mapping[int, list[Breakdown]]) -> dict[str, Any]:
    return {
        "name": timeline.name,
        "simulated": timeline.simulated,
        "device": timeline.device,
        "world_size": timeline.world_size,
        "ranks": sorted(by_rank),
        "steps": max((len(steps) for steps in by_rank.values()), default=0),
    }
