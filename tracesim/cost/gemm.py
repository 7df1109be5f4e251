"""Duration of matrix products: tile and wave quantisation under a power cap, the epilogue, and a memory roofline.

A product ``[m, k] x [k, n]`` is cut into output tiles, one thread block each; the blocks run in waves over the SMs,
and the last, partly filled wave costs as much as a full one. Fill and drain of a tile cost as much as ``prologue_k``
more elements of ``k``. A product that lasts is slowed to the rate the chip sustains at its power limit, so waves show
on short products only. Part of the output is written after the last multiplication and is not hidden. Products with
few tiles and a long ``k`` are split along ``k``.

Operands or outputs whose rows are not multiples of 16 bytes (a vocabulary that is not padded) cannot be loaded or
stored in vectors, and libraries fall back to slower kernels.

Left out: the L2 cache, stream-K schedulers (which fill the last wave), and tiles chosen by a kernel heuristic that is
not the fastest one. ``docs/compute_cost.md`` holds the formula with its residuals. The wave model is the one of
NVIDIA's "Matrix Multiplication Background" guide.
"""

from __future__ import annotations

from dataclasses import replace

from hardware_profiles.profile import GemmFigures, GemmTile
from op_graphs.graph import GemmShape

SPLITS = (1, 2, 3, 4, 6, 8)
"""Ways a product may be cut along ``k``."""

MINIMUM_SPLIT_K = 2048
"""Elements of ``k`` below which a part is not worth its own accumulation."""

SPLIT_PARTIAL_BYTES = 8
"""Traffic of one element of a partial sum: an fp32 write and an fp32 read."""

OPERAND_ALIGNMENT_BYTES = 16
"""Contiguous rows must be multiples of this for the vector loads that the rates assume."""

ASYNCHRONOUS_COPY_BYTES = 4
"""Smallest piece that ``cp.async`` copies to shared memory (PTX ISA); rows of odd multiples of two bytes go through
registers."""

UNALIGNED_RATIO, ODD_RATIO = 1 / 1.5, 1 / 3
"""Rate with rows that are not multiples of 16 bytes, of which real kernels take 1.3 to 1.7 times as long, and with rows
that are not even multiples of 4: a head on an odd vocabulary takes three times as long (Netflix, "Scaling LLM
Post-Training at Netflix", 2026)."""


