"""Fixed cost and cost of a microbatch, measured and predicted, where a layout ran with three counts or more.

A line through three runs says little about its own error, so the scatter of the runs about their lines is pooled: its
relative standard deviation is one figure a source, over all its layouts, each losing the two degrees of freedom of its
line. From it follow the standard errors of slope and fixed cost of each layout. A source whose runs do not scatter at
all did not time whole steps: no run of a GPU repeats to a hundred-thousandth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LEAST_COUNTS = 3
SLOPE_LIMIT_PCT, FIXED_LIMIT_PCT = 4.0, 20.0
STANDARD_ERRORS = 2.0
"""Standard errors of the measured line within which a prediction is as good as the measurement."""
COMPOSED_BELOW_PCT = 0.01
"""Scatter below which times were put together from parts; of steps that were timed it is a tenth of a percent and
more."""


@dataclass(frozen=True)
class Slope:
    """Lines through the iteration times of a layout over its microbatches, in ms."""

    source: str
    layout: str
    """The row of the fewest microbatches."""
    counts: tuple[int, ...]
    measured_slope: float
    predicted_slope: float
    measured_fixed: float
    predicted_fixed: float
    scatter_pct: float = 0.0
    """Relative standard deviation of the source's runs about their lines."""
    slope_error: float = 0.0
    """Standard error of the measured slope, in ms."""
    fixed_error: float = 0.0
    """Standard error of the measured fixed cost, in ms."""

    @property
    def slope_error_pct(self) -> float:
        """Error of the time of a further microbatch."""
        return 100 * (self.predicted_slope / self.measured_slope - 1)

    @property
    def fixed_error_pct(self) -> float | None:
        """Error of the fixed cost; None where the measured line has none."""
        if self.measured_fixed <= 0:
            return None
        return 100 * (self.predicted_fixed / self.measured_fixed - 1)

    @property
    def composed(self) -> bool:
        """Whether the times do not scatter, so that they are sums of parts and no steps that were timed."""
        return self.scatter_pct < COMPOSED_BELOW_PCT

    def slope_right(self, *, with_scatter: bool = False) -> bool:
        """Whether the slope is within its limit, or within what the measured one is uncertain by."""
        off = abs(self.predicted_slope - self.measured_slope)
        within = with_scatter and off <= STANDARD_ERRORS * self.slope_error
        return within or abs(self.slope_error_pct) <= SLOPE_LIMIT_PCT

    def fixed_right(self, *, with_scatter: bool = False) -> bool:
        """The same of the fixed cost."""
        off = abs(self.predicted_fixed - self.measured_fixed)
        within = with_scatter and off <= STANDARD_ERRORS * self.fixed_error
        percent = self.fixed_error_pct
        return within or (percent is not None and abs(percent) <= FIXED_LIMIT_PCT)


def verdict(found: Sequence[Slope]) -> str:
    """How many layouts are right, strictly and allowing for the scatter of the runs, and how many were timed."""
    timed = [one for one in found if not one.composed]
    words = (
        f"The slope is within {SLOPE_LIMIT_PCT:.0f} % in {sum(one.slope_right() for one in found)} of {len(found)} "
        f"layouts, the fixed cost within {FIXED_LIMIT_PCT:.0f} % in {sum(one.fixed_right() for one in found)}"
    )
    if not timed:
        return words + "."
    lenient = [
        sum(right(one, with_scatter=True) for one in found)
        for right in (Slope.slope_right, Slope.fixed_right)
    ]
    words += (
        f"; counting as right what is within {STANDARD_ERRORS:.0f} standard errors of the measured line, {lenient[0]} "
        f"and {lenient[1]}."
    )
    if len(timed) == len(found):
        return words
    counts = [
        sum(right(one, with_scatter=scatter) for one in timed)
        for right in (Slope.slope_right, Slope.fixed_right)
        for scatter in (False, True)
    ]
    return words + (
        f" Of the {len(timed)} layouts whose times scatter, as times of steps do, the slope is within its limit in "
        f"{counts[0]} ({counts[1]} with the scatter), the fixed cost in {counts[2]} ({counts[3]})."
    )


def slopes(rows: Iterable[Mapping[str, Any]]) -> list[Slope]:
    """One a layout with at least three counts of microbatches; ``rows`` as in the JSON of the scoreboard."""
    layouts: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "time" in row and row.get("layout"):
            layouts[row["source"], row["layout"]].append(row)
    found: list[Slope] = []
    squares: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for (source, _), group in layouts.items():
        ordered = sorted(group, key=lambda row: row["microbatches"])
        counts = tuple(row["microbatches"] for row in ordered)
        if len(set(counts)) < LEAST_COUNTS:
            continue
        measured, predicted = (
            _line(counts, [row["time"][side] for row in ordered]) for side in ("measured", "predicted")
        )
        found.append(
            Slope(source, ordered[0]["row"], counts, measured[0], predicted[0], measured[1], predicted[1])
        )
        squares[source].append((_scatter(counts, ordered, measured), len(counts) - 2))
    scatter = {
        source: float(np.sqrt(sum(square for square, _ in parts) / sum(freedom for _, freedom in parts)))
        for source, parts in squares.items()
    }
    return [_with_errors(one, scatter[one.source]) for one in found]


def _scatter(counts: Sequence[int], ordered: Sequence[Mapping[str, Any]], line: tuple[float, float]) -> float:
    """Sum of the squared relative deviations of the measured times from their line."""
    return float(
        sum(
            ((line[0] * count + line[1]) / row["time"]["measured"] - 1) ** 2
            for count, row in zip(counts, ordered, strict=True)
        )
    )


def _with_errors(one: Slope, scatter: float) -> Slope:
    """A line with the standard errors that the relative scatter of the runs gives it."""
    counts = np.asarray(one.counts, dtype=float)
    weights = 1 / (one.measured_slope * counts + one.measured_fixed)
    design = np.stack([counts * weights, weights], axis=1)
    slope_error, fixed_error = scatter * np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
    return replace(
        one, scatter_pct=100 * scatter, slope_error=float(slope_error), fixed_error=float(fixed_error)
    )


def _line(counts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of least squares of the relative deviation: short runs weigh like long ones."""
    slope, fixed = np.polyfit(np.asarray(counts, dtype=float), np.asarray(times), 1, w=1 / np.asarray(times))
    return float(slope), float(fixed)
