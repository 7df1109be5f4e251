"""``training_clock_ratio``: the clock of a sustained step over the one of back-to-back runs of a single kernel.

Where a source ran a layout with several counts of microbatches, the *slope* of the iteration time over the count
decides, so that fixed costs (optimizer, gradient reduction) cannot hide in it; of several layouts the median counts.
Only dense models of a hidden size of at least 4,096 on one node with one sequence a rank take part: their kernels take
milliseconds, so that launches cannot explain much, and what communication explains differs from layout to layout.

Sources that run each layout once are fitted by level, without tensor parallelism and below the sequences on which
attention is fitted (:mod:`~benchmarks.fits.attention`): the median over their rows of the ratio that each row asks for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from benchmarks.rows import MeasuredRow
from tracesim.scenario import Scenario

from .attention import LONG_SEQUENCE
from .result import Fit, expressed, installed_value, time_ms

FIGURE = "training_clock_ratio"
BY_SLOPE = {"simumax-b200": "b200-sxm", "simumax-a100-pcie": "a100-pcie-80g"}
BY_LEVEL = {("llm-foundry-mpt", "h100-sxm"): "h100-sxm"}
_LEAST_HIDDEN = 4096
_NODE = 8


def fit(files: Sequence[Path]) -> list[Fit]:
    """One fit for each machine of :data:`BY_SLOPE` and :data:`BY_LEVEL` whose rows are there."""
    by_source: dict[str, list[MeasuredRow]] = defaultdict(list)
    for source, row in expressed(files):
        if _is_bound_by_kernels(row.scenario):
            by_source[source].append(row)
    fits = [_by_slope(source, by_source[source]) for source in BY_SLOPE if by_source[source]]
    for source, hardware in BY_LEVEL:
        rows = [
            row
            for row in by_source[source]
            if row.scenario.hardware.name == hardware
            and row.scenario.parallel.tp == 1
            and row.scenario.training.seq_len < LONG_SEQUENCE
        ]
        if rows:
            fits.append(_by_level(source, BY_LEVEL[source, hardware], rows))
    return fits


def _is_bound_by_kernels(scenario: Scenario) -> bool:
    parallel, model = scenario.parallel, scenario.model
    return (
        parallel.world_size <= _NODE
        and parallel.cp == 1
        and model.moe is None
        and model.hidden_size >= _LEAST_HIDDEN
    )


def _by_slope(source: str, rows: Sequence[MeasuredRow]) -> Fit:
    layouts: dict[str, list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        training = replace(row.scenario.training, num_microbatches=1)
        layouts[repr((row.scenario.model, row.scenario.parallel, training))].append(row)
    asked = []
    for layout in layouts.values():
        ordered = sorted(layout, key=lambda row: row.scenario.training.num_microbatches)
        first, last = (row.scenario.training.num_microbatches for row in (ordered[0], ordered[-1]))
        if last > first:
            asked.append((ordered[0].label, first, last, *_slopes(ordered[0], ordered[-1])))
    ratios = [ratio_asked(measured, full, half) for _, _, _, measured, full, half in asked]
    value = round(median(ratios), 3)
    details = tuple(
        f"{label}, {first} to {last} microbatches: {measured:.2f} ms each, "
        f"{full:.2f} at full clock, asks for {ratio:.3f}"
        for (label, first, last, measured, full, _), ratio in zip(asked, ratios, strict=True)
    )

    def residual(ratio: float) -> float:
        return mean(100 * (_at_ratio(full, half, ratio) / measured - 1) for *_, measured, full, half in asked)

    return Fit(
        FIGURE,
        BY_SLOPE[source],
        f"{len(asked)} dense layouts of {source} with several counts of microbatches",
        "median of what the slopes ask for",
        value,
        "mean error of the time a microbatch, %",
        residual(1.0),
        residual(value),
        residual(installed_value(BY_SLOPE[source], FIGURE)),
        details,
    )


def _slopes(few: MeasuredRow, many: MeasuredRow) -> tuple[float, float, float]:
    """Time of a further microbatch: measured, and simulated at full and at half the clock."""
    assert few.time_ms is not None
    assert many.time_ms is not None
    span = many.scenario.training.num_microbatches - few.scenario.training.num_microbatches
    full, half = (
        (at_clock_ms(many.scenario, clock) - at_clock_ms(few.scenario, clock)) / span for clock in (1.0, 0.5)
    )
    return (many.time_ms - few.time_ms) / span, full, half


def _by_level(source: str, profile: str, rows: Sequence[MeasuredRow]) -> Fit:
    measured = [row.time_ms or 0.0 for row in rows]
    full, half = ([at_clock_ms(row.scenario, clock) for row in rows] for clock in (1.0, 0.5))
    asked = [ratio_asked(*times) for times in zip(measured, full, half, strict=True)]
    value = round(median(asked), 3)

    def residual(ratio: float) -> float:
        return mean(
            100 * (_at_ratio(f, h, ratio) / m - 1) for m, f, h in zip(measured, full, half, strict=True)
        )

    return Fit(
        FIGURE,
        profile,
        f"{len(rows)} dense one-node rows of {source} below {LONG_SEQUENCE} tokens a sequence",
        "median of what the rows ask for",
        value,
        "mean error of the iteration time, %",
        residual(1.0),
        residual(value),
        residual(installed_value(profile, FIGURE)),
        tuple(f"{row.label}: asks for {ratio:.3f}" for row, ratio in zip(rows, asked, strict=True)),
    )


def ratio_asked(measured: float, full: float, half: float) -> float:
    """The clock that explains a time, from the times at full and at half the clock."""
    # Half the clock adds once more what runs at the clock.
    clocked = half - full
    return clocked / (measured - (full - clocked))


def _at_ratio(full: float, half: float, ratio: float) -> float:
    """Time at a clock, from those at full and at half of it."""
    return full + (half - full) * (1 / ratio - 1)


def at_clock_ms(scenario: Scenario, ratio: float) -> float:
    """Iteration time with another ``training_clock_ratio``."""
    hardware = replace(scenario.hardware, training_clock_ratio=ratio)
    return time_ms(replace(scenario, hardware=hardware))
