"""``attention.flash_1_ratio``: rate of the first FlashAttention over the machine's best kernel.

Rows of one source whose sequences are so long (:data:`LONG_SEQUENCE` tokens and more) that attention takes much of the
step: the ratio that each row asks for, as time is linear in its inverse, and the median of them. Only one node, so that
waiting between nodes does not count. Microbatches of one short sequence are no test of attention and take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from benchmarks.rows import MeasuredRow
from tracesim.scenario import Scenario

from .result import Fit, expressed, installed_value, time_ms

SOURCE = "llm-foundry-mpt"
FIGURES = ("attention.flash_1_ratio",)
KERNEL = "flash-1"
PROFILES = ("h100-sxm", "a100-sxm-80g")
LONG_SEQUENCE = 16384
"""Tokens from which on a sequence is long."""
_NODE = 8


def fit(files: Sequence[Path], figure: str = "") -> list[Fit]:
    """The fits of the machines whose rows are there."""
    if figure not in ("", *FIGURES):
        return []
    rows = [row for source, row in expressed(files) if source == SOURCE and _is_long(row.scenario)]
    fits = []
    for profile in PROFILES:
        own = [row for row in rows if row.scenario.hardware.name.startswith(profile)]
        if own:
            fits.append(_ratio(FIGURES[0], profile, own))
    return fits


def _is_long(scenario: Scenario) -> bool:
    long = scenario.training.seq_len >= LONG_SEQUENCE and scenario.parallel.world_size <= _NODE
    return long and scenario.training.attention == KERNEL


def _ratio(path: str, profile: str, rows: Sequence[MeasuredRow]) -> Fit:
    measured = [row.time_ms or 0.0 for row in rows]
    # At half the ratio attention takes once more what it takes at the whole.
    whole, half = ([_at_ratio_ms(row.scenario, path, ratio) for row in rows] for ratio in (1.0, 0.5))
    times = list(zip(measured, whole, half, strict=True))
    asked = [(h - w) / (m - (2 * w - h)) for m, w, h in times]
    value = round(median(asked), 2)

    def residual(ratio: float) -> float:
        return mean(100 * ((w + (h - w) * (1 / ratio - 1)) / m - 1) for m, w, h in times)

    return Fit(
        path,
        profile,
        f"{len(rows)} one-node rows of {SOURCE} with {LONG_SEQUENCE} tokens a sequence or more",
        "median of what the rows ask for",
        value,
        "mean error of the iteration time, %",
        residual(1.0),
        residual(value),
        residual(installed_value(profile, path)),
        tuple(f"{row.label}: asks for {ratio:.3f}" for row, ratio in zip(rows, asked, strict=True)),
    )


def _at_ratio_ms(scenario: Scenario, path: str, ratio: float) -> float:
    attention = replace(scenario.hardware.attention, **{path.rpartition(".")[2]: ratio})
    return time_ms(replace(scenario, hardware=replace(scenario.hardware, attention=attention)))
