"""The allocator replay against hand arithmetic, against its own invariants, and against a naive allocator."""

from __future__ import annotations

import contextlib
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError, TraceError
from lowtide.tracing.allocator import AllocatorFullError, AllocatorSettings, CachingAllocator
from lowtide.units import KiB, MiB
from tests.tracing.allocator.looking import address, segments, with_increasing_addresses
from tests.tracing.allocator.naive import NaiveAllocator, NaiveExpandable

SIZES = st.one_of(
    st.integers(0, 4 * KiB),
    st.integers(0, 2 * MiB),
    st.sampled_from([512, MiB, MiB + 1, 2 * MiB, 10 * MiB - 1, 10 * MiB, 19 * MiB, 20 * MiB, 21 * MiB, 64 * MiB]),
    st.integers(MiB, 70 * MiB),
)
CALLS = st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True)), max_size=60)
"""An int is a request of that size; a float frees the live handle at that share of the list."""


def check_invariants(allocator: CachingAllocator) -> None:
    snapshot = segments(allocator)
    allocated = reserved = 0
    for segment in snapshot:
        cursor, was_free = segment.address, False
        for block in segment.blocks:
            assert block.address == cursor, "blocks lie one after the other"
            assert block.size > 0
            assert block.size % 512 == 0
            assert block.size >= block.requested
            assert not (was_free and not block.is_allocated), "two free neighbours were not merged"
            cursor, was_free = block.address + block.size, not block.is_allocated
            allocated += block.size if block.is_allocated else 0
        assert cursor == segment.address + segment.bytes
        reserved += segment.bytes
    ends = [0, *(segment.address + segment.bytes for segment in snapshot)]
    assert all(segment.address >= end for segment, end in zip(snapshot, ends, strict=False)), "segments overlap"
    assert allocated == allocator.allocated_bytes
    assert reserved == allocator.reserved_bytes
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes


def test_fresh_large_request_is_rounded_to_two_mib_and_not_split() -> None:
    allocator = CachingAllocator()
    activation, weight = allocator.malloc(int(63.28125 * MiB)), allocator.malloc(int(21.09375 * MiB))
    assert (allocator.block_bytes(activation), allocator.block_bytes(weight)) == (64 * MiB, 22 * MiB)
    assert allocator.reserved_bytes == 86 * MiB


def test_a_rest_of_more_than_one_mib_is_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MiB))
    assert allocator.block_bytes(allocator.malloc(63 * MiB)) == 64 * MiB  # rest of exactly 1 MiB: kept
    other = CachingAllocator()
    other.free(other.malloc(64 * MiB))
    assert other.block_bytes(other.malloc(63 * MiB - 512)) == 63 * MiB - 512
    assert other.reserved_bytes == 64 * MiB


def test_small_requests_share_one_segment() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(1), allocator.malloc(MiB)
    assert (allocator.block_bytes(first), allocator.block_bytes(second)) == (512, MiB)
    assert address(allocator, second) == address(allocator, first) + 512
    assert allocator.reserved_bytes == 2 * MiB
    allocator.malloc(MiB)  # 512 bytes short of fitting
    assert allocator.reserved_bytes == 4 * MiB


def test_one_byte_over_one_mib_takes_from_a_twenty_mib_segment() -> None:
    allocator = CachingAllocator()
    assert allocator.block_bytes(allocator.malloc(MiB + 1)) == MiB + 512
    assert allocator.reserved_bytes == 20 * MiB
    allocator.malloc(9 * MiB)
    assert allocator.reserved_bytes == 20 * MiB


def test_ten_mib_gets_a_segment_of_its_own() -> None:
    just_below, exact = CachingAllocator(), CachingAllocator()
    just_below.malloc(10 * MiB - 512)
    exact.malloc(10 * MiB)
    assert (just_below.reserved_bytes, exact.reserved_bytes) == (20 * MiB, 10 * MiB)


def test_pools_do_not_lend_to_each_other() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MiB))
    allocator.malloc(512)
    assert allocator.reserved_bytes == 66 * MiB


