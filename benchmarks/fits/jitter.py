"""``rank_jitter``: by how much ranks differ that wait for each other in every layer (``tracesim.rank_jitter``).

Rows of one source that ran the same layout under fully sharded data parallelism on different numbers of ranks: work,
messages and memory of a rank are nearly the same, so what the larger run takes longer than simulated without jitter is
waiting. Of each layout the smallest and the largest run count; the value is the median of what the layouts ask for,
those that ask for less than nothing among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.rows import MeasuredRow
from tracesim.rank_jitter import slowest_rank_factor
from tracesim.scenario import Scenario

from .result import Fit, expressed, installed_value, time_ms

FIGURE = "rank_jitter"
SOURCE = "llm-foundry-mpt"
PROFILES = ("a100-sxm-80g", "h100-sxm")
"""Machines that get one value: their rows ask for the same, and one has too few."""
_TRIAL = 0.04


def fit(files: Sequence[Path]) -> list[Fit]:
    """One value for the machines of :data:`PROFILES`, if rows of their source are there."""
    layouts: dict[str, list[MeasuredRow]] = defaultdict(list)
    for source, row in expressed(files):
        if source == SOURCE and row.scenario.parallel.zero >= 2:
            layouts[_layout(row.scenario)].append(row)
    pairs = []
    for rows in layouts.values():
        ordered = sorted(rows, key=lambda row: row.scenario.parallel.world_size)
        few, many = ordered[0], ordered[-1]
        if _waits(many.scenario) > _waits(few.scenario):
            pairs.append((few, many))
    if not pairs:
        return []
    growths = [_growths(few, many) for few, many in pairs]
    asked = [_TRIAL * (measured - without) / (trial - without) for measured, without, trial in growths]
    value = round(median(asked), 3)

    def residual(jitter: float) -> float:
        return median(
            100 * ((without + (trial - without) * jitter / _TRIAL) / measured - 1)
            for measured, without, trial in growths
        )

    details = tuple(
        f"{few.label} to {many.scenario.parallel.world_size} ranks: {100 * (measured - 1):+.1f} %, "
        f"without jitter {100 * (without - 1):+.1f} %, asks for {found:.3f}"
        for (few, many), (measured, without, _), found in zip(pairs, growths, asked, strict=True)
    )
    return [
        Fit(
            FIGURE,
            profile,
            f"{len(pairs)} layouts of {SOURCE} on different numbers of ranks, A100 and H100",
            "median of what the layouts ask for",
            value,
            "median error of how much longer the larger run takes, %",
            residual(0.0),
            residual(value),
            residual(installed_value(profile, FIGURE)),
            details,
        )
        for profile in PROFILES
    ]


def _layout(scenario: Scenario) -> str:
    """Everything but the number of ranks."""
    parallel = replace(scenario.parallel, dp=1)
    return repr(
        (scenario.hardware.name, scenario.hardware.memory, scenario.model, parallel, scenario.training)
    )


def _waits(scenario: Scenario) -> float:
    """The factor of a scenario at the trial value."""
    return slowest_rank_factor(_with(scenario, _TRIAL))


def _with(scenario: Scenario, jitter: float) -> Scenario:
    return replace(scenario, hardware=replace(scenario.hardware, rank_jitter=jitter))


def _growths(few: MeasuredRow, many: MeasuredRow) -> tuple[float, float, float]:
    """Time of the larger run over that of the smaller: measured, simulated without jitter, and at the trial value."""
    assert few.time_ms is not None
    assert many.time_ms is not None

    def growth(jitter: float) -> float:
        return time_ms(_with(many.scenario, jitter)) / time_ms(_with(few.scenario, jitter))

    return many.time_ms / few.time_ms, growth(0.0), growth(_TRIAL)
