"""Expandable segments: address space for more than the device, into which memory is mapped page by page as it is needed.

One segment per pool and stream grows instead of many being made, so what is free lies together and serves any later
request. Reserved memory counts mapped pages: 2 MiB each in the small pool, `large_segment_bytes` (20 MiB) each in the
large one.
"""

from __future__ import annotations

from lowtide.tracing.allocator.blocks import Block, Pool
from lowtide.tracing.allocator.driver import DriverMemory
from lowtide.tracing.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from lowtide.units import TiB

_ENDLESS_BYTES = 4 * TiB
"""Stands for the memory of a device whose capacity is not given."""


class ExpandableSegments:
    """Grows and shrinks the expandable segments of all pools."""

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
