"""torchtitan's cards of 500 W: their clock, and what 8 bits gain on them, beside what was measured on such cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from op_graphs.graph import GemmShape
from op_graphs.vocabulary import DType
from tests.measured_rows import expressed
from tracesim.cost.compute import ComputeCost
from tracesim.scenario import Scenario
from tracesim.simulation import simulate

# torchao's float8/README.md, training benchmarks: Llama 3 8B on 8 of these cards. The loss is not compiled yet.
TORCHAO: dict[str, Any] = {
    "gpu": "H100-96GB-HBM2e-500W",
    "local_batch": 1,
    "metrics": {"tokens_per_s_per_gpu": 1000},
    "model": {"name": "Llama 3 8B", "seq": 8192},
    "num_gpus": 8,
    "parallel": {"fsdp": 8},
    "recompute": "per-op SAC",
    "source": "torchtitan-bench",
    "table": "2024 torchao",
    "technique": "compile",
}


def torchao(precision: str, folder: Path) -> Scenario:
    return expressed({**TORCHAO, "precision": precision}, folder).scenario


def test_the_clock_is_what_torchaos_run_in_bf16_asks_for(tmp_path: Path) -> None:
    """6,150 tokens a second and GPU, and 47.65 GiB."""
    simulation = simulate(torchao("bf16", tmp_path))
    assert simulation.report["iteration_time_ms"] == pytest.approx(1e3 * 8192 / 6150, rel=0.01)
    reserved = max(memory.usage.peak_reserved for memory in simulation.reserved[0].values())
    assert reserved / 2**30 == pytest.approx(47.65, rel=0.01)


def test_8_bits_gain_what_kernels_on_such_a_card_gain(tmp_path: Path) -> None:
    """pytorch/FBGEMM, pull request 2546 ("H100 500W"): TFLOPS of bf16 and of row-scaled fp8 products, alone."""
    measured = {
        (8192, 8192, 8192): (585.23, 1125.51),
        (65536, 8192, 7168): (575.12, 1082.75),
        (65536, 3584, 8192): (546.31, 1141.38),
    }
    costs = ComputeCost(torchao("bf16", tmp_path).hardware)

    def gain(m: int, n: int, k: int) -> float:
        plain = GemmShape(m, n, k, "TN", dtype=DType.BF16, output=DType.BF16)
        return costs.duration_ns(plain) / costs.duration_ns(replace(plain, dtype=DType.FP8))

    expected = [eight / sixteen for sixteen, eight in measured.values()]
    assert mean(gain(*shape) for shape in measured) == pytest.approx(mean(expected), rel=0.02)


def test_casts_along_columns_are_what_torchaos_run_with_scales_of_rows_asks_for(tmp_path: Path) -> None:
    """6,768 tokens a second and GPU."""
    report = simulate(torchao("float8 rowwise", tmp_path)).report
    assert report["iteration_time_ms"] == pytest.approx(1e3 * 8192 / 6768, rel=0.01)
