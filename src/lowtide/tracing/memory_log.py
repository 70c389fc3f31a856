"""MemoryLog: allocated and reserved bytes after each entry of a recorder's log, and the block each life occupies.

Three sources give one: a replay of the caching allocator (prediction), the storages' own sizes (a step on the
host, which rounds nothing and reserves nothing), and the card's allocator itself (a step observed on CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.tracing.allocator import AllocatorSettings, CachingAllocator
from lowtide.tracing.recorder import Recorder


@dataclass(slots=True)
class MemoryLog:
    """Lists as long as the recorder's log, and a block for each life in it."""

    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    block_bytes: dict[int, int] = field(default_factory=dict)
    """By life number."""


def replay(recorder: Recorder, settings: AllocatorSettings) -> MemoryLog:
    """What the caching allocator would have done."""
    allocator = CachingAllocator(settings)
    handles: dict[int, int] = {}
    result = MemoryLog()
    for entry in recorder.log:
        if entry >= 0:
            life = recorder.lives[entry]
            handle = handles[entry] = allocator.malloc(life.requested_bytes, life.stream)
            result.block_bytes[entry] = allocator.block_bytes(handle)
        else:
            allocator.free(handles.pop(~entry))
        result.allocated.append(allocator.allocated_bytes)
        result.reserved.append(allocator.reserved_bytes)
    return result


def exact(recorder: Recorder) -> MemoryLog:
    """Each storage's own bytes; reserved is what is allocated."""
    result = MemoryLog()
    total = 0
    for entry in recorder.log:
        size = recorder.lives[entry if entry >= 0 else ~entry].requested_bytes
        if entry >= 0:
            result.block_bytes[entry] = size
        total += size if entry >= 0 else -size
        result.allocated.append(total)
    result.reserved = list(result.allocated)
    return result
