"""The card behind the allocator: capacity, and addresses as the CUDA driver gave them."""

from __future__ import annotations

import random

from lowtide.tracing.allocator.driver import DriverMemory
from lowtide.units import MiB
from tests.tracing.allocator.looking import IncreasingAddresses

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
    # The process had three segments in its first chunk before those listed.
    for size in (2, 2, 20, 2):
        driver.reserve_addresses(size * MiB)
    origin = driver.reserve_addresses(64 * MiB)
    for size, address in SEEN_ON_A_CARD[1:]:
        assert (driver.reserve_addresses(size * MiB) - origin) / MiB == address
    for size, address in FREED:
        driver.release_addresses(origin + address * MiB, size * MiB)
    for size, address in SEEN_AFTERWARDS:
        assert (driver.reserve_addresses(size * MiB) - origin) / MiB == address


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
