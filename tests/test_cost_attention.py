"""Attention at small heads, in windows, and where it reads more than it multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from op_graphs.graph import AttentionShape
from tests.test_cost_compute import ROUND, SQUARE
from tracesim.cost import ComputeCost
from tracesim.cost.attention import KEY_TILE, attention_flops

# 100 TFLOP/s at one half: 50,000 FLOP/ns; heads of 64 at 0.6 of it.
SMALL = replace(ROUND, attention=replace(ROUND.attention, small_head_ratio=0.6))


def rate(shape: AttentionShape) -> float:
    """FLOP/ns of a shape."""
    return attention_flops(shape) / ComputeCost(SMALL).duration_ns(shape)


@pytest.mark.parametrize(
    ("head", "share"),
    [(32, 0.6), (64, 0.6), (80, 0.7), (96, 0.8), (128, 1.0), (256, 1.0)],
)
def test_small_heads_have_more_exponentials_for_their_products(head: int, share: float) -> None:
    shape = replace(SQUARE, head_size=head, value_head_size=head)
    assert rate(shape) == pytest.approx(50_000 * share, rel=1e-4)
    backward = replace(shape, backward=True)
    assert rate(backward) == pytest.approx(25_000 * share, rel=1e-4)


def test_earlier_kernels_have_their_own_ratio() -> None:
    machine = replace(SMALL, attention=replace(SMALL.attention, flash_2_ratio=0.5))
    shape = replace(SQUARE, head_size=64, value_head_size=64, kernel="flash-2")
    assert ComputeCost(machine).duration_ns(shape) == round(attention_flops(shape) / 25_000)


@pytest.mark.parametrize("window", [128, 1024])
def test_a_window_costs_the_keys_of_one_tile_more(window: int) -> None:
    shape = replace(SQUARE, window=window)
    assert rate(shape) == pytest.approx(50_000 / (1 + KEY_TILE / window), rel=1e-4)


def test_a_window_as_long_as_the_keys_is_none() -> None:
    assert rate(replace(SQUARE, window=4096)) == rate(SQUARE)


def test_attention_is_never_faster_than_its_traffic() -> None:
    # 1 GB at 1,000 B/ns.
    shape = replace(SQUARE, window=1)
    assert ComputeCost(SMALL).duration_ns(shape, bytes_read=8e8, bytes_written=2e8) == 1_000_000
