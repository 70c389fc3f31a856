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


MAX_REPEATS = 4
"""How often a step is repeated before its record, at most, for what the allocator reserves to settle."""


def replay(recorder: Recorder, settings: AllocatorSettings, first_event: int | None = None) -> MemoryLog:
    """What the caching allocator would have done.

    The steps before the recorded one leave free blocks that need not suit it: reserved memory may still grow in the third step and
    later. From `first_event` on the log is a step that repeats itself, so it is played until nothing more is reserved, and
    then once more for the result.
    """
    allocator = CachingAllocator(settings)
    handles: dict[int, int] = {}
    result = MemoryLog()
    first = len(recorder.log) if first_event is None else first_event
    heirs = _heirs(recorder, first)

    def play(entries: list[int], *, is_kept: bool) -> None:
        for entry in entries:
            if entry >= 0:
                life = recorder.lives[entry]
                handle = handles[entry] = allocator.malloc(life.requested_bytes, life.stream)
                if is_kept:
                    result.block_bytes[entry] = allocator.block_bytes(handle)
            else:
                allocator.free(handles.pop(~entry))
            if is_kept:
                result.allocated.append(allocator.allocated_bytes)
                result.reserved.append(allocator.reserved_bytes)

    play(recorder.log[:first], is_kept=True)
    step = recorder.log[first:]
    for _ in range(MAX_REPEATS if heirs is not None else 0):
        before = allocator.reserved_bytes
        play(step, is_kept=False)
        for heir, number in (heirs or {}).items():
            handles[number] = handles.pop(heir)
        if allocator.reserved_bytes == before:
            break
    if first:
        result.reserved[-1] = allocator.reserved_bytes  # when the step begins
    play(step, is_kept=True)
    return result


def _heirs(recorder: Recorder, first: int) -> dict[int, int] | None:
    """For each block that the step leaves behind, the one of the same size that it found and freed, in order.

    None where they do not come out even: the step does not repeat itself.
    """
    born: dict[int, None] = {}
    freed: list[int] = []
    for entry in recorder.log[first:]:
        if entry >= 0:
            born[entry] = None
        elif ~entry in born:
            del born[~entry]
        else:
            freed.append(~entry)
    found: dict[tuple[int, int], list[int]] = {}
    for number in sorted(freed, reverse=True):
        found.setdefault(_kind(recorder, number), []).append(number)
    heirs = {}
    for number in born:
        candidates = found.get(_kind(recorder, number))
        if not candidates:
            return None
        heirs[number] = candidates.pop()
    return heirs if len(heirs) == len(freed) else None


def _kind(recorder: Recorder, number: int) -> tuple[int, int]:
    return recorder.lives[number].requested_bytes, recorder.lives[number].stream


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