def gemm_ns(
    shape: GemmShape,
    figures: GemmFigures,
    peak_flop_per_ns: float,
    bandwidth_byte_per_ns: float,
    sm_count: int,
    traffic_bytes: float = 0.0,
) -> float:
    """Duration of one matrix product, or of ``shape.count`` of them in one persistent kernel.

    Args:
        shape: sizes in elements.
        figures: how fast the machine multiplies.
        peak_flop_per_ns: dense peak of the ``sm_count`` SMs, FLOP/ns.
        bandwidth_byte_per_ns: memory bandwidth that streaming kernels reach, B/ns.
        sm_count: SMs the kernel can use.
        traffic_bytes: bytes read and written; 0 for each operand once and the output.

    Returns:
        Nanoseconds.
    """
    output_bytes = _output_bytes(shape)
    work = 2.0 * shape.m * shape.n * shape.k * shape.count
    epilogue = figures.exposed_epilogue * output_bytes / bandwidth_byte_per_ns
    peak_flop_per_ns *= alignment_ratio(shape)
    sustained = work / (peak_flop_per_ns * figures.sustained_efficiency)
    traffic = traffic_bytes or gemm_traffic_bytes(shape)
    mainloop_rate = peak_flop_per_ns * figures.mainloop_efficiency
    best = float("inf")
    for tile in figures.tiles:
        tiles = shape.count * -(-shape.m // tile.m) * -(-shape.n // tile.n)
        for split in SPLITS:
            if split > 1 and (tiles >= sm_count or shape.k < split * MINIMUM_SPLIT_K):
                break
            waves = -(-tiles * split // sm_count)
            mainloop = (
                _wave_work(tile, sm_count) * waves * (shape.k / split + figures.prologue_k) / mainloop_rate
            )
            partial_sums = _split_bytes(shape, split) * figures.exposed_epilogue / bandwidth_byte_per_ns
            best = min(best, max(mainloop, sustained) + partial_sums)
    return max(best + epilogue, traffic / bandwidth_byte_per_ns)


def multi_stream_gemm_ns(
    shape: GemmShape,
    figures: GemmFigures,
    peak_flop_per_ns: float,
    memory_byte_per_ns: float,
    traffic_bytes: float = 0.0,
) -> float:
    """Duration of a grouped product that is launched as one product an expert over a few streams.

    The kernels of the experts are short, so their start, their work and their traffic add up instead of hiding each
    other.

    Args:
        shape: sizes of one expert, and the number of experts in ``count``.
        figures: how fast the machine multiplies.
        peak_flop_per_ns: dense peak, FLOP/ns.
        memory_byte_per_ns: nominal memory bandwidth, B/ns.
        traffic_bytes: bytes read and written by all experts; 0 for each operand once and the output.

    Returns:
        Nanoseconds.
    """
    work = 2.0 * shape.m * shape.n * shape.k * shape.count
    traffic = traffic_bytes or gemm_traffic_bytes(shape)
    efficiency = figures.grouped_efficiency or figures.sustained_efficiency
    return (
        shape.count * figures.grouped_per_expert_us * 1e3
        + work / (peak_flop_per_ns * efficiency)
        + figures.grouped_exposed_traffic * traffic / memory_byte_per_ns
    )


def figures_for(figures: GemmFigures, dtype: str, *, accumulates: bool = False) -> GemmFigures:
    """The figures for operands of a dtype, which reach another share of their peak than bf16 does.

    ``accumulates`` says that the product adds to an fp32 gradient.
    """
    own = figures.dtypes.get(dtype)
    if own is not None:
        ratio = own.accumulate_ratio if accumulates else 1.0
        return replace(
            figures,
            mainloop_efficiency=ratio * own.mainloop_efficiency,
            sustained_efficiency=ratio * own.sustained_efficiency,
            exposed_epilogue=own.exposed_epilogue,
            grouped_per_expert_us=own.grouped_per_expert_us,
            grouped_efficiency=ratio * own.grouped_efficiency,
            grouped_exposed_traffic=own.grouped_exposed_traffic,
        )
    ratio = figures.dtype_ratio.get(dtype, 1.0)
    sustained = figures.sustained_dtype_ratio.get(dtype, ratio)
    if ratio == sustained == 1.0:
        return figures
    mainloop = ratio * figures.mainloop_efficiency
    return replace(
        figures,
        mainloop_efficiency=mainloop,
        sustained_efficiency=min(mainloop, sustained * figures.sustained_efficiency),
        grouped_efficiency=min(mainloop, sustained * figures.grouped_efficiency),
    )


def gemm_traffic_bytes(shape: GemmShape) -> float:
    """Bytes that move at least: both operands once, the output once, or twice if it accumulates."""
    operands = shape.dtype.itemsize * (shape.m * shape.k + shape.k * shape.n)
    return shape.count * operands + _output_bytes(shape)


def is_aligned(shape: GemmShape, multiple: int = OPERAND_ALIGNMENT_BYTES) -> bool:
    """Whether the contiguous rows of both operands and of the output are multiples of so many bytes."""
    contiguous = (shape.m, shape.n) if shape.layout == "NT" else (shape.k, shape.n)
    return all(size * shape.dtype.itemsize % multiple == 0 for size in contiguous)


def alignment_ratio(shape: GemmShape) -> float:
    """The rate of a product relative to one whose rows are multiples of 16 bytes."""
    if is_aligned(shape):
        return 1.0
    return UNALIGNED_RATIO if is_aligned(shape, ASYNCHRONOUS_COPY_BYTES) else ODD_RATIO


def _output_bytes(shape: GemmShape) -> float:
    passes = 2 if shape.accumulate else 1
    return passes * shape.output.itemsize * float(shape.m) * shape.n * shape.count


def _wave_work(tile: GemmTile, sm_count: int) -> float:
    """FLOPs of a full wave for each element of ``k``, in units of the best tile's rate."""
    return sm_count * 2.0 * tile.m * tile.n / tile.relative_rate


def _split_bytes(shape: GemmShape, split: int) -> float:
    if split == 1:
        return 0.0
    return float(split * SPLIT_PARTIAL_BYTES) * shape.m * shape.n * shape.count
