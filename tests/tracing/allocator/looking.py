"""What the tests look at inside of the allocator, and addresses that only grow, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.tracing.allocator import AllocatorSettings, CachingAllocator
from lowtide.tracing.allocator.driver import Block, DriverMemory
from lowtide.units import MiB


@dataclass(frozen=True)
class Segment:
    """Memory taken from the driver in one piece (or mapped in a row, when expandable)."""

    address: int
    bytes: int
    blocks: tuple[Block, ...]
    """In order of address, without gaps."""


def segments(allocator: CachingAllocator) -> tuple[Segment, ...]:
    """All segments with their blocks, in order of address."""
    blocks = [block for block in allocator._live.values() if block is not None]
    blocks += [block for pools in allocator._pools.values() for pool in pools for block in pool.free_blocks()]
    heads = [block for block in blocks if block.prev is None or not block.prev.is_mapped]
    found = [tuple(_run(head)) for head in sorted(heads, key=lambda block: block.address)]
    return tuple(Segment(run[0].address, sum(block.size for block in run), run) for run in found)


def _run(block: Block | None) -> Iterator[Block]:
    while block is not None and block.is_mapped:
        yield block
        block = block.next


def address(allocator: CachingAllocator, handle: int) -> int:
    """Where a live block lies; 0 for a request of no bytes."""
    block = allocator._live[handle]
    return 0 if block is None else block.address


class IncreasingAddresses(DriverMemory):
    """A driver that puts each segment above every earlier one, as the naive allocator has it."""

    def __init__(self, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._top = 2 * MiB

    def reserve_addresses(self, size: int) -> int:
        self._top += size
        return self._top - size

    def release_addresses(self, start: int, size: int) -> None:
        pass


def with_increasing_addresses(settings: AllocatorSettings | None = None) -> CachingAllocator:
    """An allocator over such a driver; expandable segments have addresses of their own."""
    allocator = CachingAllocator(settings)
    if not allocator.settings.expandable_segments:
        allocator._driver = IncreasingAddresses(allocator.settings.capacity_bytes)
    return allocator
