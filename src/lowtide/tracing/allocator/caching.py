"""CachingAllocator: torch's CUDA caching allocator, replayed block by block without a device.

Note [The rules]
A request is rounded up to 512 bytes. Up to 1 MiB it belongs to the small pool, else to the large one; each stream has
its own pools. The smallest free block that fits is taken, the lowest address among equals. If it is larger than needed
it is split: in the small pool when 512 bytes or more remain, in the large pool only when more than 1 MiB remains, so a
large block can cost up to 1 MiB more than was asked for. When nothing fits, a segment comes from the driver: 2 MiB for
a small request, 20 MiB below 10 MiB, otherwise the request rounded up to 2 MiB. A freed block merges with free
neighbours in its segment and stays in its pool; segments are kept. Only when the device is full are segments without a
block in use given back, and the request tried again. Requests of no bytes never reach the allocator. A block taken on
a stream serves that stream only; `record_stream`, graph capture and private pools are not modelled.
"""

from __future__ import annotations

import sys

from lowtide.errors import ConfigError, TraceError
from lowtide.tracing.allocator.driver import Block, DriverMemory, ExpandableSegments, Pool
from lowtide.tracing.allocator.settings import BLOCK_BYTES, SMALL_REQUEST_BYTES, AllocatorSettings
from lowtide.units import format_bytes


class AllocatorFullError(TraceError):
    """The step does not fit on the device, even with all cached memory given back. Use less, or a larger device."""

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        requested_bytes: int,
        segment_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
    ) -> None:
        limits = (settings.capacity_bytes, settings.allowed_bytes)
        limit = format_bytes(min(limit for limit in limits if limit is not None))
        request, more, in_use = map(format_bytes, (requested_bytes, segment_bytes, allocated_bytes))
        pieces = format_bytes(reserved_bytes - allocated_bytes)
        super().__init__(
            f"a request of {request} needs {more} more from a device of {limit}, of which {in_use} are in use and"
            f" {pieces} are free in pieces that cannot be given back; make the batch smaller, use a technique that"
            " saves memory, or choose a larger device"
        )
        self.requested_bytes = requested_bytes
        """Bytes of the request that failed."""
        self.allocated_bytes = allocated_bytes
        """Bytes in use when it failed."""
        self.reserved_bytes = reserved_bytes
        """Held by the allocator then: in use, or in pieces of segments that are in use."""


