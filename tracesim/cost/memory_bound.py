"""Duration of kernels bound by memory traffic: a floor for each kernel, and the bytes over an achieved bandwidth.

Three access patterns stand for nearly all kernels: streaming (elementwise, optimizer), reductions (norms, softmax,
sums) and strided (permutes, transposes, gathers, casts between layouts). A fourth is that of compiled casts with a
scale for each column, which write the transpose.

Left out: hits in the L2 cache, which make a kernel faster whose input the one before just wrote, and kernels with too
few blocks to fill the SMs. The floor and the bandwidth are those of the roofline model (Williams et al., 2009).
"""

from __future__ import annotations

from hardware_profiles.profile import MemoryFigures
from op_graphs.graph import MemoryShape
from op_graphs.vocabulary import OpKind

ACCESS_OF_KIND: dict[OpKind, str] = {
    OpKind.NORM: "reduction",
    OpKind.SOFTMAX: "reduction",
    OpKind.REDUCTION: "reduction",
    OpKind.LOSS: "reduction",
    OpKind.PERMUTE: "strided",
    OpKind.EMBEDDING: "strided",
    OpKind.CAST: "strided",
}
"""Access pattern of an operation that carries bytes but no shape; ``stream`` for kinds not listed."""


def memory_bound_ns(shape: MemoryShape, figures: MemoryFigures, traffic_bytes: float) -> float:
    """Duration of ``shape.passes`` kernels that together move ``traffic_bytes``.

    Returns:
        Nanoseconds.

    Raises:
        ValueError: if the access pattern is not one of ``stream``, ``reduction``, ``strided``, ``columns``.
    """
    rate = achieved_bandwidth(figures, shape.access)
    return shape.passes * figures.kernel_floor_us * 1e3 + traffic_bytes / rate


def achieved_bandwidth(figures: MemoryFigures, access: str) -> float:
    """Bandwidth in B/ns that kernels of an access pattern reach.

    Raises:
        ValueError: if the access pattern is not one of ``stream``, ``reduction``, ``strided``, ``columns``.
    """
    efficiencies = {
        "stream": figures.stream_efficiency,
        "reduction": figures.reduction_efficiency,
        "strided": figures.strided_efficiency,
        "columns": figures.column_cast_efficiency or figures.strided_efficiency,
    }
    if access not in efficiencies:
        raise ValueError(
            f"memory access pattern {access!r} is not known; a MemoryShape takes one of {', '.join(efficiencies)}"
        )
    return figures.bandwidth_gb_per_s * efficiencies[access]
