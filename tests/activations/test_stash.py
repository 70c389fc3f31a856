"""Stash: copies in an order that no queue can get wrong, which tensors share a copy, and graphs that die at any moment."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.activations import Offload, apply
from lowtide.activations.stash import MAX_SLACK, HostBuffers, Stash, Stashed
from lowtide.errors import BudgetError
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Copied, Ticket
from tests.activations.checking_mover import CheckingMover
from tests.activations.measured import ROWS, WIDTH, assert_equal, gradients, stack

ALL = Offload(recompute=False, min_bytes=0)


@pytest.fixture
def checking() -> Iterator[CheckingMover]:
    mover = CheckingMover()
    yield mover
    gc.collect()
    assert mover.num_copies
    assert mover.faults == []


def elsewhere(work: Callable[[], None]) -> None:
    """In a thread of its own, with a queue of its own: nothing that this thread waited for counts there."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def sent(stash: Stash, count: int, depth: int = 1) -> list[Stashed]:
    """So many tensors in one parcel, and two more that are dropped at once: the device holds none of the first."""
    parcel = stash.open_parcel(depth)
    packed = [stash.put(parcel, torch.full((256,), float(index))) for index in range(count)]
    for _ in range(2):
        stash.put(stash.open_parcel(0), torch.zeros(256))
    return packed


class WatchedMover(EmulatedMover):
    """Knows for which copies to the host the computation was told to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Ticket] = []
        self.awaited: list[int] = []

    def to_host(self, target: Tensor, source: Tensor, after: Sequence[Ticket] = (), *, keep: bool = True) -> Copied:
        copied = super().to_host(target, source, after, keep=keep)
        self.sent.append(copied.ended)
        return copied

    def compute_after(self, ticket: Ticket) -> None:
        if ticket in self.sent:
            self.awaited.append(self.sent.index(ticket))
        super().compute_after(ticket)


def test_the_computation_does_not_wait_for_a_large_input_because_of_small_ones_beside_it() -> None:
    mover = WatchedMover()
    stash = Stash(mover)
    held = []
    for call in range(4):
        parcel = stash.open_parcel(1)
        held += [stash.put(parcel, torch.zeros(size)) for size in (1024, 64, 64)]
        # Copies 3 * call and the two after it: those of the call before are waited for, and had all of its time.
        assert mover.awaited == list(range(max(3 * call - 2, 0)))
    assert len(held) == 12


def test_a_large_tensor_leaves_though_only_small_ones_follow() -> None:
    mover = WatchedMover()
    stash = Stash(mover)
    held = [stash.put(stash.open_parcel(1), torch.zeros(size)) for size in (4096, 256, 64)]
    assert mover.awaited == [0]
    held.append(stash.put(stash.open_parcel(1), torch.zeros(16)))
    assert mover.awaited == [0, 1]


def test_of_tensors_of_one_size_two_wait() -> None:
    mover = WatchedMover()
    stash, held = Stash(mover), []
    parcel = stash.open_parcel(1)
    for number in range(6):
        held.append(stash.put(parcel, torch.zeros(256)))
        assert mover.awaited == list(range(number - 1))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("recompute", [True, False])
def test_steps_in_any_order_of_copies(checking: CheckingMover, recompute: bool, depth: int) -> None:
    model, x = stack(6), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    with apply(model, Offload(recompute=recompute, min_bytes=0, depth=depth), mover=checking):
        for _ in range(3):
            assert_equal(expected, gradients(model, x))
        one, two = model(x), model(x)
        del one
        two.backward(retain_graph=True)
        two.backward()


def test_what_another_thread_brings_comes_after_its_copy_out(checking: CheckingMover) -> None:
    stash = Stash(checking)
    packed = sent(stash, 2)

    def bring() -> None:
        assert [saved.take()[0].item() for saved in packed] == [0.0, 1.0]

    elsewhere(bring)


def test_a_buffer_is_written_to_after_its_last_reader(checking: CheckingMover) -> None:
    stash = Stash(checking)
    packed = sent(stash, 4)

    def bring_and_drop() -> None:
        for saved in packed:
            saved.take()
        packed.clear()
        del saved

    elsewhere(bring_and_drop)
    again = sent(stash, 4)
    assert [saved.take()[0].item() for saved in again] == [0.0, 1.0, 2.0, 3.0]


def test_what_was_brought_ahead_and_dropped_is_freed_after_its_copy(checking: CheckingMover) -> None:
    model, x = stack(6), torch.randn(ROWS, WIDTH)
    with apply(model, Offload(recompute=False, min_bytes=0, depth=3), mover=checking) as applied:
        loss = model(x)
        # A backward that ends early: what the blocks before would have needed is on its way.
        torch.autograd.grad(loss, [model.blocks[4].up.weight])
        num_brought = applied.stats().brought_bytes
        assert num_brought > applied.stats().offloaded_bytes / 3
        del loss
        gc.collect()
        assert applied.stats().host_bytes == 0


def test_a_tensor_that_was_written_to_goes_again() -> None:
    stash = Stash(EmulatedMover(), poison=True)
    parcel = stash.open_parcel(1)
    x = torch.ones(256)
    before = stash.put(parcel, x)
    assert stash.put(parcel, x.view(16, 16)).slot is before.slot
    others = [stash.put(parcel, torch.zeros(256)) for _ in range(2)]
    x.mul_(2)
    after = stash.put(parcel, x)
    assert len(others) == 2
    assert before.take()[0] == 1
    assert after.take()[0] == 2


def test_writes_that_do_not_count_between_two_graphs() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)))
    model, new = copy.deepcopy(plain), torch.randn(64, 64)
    apply(model, ALL)
    found = []
    for network in (plain, model):
        x = torch.zeros(64, 64)
        first = network(x).sum()
        x.data.copy_(new)
        network(x).square().sum().backward()
        found.append([parameter.grad for parameter in network.parameters() if parameter.grad is not None])
        del first
    assert_equal(*found)


def test_parcels_of_another_forward_are_not_brought() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    with apply(model, Offload(min_bytes=0, depth=2)) as applied:
        first = model(x)
        second = model(x)
        second.backward()
        # The last two were still on the device.
        assert applied.stats().brought_bytes == 2 * ROWS * WIDTH * 4
        first.backward()
        assert applied.stats().brought_bytes == 6 * ROWS * WIDTH * 4


class CollectingMover(EmulatedMover):
    """Frees host memory under a lock that is not to be taken twice, and the collector runs just then."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.num_free_bytes = 0

    def free_host_buffer(self, buffer: Tensor) -> None:
        assert self.lock.acquire(timeout=5), "waits for itself"
        try:
            gc.collect()
            self.num_free_bytes += buffer.numel()
        finally:
            self.lock.release()


