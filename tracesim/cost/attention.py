"""Duration of fused (flash) attention: the work really done over one efficiency, plus what does not scale.

Work counts only the query-key pairs that a causal mask or a sliding window leaves, and the products a kernel runs:
two forward (scores, values), five backward (the scores again and four gradients). The efficiency of the backward, of
heads whose query and value sizes differ, and of heads of 64 are ratios to the forward efficiency at heads of 128. Whole
tiles are computed: a window costs the keys of one tile more than it has, which the causal diagonal does too (that is in
the efficiency).

Left out: the tail of the longest query tile (it hides in the fixed cost), splits along the keys for few heads. The
generation of the kernel is a ratio of its own.

The algorithm is Dao, "FlashAttention-2" (arXiv:2307.08691).
"""

from __future__ import annotations

from hardware_profiles.profile import AttentionFigures
from op_graphs.graph import AttentionShape

CALIBRATED_HEAD_SIZE = 128
"""Smallest head size among the rows the efficiencies are fitted on."""

SMALL_HEAD_SIZE = 64
"""Head size of ``small_head_ratio``; between the two the efficiency is taken as linear, and below as constant."""

KEY_TILE = 128
"""Keys that a kernel computes at once (FlashAttention-3 and cuDNN at heads up to 128)."""

CALIBRATED_LENGTH = 2048
"""Key length below which fixed costs and idle SMs dominate and the rows say nothing."""


def attention_ns(
    shape: AttentionShape, figures: AttentionFigures, peak_flop_per_ns: float, flops: float = 0.0
) -> float:
    """Duration of one fused attention kernel, forward or backward.

    Args:
        shape: sizes in tokens and elements.
        figures: how fast the machine runs attention.
        peak_flop_per_ns: dense peak, FLOP/ns.
        flops: work really done, for masks that ``shape`` cannot say; 0 for :func:`attention_flops`.

    Returns:
        Nanoseconds.
    """
    efficiency = figures.forward_efficiency
    if shape.backward:
        efficiency *= figures.backward_ratio
    if shape.head_size != shape.value_head_size:
        efficiency *= figures.wide_head_ratio
    efficiency *= kernel_ratio(shape.kernel, figures) * _head_ratio(shape, figures)
    work = flops or attention_flops(shape)
    if 0 < shape.window < shape.key_length:
        work *= 1 + KEY_TILE / shape.window
    return figures.fixed_us * 1e3 + work / (peak_flop_per_ns * efficiency)


def kernel_ratio(kernel: str, figures: AttentionFigures) -> float:
    """Rate of a generation of FlashAttention over that of the machine's best kernel.

    Raises:
        ValueError: if the profile does not say how fast that generation is.
    """
    ratio = {"flash-2": figures.flash_2_ratio, "flash-1": figures.flash_1_ratio}.get(kernel, 1.0)
    if not ratio:
        name = kernel.replace("-", "_")
        raise ValueError(
            f"the hardware profile does not say how fast {kernel} runs; set attention.{name}_ratio in it, or use flash"
        )
    return ratio


def _head_ratio(shape: AttentionShape, figures: AttentionFigures) -> float:
    """Efficiency at the head size of a shape over that at 128, of the machine's best kernel."""
    if shape.kernel != "flash":
        return 1.0
    head = max(shape.head_size, shape.value_head_size, SMALL_HEAD_SIZE)
    missing = max(CALIBRATED_HEAD_SIZE - head, 0) / (CALIBRATED_HEAD_SIZE - SMALL_HEAD_SIZE)
    return 1 - missing * (1 - figures.small_head_ratio)


def attention_flops(shape: AttentionShape) -> float:
    """FLOPs of the pairs that the mask leaves: two products forward, five backward with the recomputed scores."""
    if shape.backward:
        sizes = 3 * shape.head_size + 2 * shape.value_head_size
    else:
        sizes = shape.head_size + shape.value_head_size
    return 2.0 * shape.batch * shape.heads * _pairs(shape) * sizes


def is_calibrated(shape: AttentionShape) -> bool:
    """Whether a shape lies in the range the efficiencies come from."""
    return shape.head_size >= CALIBRATED_HEAD_SIZE and shape.key_length >= CALIBRATED_LENGTH


def _pairs(shape: AttentionShape) -> float:
    """Query-key pairs left by the mask, in the continuum (a causal square is exactly half).

    The last query sees the last key, as flash attention aligns a mask whose sides differ.
    """
    queries, keys = float(shape.query_length), float(shape.key_length)
    window = min(float(shape.window), keys) if shape.window else keys
    if not shape.causal:
        return queries * window
    # Query i of [0, queries) sees keys - queries + i keys, at least none and at most the window.
    first, last = max(keys - queries, 0.0), keys
    full = min(max(last - window, 0.0), last - first)
    rising_from, rising_to = min(first, window), min(last, window)
    return (rising_to**2 - rising_from**2) / 2 + full * window
