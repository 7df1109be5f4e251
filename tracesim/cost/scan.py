"""Duration of the kernels of chunked scans: state spaces (Mamba-2) and delta rules.

Such a kernel multiplies small tiles of a chunk and of its state, and between the products computes decays, masks and
casts, so it stays far below the rate of matrix products and mostly below the bandwidth. A pass that goes through the
chunks of a sequence one after the other cannot be faster than its steps, however few heads there are.

Left out: that a kernel with more traffic for its products overlaps them less well, and differences between kernels; one
efficiency stands for all that run forward, and one for all that compute gradients. The algorithms are those of
arXiv:2405.21060, section 6, and arXiv:2412.06464, section 3.
"""

from __future__ import annotations

from hardware_profiles.profile import ScanFigures


def scan_ns(
    figures: ScanFigures,
    peak_flop_per_ns: float,
    bandwidth_byte_per_ns: float,
    *,
    flops: float,
    traffic_bytes: float,
    steps: int = 0,
    backward: bool = False,
) -> float:
    """Duration of one kernel of a scan, without the floor that every kernel has.

    Args:
        figures: how fast the machine runs scans.
        peak_flop_per_ns: dense peak of the operands, FLOP/ns.
        bandwidth_byte_per_ns: memory bandwidth that streaming kernels reach, B/ns.
        flops: products that it really runs, FLOP.
        traffic_bytes: bytes read and written.
        steps: chunks that it goes through one after the other; 0 where all run at once.
        backward: whether it computes gradients.

    Returns:
        Nanoseconds: the longest of products, traffic and steps.
    """
    efficiency = figures.efficiency * (figures.backward_ratio if backward else 1.0)
    return max(
        flops / (peak_flop_per_ns * efficiency),
        traffic_bytes / bandwidth_byte_per_ns,
        steps * figures.step_us * 1e3,
    )
