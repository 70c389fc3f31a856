"""The device behind the allocator: how much memory there is, and at which addresses segments lie.

Note [Addresses]
Among free blocks of exactly one size the allocator takes the one at the lowest address, so the order of segments in
the address space decides which of them is split next, and with it how memory fragments. The CUDA driver (seen with
version 580 on Linux) hands out addresses from chunks of 32 MiB or multiples of that, a new chunk below the older ones;
what is left of a chunk serves later segments that fit, the newest chunk first. A chunk without a segment gives its
addresses back, and a later chunk takes the highest such gap that is larger than itself. With this order the replay
matched every call of the recordings in tests/tracing/allocator; with increasing addresses it missed by 2 MiB in some.

Note [Expandable segments]
Address space for more than the device, into which memory is mapped page by page as it is needed. One segment per pool
and stream grows instead of many being made, so what is free lies together and serves any later request. Reserved memory
counts mapped pages: 2 MiB each in the small pool, `large_segment_bytes` (20 MiB) each in the large one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from lowtide.tracing.allocator.blocks import Block, Pool
from lowtide.tracing.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from lowtide.units import MiB, TiB

_CHUNK_BYTES = 32 * MiB
_TOP_ADDRESS = 1 << 47
_CONTEXT_BYTES = 6 * MiB
"""What the CUDA context itself has taken of the first chunk before torch allocates anything."""
_ENDLESS_BYTES = 4 * TiB
"""Stands for the memory of a device whose capacity is not given."""


@dataclass(slots=True, eq=False)
class _Chunk:
    start: int
    size: int
    age: int
    """Number of chunks made before it."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(first byte, size) of what no segment uses, lowest first."""

    def take(self, size: int) -> int | None:
        for index, (start, gap_bytes) in enumerate(self.gaps):
            if gap_bytes >= size:
                self.gaps[index : index + 1] = [(start + size, gap_bytes - size)] if gap_bytes > size else []
                return start
        return None

    def put_back(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for gap_start, gap_bytes in sorted([*self.gaps, (start, size)]):
            if merged and sum(merged[-1]) == gap_start:
                merged[-1] = (merged[-1][0], merged[-1][1] + gap_bytes)
            else:
                merged.append((gap_start, gap_bytes))
        self.gaps = merged


class DriverMemory:
    """Memory of one device: counts what is taken, refuses what does not fit, and hands out addresses.

    Fragmentation of physical memory is not modelled: the driver maps pages, so what is free can be had in one piece.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.taken_bytes = 0
        self.peak_taken_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._chunks: list[_Chunk] = []
        """In order of age."""
        self._open: list[_Chunk] = []
        """Those with a gap, in order of age: a model of many layers has thousands of chunks, and few of them."""
        self._num_made = 0
        self._has_holes = False
        """Whether a chunk has been given up: until then each new one lies below all others."""
        self._new_chunk(_CONTEXT_BYTES)

    def take(self, size: int) -> bool:
        """Count `size` bytes as taken; False, and nothing happens, when they do not fit."""
        if self._capacity_bytes is not None and self.taken_bytes + size > self._capacity_bytes:
            return False
        self.taken_bytes += size
        self.peak_taken_bytes = max(self.peak_taken_bytes, self.taken_bytes)
        return True

    def give_back(self, size: int) -> None:
        """Count `size` bytes as free again."""
        self.taken_bytes -= size

    def reserve_addresses(self, size: int) -> int:
        """Start of `size` bytes of address space for a segment."""
        for chunk in reversed(self._open):
            start = chunk.take(size)
            if start is not None:
                if not chunk.gaps:
                    self._open.remove(chunk)
                return start
        return self._new_chunk(size)

    def release_addresses(self, start: int, size: int) -> None:
        """Give up the address space of a segment."""
        chunk = next(chunk for chunk in self._chunks if chunk.start <= start < chunk.start + chunk.size)
        if not chunk.gaps:
            insort(self._open, chunk, key=lambda other: other.age)
        chunk.put_back(start, size)
        if chunk.gaps == [(chunk.start, chunk.size)]:
            self._chunks.remove(chunk)
            self._open.remove(chunk)
            self._has_holes = True

    def _new_chunk(self, size: int) -> int:
        """Start of `size` bytes in a chunk of their own."""
        chunk_bytes = -(-size // _CHUNK_BYTES) * _CHUNK_BYTES
        chunk = _Chunk(self._end_for(chunk_bytes) - chunk_bytes, chunk_bytes, self._num_made)
        self._num_made += 1
        self._chunks.append(chunk)
        if chunk_bytes > size:
            chunk.gaps.append((chunk.start + size, chunk_bytes - size))
            self._open.append(chunk)
        return chunk.start

    def _end_for(self, chunk_bytes: int) -> int:
        """Where a new chunk ends: in the highest hole that is larger than itself, else below all others."""
        if not self._has_holes:
            return self._chunks[-1].start if self._chunks else _TOP_ADDRESS
        end = _TOP_ADDRESS
        for other in sorted(self._chunks, key=lambda chunk: -chunk.start):
            if end - (other.start + other.size) > chunk_bytes:
                break
            end = other.start
        return end


class ExpandableSegments:
    """Grows and shrinks the expandable segments of all pools; see Note [Expandable segments]."""

    def __init__(self, settings: AllocatorSettings, driver: DriverMemory) -> None:
        self._driver = driver
        self._large_page_bytes = settings.large_segment_bytes
        memory_bytes = settings.capacity_bytes or _ENDLESS_BYTES
        # An eighth more than the device, so that pages unmapped in the middle can come back at the end.
        self._address_bytes = memory_bytes + memory_bytes // 8
        self._top = 0

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes, outside its pool, made by mapping pages; None when the device is full.

        Pages mapped before the device turned out to be full stay mapped, as free blocks.
        """
        candidate = self._lowest_room(pool, size)
        if not candidate.is_mapped and not self._map(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            tail = candidate.next
            assert tail is not None, "_lowest_room promised more room"
            if not self._map(tail, min(tail.size, size - candidate.size)):
                return None
            candidate = tail
        pool.remove(candidate)
        return candidate

    def shrink(self, pool: Pool) -> None:
        """Give every page back that no block in use touches."""
        for block in pool.free_blocks():
            self._unmap(block)
            if not block.is_mapped and block.is_whole_segment:
                pool.remove_unmapped(block)

    def _lowest_room(self, pool: Pool, size: int) -> Block:
        """First block of the lowest run of free and unmapped blocks with `size` bytes of room; else a new segment."""
        for block in pool.unmapped:
            below = block.prev
            start = below if below is not None and not below.is_allocated else block
            if _room(start, size) >= size:
                return start
        page = self._page_bytes(pool)
        segment_bytes = -(-max(self._address_bytes, size) // page) * page
        # At a multiple of the page and above 0, so that pages can be told by their address.
        address = (self._top // page + 1) * page
        self._top = address + segment_bytes
        segment = Block(pool, address, segment_bytes, is_mapped=False)
        pool.add_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first `size` bytes, rounded up to pages, of unmapped address space."""
        pool = block.pool
        page = self._page_bytes(pool)
        mapped_bytes = -(-size // page) * page
        if not self._driver.take(mapped_bytes):
            return False
        pool.remove_unmapped(block)
        if mapped_bytes < block.size:
            pool.add_unmapped(block.split_back(mapped_bytes))
        block.is_mapped = True
        block.merge()
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages inside a free block; what is left on either side stays free."""
        pool = block.pool
        page = self._page_bytes(pool)
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            pool.add(block.split_front(first - block.address))
        if block.address + block.size > last:
            pool.add(block.split_back(last - first))
        block.is_mapped = False
        self._driver.give_back(block.size)
        block.merge()
        pool.add_unmapped(block)

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self._large_page_bytes


def _room(block: Block | None, size: int) -> int:
    """Bytes of free and unmapped blocks in a row, counted until there are `size` of them."""
    room = 0
    while block is not None and not block.is_allocated and room < size:
        room += block.size
        block = block.next
    return room
