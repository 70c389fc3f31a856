from __future__ import annotations

from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.memory_log import exact, replay
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
