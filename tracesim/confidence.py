"""How far off a prediction may be: the errors of past predictions, as ranges and probabilities.

``residuals.yaml`` holds quantiles of measured over predicted, from the rows that ``python -m benchmarks.intervals``
compares. Every source of rows counts alike, however many rows it has: a new run differs from the known ones as one
source does from another (other cluster, framework version, settings), not as two rows of one source do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

CONFIDENCE = 0.8
"""Share of the runs that a range is meant to contain."""

ONE_DOMAIN, SEVERAL_DOMAINS = "time in one domain", "time over several domains"
ALLOCATED, RESERVED = "allocated memory", "reserved memory"
FIGURES = (ONE_DOMAIN, SEVERAL_DOMAINS, ALLOCATED, RESERVED)
"""What residuals are kept apart for."""


@dataclass(frozen=True)
class Residuals:
    """The distribution of measured over predicted of one figure."""

    rows: int
    sources: int
    percents: tuple[float, ...]
    """Rising from 0 to 100."""
    ratios: tuple[float, ...]
    """The quantile of each; measured over predicted."""
    tail_percent: float
    """What a range leaves out on each side, so that it holds :data:`CONFIDENCE` of the rows of a *further* source.

    A few sources do not show all that the next one can do, so this is at most half of what a range misses.
    """

    def range_of(self, predicted: float) -> tuple[float, float]:
        """Where the measured value lies with a probability of :data:`CONFIDENCE`, equal tails on both sides."""
        low, high = np.interp([self.tail_percent, 100 - self.tail_percent], self.percents, self.ratios)
        return predicted * float(low), predicted * float(high)

    def probability_above(self, predicted: float, limit: float) -> float:
        """Probability that the measured value is above a limit; 0 or 1 beyond all ratios that were seen."""
        if predicted <= 0:
            return 0.0
        below = np.interp(limit / predicted, self.ratios, self.percents, left=0.0, right=100.0)
        return 1 - float(below) / 100

    @property
    def basis(self) -> str:
        """What the distribution rests on, for people."""
        return f"{self.rows} measured rows of {self.sources} sources"


@cache
def residuals() -> Mapping[str, Residuals]:
    """The distributions by figure (:data:`FIGURES`)."""
    document: dict[str, Any] = yaml.safe_load(files("tracesim").joinpath("residuals.yaml").read_text("utf-8"))
    return {
        figure: Residuals(
            rows=entry["rows"],
            sources=entry["sources"],
            percents=tuple(entry["ratio_at_percent"]),
            ratios=tuple(entry["ratio_at_percent"].values()),
            tail_percent=entry["tail_percent"],
        )
        for figure, entry in document["figures"].items()
    }


def time_figure(world_size: int, gpus_per_domain: int) -> str:
    """Which distribution a step time belongs to."""
    return ONE_DOMAIN if world_size <= gpus_per_domain else SEVERAL_DOMAINS
