"""The pieces the allocator replay is made of: blocks in a chain per segment, and pools of free blocks kept by size."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

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