def test_best_fit_prefers_the_smallest_then_the_lowest() -> None:
    allocator = with_increasing_addresses()
    handles = [allocator.malloc(size * MiB) for size in (40, 30, 30)]
    addresses = [address(allocator, handle) for handle in handles]
    for handle in reversed(handles):
        allocator.free(handle)
    assert address(allocator, allocator.malloc(30 * MiB)) == addresses[1]
    assert address(allocator, allocator.malloc(30 * MiB)) == addresses[2]
    assert address(allocator, allocator.malloc(30 * MiB)) == addresses[0]


def test_a_request_of_nothing_costs_nothing() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(0)
    assert (allocator.block_bytes(handle), address(allocator, handle), allocator.reserved_bytes) == (0, 0, 0)
    allocator.free(handle)


def test_streams_have_their_own_pools() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MiB, stream=1))
    allocator.malloc(30 * MiB, stream=2)
    assert allocator.reserved_bytes == 60 * MiB
    allocator.malloc(30 * MiB, stream=1)
    assert allocator.reserved_bytes == 60 * MiB


def test_a_full_card_gives_back_idle_segments_first() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=100 * MiB))
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(512)
    allocator.malloc(70 * MiB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes, allocator.num_retries) == (72 * MiB, 72 * MiB, 1)


def test_out_of_memory_says_what_with_numbers() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=100 * MiB))
    allocator.malloc(60 * MiB)
    allocator.malloc(3 * MiB)
    with pytest.raises(AllocatorFullError, match=r"request of 30\.0 MiB needs 30\.0 MiB more .* 100\.0 MiB") as caught:
        allocator.malloc(30 * MiB)
    assert "63.0 MiB are in use and 17.0 MiB are free in pieces" in str(caught.value)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.requested_bytes, error.allocated_bytes, error.reserved_bytes) == (30 * MiB, 63 * MiB, 80 * MiB)
    allocator.malloc(17 * MiB)  # still usable
    check_invariants(allocator)


def test_allowed_bytes_limit_like_capacity() -> None:
    allocator = CachingAllocator(AllocatorSettings(allowed_bytes=50 * MiB))
    with pytest.raises(AllocatorFullError, match=r"device of 50\.0 MiB"):
        allocator.malloc(51 * MiB)


def test_blocks_too_large_to_split_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=40 * MiB))
    allocator.free(allocator.malloc(100 * MiB))
    allocator.malloc(30 * MiB)  # may not touch the 100 MiB block
    assert allocator.reserved_bytes == 130 * MiB
    allocator.malloc(80 * MiB)  # 20 MiB less than the block: too much waste
    assert allocator.reserved_bytes == 210 * MiB
    near = allocator.malloc(81 * MiB)
    assert (allocator.block_bytes(near), allocator.reserved_bytes) == (100 * MiB, 210 * MiB)


def test_a_full_card_gives_back_only_the_oversize_block_it_needs() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=200 * MiB, max_split_bytes=40 * MiB))
    handles = [allocator.malloc(size * MiB) for size in (50, 100)]
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(70 * MiB)  # the 100 MiB block is 30 MiB too large, so it goes back and the other stays
    assert (allocator.reserved_bytes, allocator.num_retries) == (120 * MiB, 0)


def test_garbage_collection_frees_the_oldest_idle_segments() -> None:
    limits = AllocatorSettings(allowed_bytes=200 * MiB, garbage_collection_threshold=0.5)
    allocator = CachingAllocator(limits)
    old = allocator.malloc(60 * MiB)
    young = allocator.malloc(50 * MiB)
    allocator.free(old)
    for _ in range(5):
        allocator.free(allocator.malloc(55 * MiB))  # served by the 60 MiB block, so it is the young one after all
    allocator.free(young)
    for _ in range(5):
        allocator.free(allocator.malloc(50 * MiB))
    allocator.malloc(80 * MiB)  # 110 MiB reserved is over 100: the 60 MiB block, idle for longest, goes
    assert allocator.reserved_bytes == 130 * MiB


def test_peaks_hold() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MiB - 100))
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 30 * MiB
    assert (allocator.peak_requested_bytes, allocator.allocated_bytes) == (30 * MiB - 100, 0)
    allocator.empty_cache()
    assert (allocator.peak_reserved_bytes, allocator.reserved_bytes) == (30 * MiB, 0)