@pytest.mark.slow
def test_a_graph_that_dies_in_the_middle_of_anything() -> None:
    class Knot:
        def __init__(self, held: Tensor) -> None:
            self.held, self.me = held, self

    model, x = stack(2), torch.randn(ROWS, WIDTH)
    mover = CollectingMover()
    gc.collect()
    gc.disable()
    try:
        applied = apply(model, ALL, mover=mover)
        knot, loss = Knot(model(x)), model(x)
        applied.remove()
        del knot
        loss.backward()
        del loss
        assert applied.stats().host_bytes == 0
    finally:
        gc.enable()
    gc.collect()
    assert applied.stats().host_bytes == 0
    assert mover.num_free_bytes > 0


def test_after_removal_a_backward_gives_its_host_memory_back() -> None:
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    mover = CheckingMover()
    applied = apply(model, ALL, mover=mover)
    loss = model(x)
    stash = applied._offloading.stash
    assert stash is not None
    applied.remove()
    assert stash._buffers.lent_bytes > 0
    loss.backward()
    # Looked at as they are: the properties would tidy up.
    assert (stash._buffers.lent_bytes, stash._buffers.held_bytes) == (0, 0)
    assert mover.faults == []


def test_a_stash_that_is_forgotten_frees_its_buffers() -> None:
    mover = CheckingMover()
    stash = Stash(mover)
    packed = sent(stash, 3)
    del stash, packed
    gc.collect()
    assert len(mover.freed) == 4, "one of the two that were dropped was used again"
    assert mover.faults == []


