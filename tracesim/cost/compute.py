"""Durations of compute kernels on a machine: which formula an operation takes, and what a measured shape overrules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from hardware_profiles.profile import HardwareProfile, ProfileError
from op_graphs.columns import Int8, Int64
from op_graphs.graph import (
    AttentionShape,
    GemmShape,
    HostCopyShape,
    HostUpdateShape,
    MemoryShape,
    OpGraph,
    ScanShape,
    Shape,
)
from op_graphs.vocabulary import DType, OpKind

from .attention import attention_flops, attention_ns, is_calibrated
from .distinct import distinct_rows
from .gemm import figures_for, gemm_ns, is_aligned, multi_stream_gemm_ns
from .host_memory import host_copy_ns, host_update_ns
from .memory_bound import ACCESS_OF_KIND, achieved_bandwidth, memory_bound_ns
from .scan import scan_ns

NANOSECONDS_PER_MICROSECOND = 1e3
FREE_KINDS = frozenset({OpKind.HOST, OpKind.ANNOTATION})
MULTIPLYING_KINDS = frozenset(
    {
        OpKind.GEMM,
        OpKind.GROUPED_GEMM,
        OpKind.ATTENTION,
        OpKind.CONVOLUTION,
        OpKind.SCAN,
        OpKind.OTHER,
    }
)

_PEAK_NAMES: dict[DType, tuple[str, ...]] = {
    DType.FP32: ("fp32",),
    DType.TF32: ("tf32",),
    DType.FP16: ("fp16", "bf16"),
    DType.BF16: ("bf16", "fp16"),
    DType.FP8: ("fp8",),
    DType.FP4: ("fp4",),
    DType.INT8: ("int8",),
}


class Provenance(IntEnum):
    """Where a duration comes from; reports mark what is not modelled inside the calibrated range."""

    MODELLED = 0
    """The formula, in the range of shapes it was fitted on."""
    MEASURED = 1
    """A row of the profile with the same shape."""
    EXTRAPOLATED = 2
    """The formula, outside the range of shapes it was fitted on."""


@dataclass(frozen=True)
class ComputeEstimate:
    """Duration of one kernel and where it comes from."""

    time_ns: int
    provenance: Provenance


class ComputeCost:
    """Durations of compute operations on a machine.

    Args:
        profile: the machine.
        available_sms: SMs left to compute beside a communication kernel; all of them by default.
        reserved_sms: of these, SMs that matrix products leave free (a margin for communication kernels).

    Raises:
        ValueError: if ``available_sms`` is not between 1 and the SMs of the machine, or ``reserved_sms`` leaves none.
    """

    def __init__(
        self, profile: HardwareProfile, available_sms: int | None = None, reserved_sms: int = 0
    ) -> None:
        if available_sms is not None and not 1 <= available_sms <= profile.sm_count:
            raise ValueError(
                f"available_sms is {available_sms}, but {profile.name} has {profile.sm_count} SMs; "
                f"give 1 to {profile.sm_count}"
            )
        self.profile = profile
        self.available_sms = profile.sm_count if available_sms is None else available_sms
        if not 0 <= reserved_sms < self.available_sms:
            raise ValueError(
                f"reserved_sms is {reserved_sms}, but there are {self.available_sms} SMs, of which one must be left; "
                f"give 0 to {self.available_sms - 1}"
            )
        self.product_sms = self.available_sms - reserved_sms
        self._measured = _measured_times_ns(profile)

    @property
    def gap_ns(self) -> int:
        """Idle time between two kernels queued back to back. Part of no duration: the timeline inserts it."""
        return round(self.profile.memory.kernel_gap_us * NANOSECONDS_PER_MICROSECOND)

    def duration_ns(
        self,
        shape: Shape,
        flops: float = 0.0,
        bytes_read: float = 0.0,
        bytes_written: float = 0.0,
        dtype: DType = DType.NONE,
        kind: OpKind = OpKind.OTHER,
    ) -> int:
        """Duration of one operation in nanoseconds; see :meth:`estimate`."""
        return self.estimate(shape, flops, bytes_read, bytes_written, dtype, kind).time_ns

    def estimate(
        self,
        shape: Shape,
        flops: float = 0.0,
        bytes_read: float = 0.0,
        bytes_written: float = 0.0,
        dtype: DType = DType.NONE,
        kind: OpKind = OpKind.OTHER,
    ) -> ComputeEstimate:
        """Duration of one operation and where it comes from.

        Args:
            shape: what the kernel computes; ``None`` for a kernel described by its bytes and FLOPs alone.
            flops: work really done, FLOP; 0 to derive it from ``shape``. A GEMM always derives it.
            bytes_read: memory traffic, bytes; 0 with ``bytes_written`` 0 to derive it from ``shape``.
            bytes_written: as ``bytes_read``.
            dtype: operand type where ``shape`` does not say.
            kind: decides between the two ways a grouped product is launched, and the access pattern of a
                kernel without a shape.

        Returns:
            0 for host calls and annotations without a shape, and for operations without shape, bytes or FLOPs.

        Raises:
            ValueError: if the machine has no peak for the dtype, a size is not positive, or an amount is negative.
        """
        traffic = bytes_read + bytes_written
        if min(flops, bytes_read, bytes_written) < 0:
            raise ValueError(
                f"an operation of kind {kind.name} has {flops} FLOPs, {bytes_read} bytes read and {bytes_written} "
                "bytes written; none can be negative"
            )
        if (kind in FREE_KINDS and shape is None) or (shape is None and flops == 0 and traffic == 0):
            return ComputeEstimate(0, Provenance.MODELLED)
        measured = self._measured.get(shape) if isinstance(shape, GemmShape | AttentionShape) else None
        sm_count = self.product_sms if isinstance(shape, GemmShape) else self.available_sms
        if measured is not None and sm_count == self.profile.sm_count:
            return ComputeEstimate(round(measured), Provenance.MEASURED)
        time_ns, provenance = self._modelled(shape, flops, traffic, dtype, kind, sm_count)
        if measured is not None:
            # The row was measured with all SMs: take from the formula only what fewer of them cost.
            whole_ns, _ = self._modelled(shape, flops, traffic, dtype, kind, self.profile.sm_count)
            return ComputeEstimate(round(measured * time_ns / whole_ns), Provenance.MODELLED)
        return ComputeEstimate(max(1, round(time_ns)), provenance)

    def durations_ns(self, graph: OpGraph) -> Int64:
        """Duration of every compute row of a graph, nanoseconds; 0 for communication rows."""
        return self.estimates(graph)[0]

    def estimates(self, graph: OpGraph) -> tuple[Int64, Int8]:
        """Durations in nanoseconds and :class:`Provenance` of every row; zeros for communication rows.

        Each distinct operation is evaluated once. Matrix products and attention run at the clock of a sustained
        training step (``training_clock_ratio``).

        Raises:
            ValueError: as :meth:`estimate`, with the name of the first operation that is refused.
        """
        operations = graph.operations
        durations = np.zeros(len(operations), dtype=np.int64)
        provenances = np.zeros(len(operations), dtype=np.int8)
        rows = np.flatnonzero(~graph.is_communication())
        if not len(rows):
            return durations, provenances
        columns = ("shape", "kind", "dtype", "flops", "bytes_read", "bytes_written")
        first, inverse = distinct_rows([getattr(operations, column)[rows] for column in columns])
        estimates = [self._estimate_row(graph, int(row)) for row in rows[first]]
        durations[rows] = np.array([estimate.time_ns for estimate in estimates], dtype=np.int64)[inverse]
        provenances[rows] = np.array([estimate.provenance for estimate in estimates], dtype=np.int8)[inverse]
        return durations, provenances

    def peak_flop_per_ns(self, dtype: DType, sm_count: int | None = None) -> float:
        """Dense peak for a dtype in FLOP/ns, of ``sm_count`` SMs (all by default).

        Half-precision types stand in for each other. Nothing else does: fp32 without tensor cores is ``fp32``.

        Raises:
            ValueError: if the machine has no such peak; lists those it has.
        """
        for name in _PEAK_NAMES.get(dtype, ()):
            if name in self.profile.peak_tflops:
                share = 1.0 if sm_count is None else sm_count / self.profile.sm_count
                return self.profile.peak_tflops[name] * 1e3 * share
        raise ValueError(
            f"{self.profile.name} has no peak for dtype {dtype.name.lower()}; its profile has "
            f"{', '.join(sorted(self.profile.peak_tflops)) or 'none'}. Choose one of these, or add "
            f"{dtype.name.lower()} to peak_tflops of the profile"
        )

    def _estimate_row(self, graph: OpGraph, row: int) -> ComputeEstimate:
        operations = graph.operations
        index = int(operations.shape[row])
        shape = graph.shapes[index] if index >= 0 else None
        try:
            estimate = self.estimate(
                shape,
                float(operations.flops[row]),
                float(operations.bytes_read[row]),
                float(operations.bytes_written[row]),
                DType(int(operations.dtype[row])),
                OpKind(int(operations.kind[row])),
            )
        except ValueError as error:
            raise ValueError(f"operation {graph.strings[operations.name[row]]!r}: {error}") from None
        if not isinstance(shape, GemmShape | AttentionShape):
            return estimate
        time_ns = float(estimate.time_ns)
        if shape in self._measured:
            time_ns = max(time_ns, self._power_limit_ns(shape, float(operations.flops[row])))
        return replace(estimate, time_ns=round(time_ns / self.profile.training_clock_ratio))

    def _power_limit_ns(self, shape: GemmShape | AttentionShape, flops: float) -> float:
        """Time at the rate that the chip sustains at its power limit; a short kernel measured alone may be faster.

        The figures of the formulas are sustained ones already.
        """
        if isinstance(shape, GemmShape):
            flops = 2.0 * shape.m * shape.n * shape.k * shape.count
        else:
            flops = flops or attention_flops(shape)
        accumulates = isinstance(shape, GemmShape) and shape.accumulate
        figures = figures_for(self.profile.gemm, shape.dtype.name.lower(), accumulates=accumulates)
        return flops / (self.peak_flop_per_ns(shape.dtype, self.available_sms) * figures.sustained_efficiency)

    def _modelled(
        self, shape: Shape, flops: float, traffic: float, dtype: DType, kind: OpKind, sm_count: int
    ) -> tuple[float, Provenance]:
        memory = self.profile.memory
        floor_ns = memory.kernel_floor_us * NANOSECONDS_PER_MICROSECOND
        provenance = Provenance.MODELLED
        if isinstance(shape, MemoryShape):
            return memory_bound_ns(shape, memory, traffic), provenance
        if isinstance(shape, HostCopyShape):
            return host_copy_ns(shape, self.profile, traffic), provenance
        if isinstance(shape, HostUpdateShape):
            return host_update_ns(self.profile, traffic), provenance
        if isinstance(shape, GemmShape):
            _require_positive(shape, (shape.m, shape.n, shape.k, shape.count))
            peak = self.peak_flop_per_ns(shape.dtype, sm_count)
            figures = figures_for(self.profile.gemm, shape.dtype.name.lower(), accumulates=shape.accumulate)
            if not is_aligned(shape):
                provenance = Provenance.EXTRAPOLATED
            if kind == OpKind.GROUPED_GEMM and figures.grouped_per_expert_us > 0:
                time_ns = multi_stream_gemm_ns(shape, figures, peak, memory.bandwidth_gb_per_s, traffic)
            else:
                bandwidth = achieved_bandwidth(memory, "stream")
                time_ns = gemm_ns(shape, figures, peak, bandwidth, sm_count, traffic)
            return max(time_ns, floor_ns), provenance
        if isinstance(shape, AttentionShape):
            _require_positive(
                shape, (shape.batch, shape.query_length, shape.key_length, shape.heads, shape.head_size)
            )
            peak = self.peak_flop_per_ns(shape.dtype, sm_count)
            if not is_calibrated(shape):
                provenance = Provenance.EXTRAPOLATED
            time_ns = attention_ns(shape, self.profile.attention, peak, flops)
            return max(time_ns, traffic / achieved_bandwidth(memory, "stream"), floor_ns), provenance
        if isinstance(shape, ScanShape) or kind == OpKind.SCAN:
            scan = shape if isinstance(shape, ScanShape) else ScanShape()
            time_ns = scan_ns(
                self.profile.scan,
                self.peak_flop_per_ns(dtype, sm_count) if flops else 1.0,
                achieved_bandwidth(memory, "stream"),
                flops=flops,
                traffic_bytes=traffic,
                steps=scan.steps,
                backward=scan.backward,
            )
            return floor_ns + time_ns, Provenance.EXTRAPOLATED if flops else provenance
        time_ns = memory_bound_ns(MemoryShape(ACCESS_OF_KIND.get(kind, "stream")), memory, traffic)
        if flops and kind in MULTIPLYING_KINDS:
            rate = self.peak_flop_per_ns(dtype, sm_count) * self.profile.gemm.sustained_efficiency
            return max(time_ns, floor_ns + flops / rate), Provenance.EXTRAPOLATED
        return time_ns, provenance


def _measured_times_ns(profile: HardwareProfile) -> dict[GemmShape | AttentionShape, float]:
    """Measured durations by shape; the first row wins where a profile repeats one."""
    times: dict[GemmShape | AttentionShape, float] = {}
    for gemm in profile.measured_gemms:
        gemm_shape = GemmShape(
            m=gemm.m,
            n=gemm.n,
            k=gemm.k,
            layout=gemm.layout,
            dtype=_dtype_named(gemm.dtype, profile),
            output=_dtype_named(gemm.output, profile),
            accumulate=gemm.accumulate,
            count=gemm.count,
        )
        times.setdefault(gemm_shape, gemm.time_us * NANOSECONDS_PER_MICROSECOND)
    for row in profile.measured_attentions:
        attention_shape = AttentionShape(
            batch=row.batch,
            query_length=row.query_length,
            key_length=row.key_length,
            heads=row.heads,
            kv_heads=row.kv_heads,
            head_size=row.head_size,
            value_head_size=row.value_head_size,
            causal=row.causal,
            backward=row.backward,
            dtype=_dtype_named(row.dtype, profile),
        )
        times.setdefault(attention_shape, row.time_us * NANOSECONDS_PER_MICROSECOND)
    return times


def _dtype_named(name: str, profile: HardwareProfile) -> DType:
    try:
        return DType[name.upper()]
    except KeyError:
        raise ProfileError(
            f"{profile.name}: a measured row has dtype {name!r}; use one of "
            f"{', '.join(dtype.name.lower() for dtype in DType if dtype)}"
        ) from None


def _require_positive(shape: GemmShape | AttentionShape, sizes: tuple[int, ...]) -> None:
    if min(sizes) < 1:
        raise ValueError(f"{shape} has a size below 1; every size must be at least 1")
