"""HostBuffers: what is kept serves the next step, and never more is held than was in use at once."""

from __future__ import annotations

import random

import pytest
import torch

from lowtide.activations import Offload, apply
from lowtide.activations.host_buffers import MAX_SLACK, HostBuffers
from lowtide.errors import BudgetError
from lowtide.memory.emulated_mover import EmulatedMover
from tests.activations.measured import WIDTH, gradients, stack


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