class CountingMover(EmulatedMover):
    """With so much host memory; notes what happens to it."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        super().__init__()
        self.limit_bytes, self.used_bytes, self.peak_bytes = limit_bytes, 0, 0
        self.events: list[str] = []

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise BudgetError("full", tier="host", needed_bytes=num_bytes, free_bytes=0, budget_bytes=self.limit_bytes)
        self.events.append("allocate")
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return super().host_buffer(num_bytes)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        self.events.append("free")
        self.used_bytes -= buffer.numel()

    def drain(self) -> None:
        self.events.append("drain")
        super().drain()


def step(buffers: HostBuffers, sizes: list[int]) -> None:
    for buffer in [buffers.take(size) for size in sizes]:
        buffers.give_back(buffer)


def test_equal_steps_allocate_once() -> None:
    mover = CountingMover()
    buffers = HostBuffers(mover)
    for _ in range(5):
        step(buffers, [1000, 5000, 900, 100_000, 5000])
    assert mover.events == ["allocate"] * 5
    assert buffers.lent_bytes == 0
    assert buffers.held_bytes == mover.used_bytes == 1024 * 2 + 5120 * 2 + 100_352


def test_a_larger_buffer_will_do_and_a_much_larger_one_not() -> None:
    buffers = HostBuffers(CountingMover())
    large, small = buffers.take(4096), buffers.take(1024)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(700).data_ptr() == small.data_ptr()
    assert buffers.take(2048).data_ptr() == large.data_ptr()
    assert buffers.take(512).data_ptr() not in (small.data_ptr(), large.data_ptr())


def test_no_more_is_held_than_was_in_use() -> None:
    mover = CountingMover()
    buffers = HostBuffers(mover)
    most_bytes = 0
    order = random.Random(0)
    lengths = [*range(1, 40), *range(39, 0, -1), *(order.randint(1, 80) for _ in range(60))]
    for length in lengths:
        sizes = [512 * length * factor for factor in (1, 4, 1, 3, 4)]
        most_bytes = max(most_bytes, sum(sizes))
        step(buffers, sizes)
        assert mover.used_bytes <= MAX_SLACK * most_bytes
    assert mover.events.count("allocate") < 5 * len(lengths)


def test_the_growing_batches_of_a_model() -> None:
    mover, model = CountingMover(), stack(4)
    one_step = 0
    with apply(model, Offload(recompute=False, min_bytes=0), mover=mover) as applied:
        for num_rows in range(64, 64 + 8 * 20, 8):
            gradients(model, torch.randn(num_rows, WIDTH))
            assert applied.stats().host_bytes == 0
            one_step = one_step or mover.used_bytes
    # The last batch has 216 rows.
    assert mover.peak_bytes <= 216 / 64 * one_step * 1.1


def test_copies_end_before_a_buffer_is_freed() -> None:
    mover = CountingMover(limit_bytes=8192)
    buffers = HostBuffers(mover)
    step(buffers, [2048, 2048, 2048])
    mover.events.clear()
    held = buffers.take(6000)
    assert mover.events[:2] == ["drain", "free"]
    with pytest.raises(BudgetError):
        buffers.take(6000)
    buffers.give_back(held)
    mover.events.clear()
    buffers.clear()
    assert mover.events == ["drain", "free"]
    assert mover.used_bytes == 0


def test_kept_buffers_make_room_where_the_host_is_full() -> None:
    mover = CountingMover(limit_bytes=4096)
    buffers = HostBuffers(mover)
    large = [buffers.take(1024) for _ in range(4)]
    for buffer in large:
        buffers.give_back(buffer)
    mover.limit_bytes = 2048
    mover.events.clear()
    assert buffers.take(2048).numel() == 2048
    assert mover.events[0] == "drain"
    assert mover.used_bytes == 2048


class BrokenOffError(Exception):
    """What is raised at a line."""


def test_an_exception_at_any_line_leaves_buffers_that_go_on_working() -> None:
    """As an interrupt does, where the stash is at work in a forward."""
    for number in itertools.count(1):
        buffers = HostBuffers(CountingMover())
        step(buffers, [1024, 4096])
        was_reached = broken_off_at(number, lambda: step(buffers, [900, 70_000, 1024]))  # noqa: B023  # called at once
        for _ in range(2):
            step(buffers, [1024, 4096, 70_000])
        buffers.clear()
        if not was_reached:
            break
    assert number > 30


def broken_off_at(number: int, work: Callable[[], None]) -> bool:
    """Raise at this line of `HostBuffers`, counted from 1; whether the work came there."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_qualname.startswith("HostBuffers."):
            return None
        num_lines += event == "line"
        if event == "line" and num_lines == number:
            raise BrokenOffError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except BrokenOffError:
        return True
    finally:
        sys.settrace(before)
    return False
