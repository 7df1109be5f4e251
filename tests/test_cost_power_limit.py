"""The power limit of a training step: what was measured alone on a cool chip is slower inside one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hardware_profiles.profile import AttentionFigures, MeasuredAttention, MeasuredGemm
from op_graphs.graph import GemmShape
from op_graphs.vocabulary import OpKind
from tests.test_cost_compute import ROUND, SQUARE, graph_of
from tracesim.cost import ComputeCost
from tracesim.cost.attention import attention_flops


def test_no_measured_kernel_of_a_step_is_faster_than_the_sustained_rate_at_the_clock_of_a_step() -> None:
    # 2 GFLOP: 40 us at half of 100 TFLOP/s, measured alone in 25 us on a cool chip, or in 80 us.
    product, slow = GemmShape(1000, 1000, 1000), GemmShape(1000, 1000, 1000, "NN")
    attention = replace(SQUARE, causal=True)
    profile = replace(
        ROUND,
        gemm=replace(ROUND.gemm, sustained_efficiency=0.5),
        attention=AttentionFigures(0.9, 1.0, 0.0),
        training_clock_ratio=0.8,
        measured_attentions=(
            MeasuredAttention(
                *(attention.batch, attention.query_length, attention.key_length, attention.heads),
                *(attention.kv_heads, attention.head_size, attention.value_head_size),
                causal=True,
                backward=False,
                dtype="bf16",
                time_us=1.0,
            ),
        ),
        measured_gemms=(
            MeasuredGemm(1000, 1000, 1000, "TN", "bf16", "bf16", False, 1, 25.0),
            MeasuredGemm(1000, 1000, 1000, "NN", "bf16", "bf16", False, 1, 80.0),
        ),
    )
    rows: list[dict[str, Any]] = [
        {"kind": OpKind.GEMM, "shape": 0},
        {"kind": OpKind.GEMM, "shape": 1},
        {"kind": OpKind.ATTENTION, "shape": 2},
        # Packed documents leave less of the square, which the operation says and the shape does not.
        {"kind": OpKind.ATTENTION, "shape": 2, "flops": attention_flops(attention) / 2},
    ]
    durations = ComputeCost(profile).durations_ns(graph_of(rows, (product, slow, attention)))
    whole = attention_flops(attention) / (100e3 * 0.5)
    expected = np.array([40_000, 80_000, whole, whole / 2]) / 0.8
    assert durations.tolist() == pytest.approx(expected.tolist(), abs=1)
    # The formula's figures are sustained ones already: without the measured row they alone decide.
    formula = ComputeCost(replace(profile, measured_attentions=())).durations_ns(
        graph_of(rows, (product, slow, attention))
    )
    assert formula[2] == pytest.approx(attention_flops(attention) / (100e3 * 0.9) / 0.8, abs=1)
    # By itself a kernel is as fast as it was measured.
    assert ComputeCost(profile).duration_ns(product) == 25_000
