"""Expandable segments by hand: pages, order, and what goes back to the driver."""

from __future__ import annotations

import pytest

from lowtide.tracing.allocator import AllocatorFullError, AllocatorSettings, CachingAllocator
from lowtide.units import MiB
from tests.tracing.allocator.looking import address, segments


def test_expandable_segment_grows_by_pages() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first = allocator.malloc(int(63.28125 * MiB))
    assert (allocator.block_bytes(first), allocator.reserved_bytes) == (int(63.28125 * MiB), 80 * MiB)
    second = allocator.malloc(20 * MiB)  # 16.7 MiB are mapped already; one page more
    assert address(allocator, second) == address(allocator, first) + allocator.block_bytes(first)
    assert allocator.reserved_bytes == 100 * MiB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 102 * MiB
    assert len(segments(allocator)) == 2


def test_expandable_segment_gives_back_whole_pages_only() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    large = allocator.malloc(50 * MiB)
    allocator.malloc(2 * MiB)  # lies in the third page
    allocator.free(large)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MiB
    low = allocator.malloc(45 * MiB)  # fills the hole again, from its lowest address
    assert (allocator.reserved_bytes, address(allocator, low)) == (60 * MiB, segments(allocator)[0].address)


def test_a_block_that_can_grow_is_the_last_choice() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    hole = allocator.malloc(19 * MiB)
    allocator.malloc(3 * MiB)  # ends in the second page, of which 18 MiB stay free before unmapped pages
    before = address(allocator, hole)
    allocator.free(hole)
    # Both free blocks fit and the one at the end is smaller, but it counts as large as all that it could become.
    assert address(allocator, allocator.malloc(10 * MiB)) == before


def test_growth_starts_in_the_free_block_before_the_unmapped_pages() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first = allocator.malloc(15 * MiB)
    second = allocator.malloc(10 * MiB)
    assert address(allocator, second) == address(allocator, first) + 15 * MiB
    assert allocator.reserved_bytes == 40 * MiB


def test_pages_follow_the_large_segment_size() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, large_segment_bytes=40 * MiB))
    allocator.malloc(2 * MiB)
    assert allocator.reserved_bytes == 40 * MiB


def test_a_full_card_unmaps_idle_pages_of_the_other_pool() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity_bytes=41 * MiB))
    allocator.free(allocator.malloc(1))  # 2 MiB of the small pool
    allocator.malloc(40 * MiB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (40 * MiB, 1)


def test_a_full_card_says_so() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity_bytes=50 * MiB))
    allocator.malloc(21 * MiB)
    with pytest.raises(AllocatorFullError, match="needs 30.0 MiB more"):
        allocator.malloc(30 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
