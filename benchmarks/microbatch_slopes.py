"""Fixed cost and cost of a microbatch, measured and predicted, where a layout ran with three counts or more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_COUNTS = 3
SLOPE_LIMIT_PCT, FIXED_LIMIT_PCT = 4.0, 20.0


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


def slopes(rows: Iterable[Mapping[str, Any]]) -> list[Slope]:
    """One a layout with at least three counts of microbatches; ``rows`` as in the JSON of the scoreboard."""
    layouts: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "time" in row and row.get("layout"):
            layouts[row["source"], row["layout"]].append(row)
    found = []
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
    return found


def _line(counts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of least squares of the relative deviation: short runs weigh like long ones."""
    slope, fixed = np.polyfit(np.asarray(counts, dtype=float), np.asarray(times), 1, w=1 / np.asarray(times))
    return float(slope), float(fixed)
