"""What a hardware profile holds. Data only: the formulas that use these figures live in ``tracesim.cost``.

Every figure has its unit in its name. ``sources`` says, for each figure, where it comes from: a datasheet, a
measurement, or a fit and on what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class ProfileError(ValueError):
    """A hardware profile that cannot be read, named with all that is wrong in it."""


@dataclass(frozen=True)
class GemmTile:
    """A tile a GEMM kernel computes in one thread block, with its rate relative to the best tile."""

    m: int
    n: int
    relative_rate: float = 1.0


@dataclass(frozen=True)
class GemmDTypeFigures:
    """What holds in the place of the figures of :class:`GemmFigures` for operands of one dtype, by another kernel."""

    mainloop_efficiency: float
    sustained_efficiency: float
    exposed_epilogue: float
    accumulate_ratio: float = 1.0
    """Rate inside a tile of products that add to an fp32 gradient, over that of the others."""
    grouped_per_expert_us: float = 0.0
    grouped_efficiency: float = 0.0
    grouped_exposed_traffic: float = 1.0


@dataclass(frozen=True)
class GemmFigures:
    """How fast matrix products run; see ``docs/compute_cost.md`` for the formula."""

    tiles: tuple[GemmTile, ...]
    mainloop_efficiency: float
    """Share of the dense peak reached inside a tile while clocks hold."""
    sustained_efficiency: float
    """Share of the dense peak a long-running, power-capped chip sustains."""
    prologue_k: float
    """Fill and drain of a tile, in units of K elements."""
    exposed_epilogue: float
    """Share of the output traffic that is not hidden behind the next tile."""
    grouped_per_expert_us: float = 0.0
    """Fixed cost of each expert in a grouped GEMM; 0 if one persistent kernel runs all experts."""
    grouped_efficiency: float = 0.0
    """Share of the dense peak of a grouped GEMM launched expert by expert; 0 means as ``sustained_efficiency``."""
    grouped_exposed_traffic: float = 1.0
    """Share of the memory traffic of such a grouped GEMM that is not hidden behind the work of other experts."""
    dtype_ratio: Mapping[str, float] = field(default_factory=dict)
    """Share of the peak that operands of a dtype reach over the share that bf16 reaches; 1 where nothing is given."""
    sustained_dtype_ratio: Mapping[str, float] = field(default_factory=dict)
    """Share of the peak that operands of a dtype sustain at the power limit over the share that bf16 sustains, where it
    is not :attr:`dtype_ratio`: narrower operands switch less for a FLOP of their own, higher peak."""
    dtypes: Mapping[str, GemmDTypeFigures] = field(default_factory=dict)
    """Figures of dtypes whose products were measured by themselves; wins over :attr:`dtype_ratio`."""


@dataclass(frozen=True)
class AttentionFigures:
    """How fast fused attention runs."""

    forward_efficiency: float
    """Share of the dense peak on the work really done (causal halves it)."""
    backward_ratio: float
    """Backward efficiency over forward efficiency."""
    fixed_us: float
    """Cost that does not scale with the work."""
    wide_head_ratio: float = 0.82
    """Efficiency at unequal query and value head sizes (192/128) over that at 128/128."""
    flash_2_ratio: float = 0.0
    """Rate of FlashAttention-2 over that of the machine's best kernel; 0 where it is not known."""
    flash_1_ratio: float = 0.0
    """Rate of the first FlashAttention (and its Triton version) over the best kernel's; 0 where it is not known."""
    small_head_ratio: float = 1.0
    """Efficiency of the best kernel at heads of 64 over that at 128: half the products for each exponential."""


@dataclass(frozen=True)
class ScanFigures:
    """How fast chunked scans run (state spaces, delta rules), whose kernels multiply between much else.

    The defaults are those of the H100.
    """

    efficiency: float = 0.085
    """Share of the dense peak that their products reach, with the decays, masks and copies in between."""
    backward_ratio: float = 0.35
    """Efficiency of the kernels of a backward pass over ``efficiency``."""
    step_us: float = 1.16
    """One chunk of a pass that goes through a sequence chunk by chunk."""


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory and how much of its bandwidth kernels reach, by access pattern."""

    capacity_gib: float
    bandwidth_gb_per_s: float
    stream_efficiency: float
    reduction_efficiency: float
    strided_efficiency: float
    kernel_floor_us: float
    """Duration of the smallest kernel."""
    kernel_gap_us: float
    """Idle time between two kernels that are queued back to back."""
    column_cast_efficiency: float = 0.0
    """Share of the bandwidth that compiled casts with a scale for each column reach; 0 means as strided."""
    context_gib: float = 0.0
    """What a process takes before its first tensor (CUDA or HIP context, loaded kernels)."""


@dataclass(frozen=True)
class LinkFigures:
    """A tier of the network, seen from one GPU."""

    bandwidth_gb_per_s: float
    """Each direction, per GPU, nominal."""
    efficiency: float
    """Share of it a large collective reaches."""
    latency_us: float
    """Per step of a collective on this tier, with NCCL's LL128 protocol or its like."""
    p2p_efficiency: float = 0.0
    """Share of it a large send reaches; 0 means as ``efficiency``."""


