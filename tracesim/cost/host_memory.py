"""Copies between a device and the memory of its host, and work of the processor on that memory."""

from __future__ import annotations

from hardware_profiles.profile import HardwareProfile
from op_graphs.graph import HostCopyShape


def host_copy_ns(shape: HostCopyShape, profile: HardwareProfile, size: float) -> float:
    """Nanoseconds of copies of ``size`` bytes together: a fixed cost each, and the bytes over the achieved bandwidth.

    Raises:
        ValueError: if the profile does not know the link.
    """
    host = profile.host
    if host.link_gb_per_s <= 0:
        raise ValueError(f"{profile.name} has no host.link_gb_per_s; add it to the profile")
    efficiency = host.to_host_efficiency if shape.to_host else host.to_device_efficiency
    return 1e3 * host.link_latency_us * shape.copies + size / (host.link_gb_per_s * efficiency)


def host_update_ns(profile: HardwareProfile, traffic: float) -> float:
    """Nanoseconds in which the processor reads and writes ``traffic`` bytes together.

    Raises:
        ValueError: if the profile does not know the memory of the host.
    """
    host = profile.host
    if host.memory_gb_per_s <= 0:
        raise ValueError(f"{profile.name} has no host.memory_gb_per_s; add it to the profile")
    return traffic / (host.memory_gb_per_s * host.update_efficiency)
