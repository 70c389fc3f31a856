"""Turn a recorder's log into a StepTrace: keep the last step, with the memory it took, and name categories."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.tracing.memory_log import MemoryLog
from lowtide.tracing.recorder import Life, Recorder
from lowtide.tracing.step_trace import Allocation, Category, Event, Op, Phase, StepTrace, Target


def assemble(
    recorder: Recorder,
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
) -> StepTrace:
    """The trace of what was logged from `first_event` on; what came before made the state the step starts from."""
    backward_starts = [
        index
        for index in range(first_event, len(recorder.log))
        if recorder.log_phases[index] is Phase.BACKWARD
        and (index == 0 or recorder.log_phases[index - 1] is not Phase.BACKWARD)
    ]
    shown: list[Life] = []
    numbers: dict[int, int] = {}
    for life in recorder.lives:
        is_counted = life.on_device and life.requested_bytes and life.is_logged
        if is_counted and (life.died_event is None or life.died_event >= first_event):
            numbers[life.number] = len(shown)
            shown.append(life)
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
    ops = tuple(
        Op(
            name=recorder.op_names[index],
            module=recorder.op_modules[index],
            source=recorder.op_sources[index],
            phase=recorder.op_phases[index] or Phase.FORWARD,
            seconds=recorder.op_seconds[index],
        )
        for index in range(first_op, len(recorder.op_names))
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
