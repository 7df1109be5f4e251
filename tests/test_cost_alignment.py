"""Rows that vectors do not divide make a product slower, and which shapes the formulas were fitted on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from op_graphs.graph import GemmShape, Shape
from op_graphs.vocabulary import DType, OpKind
from tests.test_cost_compute import ROUND, SQUARE, TABLE_SHAPE, with_gemm
from tracesim.cost import ComputeCost, Provenance

ALIGNMENTS: dict[str, tuple[GemmShape, float]] = {
    "rows of 16 bytes": (GemmShape(4096, 8192, 8192), 1),
    "tokens are no row of a forward": (GemmShape(4097, 8192, 8192), 1),
    "rows of 8 bytes": (GemmShape(4096, 8196, 8192), 1.5),
    "an odd vocabulary": (GemmShape(4096, 8193, 8192), 3),
    "its data gradient": (GemmShape(4096, 8192, 8193, "NN"), 3),
    "its weight gradient": (GemmShape(8193, 8192, 4096, "NT"), 3),
    "odd rows of fp32 are 4 bytes": (GemmShape(4096, 8193, 8192, dtype=DType.TF32), 1.5),
}


@pytest.mark.parametrize("case", ALIGNMENTS)
def test_rows_that_vectors_do_not_divide_are_slower(case: str) -> None:
    """A sustained rate, so that time is work over rate: 2 m n k over the peak, times the slowdown."""
    profile = with_gemm(sustained_efficiency=0.5, exposed_epilogue=0.0)
    shape, slower = ALIGNMENTS[case]
    peak = profile.peak_tflops[shape.dtype.name.lower()] * 1e3
    expected = 2 * shape.m * shape.n * shape.k / (0.5 * peak) * slower
    assert ComputeCost(profile).duration_ns(shape, kind=OpKind.GEMM) == pytest.approx(expected, rel=1e-6)


PROVENANCES: dict[str, tuple[Shape, Provenance]] = {
    "aligned": (TABLE_SHAPE, Provenance.MODELLED),
    "k not a multiple of 16 bytes": (replace(TABLE_SHAPE, k=1001), Provenance.EXTRAPOLATED),
    "tokens of a forward may be odd": (replace(TABLE_SHAPE, m=1001), Provenance.MODELLED),
    "odd tokens, weight gradient": (replace(TABLE_SHAPE, layout="NT", k=1001), Provenance.MODELLED),
    "odd outputs, weight gradient": (replace(TABLE_SHAPE, layout="NT", m=1001), Provenance.EXTRAPOLATED),
    "long attention": (SQUARE, Provenance.MODELLED),
    "short attention": (replace(SQUARE, query_length=512, key_length=512), Provenance.EXTRAPOLATED),
    "small heads": (replace(SQUARE, head_size=64, value_head_size=64), Provenance.EXTRAPOLATED),
}


@pytest.mark.parametrize("case", PROVENANCES)
def test_provenance_says_whether_the_formula_was_fitted_there(case: str) -> None:
    shape, expected = PROVENANCES[case]
    assert ComputeCost(ROUND).estimate(shape).provenance == expected
