"""Residuals of the compute formulas with the installed profiles on measured kernels; print them with ``pytest -s``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardware_profiles import load_profile
from op_graphs.graph import AttentionShape, GemmShape, Shape
from op_graphs.vocabulary import DType, OpKind
from tracesim.cost import ComputeCost


def fields_of(key: str) -> dict[str, str]:
    return dict(part.split("=") for part in key.split(", "))


def measured_rows(path: Path, table: str) -> list[tuple[Shape, float]]:
    """Shapes of one table of a SimuMax machine file and their measured nanoseconds."""
    operation = json.loads(path.read_text())["accelerator"]["op"][table]
    rows: list[tuple[Shape, float]] = []
    for key, efficiency in operation["accurate_efficient_factor"].items():
        shape, flops = READERS[table](fields_of(key))
        rows.append((shape, flops / (operation["tflops"] * 1e3 * efficiency)))
    return rows


def read_gemm(f: dict[str, str]) -> tuple[Shape, float]:
    m, n, k = int(f["m"]), int(f["n"]), int(f["k"])
    output = DType[f["out_dtype"].upper()]
    return GemmShape(m, n, k, f["layout"], DType.BF16, output, f["accumulate"] == "True"), 2.0 * m * n * k


def read_grouped(f: dict[str, str]) -> tuple[Shape, float]:
    count, m, n, k = (int(f[name]) for name in ("ng", "M", "N", "K"))
    flops = 2.0 * m * n * k * count
    if f["stage"] == "fwd":
        return GemmShape(m, n, k, "TN", count=count), flops
    if f["stage"] == "bwd_grad_act":
        return GemmShape(m, k, n, "NN", count=count), flops
    gradient = DType[f["main_grad_dtype"].upper()]
    return GemmShape(n, k, m, "NT", DType.BF16, gradient, f["accumulate"] == "True", count), flops


def read_attention(f: dict[str, str], *, backward: bool) -> tuple[Shape, float]:
    batch, length, heads, kv_heads, head, value = (
        int(f[name]) for name in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    )
    # The efficiencies of these files are over the square without the causal mask.
    flops = 2.0 * batch * heads * length**2 * (head + value) * (2.5 if backward else 1.0)
    return AttentionShape(batch, length, length, heads, kv_heads, head, value, backward=backward), flops


READERS: dict[str, Callable[[dict[str, str]], tuple[Shape, float]]] = {
    "matmul": read_gemm,
    "group_matmul": read_grouped,
    "sdp_fwd": lambda f: read_attention(f, backward=False),
    "sdp_bwd": lambda f: read_attention(f, backward=True),
}
KINDS = {"matmul": OpKind.GEMM, "group_matmul": OpKind.GROUPED_GEMM}

RESIDUALS = [
    # machine, file, table, rows, limits of mean and 90th percentile of the absolute error in per cent
    ("a100-pcie-80g", "a100_pcie.json", "matmul", 183, 3.0, 7.0),
    ("a100-pcie-80g", "a100_pcie.json", "group_matmul", 12, 3.5, 5.5),
    ("a100-pcie-80g", "a100_pcie.json", "sdp_fwd", 12, 2.6, 4.7),
    ("a100-pcie-80g", "a100_pcie.json", "sdp_bwd", 12, 2.8, 7.0),
    ("b200-sxm", "b200_bf16_ceperm.json", "matmul", 514, 10.0, 29.0),
    ("b200-sxm", "b200_bf16_ceperm.json", "group_matmul", 108, 9.4, 22.5),
    ("b200-sxm", "b200_bf16_ceperm.json", "sdp_fwd", 32, 9.7, 17.3),
    ("b200-sxm", "b200_bf16_ceperm.json", "sdp_bwd", 32, 4.7, 8.7),
]


LAUNCH_BOUND_NS = {("b200-sxm", "sdp_fwd"): 101_000, ("b200-sxm", "sdp_bwd"): 101_000}
"""Those rows are wall clock of a loop on the host and never below this; the formula leaves launches out."""


def residuals(machine: str, path: Path, table: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    cost = ComputeCost(load_profile(machine))
    rows = measured_rows(path, table)
    kind = KINDS.get(table, OpKind.ATTENTION)
    floor_ns = LAUNCH_BOUND_NS.get((machine, table), 0)
    return np.array(
        [max(cost.duration_ns(shape, kind=kind), floor_ns) / measured - 1 for shape, measured in rows]
    )


@pytest.mark.shared_data
@pytest.mark.parametrize(("machine", "file", "table", "count", "mean_limit", "p90_limit"), RESIDUALS)
def test_formula_stays_near_measured_kernels(
    shared_data: Path,
    machine: str,
    file: str,
    table: str,
    count: int,
    mean_limit: float,
    p90_limit: float,
) -> None:
    errors = np.abs(residuals(machine, shared_data / "simumax_system" / file, table)) * 100
    print(
        f"{machine} {table}: {len(errors)} rows, mean {errors.mean():.1f} %, "
        f"90th percentile {np.quantile(errors, 0.9):.1f} %, largest {errors.max():.1f} %"
    )
    assert len(errors) == count
    assert errors.mean() <= mean_limit
    assert np.quantile(errors, 0.9) <= p90_limit
