"""Device memory beyond the sum of live buffers: what the allocator of the framework reserves for them."""

from .caching_allocator import AllocatorSettings, CachingAllocator, OutOfMemoryError
from .expandable_segments import ExpandableAllocator
from .replay_allocations import (
    AllocationEvents,
    AllocatorUsage,
    MemoryState,
    OutOfMemoryReport,
    order_events,
    replay_allocations,
    replay_events,
)

__all__ = [
    "AllocationEvents",
    "AllocatorSettings",
    "AllocatorUsage",
    "CachingAllocator",
    "ExpandableAllocator",
    "MemoryState",
    "OutOfMemoryError",
    "OutOfMemoryReport",
    "order_events",
    "replay_allocations",
    "replay_events",
]
