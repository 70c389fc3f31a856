"""The device behind the allocator: capacity, addresses as the CUDA driver gave them, and expandable segments by hand."""

from __future__ import annotations

import random

import pytest

from lowtide.tracing.allocator import AllocatorFullError, AllocatorSettings, CachingAllocator
from lowtide.tracing.allocator.driver import DriverMemory
from lowtide.units import MiB
from tests.tracing.allocator.looking import IncreasingAddresses, address, segments

# Sizes in MiB with the addresses that cudaMalloc answered on an H200 (driver 580), in MiB from the first of them.
SEEN_ON_A_CARD = [
    (64, 0), (22, -32), (2, -10), (2, -8), (20, -64), (128, -192), (2, -44), (10, -42), (12, -224), (600, -832),
    (2, -232), (20, -212), (1100, -1952), (4, -852),
]  # fmt: skip
FREED = [(64, 0), (22, -32), (128, -192), (2, -10)]
SEEN_AFTERWARDS = [
    (20, -32), (2, -848), (22, 32), (64, -128), (2, 54), (30, -160), (100, -2080), (16, -1980), (600, -2688),
]  # fmt: skip


def test_addresses_are_those_of_the_cuda_driver() -> None:
    driver = DriverMemory(None)
    # The process had three segments in its first address range before those listed.
    for size in (2, 2, 20, 2):
        driver.reserve_addresses(size * MiB)
    origin = driver.reserve_addresses(64 * MiB)
    for size, place in SEEN_ON_A_CARD[1:]:
        assert (driver.reserve_addresses(size * MiB) - origin) / MiB == place
    for size, place in FREED:
        driver.release_addresses(origin + place * MiB, size * MiB)
    for size, place in SEEN_AFTERWARDS:
        assert (driver.reserve_addresses(size * MiB) - origin) / MiB == place


def test_addresses_never_overlap() -> None:
    draw = random.Random(3)
    for driver in (DriverMemory(None), IncreasingAddresses(None)):
        live: list[tuple[int, int]] = []
        for _ in range(600):
            if live and draw.random() < 0.45:
                driver.release_addresses(*live.pop(draw.randrange(len(live))))
            else:
                size = draw.choice([2, 2, 20, 12, 34, 64, 200]) * MiB
                live.append((driver.reserve_addresses(size), size))
            ends = [0, *(start + size for start, size in sorted(live))]
            assert all(start >= end for (start, _), end in zip(sorted(live), ends, strict=False))


def test_capacity_is_a_hard_limit() -> None:
    driver = DriverMemory(10 * MiB)
    assert driver.take(8 * MiB)
    assert not driver.take(3 * MiB)
    driver.give_back(8 * MiB)
    assert driver.take(10 * MiB)
    assert (driver.taken_bytes, driver.peak_taken_bytes) == (10 * MiB, 10 * MiB)


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
