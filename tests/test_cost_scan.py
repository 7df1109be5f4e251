"""Kernels of chunked scans take the longest of products, traffic and steps; a delta rule's two passes have steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles import ScanFigures, load_profile
from op_graphs.graph import ScanShape, Shape
from op_graphs.vocabulary import DType, OpKind
from tests.test_cost_compute import ROUND
from tests.test_delta_net import CHUNK, SEQUENCE, lowered
from tracesim.cost import ComputeCost, Provenance

# 100 TFLOP/s at a tenth: 10,000 FLOP/ns. 1 TB/s: 1,000 B/ns. The smallest kernel takes 2 us.
SLOW = replace(ROUND, scan=ScanFigures(efficiency=0.1, backward_ratio=0.5, step_us=3.0))

CASES: dict[str, tuple[Shape, float, float, int]] = {
    "products": (ScanShape(), 1e9, 1e6, 2_000 + 100_000),
    "traffic": (ScanShape(), 1e6, 1e9, 2_000 + 1_000_000),
    "products of a backward pass": (ScanShape(backward=True), 1e9, 1e6, 2_000 + 200_000),
    "steps": (ScanShape(64), 1e9, 1e6, 2_000 + 192_000),
    "steps hide behind traffic": (ScanShape(64), 1e9, 1e9, 2_000 + 1_000_000),
    "without a shape, by its kind": (None, 1e9, 1e6, 2_000 + 100_000),
}


@pytest.mark.parametrize("case", CASES)
def test_a_scan_takes_the_longest_of_products_traffic_and_steps(case: str) -> None:
    shape, flops, traffic, expected_ns = CASES[case]
    assert ComputeCost(SLOW).duration_ns(shape, flops, traffic, 0.0, DType.BF16, OpKind.SCAN) == expected_ns


def test_products_of_scans_are_extrapolated_and_traffic_alone_is_modelled() -> None:
    cost = ComputeCost(SLOW)
    assert cost.estimate(ScanShape(), 1e9, dtype=DType.BF16).provenance == Provenance.EXTRAPOLATED
    assert cost.estimate(ScanShape(), 0.0, 1e6).provenance == Provenance.MODELLED


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(0, 1000), st.floats(0.01, 1.0))
def test_a_faster_machine_is_never_slower(
    flops: float, traffic: float, steps: int, efficiency: float
) -> None:
    slow, fast = (replace(ROUND, scan=ScanFigures(rate, 1.0, 1.0)) for rate in (efficiency, 1.0))
    times = [
        ComputeCost(machine).duration_ns(ScanShape(steps), flops, traffic, dtype=DType.BF16)
        for machine in (slow, fast)
    ]
    assert times[1] <= times[0]


def test_one_sequence_through_its_chunks_takes_as_long_however_few_heads_there_are() -> None:
    """The two passes of a delta rule from state to state: once forward, again and its gradient backward."""
    machine = replace(load_profile("h100-sxm"), scan=ScanFigures(1.0, 1.0, 1000.0), training_clock_ratio=1.0)
    for sequences in (1, 2):
        _, graph = lowered("G", training__micro_batch_size=sequences)
        operations = graph.operations
        scans = operations.kind == OpKind.SCAN
        long = np.sort(ComputeCost(machine).durations_ns(graph)[scans])[-4:]
        passes = 3 * int(np.unique(operations.microbatch[scans]).size)
        step_ns = SEQUENCE // CHUNK * 1_000_000
        durations = ComputeCost(machine).durations_ns(graph)
        assert int(np.sum(durations[scans] >= step_ns)) == passes
        assert long[-1] == pytest.approx(step_ns, rel=0.01)
