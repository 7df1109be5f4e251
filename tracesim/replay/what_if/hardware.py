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
from op_graphs.columns import Float64
from op_graphs.vocabulary import DType, OpKind
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt

_COMPUTE_BOUND = (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.ATTENTION, OpKind.CONVOLUTION)
_TERA, _GIGA = 1e12, 1e9


def move(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``FROM:TO``, two names or files of hardware profiles."""
    first, colon, second = value.partition(":")
    if not colon:
        raise ScenarioError(
            f"hardware={value}: write FROM:TO, the profile of the machine the trace is of "
            f"({rebuilt.timeline.device or 'not named in it'}) and that of the other"
        )
    ratio = kernel_ratios(rebuilt, load_profile(first), load_profile(second))
    changed = np.rint(rebuilt.durations * ratio).astype(np.int64)
    return replace(rebuilt, durations=np.where(rebuilt.on_device(), changed, rebuilt.durations))


def kernel_ratios(rebuilt: Rebuilt, first: HardwareProfile, second: HardwareProfile) -> Float64:
    """Time on the second machine over time on the first, for each row."""
    operations = rebuilt.graph.operations
    kind = operations.kind
    peak = np.array([[_peak(machine, d) for d in DType] for machine in (first, second)])[:, operations.dtype]
    memory = [machine.memory.bandwidth_gb_per_s * _GIGA for machine in (first, second)]
    link = [machine.network.domain.bandwidth_gb_per_s for machine in (first, second)]
    traffic = operations.bytes_read + operations.bytes_written
    known = (operations.flops > 0) & (traffic > 0)
    before, after = (np.maximum(operations.flops / p, traffic / m) for p, m in zip(peak, memory, strict=True))
    by_kind = np.where(np.isin(kind, _COMPUTE_BOUND), peak[0] / peak[1], memory[0] / memory[1])
    ratio = np.where(known, after / np.maximum(before, 1e-30), by_kind)
    communication = rebuilt.graph.is_communication()
    return np.where(communication, link[0] / link[1], ratio)


def _peak(machine: HardwareProfile, dtype: DType) -> float:
    """FLOP/s of a dtype; of bf16 where a machine names none for it."""
    peaks = machine.peak_tflops
    return _TERA * peaks.get(dtype.name.lower(), peaks.get("bf16", max(peaks.values())))
