"""What if the kernels ran on another machine: each scaled by the rooflines of two hardware profiles.

A kernel with known FLOPs and traffic scales by the ratio of its roofline times ``max(flops / peak, bytes / rate)``,
or else by its kind: matrix products, convolutions and attention with the peak, communication with the bandwidth of the
link, all others with the bandwidth of device memory. Efficiencies are taken to be those of the measured machine, which
is the largest uncertainty: a kernel tuned for one machine may reach less on another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hardware_profiles import HardwareProfile, load_profile
from op_graphs.columns import Bool, Float64
from op_graphs.vocabulary import DType, OpKind
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if.selection import with_note

_COMPUTE_BOUND = (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.ATTENTION, OpKind.CONVOLUTION)
_TERA, _GIGA = 1e12, 1e9


def move(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``FROM:TO``, two names or files of hardware profiles."""
    first, second = _machines(rebuilt, value)
    ratio = kernel_ratios(rebuilt, first, second)
    known = _known(rebuilt)
    compute = rebuilt.on_device() & ~rebuilt.graph.is_communication()
    total = int(rebuilt.durations[compute].sum())
    share = rebuilt.durations[compute & known].sum() / total if total else 0.0
    least, most = ratio_bounds(rebuilt, first, second)
    scaled = _scaled(rebuilt, ratio)
    return with_note(
        scaled,
        f"hardware={value}: {100 * share:.0f} % of compute time is scaled by known FLOPs and bytes, the rest by "
        "its kind; efficiencies and the host are taken to stay. The range scales each kernel by the peak of its type "
        f"or by memory alone (from {least[compute].min(initial=9e9):.2f} to {most[compute].max(initial=0):.2f} times)",
    )


def move_at_best(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Each slice by the smaller of the ratios that may hold for it."""
    return _scaled(rebuilt, ratio_bounds(rebuilt, *_machines(rebuilt, value))[0])


def move_at_worst(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Each slice by the larger of the ratios that may hold for it."""
    return _scaled(rebuilt, ratio_bounds(rebuilt, *_machines(rebuilt, value))[1])


def _machines(rebuilt: Rebuilt, value: str) -> tuple[HardwareProfile, HardwareProfile]:
    first, colon, second = value.partition(":")
    if not colon:
        raise ScenarioError(
            f"hardware={value}: write FROM:TO, the profile of the machine the trace is of "
            f"({rebuilt.timeline.device or 'not named in it'}) and that of the other"
        )
    return load_profile(first), load_profile(second)


def _scaled(rebuilt: Rebuilt, ratio: Float64) -> Rebuilt:
    changed = np.rint(rebuilt.durations * ratio).astype(np.int64)
    return replace(rebuilt, durations=np.where(rebuilt.on_device(), changed, rebuilt.durations))


def _known(rebuilt: Rebuilt) -> Bool:
    operations = rebuilt.graph.operations
    known: Bool = (operations.flops > 0) & (operations.bytes_read + operations.bytes_written > 0)
    return known


def kernel_ratios(rebuilt: Rebuilt, first: HardwareProfile, second: HardwareProfile) -> Float64:
    """Time on the second machine over time on the first, for each row."""
    operations = rebuilt.graph.operations
    peak, memory, link = _rates(rebuilt, first, second)
    traffic = operations.bytes_read + operations.bytes_written
    before, after = (np.maximum(operations.flops / p, traffic / m) for p, m in zip(peak, memory, strict=True))
    by_kind = np.where(np.isin(operations.kind, _COMPUTE_BOUND), peak[0] / peak[1], memory[0] / memory[1])
    ratio = np.where(_known(rebuilt), after / np.maximum(before, 1e-30), by_kind)
    return np.where(rebuilt.graph.is_communication(), link[0] / link[1], ratio)


def ratio_bounds(
    rebuilt: Rebuilt, first: HardwareProfile, second: HardwareProfile
) -> tuple[Float64, Float64]:
    """The least and greatest ratio that may hold for each row: one bound alone, inside or between fast domains.

    A roofline lies between its two bounds, and what a kernel is bound by is the main thing a trace does not say.
    """
    peak, memory, link = _rates(rebuilt, first, second)
    fabric = [machine.network.fabric.bandwidth_gb_per_s for machine in (first, second)]
    both = np.stack([peak[0] / peak[1], np.full(len(rebuilt.rows), memory[0] / memory[1])])
    communication = rebuilt.graph.is_communication()
    links = [link[0] / link[1], fabric[0] / fabric[1]]
    least = np.where(communication, min(links), both.min(axis=0))
    most = np.where(communication, max(links), both.max(axis=0))
    memory_alone = ~np.isin(rebuilt.graph.operations.kind, _COMPUTE_BOUND) & (
        rebuilt.graph.operations.flops <= 0
    )
    memory_alone &= ~communication
    return np.where(memory_alone, both[1], least), np.where(memory_alone, both[1], most)


def _rates(
    rebuilt: Rebuilt, first: HardwareProfile, second: HardwareProfile
) -> tuple[Float64, list[float], list[float]]:
    """FLOP/s of the type of each row, bytes/s of device memory, and GB/s of the fast links, on both machines."""
    machines = (first, second)
    peak = np.array([[_peak(machine, d) for d in DType] for machine in machines])
    memory = [machine.memory.bandwidth_gb_per_s * _GIGA for machine in machines]
    link = [machine.network.domain.bandwidth_gb_per_s for machine in machines]
    return peak[:, rebuilt.graph.operations.dtype], memory, link


def _peak(machine: HardwareProfile, dtype: DType) -> float:
    """FLOP/s of a dtype; of bf16 where a machine names none for it."""
    peaks = machine.peak_tflops
    return _TERA * peaks.get(dtype.name.lower(), peaks.get("bf16", max(peaks.values())))
