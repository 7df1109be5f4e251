"""The CUDA caching allocator of PyTorch: what it takes from the device to serve a row of allocations.

Follows the rules of ``CUDACachingAllocator`` as PyTorch 2.x applies them with its default backend
(``native``): rounding, two pools a stream, segments, best fit, splitting, merging of free neighbours, and the
release of cached segments when the device is full. Left out, because they need what a program order of
allocations does not tell: ``record_stream`` (a block whose release waits for another stream), private pools
of CUDA graphs and ``garbage_collection_threshold``. ``expandable_segments`` are in :mod:`.expandable_segments`.

Inside, sizes and addresses count units of 512 bytes. A free block is one integer, ``size << 40 | address``,
in the sorted list of its pool, so that "the smallest block that is large enough, lowest address first" is one
bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import SimulationError

KIB = 1 << 10
MIB = 1 << 20

BLOCK_BYTES = 512
"""Every block is a multiple of this."""
SMALL_REQUEST_BYTES = 1 * MIB
"""Largest rounded request that the small pool serves; also what an unsplit large block may waste."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment for large requests below :data:`OWN_SEGMENT_BYTES`; also what an oversized block may waste."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on a request that finds no block gets a segment of its own size."""
SEGMENT_GRANULE_BYTES = 2 * MIB

_UNIT_SHIFT = 9
_ADDRESS_BITS = 40
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_SMALL_REQUEST = SMALL_REQUEST_BYTES >> _UNIT_SHIFT
_LARGE_SEGMENT = LARGE_SEGMENT_BYTES >> _UNIT_SHIFT
_NEVER = 1 << 62


class OutOfMemoryError(SimulationError):
    """A request fits neither a cached block nor the device, even after all cached segments were released."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The part of ``PYTORCH_CUDA_ALLOC_CONF`` that decides where blocks go.

    Raises:
        ValueError: if a value is one that PyTorch rejects as well; the message names it and its limit.

    """

    max_split_bytes: int | None = None
    """``max_split_size_mb`` in bytes: blocks of this size and above are never split. None: no such limit."""
    roundup_power2_divisions: int = 0
    """Requests are rounded up to one of so many steps between powers of two; 0 or 1 rounds to 512 bytes."""
    expandable_segments: bool = False
    """Whether segments grow in place (:mod:`.expandable_segments`)."""

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(
                f"roundup_power2_divisions is {divisions}; PyTorch takes powers of two "
                "(1, 2, 4, 8, ...), or 0 for off"
            )
        if self.max_split_bytes is not None and self.max_split_bytes <= LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"max_split_bytes is {self.max_split_bytes}; it must be above {LARGE_SEGMENT_BYTES} "
                "(20 MiB, the segment for large blocks), or None for no limit"
            )

        if self.max_split_bytes is not None and self.expandable_segments:
            raise ValueError(
                f"max_split_bytes is {self.max_split_bytes} with expandable_segments, whose blocks are always "
                "split; leave one of them out"
            )

    def round_request(self, size: int) -> int:
        """Bytes of the block for a request of ``size`` bytes, before any unsplit remainder is added."""
        if size <= BLOCK_BYTES:
            return BLOCK_BYTES
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size > BLOCK_BYTES * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Bytes asked of ``cudaMalloc`` for a (rounded) block that no cached block can serve."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_GRANULE_BYTES) * SEGMENT_GRANULE_BYTES


class CachingAllocator:
    """Allocates and frees like PyTorch's caching allocator on one device.

    ``allocated_bytes`` is what ``torch.cuda.memory_allocated`` prints (block sizes: rounded requests plus
    remainders too small to split off), ``reserved_bytes`` what ``torch.cuda.memory_reserved`` prints. The
    counters are plain attributes, kept up to date by every call: read them, do not set them.

    Args:
        device_bytes: what all segments together may take: the device's memory less what the CUDA context,
            NCCL and other processes hold. None: no limit.
        settings: the part of ``PYTORCH_CUDA_ALLOC_CONF`` that is modelled.
        place_segment: the address of a new segment of so many bytes, a multiple of 512. Equally large free
            blocks are told apart by address alone, so a replay of a recorded run that knows the addresses
            passes them here. By default segments lie behind one another in the order of their allocation.

    """

    def __init__(
        self,
        device_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        place_segment: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device_bytes = device_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.segments_allocated = 0
        self.segments_released = 0
        self._place_segment = place_segment
        self._next_address = SEGMENT_GRANULE_BYTES >> _UNIT_SHIFT
        limit = self.settings.max_split_bytes
        # Rounded up: a block of n units reaches a limit of x bytes exactly if it reaches the unit above it.
        self._max_split = _NEVER if limit is None else -(-limit // BLOCK_BYTES)
        self._small: dict[int, list[int]] = {}
        self._large: dict[int, list[int]] = {}
        self._segments: dict[int, tuple[int, list[int]]] = {}
        self._allocated: dict[int, tuple[int, list[int]]] = {}
        # Free blocks by both ends: a freed block finds the neighbours it merges with in one look-up each.
        self._free_end: dict[int, int] = {}
        self._free_start: dict[int, int] = {}

    def allocate(self, size: int, stream: int = 0) -> int:
        """Address of a new block for ``size`` bytes on ``stream``.

        Raises:
            ValueError: if ``size`` is not positive (PyTorch hands out no block for it).
            OutOfMemoryError: if neither the cache nor the device can serve it; nothing is allocated then, but
                the cached segments have been released.

        """
        if size <= 0:
            raise ValueError(f"cannot allocate {size} bytes: a block has at least one")
        units = self.settings.round_request(size) >> _UNIT_SHIFT
        small = units <= _SMALL_REQUEST
        pools = self._small if small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = []
        found = bisect_left(pool, units << _ADDRESS_BITS)
        if found == len(pool) or (not small and self._unsuitable(units, pool[found] >> _ADDRESS_BITS)):
            start, block = self._new_segment(units, pool)
        else:
            key = pool.pop(found)
            start, block = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
            del self._free_end[start], self._free_start[start + block]
        remaining = block - units
        if remaining and (small or (remaining > _SMALL_REQUEST and units < self._max_split)):
            middle, end = start + units, start + block
            insort(pool, remaining << _ADDRESS_BITS | middle)
            self._free_end[middle] = end
            self._free_start[end] = middle
            block = units
        self._allocated[start] = (block, pool)
        allocated = self.allocated_bytes + (block << _UNIT_SHIFT)
        self.allocated_bytes = allocated
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return start << _UNIT_SHIFT

    def free(self, address: int) -> None:
        """Give back the block at ``address``; it stays reserved, merged with its free neighbours.

        Raises:
            ValueError: if no allocated block starts there.

        """
        start = address >> _UNIT_SHIFT
        found = self._allocated.pop(start, None)
        if found is None or address & (BLOCK_BYTES - 1):
            raise ValueError(f"cannot free address {address}: no allocated block starts there")
        block, pool = found
        self.allocated_bytes -= block << _UNIT_SHIFT
        end = start + block
        # Segments may touch in the address space, but blocks never merge across them.
        segments = self._segments
        if start not in segments:
            left = self._free_start.pop(start, -1)
            if left >= 0:
                del pool[bisect_left(pool, (start - left) << _ADDRESS_BITS | left)]
                start = left
        if end not in segments:
            right_end = self._free_end.pop(end, -1)
            if right_end >= 0:
                del pool[bisect_left(pool, (right_end - end) << _ADDRESS_BITS | end)]
                end = right_end
        insort(pool, (end - start) << _ADDRESS_BITS | start)
        self._free_end[start] = end
        self._free_start[end] = start

    def empty_cache(self) -> int:
        """Return wholly free segments to the device, as ``torch.cuda.empty_cache``, and say how many bytes."""
        before = self.reserved_bytes
        for pools in (self._large, self._small):
            for pool in pools.values():
                pool[:] = [key for key in pool if not self._release_segment(key)]
        return before - self.reserved_bytes

    def adopt_segment(
        self, address: int, size: int, blocks: Iterable[tuple[int, int]], *, small: bool, stream: int = 0
    ) -> None:
        """Take over a segment that exists already, for a replay that starts in the middle of a run.

        ``blocks`` are the address and size of its allocated blocks, in address order; the gaps are free.

        Raises:
            ValueError: if a block lies outside the segment or overlaps the one before it.

        """
        begin, end = address >> _UNIT_SHIFT, (address + size) >> _UNIT_SHIFT
        pool = (self._small if small else self._large).setdefault(stream, [])
        position, used = begin, []
        for block_address, block_size in blocks:
            start, units = block_address >> _UNIT_SHIFT, block_size >> _UNIT_SHIFT
            if not position <= start < start + units <= end:
                raise ValueError(
                    f"block of {block_size} bytes at {block_address} does not fit behind "
                    f"{position << _UNIT_SHIFT} in the segment of {size} bytes at {address}"
                )
            used.append((start, units))
            position = start + units
        self._segments[begin] = (end - begin, pool)
        position = begin
        for start, units in [*used, (end, 0)]:
            if start > position:
                insort(pool, (start - position) << _ADDRESS_BITS | position)
                self._free_end[position] = start
                self._free_start[start] = position
            if units:
                self._allocated[start] = (units, pool)
                self.allocated_bytes += units << _UNIT_SHIFT
            position = start + units
        self._next_address = max(self._next_address, end)
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest cached block of any pool; 0 if all that is reserved is allocated."""
        pools = (pool for kind in (self._small, self._large) for pool in kind.values() if pool)
        return max((pool[-1] >> _ADDRESS_BITS << _UNIT_SHIFT for pool in pools), default=0)

    def segments(self) -> list[tuple[int, int]]:
        """Address and bytes of every segment, in address order."""
        return [
            (start << _UNIT_SHIFT, units << _UNIT_SHIFT)
            for start, (units, _) in sorted(self._segments.items())
        ]

    def blocks(self) -> list[tuple[int, int, bool]]:
        """Address, bytes and "is allocated" of every block, in address order; for reports and tests."""
        used = [
            (start << _UNIT_SHIFT, units << _UNIT_SHIFT, True)
            for start, (units, _) in self._allocated.items()
        ]
        free = [(s << _UNIT_SHIFT, (e - s) << _UNIT_SHIFT, False) for s, e in self._free_end.items()]
        return sorted(used + free)

    def _unsuitable(self, units: int, block: int) -> bool:
        """Whether the best fit may not be used: oversized blocks wait for oversized requests of about their size."""
        if units < self._max_split:
            return block >= self._max_split
        return block >= units + _LARGE_SEGMENT

    def _new_segment(self, units: int, pool: list[int]) -> tuple[int, int]:
        """Start and size of a new segment, in units, after making room for it where the device is full."""
        size = segment_bytes(units << _UNIT_SHIFT)
        limit = self.device_bytes
        if limit is not None and self.reserved_bytes + size > limit:
            self._release_oversized(units, pool)
            if self.reserved_bytes + size > limit:
                self.empty_cache()
            if self.reserved_bytes + size > limit:
                raise OutOfMemoryError(
                    f"cannot reserve {size} bytes for a block of {units << _UNIT_SHIFT}: {self.reserved_bytes} of "
                    f"the device's {limit} bytes are reserved, {self.allocated_bytes} of these allocated; the "
                    f"largest free block has {self.largest_free_bytes}. Lower the memory the plan needs "
                    "(micro-batch size, recompute, more shards) or raise the limit."
                )
        start = self._segment_start(size)
        self._segments[start] = (size >> _UNIT_SHIFT, pool)
        self.segments_allocated += 1
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return start, size >> _UNIT_SHIFT

    def _segment_start(self, size: int) -> int:
        if self._place_segment is not None:
            start = self._place_segment(size) >> _UNIT_SHIFT
        else:
            start = self._next_address
            self._next_address += size >> _UNIT_SHIFT
        if not 0 <= start <= _ADDRESS_MASK:
            raise ValueError(
                f"segment address {start << _UNIT_SHIFT} is outside 0 .. {_ADDRESS_MASK << _UNIT_SHIFT}"
            )
        return start

    def _release_oversized(self, units: int, pool: list[int]) -> None:
        """Release cached oversized blocks: the smallest that is large enough, else the largest until enough."""
        if self._max_split == _NEVER:
            return
        wanted = max(units, self._max_split)
        found = bisect_left(pool, wanted << _ADDRESS_BITS)
        if found < len(pool):
            if self._release_segment(pool[found]):
                del pool[found]
            return
        released = 0
        while pool and released < wanted and pool[-1] >> _ADDRESS_BITS >= self._max_split:
            if not self._release_segment(pool[-1]):
                return
            released += pool.pop() >> _ADDRESS_BITS

    def _release_segment(self, key: int) -> bool:
        """Return the segment that a free block fills to the device; False if the block is only a part of it."""
        start, block = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
        segment = self._segments.get(start)
        if segment is None or segment[0] != block:
            return False
        del self._segments[start], self._free_end[start], self._free_start[start + block]
        self.reserved_bytes -= block << _UNIT_SHIFT
        self.segments_released += 1
        return True
