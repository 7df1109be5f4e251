"""Rates of low-precision products and of attention in steps of dense models, by machine.

Matrix products of 8 bits take less energy for a FLOP than those of 16, over and above their higher peak, so that a
chip at its power limit sustains a higher share of the peak: ``gemm.sustained_dtype_ratio``. Where the power limit is
not what binds, what 8-bit products reach inside a tile is fitted instead (``gemm.dtype_ratio``), and on Blackwell
Ultra, whose unit for exponentials is twice as fast, the rate of attention.

Rows of dense models with a hidden size of at least 4,096 take part: their kernels take long, launches explain little.
The value at which the median error of their rows is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from benchmarks.rows import MeasuredRow
from hardware_profiles.profile import HardwareProfile

from .host import zero_of_median
from .result import Fit, expressed, installed_value, time_ms

_SOURCES = ("megatron-bridge", "nemo-24.07", "nemo-24.12", "nemo-25.02-25.04")
_LEAST_HIDDEN = 4096


@dataclass(frozen=True)
class _Rate:
    """A figure, the profiles of the chip that it belongs to, and which rows decide it."""

    profiles: tuple[str, ...]
    figure: str
    bits: str
    """Element type of the products of the rows."""
    neutral: float
    values: tuple[float, ...]
    """Where rows are simulated; the time of each is taken as linear in between."""


RATES = (
    _Rate(("h100-sxm",), "gemm.dtype_ratio.fp8", "fp8", 0.88, (0.9, 1.0, 1.1)),
    _Rate(("b200-sxm", "gb200-nvl72"), "gemm.sustained_dtype_ratio.fp8", "fp8", 1.0, (1.0, 1.15, 1.3)),
    _Rate(("gb300-nvl72",), "attention.forward_efficiency", "fp8", 0.549, (0.55, 0.7, 0.85)),
    _Rate(("gb300-nvl72",), "gemm.sustained_dtype_ratio.fp4", "fp4", 0.66, (0.5, 0.65, 0.8)),
)
FIGURES = tuple(dict.fromkeys(rate.figure for rate in RATES))


def fit(files: Sequence[Path], figure: str = "") -> list[Fit]:
    """The fits whose rows are there; of one figure, or of all."""
    rows = [row for source, row in expressed(files) if source in _SOURCES and _is_dense(row)]
    fits = []
    for rate in RATES:
        own = [row for row in rows if row.scenario.hardware.name in rate.profiles and _bits(row) == rate.bits]
        if own and figure in ("", rate.figure):
            fits.append(_fit(rate, own))
    return fits


def _is_dense(row: MeasuredRow) -> bool:
    model = row.scenario.model
    return model.moe is None and model.hidden_size >= _LEAST_HIDDEN


def _bits(row: MeasuredRow) -> str:
    recipe = row.scenario.training.recipe or ""
    return "fp4" if "fp4" in recipe else "fp8" if recipe else ""


def _fit(rate: _Rate, rows: Sequence[MeasuredRow]) -> Fit:
    errors = {value: _errors(rows, rate.figure, value) for value in rate.values}
    # Errors fall as rates rise.
    value = float(f"{zero_of_median({at: [-error for error in found] for at, found in errors.items()}):.3g}")
    after = _errors(rows, rate.figure, value)
    installed = _errors(rows, rate.figure, installed_value(rate.profiles[0], rate.figure))
    return Fit(
        rate.figure,
        rate.profiles[0],
        f"{len(rows)} rows of dense models with {rate.bits} products in Megatron-Bridge's and NeMo's tables"
        f" ({', '.join(rate.profiles)})",
        "the median error is zero",
        value,
        "mean |error| of the iteration time, %",
        mean(abs(error) for error in _errors(rows, rate.figure, rate.neutral)),
        mean(abs(error) for error in after),
        mean(abs(error) for error in installed),
        (f"median error {median(after):+.2f} % after",),
    )


def _errors(rows: Sequence[MeasuredRow], figure: str, value: float) -> list[float]:
    """Error of each row; releases that ran the same share one simulation."""
    errors, times = [], dict[str, float]()
    for row in rows:
        assert row.time_ms is not None
        hardware = with_path(row.scenario.hardware, figure, value)
        scenario = replace(row.scenario, name="", hardware=hardware)
        key = repr(scenario)
        if key not in times:
            times[key] = time_ms(scenario)
        errors.append(100 * (times[key] / row.time_ms - 1))
    return errors


def with_path(profile: HardwareProfile, figure: str, value: float) -> HardwareProfile:
    """A profile with another value of a figure of a section, or of one element type in a table of a section."""
    section, name, *dtype = figure.split(".")
    figures = getattr(profile, section)
    changed = {**getattr(figures, name), dtype[0]: value} if dtype else value
    return replace(profile, **{section: replace(figures, **{name: changed})})
