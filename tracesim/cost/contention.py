"""What the operations of a graph take from a device that others running beside them need.

Communication kernels take SMs (``network.collective_sms`` of the profile, fewer for sends and small messages), memory
bandwidth, and the links of their tier; compute kernels take memory bandwidth and give up SMs. ``docs/contention.md``
holds the rules with what was measured of them. Blocks of GEMMs are the output tiles of :mod:`.gemm`, those of attention
are tiles of queries.

Left out: power (a chip that computes less beside communication clocks higher), L2, SMs on which a light communication
kernel leaves room, and persistent kernels that were launched with fewer blocks on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hardware_profiles.profile import GemmFigures, HardwareProfile, LinkFigures
from op_graphs.columns import Int64
from op_graphs.graph import (
    AttentionShape,
    GemmShape,
    HostCopyShape,
    HostUpdateShape,
    MemoryShape,
    OpGraph,
    Shape,
)
from op_graphs.vocabulary import Communication, OpKind

from ..sharing import Demand, SharingPolicy
from . import CostModel
from .collective_plans import SENDS
from .compute import FREE_KINDS
from .distinct import distinct_rows
from .gemm import figures_for, gemm_ns
from .memory_bound import achieved_bandwidth

HBM, DOMAIN_OUT, DOMAIN_IN, FABRIC_OUT, FABRIC_IN, BRIDGE_OUT, BRIDGE_IN, UPLINK_OUT, UPLINK_IN = range(9)
"""Resources of a device: memory, both directions of its links inside and between fast domains, and of what it shares
with ranks that do the same: the bridge of its domain, and its part of the uplinks of its leaf."""

SEND_SMS = 2
"""SMs of a send or receive: kernels beside one run 1.00 to 1.08 times as long in public traces, whatever its grid."""

CHANNEL_BYTES = 1 << 18
"""Message for which a collective takes one more SM, up to its most. An assumption: libraries open few channels for
small messages."""

SECOND_WAVE = 0.66
"""Part of its duration by itself that a norm needs again where SMs are gone: its blocks fit just once, so some of them
come in a second wave, with the memory bandwidth to themselves. Fitted on a public H800 trace, 1.63 to 1.69 times as
long beside a communication kernel as without (``benchmarks.fit --figure contention``)."""

QUERY_TILE = 128
"""Queries of a thread block of fused attention."""

WAVE_BYTES_PER_SM = 1 << 16
"""Traffic of the blocks that are resident on an SM: 2,048 threads that load and store 16 bytes each."""

_DIRECTIONS: dict[Communication, tuple[int, ...]] = {
    Communication.SEND: (DOMAIN_OUT, FABRIC_OUT, BRIDGE_OUT, UPLINK_OUT),
    Communication.RECEIVE: (DOMAIN_IN, FABRIC_IN, BRIDGE_IN, UPLINK_IN),
}
_BOTH = (DOMAIN_OUT, DOMAIN_IN, FABRIC_OUT, FABRIC_IN, BRIDGE_OUT, BRIDGE_IN, UPLINK_OUT, UPLINK_IN)

_RINGS = (Communication.ALL_REDUCE, Communication.ALL_GATHER, Communication.REDUCE_SCATTER)
"""What holds up kernels beside it by ``network.collective_stall_us``, as far as it fills the links of its domain."""


def sharing_policy(costs: CostModel, graph: OpGraph, durations: Int64) -> SharingPolicy:
    """What the operations of a graph share on a machine.

    Args:
        costs: of the machine.
        graph: the operations.
        durations: nanoseconds of each by itself, as :meth:`CostModel.durations_ns` gives them.
    """
    operations = graph.operations
    names = (
        "shape",
        "kind",
        "dtype",
        "bytes_read",
        "bytes_written",
        "communication",
        "communication_bytes",
        "group",
    )
    if not len(operations):
        return SharingPolicy(np.empty(0, dtype=np.int64), (Demand(),))
    first, inverse = distinct_rows([*(getattr(operations, name) for name in names), durations])
    demands = [_demand(costs, graph, int(row), int(durations[row])) for row in first]
    profile = costs.profile
    return SharingPolicy(
        classes=inverse.astype(np.int64),
        demands=tuple(demands),
        capacities=_capacities(profile),
        sms=profile.sm_count,
    )


def _capacities(profile: HardwareProfile) -> tuple[float, ...]:
    """Bytes a nanosecond of each resource, in their order."""
    network = profile.network
    fabric = _capacity(network.fabric)
    # A machine without a bridge has nothing that uses it.
    links = (
        _capacity(network.domain),
        fabric,
        network.bridge_gb_per_s or 1.0,
        fabric / network.oversubscription,
    )
    return (achieved_bandwidth(profile.memory, "stream"), *(rate for link in links for rate in (link, link)))


def _capacity(link: LinkFigures) -> float:
    return link.bandwidth_gb_per_s * max(link.efficiency, link.p2p_efficiency)


def _demand(costs: CostModel, graph: OpGraph, row: int, duration: int) -> Demand:
    operations = graph.operations
    kind = OpKind(int(operations.kind[row]))
    if duration <= 0 or kind in FREE_KINDS:
        return Demand()
    if kind.is_communication:
        return _communication_demand(costs, graph, row, duration)
    traffic = float(operations.bytes_read[row] + operations.bytes_written[row])
    uses = ((HBM, traffic / duration),) if traffic else ()
    index = int(operations.shape[row])
    shape = graph.shapes[index] if index >= 0 else None
    profile = costs.profile
    if isinstance(shape, HostUpdateShape):
        return Demand()
    if isinstance(shape, HostCopyShape):
        # Copy engines take no SMs.
        return Demand(uses=uses)
    launches = _launches(kind, shape, profile)
    return replace(
        _kernel_demand(costs, kind, shape, traffic, launches), uses=uses, kernel_ns=duration / launches
    )


def _launches(kind: OpKind, shape: Shape, profile: HardwareProfile) -> int:
    """Kernels, one after another, that an operation stands for."""
    if isinstance(shape, GemmShape):
        by_expert = figures_for(profile.gemm, shape.dtype.name.lower()).grouped_per_expert_us > 0
        return shape.count if kind == OpKind.GROUPED_GEMM and by_expert else 1
    return max(1, shape.passes) if isinstance(shape, MemoryShape) else 1


def _kernel_demand(costs: CostModel, kind: OpKind, shape: Shape, traffic: float, launches: int) -> Demand:
    """How kernels of a shape slow as SMs are taken, and when they let others in."""
    profile = costs.profile
    if isinstance(shape, GemmShape):
        blocks = gemm_blocks(replace(shape, count=1) if launches > 1 else shape, profile)
        sms = costs.compute.product_sms
        return Demand(blocks=blocks, sms=sms, last_wave=_last_wave(blocks, sms, launches))
    if isinstance(shape, AttentionShape):
        blocks = shape.batch * shape.heads * -(-shape.query_length // QUERY_TILE)
        return Demand(blocks=blocks, last_wave=_last_wave(blocks, profile.sm_count))
    waves = max(1, round(traffic / (WAVE_BYTES_PER_SM * profile.sm_count)))
    if kind is OpKind.NORM and not (isinstance(shape, MemoryShape) and shape.access == "stream"):
        return Demand(second_wave=SECOND_WAVE)
    return Demand(linear=True, last_wave=1.0 if launches > 1 else 1 / waves)


def _last_wave(blocks: int, sms: int, launches: int = 1) -> float:
    """Part of an operation in which its last blocks run; one of several launches lets others in between."""
    return 1.0 if launches > 1 else 1 / max(1, -(-blocks // sms))


def _communication_demand(costs: CostModel, graph: OpGraph, row: int, duration: int) -> Demand:
    operations, profile = graph.operations, costs.profile
    what = Communication(int(operations.communication[row]))
    size = float(operations.communication_bytes[row])
    estimate = costs.collectives.estimate_row(graph, row)
    moved = {
        DOMAIN_OUT: estimate.domain_bytes,
        DOMAIN_IN: estimate.domain_bytes,
        FABRIC_OUT: estimate.fabric_bytes,
        FABRIC_IN: estimate.fabric_bytes,
        BRIDGE_OUT: estimate.bridge_bytes,
        BRIDGE_IN: estimate.bridge_bytes,
        UPLINK_OUT: estimate.uplink_bytes,
        UPLINK_IN: estimate.uplink_bytes,
    }
    uses = [(link, moved[link] / duration) for link in _DIRECTIONS.get(what, _BOTH) if moved[link]]
    # What is sent is read from memory, what arrives is written.
    passes = 1 if what in _DIRECTIONS else 2
    uses.insert(0, (HBM, passes * (estimate.domain_bytes + estimate.fabric_bytes) / duration))
    stall_ns = 0.0
    if what in _RINGS:
        nominal = _capacity(profile.network.domain)
        stall_ns = (
            1e3 * profile.network.collective_stall_us * min(1.0, estimate.domain_bytes / duration / nominal)
        )
    return Demand(sms_taken=communication_sms(profile, what, size), uses=tuple(uses), stall_ns=stall_ns)


def communication_sms(profile: HardwareProfile, what: Communication, size: float) -> int:
    """SMs that a communication kernel takes from compute."""
    channels = max(1, -(-int(size) // CHANNEL_BYTES))
    most = min(profile.network.collective_sms, profile.sm_count - 1)
    return min(channels, most, SEND_SMS) if what in SENDS else min(channels, most)


def gemm_blocks(shape: GemmShape, profile: HardwareProfile) -> int:
    """Output tiles of a product, of the tile that is fastest for it."""
    figures = figures_for(profile.gemm, shape.dtype.name.lower())
    tile = min(figures.tiles, key=lambda one: _alone_ns(shape, replace(figures, tiles=(one,)), profile))
    return shape.count * -(-shape.m // tile.m) * -(-shape.n // tile.n)


def _alone_ns(shape: GemmShape, figures: GemmFigures, profile: HardwareProfile) -> float:
    # Only the order of tiles matters, which the peak does not change.
    peak = max(profile.peak_tflops.values()) * 1e3
    return gemm_ns(shape, figures, peak, achieved_bandwidth(profile.memory, "stream"), profile.sm_count)
