"""Figures of matrix products and attention, fitted on the measured shapes of SimuMax machine files.

Each figure is the value that makes the mean absolute error of its table smallest, the others being as installed, so the
installed values are where none can improve alone. Shapes measured several times count once, by their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from hardware_profiles import import_simumax, load_profile
from hardware_profiles.profile import HardwareProfile
from op_graphs.graph import AttentionShape, GemmShape
from op_graphs.vocabulary import DType, OpKind
from tracesim.cost import ComputeCost

from .result import Fit

_Rows = Sequence[tuple[GemmShape | AttentionShape, float]]

NEUTRAL = {
    "gemm.mainloop_efficiency": 1.0,
    "gemm.sustained_efficiency": 1.0,
    "gemm.prologue_k": 0.0,
    "gemm.exposed_epilogue": 0.0,
    "gemm.grouped_per_expert_us": 0.0,
    "gemm.grouped_efficiency": 1.0,
    "gemm.grouped_exposed_traffic": 0.0,
    "attention.forward_efficiency": 1.0,
    "attention.backward_ratio": 1.0,
    "attention.fixed_us": 0.0,
    "attention.wide_head_ratio": 1.0,
}
"""Figures that are fitted here, with the value that stands for nothing."""

FIGURES = tuple(NEUTRAL)
_GROUPED = ("gemm.grouped_per_expert_us", "gemm.grouped_efficiency", "gemm.grouped_exposed_traffic")
_ATTENTION = tuple(name for name in FIGURES if name.startswith("attention."))

_STEPS = (0.05, 0.01, 0.002)
"""Relative steps of the search, each around the best of the one before."""
_REACH = 12


@dataclass(frozen=True)
class _Machine:
    """A machine file, the profile whose figures come from it, and which of them do."""

    file: str
    profile: str
    dense: tuple[str, ...]
    floor_ns: float = 0.0
    """Attention rows below this were host time."""


MACHINES = (
    _Machine(
        "a100_pcie.json",
        "a100-pcie-80g",
        (
            "gemm.mainloop_efficiency",
            "gemm.sustained_efficiency",
            "gemm.prologue_k",
            "gemm.exposed_epilogue",
        ),
    ),
    _Machine("b200_bf16_ceperm.json", "b200-sxm", ("gemm.sustained_efficiency",), 101e3),
)


def fit(folders: Sequence[Path]) -> list[Fit]:
    """The fits of the machine files that are in the folders."""
    fits = []
    for machine in MACHINES:
        path = next((folder / machine.file for folder in folders if (folder / machine.file).is_file()), None)
        if path is None:
            continue
        base = load_profile(machine.profile)
        imported = import_simumax(path, base)
        dense, grouped = _gemms(imported, grouped=False), _gemms(imported, grouped=True)
        attention = [row for row in _attentions(imported) if row[1] > machine.floor_ns]
        for names, rows, what in (
            (machine.dense, dense, "matrix products"),
            (_GROUPED, grouped, "products of experts"),
            (_ATTENTION, attention, "attention kernels"),
        ):
            fits += [
                _fit(base, name, rows, f"{len(rows)} {what} of SimuMax's {machine.file}") for name in names
            ]
    return fits


def _gemms(profile: HardwareProfile, *, grouped: bool) -> _Rows:
    return [
        (
            GemmShape(
                row.m,
                row.n,
                row.k,
                row.layout,
                DType[row.dtype.upper()],
                DType[row.output.upper()],
                row.accumulate,
                row.count,
            ),
            row.time_us * 1e3,
        )
        for row in profile.measured_gemms
        if (row.count > 1) == grouped and row.dtype == "bf16"
    ]


def _attentions(profile: HardwareProfile) -> _Rows:
    return [
        (
            AttentionShape(
                *(row.batch, row.query_length, row.key_length, row.heads, row.kv_heads, row.head_size),
                row.value_head_size,
                causal=row.causal,
                backward=row.backward,
                dtype=DType[row.dtype.upper()],
            ),
            row.time_us * 1e3,
        )
        for row in profile.measured_attentions
    ]


def _fit(base: HardwareProfile, figure: str, rows: _Rows, what: str) -> Fit:
    def error(value: float) -> float:
        cost = ComputeCost(with_figure(base, figure, value))
        return mean(
            abs(cost.duration_ns(shape, kind=_kind(shape)) / measured - 1) for shape, measured in rows
        )

    value = best = _installed(base, figure)
    for step in _STEPS:
        candidates = [best * (1 + step * count) for count in range(-_REACH, _REACH + 1)]
        value = best = min(candidates, key=lambda one: (error(one), abs(one - best)))
    value = float(f"{value:.3g}")
    return Fit(
        figure,
        base.name,
        what,
        "smallest mean |error|, the other figures as installed",
        value,
        "mean |error| of the kernels, %",
        100 * error(NEUTRAL[figure]),
        100 * error(value),
        100 * error(_installed(base, figure)),
    )


def _kind(shape: GemmShape | AttentionShape) -> OpKind:
    if isinstance(shape, AttentionShape):
        return OpKind.ATTENTION
    return OpKind.GROUPED_GEMM if shape.count > 1 else OpKind.GEMM


def _installed(profile: HardwareProfile, figure: str) -> float:
    section, name = figure.split(".")
    return float(getattr(getattr(profile, section), name))


def with_figure(profile: HardwareProfile, figure: str, value: float) -> HardwareProfile:
    """A profile with another value of a figure."""
    section, name = figure.split(".")
    changed: Mapping[str, Any] = {section: replace(getattr(profile, section), **{name: value})}
    return replace(profile, **changed)
