"""Turn a recorder's log into a StepTrace: how many bytes there were after each entry, then the last step with its names.

Three sources give the bytes: a replay of the caching allocator (prediction), the storages' own sizes (a step on the host,
which rounds nothing and reserves nothing), and the device's allocator itself (a step observed on CUDA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.tracing.allocator import AllocatorSettings, CachingAllocator
from lowtide.tracing.recorder import Life, StorageRecorder
from lowtide.tracing.step_trace import Allocation, Category, Event, Op, Phase, StepTrace, Target

MAX_REPEATS = 4
"""How often a step is repeated before its record, at most, for what the allocator reserves to settle."""


@dataclass(slots=True)
class MemoryLog:
    """Lists as long as the recorder's log, and a block for each life in it."""

    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    block_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage's block, by the number of its life."""


def replay(recorder: StorageRecorder, settings: AllocatorSettings, first_event: int | None = None) -> MemoryLog:
    """What the caching allocator would have done.

    The steps before the recorded one leave free blocks that need not suit it: reserved memory may still grow in the third step and
    later. From `first_event` on the log is a step that repeats itself, so it is played until nothing more is reserved, and
    then once more for the result.
    """
    allocator = CachingAllocator(settings)
    handles: dict[int, int] = {}
    result = MemoryLog()
    first = len(recorder.log) if first_event is None else first_event
    successors = _successors(recorder, first)

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
    for _ in range(MAX_REPEATS if successors is not None else 0):
        before = allocator.reserved_bytes
        play(step, is_kept=False)
        for successor, number in (successors or {}).items():
            handles[number] = handles.pop(successor)
        if allocator.reserved_bytes == before:
            break
    if first:
        result.reserved[-1] = allocator.reserved_bytes  # when the step begins
    play(step, is_kept=True)
    return result


def _successors(recorder: StorageRecorder, first: int) -> dict[int, int] | None:
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
    successors = {}
    for number in born:
        candidates = found.get(_kind(recorder, number))
        if not candidates:
            return None
        successors[number] = candidates.pop()
    return successors if len(successors) == len(freed) else None


def _kind(recorder: StorageRecorder, number: int) -> tuple[int, int]:
    return recorder.lives[number].requested_bytes, recorder.lives[number].stream


def exact(recorder: StorageRecorder) -> MemoryLog:
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


def assemble(
    recorder: StorageRecorder,
    memory: MemoryLog,
    *,
    origin: str,
    first_event: int,
    first_op: int,
    model: str,
    settings: Mapping[str, object],
    num_parameters: int,
    target: Target,
    notes: tuple[str, ...],
    about: Mapping[str, str] | None = None,
    offloaded_bytes: Mapping[str, int] | None = None,
) -> StepTrace:
    """The trace of what was logged from `first_event` on; what came before made the state the step starts from."""
    backward_starts = [
        index
        for index in range(first_event, len(recorder.log))
        if recorder.log_phases[index] is Phase.BACKWARD
        and (index == 0 or recorder.log_phases[index - 1] is not Phase.BACKWARD)
    ]
    shown = [
        life
        for life in recorder.lives
        if life.is_counted and (life.died_event is None or life.died_event >= first_event)
    ]
    numbers = {life.number: index for index, life in enumerate(shown)}
    allocations = tuple(
        Allocation(
            requested_bytes=life.requested_bytes,
            bytes=memory.block_bytes[life.number],
            category=_category(life, backward_starts),
            module=life.module,
            op=life.op,
            source=life.source,
            shape=life.shape,
            dtype=life.dtype,
            phase=life.phase if life.born_event >= first_event else None,
            born=life.born_event - first_event if life.born_event >= first_event else None,
            died=None if life.died_event is None else life.died_event - first_event,
            uses=tuple(use - first_op for use in life.uses if use >= first_op),
        )
        for life in shown
    )
    events = tuple(
        Event(
            allocation=numbers[entry if entry >= 0 else ~entry],
            is_free=entry < 0,
            op=max(recorder.log_ops[index] - first_op, 0),
            phase=recorder.log_phases[index] or Phase.FORWARD,
            allocated_bytes=memory.allocated[index],
            reserved_bytes=memory.reserved[index],
        )
        for index, entry in enumerate(recorder.log)
        if index >= first_event
    )
    names, modules, sources = recorder.op_names, recorder.op_modules, recorder.op_sources
    columns = (names, modules, sources, recorder.op_phases, recorder.op_seconds, recorder.op_works)
    ops = tuple(
        Op(name=name, module=module, source=source, phase=phase or Phase.FORWARD, seconds=seconds, work=work)
        for name, module, source, phase, seconds, work in zip(*(column[first_op:] for column in columns), strict=True)
    )
    return StepTrace(
        model=model,
        origin=origin,
        target=target,
        settings=dict(settings),
        num_parameters=num_parameters,
        start_allocated_bytes=memory.allocated[first_event - 1] if first_event else 0,
        start_reserved_bytes=memory.reserved[first_event - 1] if first_event else 0,
        ops=ops,
        allocations=allocations,
        events=events,
        notes=notes,
        about=dict(about or {}),
        offloaded_bytes=dict(offloaded_bytes or {}),
    )


def _category(life: Life, backward_starts: list[int]) -> Category:
    """By role where one is known, else by lifetime: what a backward finds alive is an activation."""
    if life.category is not None:
        return life.category
    if life.in_recompute:
        return Category.ACTIVATIONS
    if life.phase in (Phase.FORWARD, Phase.LOSS):
        for start in backward_starts:
            if life.born_event < start and (life.died_event is None or life.died_event >= start):
                return Category.ACTIVATIONS
    return Category.TEMPORARIES