def test_wrong_handles_and_sizes_are_refused() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(TraceError, match="handle 0 is free already"):
        allocator.free(handle)
    with pytest.raises(TraceError, match="handle 7 was never given out"):
        allocator.block_bytes(7)
    with pytest.raises(ConfigError, match="cannot allocate -1 bytes"):
        allocator.malloc(-1)


@settings(max_examples=120, deadline=None)
@given(
    calls=CALLS,
    capacity=st.sampled_from([None, 40 * MiB, 150 * MiB]),
    max_split=st.sampled_from([None, 20 * MiB, 40 * MiB]),
    is_expandable=st.booleans(),
)
def test_invariants_hold(
    calls: list[int | float], capacity: int | None, max_split: int | None, is_expandable: bool
) -> None:
    allocator = CachingAllocator(
        AllocatorSettings(capacity_bytes=capacity, max_split_bytes=max_split, expandable_segments=is_expandable)
    )
    live: list[int] = []
    peaks = (0, 0, 0)
    for call in calls:
        if isinstance(call, int):
            with contextlib.suppress(AllocatorFullError):
                live.append(allocator.malloc(call, stream=call % 2))
        elif live:
            allocator.free(live.pop(int(call * len(live))))
        check_invariants(allocator)
        assert capacity is None or allocator.reserved_bytes <= capacity
        now = (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.peak_requested_bytes)
        assert all(new >= old for new, old in zip(now, peaks, strict=True))
        assert now[0] >= allocator.allocated_bytes
        assert now[1] >= allocator.reserved_bytes
        peaks = now
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (0, 0, 0)
    assert segments(allocator) == ()


@settings(max_examples=150, deadline=None)
@given(calls=CALLS, capacity=st.sampled_from([None, 40 * MiB, 150 * MiB]), max_split=st.sampled_from([None, 24 * MiB]))
def test_same_as_the_naive_allocator(calls: list[int | float], capacity: int | None, max_split: int | None) -> None:
    limits = AllocatorSettings(capacity_bytes=capacity, max_split_bytes=max_split)
    allocator = with_increasing_addresses(limits)
    compare(allocator, NaiveAllocator(capacity, max_split), calls)


@settings(max_examples=150, deadline=None)
@given(calls=CALLS, capacity=st.sampled_from([None, 82 * MiB, 164 * MiB]))
def test_same_as_the_naive_expandable_allocator(calls: list[int | float], capacity: int | None) -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=capacity, expandable_segments=True))
    compare(allocator, NaiveExpandable(capacity), calls)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_same_as_the_naive_allocator_over_a_long_run(is_expandable: bool) -> None:
    draw = random.Random(5)
    calls: list[int | float] = []
    for _ in range(1500):
        is_request = draw.random() < 0.55
        calls.append(int(2 ** draw.uniform(5, 26)) if is_request else draw.random())
    capacity = 500 * MiB
    limits = AllocatorSettings(capacity_bytes=capacity, expandable_segments=is_expandable)
    allocator = with_increasing_addresses(limits)
    compare(allocator, NaiveExpandable(capacity) if is_expandable else NaiveAllocator(capacity), calls)
    assert allocator.num_retries > 10, "the run was meant to fill the card"


def compare(allocator: CachingAllocator, naive: NaiveAllocator, calls: list[int | float]) -> None:
    live: list[int] = []
    for call in calls:
        if isinstance(call, int):
            try:
                handle = allocator.malloc(call)
            except AllocatorFullError:
                assert not naive.malloc(-1, call), "only the fast one is full"
            else:
                assert naive.malloc(handle, call), "only the naive one is full"
                live.append(handle)
        elif live:
            handle = live.pop(int(call * len(live)))
            allocator.free(handle)
            naive.free(handle)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (naive.allocated, naive.reserved)
    places = {handle: place for line in naive.lines for handle, place in line.used.items()}
    mine = {handle: (address(allocator, handle), allocator.block_bytes(handle)) for handle in live}
    assert {handle: place for handle, place in mine.items() if place != (0, 0)} == places
