"""Errors of predictions against measurements, and how well the order of runs is predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """Errors of one figure over the rows of a source, in percent of the measured value.

    ``spearman`` is None for fewer than two rows, or where all measured or all predicted values are equal.
    """

    n: int
    mean_abs_pct: float | None
    mean_signed_pct: float | None
    max_abs_pct: float | None
    spearman: float | None


def error_pct(measured: float, predicted: float) -> float:
    """Error of a prediction in percent of the measured value; positive if too high."""
    return 100.0 * (predicted - measured) / measured


def score(pairs: Sequence[tuple[float, float]]) -> Score:
    """The score of (measured, predicted) pairs; with no pair, every figure but ``n`` is None."""
    if not pairs:
        return Score(0, None, None, None, None)
    errors = np.array([error_pct(measured, predicted) for measured, predicted in pairs])
    measured, predicted = np.array(pairs, dtype=float).T
    return Score(
        n=len(pairs),
        mean_abs_pct=float(np.abs(errors).mean()),
        mean_signed_pct=float(errors.mean()),
        max_abs_pct=float(np.abs(errors).max()),
        spearman=spearman(measured, predicted),
    )


def spearman(first: Floats, second: Floats) -> float | None:
    """Spearman's rank correlation: the correlation of the ranks, equal values sharing their mean rank.

    None for fewer than two values, or where one side is constant.
    """
    if len(first) < 2:
        return None
    ranks_first, ranks_second = (
        _ranks(np.asarray(first, dtype=float)),
        _ranks(np.asarray(second, dtype=float)),
    )
    deviation_first, deviation_second = ranks_first - ranks_first.mean(), ranks_second - ranks_second.mean()
    scale = math.sqrt(float((deviation_first**2).sum() * (deviation_second**2).sum()))
    if scale == 0:
        return None
    return float((deviation_first * deviation_second).sum() / scale)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], dtype=float)
