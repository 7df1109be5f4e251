"""What a timeline, simulated or measured, says about where its time went."""

from __future__ import annotations

from tracesim.analysis.analysis import Analysis, StepAnalysis, analyze
from tracesim.analysis.annotate import annotate
from tracesim.analysis.breakdown import (
    DIMENSIONS,
    Breakdown,
    KindTotal,
    breakdowns,
    group_dimension,
    slice_dimensions,
    top_kernels,
)
from tracesim.analysis.describe import describe
from tracesim.analysis.windows import Window, step_windows

__all__ = [
    "DIMENSIONS",
    "Analysis",
    "Breakdown",
    "KindTotal",
    "StepAnalysis",
    "Window",
    "analyze",
    "annotate",
    "breakdowns",
    "describe",
    "group_dimension",
    "slice_dimensions",
    "step_windows",
    "top_kernels",
]
