"""The caching allocator of PyTorch with ``expandable_segments:True``: segments that grow instead of new ones.

Follows ``CUDACachingAllocator`` (``find_expandable_block``, ``map_block``, ``get_free_block``). A pool of a stream is
one range of addresses, far longer than the device; what is mapped of it grows at its end, in granules of 2 MiB (small
pool) or 20 MiB (large pool). So neighbours always merge, a block that ends where mapping ends takes only what it lacks,
and every remainder is split off. What stays unused is the holes between live blocks that no request fits into: fewer
than with segments of a size, but a hole of half a request is as lost as before. Released to a full device are the
granules that lie wholly in free blocks; the holes that this leaves in the range are mapped again, lowest first, before
its end.

Sizes and addresses inside count units of 512 bytes, as in :mod:`.caching_allocator`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from .caching_allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    OutOfMemoryError,
)

_UNIT_SHIFT = 9
_RANGE_BITS = 40
_ADDRESS_MASK = (1 << _RANGE_BITS) - 1
_ENDLESS = 1 << 39
"""Units of addresses in a range: no device is as large."""
_SMALL_REQUEST = SMALL_REQUEST_BYTES >> _UNIT_SHIFT


class _Range:
    """The addresses of one pool of one stream: live blocks, free blocks and what is not mapped, from 0 on."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.free: list[int] = []
        """``size << 40 | start`` of free blocks, ascending."""
        self.free_end: dict[int, int] = {}
        self.free_start: dict[int, int] = {}
        self.unmapped: list[tuple[int, int]] = [(0, _ENDLESS)]
        """Start and end of what is not mapped, ascending; the last is the part behind everything."""
        self.live: dict[int, int] = {}

    def take_free(self, units: int) -> int | None:
        """Start of a block cut from the best free one; None if none is large enough.

        One that can grow counts with what it can grow by, so that a hole is preferred to the end of the range.
        """
        found = bisect_left(self.free, units << _RANGE_BITS)
        if found == len(self.free):
            return None
        room = self._room(self.free[found])
        while found + 1 < len(self.free) and (following := self._room(self.free[found + 1])) < room:
            found, room = found + 1, following
        return self._cut(self.free[found], units)

    def growth(self, units: int) -> tuple[int, list[tuple[int, int]]]:
        """Where a block of so many units can be made by mapping: its start, and from where to where to map."""
        for first, (start, _) in enumerate(self.unmapped):
            begin = position = self.free_start.get(start, start)
            mapped: list[tuple[int, int]] = []
            unmapped = first
            while position - begin < units:
                if position in self.free_end:
                    position = self.free_end[position]
                elif unmapped < len(self.unmapped) and self.unmapped[unmapped][0] == position:
                    end = self.unmapped[unmapped][1]
                    wanted = -(-(units - (position - begin)) // self.granule) * self.granule
                    mapped.append((position, min(end, position + wanted)))
                    position = mapped[-1][1]
                    unmapped += 1
                else:
                    break
            if position - begin >= units:
                return begin, mapped
        raise AssertionError("the part behind everything is endless")

    def grow(self, units: int, begin: int, mapped: list[tuple[int, int]]) -> int:
        """Map what :meth:`growth` found and return the start of the block."""
        for start, end in mapped:
            at = bisect_left(self.unmapped, (start, start))
            whole = self.unmapped[at][1]
            self.unmapped[at : at + 1] = [(end, whole)] if end < whole else []
            self.add_free(start, end)
        return self._cut((self.free_end[begin] - begin) << _RANGE_BITS | begin, units)

    def add_free(self, start: int, end: int) -> None:
        """Add a free block, merged with its free neighbours."""
        left = self.free_start.get(start)
        if left is not None:
            self._drop(left)
            start = left
        right = self.free_end.get(end)
        if right is not None:
            self._drop(end)
            end = right
        insort(self.free, (end - start) << _RANGE_BITS | start)
        self.free_end[start] = end
        self.free_start[end] = start

    def unmap_free(self) -> int:
        """Unmap the granules that lie wholly in free blocks; returns the units."""
        released = 0
        for start, end in sorted(self.free_end.items()):
            first = -(-start // self.granule) * self.granule
            last = end // self.granule * self.granule
            if first >= last:
                continue
            released += last - first
            self._drop(start)
            if start < first:
                self.add_free(start, first)
            if last < end:
                self.add_free(last, end)
            self._add_unmapped(first, last)
        return released

    def _add_unmapped(self, start: int, end: int) -> None:
        at = bisect_left(self.unmapped, (start, start))
        if at < len(self.unmapped) and self.unmapped[at][0] == end:
            end = self.unmapped.pop(at)[1]
        if at and self.unmapped[at - 1][1] == start:
            start = self.unmapped.pop(at - 1)[0]
            at -= 1
        self.unmapped.insert(at, (start, end))

    def _room(self, key: int) -> int:
        """Units of a free block with what is not mapped behind it."""
        units, end = key >> _RANGE_BITS, (key & _ADDRESS_MASK) + (key >> _RANGE_BITS)
        at = bisect_left(self.unmapped, (end, end))
        if at < len(self.unmapped) and self.unmapped[at][0] == end:
            units += self.unmapped[at][1] - end
        return units

    def _cut(self, key: int, units: int) -> int:
        start = key & _ADDRESS_MASK
        end = start + (key >> _RANGE_BITS)
        self._drop(start)
        if start + units < end:
            self.add_free(start + units, end)
        self.live[start] = units
        return start

    def _drop(self, start: int) -> None:
        end = self.free_end.pop(start)
        del self.free_start[end]
        del self.free[bisect_left(self.free, (end - start) << _RANGE_BITS | start)]


class ExpandableAllocator:
    """Allocates and frees like PyTorch's caching allocator with ``expandable_segments:True``.

    Has the calls and counters of :class:`~tracesim.memory.caching_allocator.CachingAllocator`; ``segments_allocated``
    and ``segments_released`` count the calls that map and unmap.

    Args:
        device_bytes: what all mapped memory together may take. None: no limit.
        settings: how requests are rounded.

    """

    def __init__(self, device_bytes: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings(expandable_segments=True)
        self.device_bytes = device_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.segments_allocated = 0
        self.segments_released = 0
        self._ranges: dict[tuple[int, bool], int] = {}
        self._by_number: list[_Range] = []

    def allocate(self, size: int, stream: int = 0) -> int:
        """Address of a new block for ``size`` bytes on ``stream``.

        Raises:
            ValueError: if ``size`` is not positive (PyTorch hands out no block for it).
            OutOfMemoryError: if neither the cache nor the device can serve it.

        """
        if size <= 0:
            raise ValueError(f"cannot allocate {size} bytes: a block has at least one")
        units = self.settings.round_request(size) >> _UNIT_SHIFT
        number = self._range_of(stream, small=units <= _SMALL_REQUEST)
        space = self._by_number[number]
        start = space.take_free(units)
        if start is None:
            start = self._grown(space, units)
        self.allocated_bytes += units << _UNIT_SHIFT
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return (number << _RANGE_BITS | start) << _UNIT_SHIFT

    def free(self, address: int) -> None:
        """Give back the block at ``address``; it stays mapped, merged with its free neighbours.

        Raises:
            ValueError: if no allocated block starts there.

        """
        number, start = address >> _UNIT_SHIFT + _RANGE_BITS, address >> _UNIT_SHIFT & _ADDRESS_MASK
        known = 0 <= number < len(self._by_number) and not address & (BLOCK_BYTES - 1)
        units = self._by_number[number].live.pop(start, None) if known else None
        if units is None:
            raise ValueError(f"cannot free address {address}: no allocated block starts there")
        self.allocated_bytes -= units << _UNIT_SHIFT
        self._by_number[number].add_free(start, start + units)

    def empty_cache(self) -> int:
        """Return wholly free granules to the device, as ``torch.cuda.empty_cache``, and say how many bytes."""
        released = 0
        for space in self._by_number:
            units = space.unmap_free()
            released += units << _UNIT_SHIFT
            self.segments_released += units > 0
        self.reserved_bytes -= released
        return released

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest cached block of any pool; 0 if all that is mapped is allocated."""
        largest = (space.free[-1] >> _RANGE_BITS for space in self._by_number if space.free)
        return max(largest, default=0) << _UNIT_SHIFT

    def _range_of(self, stream: int, *, small: bool) -> int:
        key = stream, small
        if key not in self._ranges:
            self._ranges[key] = len(self._by_number)
            granule = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
            self._by_number.append(_Range(granule >> _UNIT_SHIFT))
        return self._ranges[key]

    def _grown(self, space: _Range, units: int) -> int:
        """A block made by mapping more, after what is cached was released where the device is full."""
        begin, mapped = space.growth(units)
        if not self._fits(mapped):
            self.empty_cache()
            begin, mapped = space.growth(units)
            if not self._fits(mapped):
                raise OutOfMemoryError(
                    f"cannot map {_units(mapped) * BLOCK_BYTES} bytes for a block of {units * BLOCK_BYTES}: "
                    f"{self.reserved_bytes} of the device's {self.device_bytes} bytes are mapped, "
                    f"{self.allocated_bytes} of these allocated. Lower the memory the plan needs "
                    "(micro-batch size, recompute, more shards) or raise the limit."
                )
        self.segments_allocated += 1
        self.reserved_bytes += _units(mapped) << _UNIT_SHIFT
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return space.grow(units, begin, mapped)

    def _fits(self, mapped: list[tuple[int, int]]) -> bool:
        return (
            self.device_bytes is None
            or self.reserved_bytes + (_units(mapped) << _UNIT_SHIFT) <= self.device_bytes
        )


def _units(parts: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in parts)
