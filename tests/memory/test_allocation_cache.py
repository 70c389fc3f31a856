"""The allocation cache over random traces: never two holders of one piece of memory, never more kept than the limit."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError, ConfigError, OwnershipError
from lowtide.memory.pools import AllocationCache, CacheCounts


def size_class(num_bytes: int) -> int:
    return max(512, (num_bytes + 511) // 512 * 512)


class Source:
    """Allocates and remembers every buffer, so that no address comes again."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.released: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.made[-1]


operations = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give", "give", "clear"]), st.integers(0, 2600)), max_size=40
)


@settings(max_examples=800)
@given(limit=st.integers(0, 3), trace=operations)
def test_never_two_holders_and_never_more_than_the_limit(limit: int, trace: list[tuple[str, int]]) -> None:
    source = Source()
    cache = AllocationCache(source.allocate, limit, source.released.append)
    held: list[torch.Tensor] = []
    kept: dict[int, list[int]] = {}  # addresses by class, oldest first
    num_hits = num_releases = 0
    for action, number in trace:
        if action == "take":
            buffer = cache.take(number)
            assert (buffer.numel(), buffer.dtype) == (number, torch.uint8)
            queue = kept.get(size_class(number), [])
            if queue:
                assert buffer.data_ptr() == queue.pop(0) or not number
                num_hits += 1
            held.append(buffer)
        elif action == "give" and held:
            buffer = held.pop(number % len(held))
            cache.give_back(buffer)
            queue = kept.setdefault(size_class(buffer.numel()), [])
            if len(queue) < limit:
                queue.append(buffer.untyped_storage().data_ptr())
            else:
                num_releases += 1
        elif action == "clear":
            cache.clear()
            num_releases += sum(map(len, kept.values()))
            kept.clear()
        holders = Counter(buffer.untyped_storage().data_ptr() for buffer in held)
        assert not holders or max(holders.values()) == 1
        assert not holders.keys() & {address for queue in kept.values() for address in queue}
        assert not holders.keys() & {buffer.data_ptr() for buffer in source.released}
        assert cache.counts == CacheCounts(
            num_hits=num_hits,
            num_misses=len(source.made),
            num_releases=num_releases,
            held_bytes=sum(size * len(queue) for size, queue in kept.items()),
            lent_bytes=sum(size_class(buffer.numel()) for buffer in held),
        )
        assert len(source.released) == num_releases
        assert all(len(queue) <= limit for queue in kept.values())


def test_another_size_is_never_handed_out() -> None:
    source = Source()
    cache = AllocationCache(source.allocate)
    cache.give_back(cache.take(2048))
    cache.take(1024)
    assert [buffer.numel() for buffer in source.made] == [2048, 1024]
    assert cache.counts.held_bytes == 2048


def test_first_in_first_out() -> None:
    cache = AllocationCache(Source().allocate)
    first, second = cache.take(512), cache.take(512)
    cache.give_back(second)
    cache.give_back(first)
    assert [cache.take(512).data_ptr(), cache.take(512).data_ptr()] == [second.data_ptr(), first.data_ptr()]


def test_contents_are_left_as_they_are() -> None:
    cache = AllocationCache(Source().allocate)
    buffer = cache.take(1000)
    buffer.fill_(7)
    cache.give_back(buffer)
    assert cache.take(1000).tolist() == [7] * 1000


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poison_is_not_a_number_in_any_type(dtype: torch.dtype, limit: int) -> None:
    cache = AllocationCache(Source().allocate, limit, poison=True)
    buffer = cache.take(1024)
    values = buffer.view(dtype)
    cache.give_back(buffer)
    assert bool(values.to(torch.float32).isnan().all())


def test_the_same_buffer_twice() -> None:
    cache = AllocationCache(Source().allocate)
    buffer = cache.take(1024)
    cache.give_back(buffer)
    with pytest.raises(OwnershipError, match=r"a buffer of 1.0 KiB is given back that this cache has not lent"):
        cache.give_back(buffer)
    again = cache.take(1024)
    assert again.data_ptr() == buffer.data_ptr()
    with pytest.raises(OwnershipError, match="given back before"):  # the memory is lent again, but not to this holder
        cache.give_back(buffer)
    assert cache.counts.lent_bytes == 1024
    cache.give_back(again)


def test_a_stranger() -> None:
    cache = AllocationCache(Source().allocate)
    buffer = cache.take(1024)
    for stranger in (torch.zeros(1024, dtype=torch.uint8), buffer[:]):
        with pytest.raises(OwnershipError, match="another tensor than `take` returned"):
            cache.give_back(stranger)


def test_what_is_lent_at_a_clear_may_come_back() -> None:
    source = Source()
    cache = AllocationCache(source.allocate, release=source.released.append)
    lent, kept = cache.take(512), cache.take(512)
    cache.give_back(kept)
    cache.clear()
    assert [buffer.data_ptr() for buffer in source.released] == [kept.data_ptr()]
    cache.give_back(lent)
    assert cache.take(512).data_ptr() == lent.data_ptr()


def test_kept_buffers_make_way_for_another_size() -> None:
    free_bytes = 2048

    def allocate(num_bytes: int) -> torch.Tensor:
        nonlocal free_bytes
        if num_bytes > free_bytes:
            raise BudgetError("full", tier="t", needed_bytes=num_bytes, free_bytes=free_bytes, budget_bytes=2048)
        free_bytes -= num_bytes
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def release(buffer: torch.Tensor) -> None:
        nonlocal free_bytes
        free_bytes += buffer.numel()

    cache = AllocationCache(allocate, release=release)
    cache.give_back(cache.take(1024))
    assert cache.take(2048).numel() == 2048
    assert cache.counts.num_releases == 1
    with pytest.raises(BudgetError, match="full"):
        cache.take(512)
    assert cache.counts.lent_bytes == 2048


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="the limit of kept buffers is -1"):
        AllocationCache(Source().allocate, -1)
    with pytest.raises(ConfigError, match="a buffer of -1 bytes was asked for"):
        AllocationCache(Source().allocate).take(-1)
    for made in (torch.zeros(512), torch.zeros(1024, dtype=torch.uint8), torch.zeros(2, 256, dtype=torch.uint8)):
        with pytest.raises(ConfigError, match=r"512 B were to be allocated, but .* return uint8 of shape \(512,\)"):
            AllocationCache(lambda num_bytes, made=made: made).take(100)  # type: ignore[misc]


def test_threads_never_share_a_buffer() -> None:
    cache = AllocationCache(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8), 1)
    start = threading.Barrier(4)
    spoilt: list[int] = []

    def work(mark: int) -> None:
        start.wait()
        for _ in range(300):
            buffer = cache.take(512)
            buffer.fill_(mark)
            if int(buffer.min()) != mark or int(buffer.max()) != mark:
                spoilt.append(mark)
            cache.give_back(buffer)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = cache.counts
    assert spoilt == []
    assert counts.num_hits + counts.num_misses == 1200
    assert counts.held_bytes == 512
    assert counts.lent_bytes == 0
    assert counts.num_misses - counts.num_releases == 1  # all that were made are released but the kept one
