from __future__ import annotations

import random

from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.memory_log import MAX_REPEATS, exact, replay
from lowtide.tracing.recorder import Recorder
from lowtide.units import MiB


def recorded() -> Recorder:
    """700 bytes, then 3 MiB, then the first is freed."""
    recorder = Recorder()
    small = recorder.allocate(700, (700,), "uint8")
    recorder.allocate(3 * MiB, (3 * MiB,), "uint8")
    recorder.free(small)
    return recorder


def test_exact_bytes_are_neither_rounded_nor_reserved() -> None:
    memory = exact(recorded())
    assert memory.allocated == memory.reserved == [700, 700 + 3 * MiB, 3 * MiB]
    assert memory.block_bytes == {0: 700, 1: 3 * MiB}


def test_replayed_bytes_are_the_caching_allocators() -> None:
    memory = replay(recorded(), AllocatorSettings())
    assert memory.allocated == [1024, 1024 + 3 * MiB, 3 * MiB]
    assert memory.reserved == [2 * MiB, 22 * MiB, 22 * MiB]  # a segment of 2 MiB for small blocks, one of 20 for others
    assert memory.block_bytes == {0: 1024, 1: 3 * MiB}


def test_each_stream_has_a_pool_of_its_own() -> None:
    recorder = Recorder()
    recorder.free(recorder.allocate(12 * MiB, (12 * MiB,), "uint8", stream=1))
    recorder.allocate(12 * MiB, (12 * MiB,), "uint8")
    recorder.allocate(12 * MiB, (12 * MiB,), "uint8", stream=1)
    memory = replay(recorder, AllocatorSettings())
    assert memory.allocated == [12 * MiB, 0, 12 * MiB, 24 * MiB]
    assert memory.reserved == [12 * MiB, 12 * MiB, 24 * MiB, 24 * MiB]  # the last one is where the first was


def steps(seed: int, count: int) -> tuple[Recorder, int]:
    """The same step several times, each keeping some blocks until the next has made its own; and where the second begins."""
    recorder, kept, first = Recorder(), [], 0
    for number in range(count):
        rng = random.Random(seed)
        first = len(recorder.log) if number == 1 else first
        passing, left = [], []
        for _ in range(12):
            life = recorder.allocate(rng.randint(2, 60) * MiB, (1,), "uint8")
            (left if rng.random() < 0.3 else passing).append(life)
            if passing and rng.random() < 0.5:
                recorder.free(passing.pop(rng.randrange(len(passing))))
        for life in (*passing, *kept):
            recorder.free(life)
        kept = left
    return recorder, first


def test_a_step_is_repeated_until_it_reserves_nothing_more() -> None:
    num_grown = 0
    for seed in range(20):
        recorder, first = steps(seed, 2)
        after = [
            max(replay(steps(seed, count)[0], AllocatorSettings()).reserved) for count in range(1, 3 + MAX_REPEATS)
        ]
        quiet = next((n for n in range(1, len(after)) if after[n] == after[n - 1]), len(after) - 1)
        settled = replay(recorder, AllocatorSettings(), first)
        assert settled.reserved[-1] == max(settled.reserved) == after[min(quiet + 1, len(after) - 1)]
        assert len(settled.reserved) == len(settled.allocated) == len(recorder.log)
        num_grown += after[2] > after[1]
    assert num_grown >= 5, "cases in which the third step reserves more than the second"


def test_a_step_that_leaves_other_than_it_found_is_not_repeated() -> None:
    recorder = Recorder()
    recorder.allocate(MiB, (1,), "uint8")
    recorder.allocate(12 * MiB, (1,), "uint8")  # a leak
    memory = replay(recorder, AllocatorSettings(), 1)
    assert memory.reserved == [2 * MiB, 14 * MiB]