class CachingAllocator:
    """Replays requests and frees, and counts what torch would count.

    Costs about two microseconds a call. The counters are plain attributes, to be read only.

    Example:
        >>> allocator = CachingAllocator()
        >>> handle = allocator.malloc(1000)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (1024, 2097152)
        >>> allocator.free(handle)
        >>> allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_allocated_bytes
        (0, 2097152, 1024)
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = 0
        """Blocks in use: `torch.cuda.memory_allocated()`."""
        self.requested_bytes = 0
        """What the callers of the blocks in use asked for."""
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.num_retries = 0
        """How often the device was full and cached memory had to be given back first."""
        self._driver = DriverMemory(self.settings.capacity_bytes)
        self._expandable = (
            ExpandableSegments(self.settings, self._driver) if self.settings.expandable_segments else None
        )
        self._pools: dict[int, tuple[Pool, Pool]] = {}
        self._live: dict[int, Block | None] = {}
        self._next_handle = 0
        self._num_large_searches = 0
        # What the hot path asks about the settings, answered once.
        self._is_plain = self._expandable is None and self.settings.max_split_bytes is None
        self._max_split_bytes = sys.maxsize if self.settings.max_split_bytes is None else self.settings.max_split_bytes
        self._rounds_to_divisions = bool(self.settings.roundup_power2_divisions)

    @property
    def reserved_bytes(self) -> int:
        """Taken from the driver, in use or cached: `torch.cuda.memory_reserved()`."""
        return self._driver.taken_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """`torch.cuda.max_memory_reserved()`."""
        return self._driver.peak_taken_bytes

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """A handle to a new block of at least that many bytes; of no bytes at all, and no cost, for a request of 0.

        Raises:
            AllocatorFullError: It does not fit within `capacity_bytes` or `allowed_bytes`.
        """
        handle = self._next_handle
        self._next_handle += 1
        if requested_bytes <= 0:
            if requested_bytes < 0:
                raise ConfigError(f"cannot allocate {requested_bytes} bytes; a size is never negative")
            self._live[handle] = None
            return handle
        if self._rounds_to_divisions:
            size = self.settings.block_bytes(requested_bytes)
        else:
            size = -(-requested_bytes // BLOCK_BYTES) * BLOCK_BYTES  # inlined: this is the hot path
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[size > SMALL_REQUEST_BYTES]
        self._num_large_searches += not pool.is_small
        block = pool.take(size) if self._is_plain else self._take_fitting(pool, size)
        if block is None:
            block = self._take_fresh(pool, size, requested_bytes)
        may_split = self._is_plain or pool.is_small or self._expandable is not None or size < self._max_split_bytes
        if may_split and block.size - size >= pool.min_remainder:
            remainder, block = block, block.split_front(size)
            self._keep(remainder)
        block.begin_use(requested_bytes)
        self._live[handle] = block
        self._count(block.size, requested_bytes)
        return handle

    def free(self, handle: int) -> None:
        """Return a block to its pool. Its memory stays reserved.

        Raises:
            TraceError: The handle was never given out, or is free already.
        """
        try:
            block = self._live.pop(handle)
        except KeyError:
            raise self._not_alive(handle) from None
        if block is None:
            return
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.end_use()
        block.merge()
        self._keep(block)

    def block_bytes(self, handle: int) -> int:
        """Size of a live block, as it counts in `allocated_bytes`."""
        try:
            block = self._live[handle]
        except KeyError:
            raise self._not_alive(handle) from None
        return block.size if block is not None else 0

    def empty_cache(self) -> None:
        """Give back every segment (or page of one) without a block in use, as `torch.cuda.empty_cache()` does."""
        # Large pools first, as torch does it.
        for is_large in (True, False):
            for pools in self._pools.values():
                pool = pools[is_large]
                if self._expandable is not None:
                    self._expandable.shrink(pool)
                    continue
                for block in pool.free_blocks():
                    if block.is_whole_segment:
                        self._release(block)

    def _add_stream(self, stream: int) -> tuple[Pool, Pool]:
        large_remainder = SMALL_REQUEST_BYTES + 1 if self._expandable is None else BLOCK_BYTES
        small = Pool(is_small=True, min_remainder=BLOCK_BYTES)
        large = Pool(is_small=False, min_remainder=large_remainder)
        self._pools[stream] = (small, large)
        return small, large

    def _count(self, block_bytes: int, requested_bytes: int) -> None:
        self.allocated_bytes = allocated = self.allocated_bytes + block_bytes
        self.requested_bytes = requested = self.requested_bytes + requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        self.peak_requested_bytes = max(self.peak_requested_bytes, requested)

    def _keep(self, block: Block) -> None:
        block.free_since = self._num_large_searches
        block.pool.add(block)

    def _take_fitting(self, pool: Pool, size: int) -> Block | None:
        """The best free block, out of its pool, when blocks can grow or may be too large to split."""
        position = pool.find(size)
        if position == len(pool):
            return None
        if self._expandable is not None:
            # Best fit among blocks that can grow: one before unmapped address space counts as large as it could become.
            while position + 1 < len(pool) and _potential(pool.peek(position + 1)) < _potential(pool.peek(position)):
                position += 1
        # A block too large to split goes to requests that are too, and only to those that nearly fill it.
        found, most = pool.peek(position).size, self._max_split_bytes
        if found >= most and (size < most or found >= size + self.settings.oversize_slack_bytes):
            return None
        return pool.pop(position)

    def _take_fresh(self, pool: Pool, size: int, requested_bytes: int) -> Block:
        """A block from the driver; when the device is full, cached memory is given back first, as little as will do."""
        if self.settings.garbage_collection_threshold is not None and self.settings.allowed_bytes is not None:
            self._collect_garbage(self.settings.garbage_collection_threshold, self.settings.allowed_bytes)
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._reserve(pool, size)
        if block is None:
            raise AllocatorFullError(
                self.settings,
                requested_bytes=requested_bytes,
                segment_bytes=self.settings.segment_bytes(size),
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        return block

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        """A block from the driver, outside any pool; None when the device is full."""
        segment_bytes = self.settings.segment_bytes(size)
        allowed = self.settings.allowed_bytes
        if allowed is not None and self._driver.taken_bytes + segment_bytes > allowed:
            return None
        if self._expandable is not None:
            return self._expandable.grow(pool, size)
        if not self._driver.take(segment_bytes):
            return None
        return Block(pool, self._driver.reserve_addresses(segment_bytes), segment_bytes)

    def _release(self, block: Block) -> None:
        """Give a free segment back to the driver."""
        block.pool.remove(block)
        self._driver.give_back(block.size)
        self._driver.release_addresses(block.address, block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back one block too large to be split, or several of the largest; whether that makes enough room."""
        max_split = self.settings.max_split_bytes
        if max_split is None or self._expandable is not None:
            return False
        needed = max(size, max_split)
        position = pool.find(needed)
        if position < len(pool):
            self._release(pool.peek(position))
            return True
        released = 0
        while released < needed and len(pool) and pool.peek(-1).size >= max_split:
            released += pool.peek(-1).size
            self._release(pool.peek(-1))
        return released >= needed

    def _collect_garbage(self, threshold: float, allowed_bytes: int) -> None:
        """Give back idle large segments, those of average age and more first, until the threshold holds."""
        excess = self._driver.taken_bytes - int(threshold * allowed_bytes)
        if excess <= 0 or self._expandable is not None:
            return
        large = [block for pools in self._pools.values() for block in pools[True].free_blocks()]
        idle = [block for block in large if block.is_whole_segment]
        while excess > 0 and idle:
            ages = [self._num_large_searches - block.free_since for block in idle]
            mean_age = sum(ages) / len(ages)
            young = []
            for block, age in zip(idle, ages, strict=True):
                if age >= mean_age:
                    excess -= block.size
                    self._release(block)
                else:
                    young.append(block)
            idle = young

    def _not_alive(self, handle: int) -> TraceError:
        state = "is free already" if 0 <= handle < self._next_handle else "was never given out"
        return TraceError(f"allocator handle {handle} {state}; free each handle that malloc returned once")


def _potential(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.is_mapped else 0)
