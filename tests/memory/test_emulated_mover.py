from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.memory.chunk import POISON
from lowtide.memory.emulated_mover import EmulatedMover


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def is_poison(buffer: torch.Tensor) -> bool:
    return bool((buffer == POISON).all())


@pytest.fixture
def mover() -> EmulatedMover:
    return EmulatedMover()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_not_a_number(mover: EmulatedMover, dtype: torch.dtype) -> None:
    assert mover.device_buffer(32).view(dtype).isnan().all()
    assert mover.host_buffer(32).view(dtype).isnan().all()


def test_a_copy_happens_when_somebody_waits_for_it_and_not_before(mover: EmulatedMover) -> None:
    device = mover.device_buffer(3)
    copied = mover.to_device(device, bytes_of(1, 2, 3))
    assert is_poison(device)
    assert not copied.ended.is_done()
    mover.compute_after(copied.ended)
    assert copied.started.is_done()
    assert copied.ended.is_done()
    assert device.tolist() == [1, 2, 3]


def test_copies_of_one_queue_happen_in_their_order(mover: EmulatedMover) -> None:
    device = mover.device_buffer(1)
    first = mover.to_device(device, bytes_of(1))
    second = mover.to_device(device, bytes_of(2))
    third = mover.to_device(device, bytes_of(3))
    second.ended.wait()
    assert device.tolist() == [2]
    assert first.ended.is_done()
    assert not third.started.is_done()


def test_a_copy_reads_its_source_when_it_happens(mover: EmulatedMover) -> None:
    source, device = bytes_of(1), mover.device_buffer(1)
    copied = mover.to_device(device, source)
    source.fill_(9)
    copied.ended.wait()
    assert device.tolist() == [9], "a source that was changed too early must show"


def test_what_a_copy_comes_after_happens_first_across_the_queues(mover: EmulatedMover) -> None:
    host, device = mover.host_buffer(1), bytes_of(7)
    written = mover.to_host(host, device)
    fetched = mover.to_device(mover.device_buffer(1), host, [written.ended])
    fetched.ended.wait()
    assert host.tolist() == [7]
    assert written.ended.is_done()


def test_queues_do_not_wait_for_each_other_unasked(mover: EmulatedMover) -> None:
    host = mover.host_buffer(1)
    written = mover.to_host(host, bytes_of(7))
    device = mover.device_buffer(1)
    mover.to_device(device, host).ended.wait()
    assert is_poison(device)
    assert not written.ended.is_done()


def test_memory_is_poisoned_when_it_comes_and_when_it_goes(mover: EmulatedMover) -> None:
    buffer = mover.device_buffer(4)
    same_memory = buffer.view(4)
    buffer.fill_(1)
    mover.shrink(buffer, [])
    assert buffer.untyped_storage().nbytes() == 0
    mover.grow(buffer)
    assert is_poison(same_memory)
    with pytest.raises(AssertionError, match="has memory already"):
        mover.grow(buffer)
    host = bytes_of(1, 2)
    mover.free_host_buffer(host)
    assert host.tolist() == [1, 2], "a state dictionary that the user took may look at it"


def test_shrink_lets_the_copies_happen_that_it_is_told_of(mover: EmulatedMover) -> None:
    device, host = bytes_of(1, 2), mover.host_buffer(2)
    written = mover.to_host(host, device)
    mover.shrink(device, [written.ended])
    assert host.tolist() == [1, 2]


def test_a_copy_that_shrink_was_not_told_of_fails_instead_of_crashing(mover: EmulatedMover) -> None:
    device = bytes_of(1, 2)
    lost_write = mover.to_host(mover.host_buffer(2), device)
    mover.shrink(device, [])
    with pytest.raises(AssertionError, match="a copy from memory that was released"):
        lost_write.ended.wait()
    target = mover.device_buffer(2)
    lost_fetch = mover.to_device(target, bytes_of(3, 4))
    mover.shrink(target, [])
    with pytest.raises(AssertionError, match="a copy to memory that was released"):
        lost_fetch.ended.wait()


def test_memory_that_came_back_in_between_holds_poison_for_a_copy_that_came_too_late(mover: EmulatedMover) -> None:
    device, host = bytes_of(1, 2), mover.host_buffer(2)
    lost_write = mover.to_host(host, device)
    mover.shrink(device, [])
    mover.grow(device)
    lost_write.ended.wait()
    assert is_poison(host)


def test_drain_does_all(mover: EmulatedMover) -> None:
    device, host = mover.device_buffer(1), mover.host_buffer(1)
    copies = [mover.to_device(device, bytes_of(1)), mover.to_host(host, bytes_of(2))]
    mover.drain()
    assert all(copied.ended.is_done() for copied in copies)
    assert (device.tolist(), host.tolist()) == ([1], [2])


def test_times_follow_the_order_of_events(mover: EmulatedMover) -> None:
    before = mover.now()
    copied = mover.to_device(mover.device_buffer(1), bytes_of(1))
    assert before.time_s() <= copied.started.time_s() <= copied.ended.time_s() <= mover.now().time_s()


def test_a_ticket_of_another_mover_is_refused(mover: EmulatedMover) -> None:
    copied = mover.to_device(mover.device_buffer(1), bytes_of(1))
    with pytest.raises(AssertionError, match="another mover"):
        EmulatedMover().run_until(copied.ended)  # type: ignore[arg-type]


def test_copies_have_no_graph(mover: EmulatedMover) -> None:
    leaf = torch.ones(2, requires_grad=True)
    target = torch.zeros(2)
    mover.to_host(target, leaf * 2).ended.wait()
    assert not target.requires_grad


def test_threads_may_wait_for_the_same_copies(mover: EmulatedMover) -> None:
    sources = [bytes_of(index) for index in range(100)]
    targets = [mover.device_buffer(1) for _ in sources]
    copies = [mover.to_device(target, source) for target, source in zip(targets, sources, strict=True)]
    threads = [threading.Thread(target=copies[place].ended.wait) for place in (99, 50, 0, 99, 75)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [target.item() for target in targets] == list(range(100))


@settings(max_examples=100)
@given(
    eagerness=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
)
def test_eager_or_late_the_result_is_the_same(eagerness: float, seed: int, sizes: list[int]) -> None:
    """A round trip of each buffer, each part after the one before."""
    mover = EmulatedMover(eagerness=eagerness, seed=seed)
    for place, size in enumerate(sizes):
        source = torch.full((size,), place + 1, dtype=torch.uint8)
        there, back = mover.device_buffer(size), mover.host_buffer(size)
        fetched = mover.to_device(there, source)
        written = mover.to_host(back, there, [fetched.ended])
        mover.now()
        mover.shrink(there, [fetched.ended, written.ended])
        assert back.tolist() == source.tolist()
    mover.drain()


def test_an_eager_mover_runs_some_unasked() -> None:
    mover = EmulatedMover(eagerness=1.0)
    copied = mover.to_device(mover.device_buffer(1), bytes_of(1))
    assert copied.ended.is_done()
