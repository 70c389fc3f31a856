"""The truth about a step on the host, from torch's profiler: what the host's allocator was asked for, in order."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import compat
from lowtide.tracing.assemble import assemble
from lowtide.tracing.observation.cuda_record import Block, StepRecord
from lowtide.tracing.observation.on_cuda import named_tensors
from lowtide.tracing.observation.profile import Marks, read_profile
from lowtide.tracing.recorder import StorageRecorder
from lowtide.tracing.step_trace import StepTrace, Target
from lowtide.tracing.training_step import TrainingStep, watch_gradients, watch_modules

CPU = torch.device("cpu")


def profile_step(step: TrainingStep, *, warm_up: int = 2) -> tuple[StepTrace, int]:
    """The steady step as the code for CUDA reads it, here on the host, and the highest sum of raw memory events."""
    marks = Marks()
    recorder = StorageRecorder()
    recorder.name_after(step.model, step.optimizer)
    with watch_modules(step.model, marks), watch_gradients(step.model, marks.mark_gradient):
        for _ in range(warm_up):
            step("cpu", marks.begin_phase)
        blocks = [
            Block(
                address=address,
                bytes=tensor.untyped_storage().nbytes(),
                requested_bytes=tensor.untyped_storage().nbytes(),
                role=role,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            for address, (tensor, role) in named_tensors(step, recorder.root).items()
        ]
        record = StepRecord(recorder, blocks, 0)
        with marks.on(), compat.MemoryProfile() as profile:
            step("cpu", marks.begin_phase)
    record.walk(read_profile(profile.roots, CPU), None)
    record.finish({})
    trace = assemble(
        recorder,
        record.memory,
        origin="observed",
        first_event=record.first_event,
        first_op=0,
        model=recorder.root,
        settings={},
        num_parameters=sum(parameter.numel() for parameter in step.model.parameters()),
        target=Target(card="cpu", torch_version="2.13.0", context_bytes=0, capacity_bytes=0),
        notes=(),
    )
    return trace, sum(block.bytes for block in blocks) + _raw_peak(profile.roots)


def _raw_peak(roots: list[Any]) -> int:
    changes: list[tuple[int, int]] = []
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    total = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        total += size
        peak = max(peak, total)
    return peak