@dataclass(frozen=True)
class NetworkFigures:
    """Where the fast domain ends, and what both tiers do."""

    gpus_per_domain: int
    """GPUs joined by NVLink, xGMI or the like (8 in a DGX, 72 in an NVL72 rack)."""
    domain: LinkFigures
    fabric: LinkFigures
    """Between domains; bandwidth is the NIC share of one GPU."""
    collective_base_us: float
    """Fixed cost of launching a collective kernel and its proxy."""
    multicast: bool = False
    """NVSwitch multicast (NVLS) is there: all-reduce in about one pass."""
    collective_sms: int = 0
    """SMs a large collective occupies."""
    collective_stall_us: float = 0.0
    """What every kernel beside a collective that fills the links of its domain takes longer, however short it is."""
    communicator_gib: float = 0.0
    """Buffers of one communicator of the collective library on a rank."""
    exchange_peer_gib: float = 0.0
    """Buffers that a communicator has besides for each peer of an all-to-all in its domain."""
    gpus_per_bridge_side: int = 0
    """GPUs on each side of a link inside the domain that they all share (sockets of a PCIe server); 0 without one."""
    bridge_gb_per_s: float = 0.0
    """What crosses that link in each direction, of all groups together; with ``gpus_per_bridge_side``."""
    domains_per_leaf: int = 0
    """Domains that exchange at the full rate of their NICs (under one leaf switch, or one unit of rails); 0 for all."""
    oversubscription: float = 1.0
    """What the NICs below a leaf can send, over what its uplinks to other leaves carry; with ``domains_per_leaf``."""


@dataclass(frozen=True)
class HostFigures:
    """The CPU side of a launch."""

    launch_us: float
    """Time a kernel launch call takes."""
    operation_us: float = 0.0
    """Time the framework takes on the host for the forward call of one module, its launch and Python together, of which
    other operations take shares; 0 leaves the host out."""
    resume_us: float = 0.0
    """Time from the end of a transfer between stages that the host waits for to the first kernel behind it: return from
    the wait, the framework's step function, the first launches."""
    link_gb_per_s: float = 0.0
    """Between a GPU and the memory of its host (PCIe, NVLink-C2C), each direction, nominal; 0 where it is not known."""
    to_device_efficiency: float = 1.0
    """Share of it a large copy from pinned memory reaches."""
    to_host_efficiency: float = 1.0
    """Share of it a large copy into pinned memory reaches."""
    link_latency_us: float = 0.0
    """Fixed cost of a copy."""
    memory_gib: float = 0.0
    """Memory of the host, the share of one GPU; 0 where it is not known."""
    memory_gb_per_s: float = 0.0
    """Bandwidth of the memory of the host, the share of one GPU; 0 where it is not known."""
    update_efficiency: float = 1.0
    """Share of it an optimizer step on the processor reaches."""


@dataclass(frozen=True)
class MeasuredGemm:
    """A measured matrix product; wins over the formula where the shape is equal. Fields as in ``GemmShape``."""

    m: int
    n: int
    k: int
    layout: str
    dtype: str
    output: str
    accumulate: bool
    count: int
    time_us: float


@dataclass(frozen=True)
class MeasuredAttention:
    """A measured fused attention; wins over the formula where the shape is equal."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    causal: bool
    backward: bool
    dtype: str
    time_us: float


@dataclass(frozen=True)
class MeasuredCollective:
    """A measured line ``fixed_us + per_step_us * (n - 1) + traffic / (efficiency * bandwidth)`` of a collective."""

    communication: str
    """Name of the :class:`Communication` in lower case, ``p2p`` for sends."""
    tier: str
    """``domain`` or ``fabric``."""
    efficiency: float
    fixed_us: float
    per_step_us: float
    group_size: int = 0
    """Members of the group it was measured with; 0: any size that has no line of its own."""


@dataclass(frozen=True)
class HardwareProfile:
    """A machine."""

    name: str
    description: str
    vendor: str
    sm_count: int
    peak_tflops: Mapping[str, float]
    """Dense peak by dtype name in lower case (``bf16``, ``fp8``, ``tf32``, ``fp32``)."""
    gemm: GemmFigures
    attention: AttentionFigures
    memory: MemoryFigures
    network: NetworkFigures
    host: HostFigures
    sources: Mapping[str, str]
    scan: ScanFigures = ScanFigures()
    training_clock_ratio: float = 1.0
    """Clock under a sustained training step over the clock in back-to-back runs of one kernel, in which the GEMM and
    attention figures and measured shapes are taken: power limits it when all of the chip works."""
    rank_jitter: float = 0.0
    """Standard deviation over ranks of the time that the same layer takes, as a share of it: ranks that meet in every
    layer wait for the slowest. 0 where it is not known."""
    compute_capability: int = 0
    """10 * major + minor for NVIDIA (90 for Hopper); decides workspace sizes. 0 if not NVIDIA."""
    measured_gemms: tuple[MeasuredGemm, ...] = ()
    measured_attentions: tuple[MeasuredAttention, ...] = ()
    measured_collectives: tuple[MeasuredCollective, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
