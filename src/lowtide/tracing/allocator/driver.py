"""The device behind the allocator: how much memory there is, and at which addresses segments lie; and the blocks that segments
are chained of, with pools of free ones kept by size.

Note [Addresses]
Among free blocks of exactly one size the allocator takes the one at the lowest address, so the order of segments in
the address space decides which of them is split next, and with it how memory fragments. The CUDA driver (seen with
version 580 on Linux) hands out addresses from ranges of 32 MiB or multiples of that, a new range below the older ones;
what is left of a range serves later segments that fit, the newest range first. A range without a segment gives its
addresses back, and a later range takes the highest such gap that is larger than itself. With this order the replay
matched every call of the recordings in tests/tracing/allocator; with increasing addresses it missed by 2 MiB in some.

Note [Expandable segments]
Address space for more than the device, into which memory is mapped page by page as it is needed. One segment per pool
and stream grows instead of many being made, so what is free lies together and serves any later request. Reserved memory
counts mapped pages: 2 MiB each in the small pool, `large_segment_bytes` (20 MiB) each in the large one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from lowtide.tracing.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from lowtide.units import MiB, TiB

_ADDRESS = attrgetter("address")
_ADDRESS_BITS = 56
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) address space without memory behind it."""

    pool: Pool
    address: int
    size: int
    """In bytes."""
    is_mapped: bool = True
    is_allocated: bool = False
    requested: int = 0
    """Bytes the caller asked for; 0 while it is free."""
    prev: Block | None = None
    """Neighbour below in the same segment."""
    next: Block | None = None
    free_since: int = 0
    """Searches for large blocks there had been when this one became free: its age, for garbage collection."""

    @property
    def is_whole_segment(self) -> bool:
        """Whether it has its segment to itself, so that the segment could be given back."""
        return self.prev is None and self.next is None

    def insert_between(self, before: Block | None, after: Block | None) -> None:
        """Become the link between two neighbours (or the end of the chain)."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def split_front(self, size: int) -> Block:
        """A new block of the first `size` bytes; this one keeps the rest. Neither may be in a pool meanwhile."""
        front = Block(self.pool, self.address, size, is_mapped=self.is_mapped)
        front.insert_between(self.prev, self)
        self.address += size
        self.size -= size
        return front

    def split_back(self, size: int) -> Block:
        """A new block of what lies behind the first `size` bytes, which this one keeps."""
        back = Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        back.insert_between(self, self.next)
        self.size = size
        return back

    def begin_use(self, requested: int) -> None:
        """A caller asked for so many bytes and got this block."""
        self.is_allocated, self.requested = True, requested

    def end_use(self) -> None:
        """The caller has given it back."""
        self.is_allocated, self.requested = False, 0

    def merge(self) -> None:
        """Take over the free neighbours on either side, which leave their pool. This block must not be in it.

        Memory merges with memory and bare address space with bare address space.
        """
        before, after = self.prev, self.next
        if before is not None and not before.is_allocated and before.is_mapped == self.is_mapped:
            before.leave_pool()
            self.address = before.address
            self.size += before.size
            self.insert_between(before.prev, after)
        if after is not None and not after.is_allocated and after.is_mapped == self.is_mapped:
            after.leave_pool()
            self.size += after.size
            self.insert_between(self.prev, after.next)

    def leave_pool(self) -> None:
        """Go out of the list of the pool that a free block is in."""
        if self.is_mapped:
            self.pool.remove(self)
        else:
            self.pool.remove_unmapped(self)


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Pool:
    """The free blocks of one kind (small or large) on one stream: smallest first, lowest address first among equals.

    Finding is O(log n). Adding and taking move list items in one memory copy, which stays well below a microsecond
    for the few thousand free blocks that a training step leaves.
    """

    is_small: bool
    min_remainder: int
    """Smallest rest, in bytes, that is worth splitting off a block of this pool."""
    # Size and address in one int, because comparing ints is several times faster than comparing tuples.
    _keys: list[int] = field(default_factory=list)
    _by_address: dict[int, Block] = field(default_factory=dict)
    unmapped: list[Block] = field(default_factory=list)
    """Address space without memory behind it, lowest address first."""

    def __len__(self) -> int:
        return len(self._keys)

    def free_blocks(self) -> list[Block]:
        """A copy of the pool's blocks in order, so that the pool may change while a caller walks over them."""
        return [self._by_address[key & _ADDRESS_MASK] for key in self._keys]

    def add(self, block: Block) -> None:
        """Keep a free block."""
        insort(self._keys, block.size << _ADDRESS_BITS | block.address)
        self._by_address[block.address] = block

    def remove(self, block: Block) -> None:
        """Let go of a block that is in the pool."""
        del self._keys[bisect_left(self._keys, block.size << _ADDRESS_BITS | block.address)]
        del self._by_address[block.address]

    def take(self, size: int) -> Block | None:
        """Let go of the smallest block of at least that size; None when there is none."""
        keys = self._keys
        position = bisect_left(keys, size << _ADDRESS_BITS)
        if position == len(keys):
            return None
        return self._by_address.pop(keys.pop(position) & _ADDRESS_MASK)

    def find(self, size: int) -> int:
        """Position of the smallest block of at least that size; `len(pool)` when there is none."""
        return bisect_left(self._keys, size << _ADDRESS_BITS)

    def peek(self, position: int) -> Block:
        """The block at a position in the order."""
        return self._by_address[self._keys[position] & _ADDRESS_MASK]

    def pop(self, position: int) -> Block:
        """Let go of the block at a position in the order."""
        return self._by_address.pop(self._keys.pop(position) & _ADDRESS_MASK)

    def add_unmapped(self, block: Block) -> None:
        """Keep address space that memory can be mapped into."""
        insort(self.unmapped, block, key=_ADDRESS)

    def remove_unmapped(self, block: Block) -> None:
        """Let go of address space."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_ADDRESS)]


_RANGE_BYTES = 32 * MiB
_TOP_ADDRESS = 1 << 47
_CONTEXT_BYTES = 6 * MiB
"""What the CUDA context itself has taken of the first range before torch allocates anything."""
_ENDLESS_BYTES = 4 * TiB
"""Stands for the memory of a device whose capacity is not given."""


@dataclass(slots=True, eq=False)
class _AddressRange:
    """Addresses that the driver took together; see Note [Addresses]."""

    start: int
    size: int
    age: int
    """Number of ranges made before it."""
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
        self._ranges: list[_AddressRange] = []
        """In order of age."""
        self._open: list[_AddressRange] = []
        """Those with a gap, in order of age: a model of many layers has thousands of ranges, and few of these."""
        self._num_made = 0
        self._has_holes = False
        """Whether a range has been given up: until then each new one lies below all others."""
        self._new_range(_CONTEXT_BYTES)

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
        for address_range in reversed(self._open):
            start = address_range.take(size)
            if start is not None:
                if not address_range.gaps:
                    self._open.remove(address_range)
                return start
        return self._new_range(size)

    def release_addresses(self, start: int, size: int) -> None:
        """Give up the address space of a segment."""
        address_range = next(
            address_range
            for address_range in self._ranges
            if address_range.start <= start < address_range.start + address_range.size
        )
        if not address_range.gaps:
            insort(self._open, address_range, key=lambda other: other.age)
        address_range.put_back(start, size)
        if address_range.gaps == [(address_range.start, address_range.size)]:
            self._ranges.remove(address_range)
            self._open.remove(address_range)
            self._has_holes = True

    def _new_range(self, size: int) -> int:
        """Start of `size` bytes in a range of their own."""
        range_bytes = -(-size // _RANGE_BYTES) * _RANGE_BYTES
        address_range = _AddressRange(self._end_for(range_bytes) - range_bytes, range_bytes, self._num_made)
        self._num_made += 1
        self._ranges.append(address_range)
        if range_bytes > size:
            address_range.gaps.append((address_range.start + size, range_bytes - size))
            self._open.append(address_range)
        return address_range.start

    def _end_for(self, range_bytes: int) -> int:
        """Where a new range ends: in the highest hole that is larger than itself, else below all others."""
        if not self._has_holes:
            return self._ranges[-1].start if self._ranges else _TOP_ADDRESS
        end = _TOP_ADDRESS
        for other in sorted(self._ranges, key=lambda address_range: -address_range.start):
            if end - (other.start + other.size) > range_bytes:
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
