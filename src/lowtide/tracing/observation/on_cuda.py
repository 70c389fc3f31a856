"""Observe a step on a CUDA device: what its allocator really did, with names from the profiler and from addresses.

Three records of the same step are joined. The profiler gives each block's true size and the operator that asked for it
(`profile_events`); the allocator's snapshot gives what was in use before; the allocator's history gives the size that
was requested, the line of code, and the changes that the profiler missed (`allocator_history`). The allocator's own
statistics have the last word: peaks that differ are told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowtide import compat, config
from lowtide.errors import ObserveError
from lowtide.hardware import cublas_workspace_bytes, known_hardware, parse_cublas_workspace_config
from lowtide.hardware.profile import LT_WORKSPACE_BYTES
from lowtide.tracing.assemble import assemble
from lowtide.tracing.observation.cuda_record import Block, Request, StepRecord
from lowtide.tracing.observation.profile import Change, Marks, read_profile
from lowtide.tracing.recorder import BATCH, Role, StorageRecorder, state_roles, users_line, weight_roles
from lowtide.tracing.step_trace import Category, StepTrace, Target
from lowtide.tracing.training_step import TrainingStep, about_step, tensors_in, watch_gradients, watch_modules
from lowtide.units import format_bytes

MAX_ENTRIES = 10_000_000
"""Length of the allocator's history: more than any step makes."""
NUM_LAST_EVENTS = 5
"""How many allocations an out-of-memory error tells of."""

Named = dict[int, tuple[Tensor, Role]]
"""Tensors with a role, by the address of their storage."""
_UNIT = 512
"""Blocks are multiples of this; the true size of one that the profiler never saw may be larger."""


def observe_on_cuda(
    step: TrainingStep, *, name: str, steps: int, notes: list[str], on_progress: Callable[[str], None]
) -> StepTrace:
    """Run the step `steps` times on the device the model is on, the last time on record.

    A recording of the allocator's history that was running ends with this one: torch keeps one for the process.
    """
    device = next(tensor.device for tensor in (*step.model.parameters(), *step.model.buffers()))
    if torch.cuda.get_allocator_backend() != "native":
        raise ObserveError(
            f"the allocator of this process is {torch.cuda.get_allocator_backend()}, which keeps no record of its "
            "blocks; run without backend:cudaMallocAsync in PYTORCH_ALLOC_CONF"
        )
    if compat.is_profiling():
        raise ObserveError("a torch profiler is running, and observing would end it; observe before or after it")
    marks = Marks()
    with torch.cuda.device(device), watch_modules(step.model, marks), watch_gradients(step.model, marks.mark_gradient):
        with _history(marks, device):
            for number in range(1, steps):
                on_progress(f"running step {number} of {steps}")
                step("cuda", marks.begin_phase)
        on_progress(f"recording step {steps} of {steps}")
        with _history(marks, device):
            return _record(step, marks, device, name=name, notes=notes)


def _record(step: TrainingStep, marks: Marks, device: torch.device, *, name: str, notes: list[str]) -> StepTrace:
    recorder = StorageRecorder()
    recorder.name_after(step.model, step.optimizer)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    blocks = used_blocks(
        compat.allocator_segments(), named_tensors(step, recorder.root), workspace_sizes(device), device
    )
    start_reserved_bytes = torch.cuda.memory_reserved(device)
    record = StepRecord(recorder, blocks, start_reserved_bytes)
    with marks.on(), compat.MemoryProfile() as profile:
        step("cuda", marks.begin_phase)
        torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    history = compat.allocator_history(device)
    seen = read_profile(profile.roots, device)
    changes = complete_changes(seen.changes, history, blocks, start_reserved_bytes)
    record.walk(replace(seen, changes=changes), requests_in(history))
    record.finish({address: role for address, (_, role) in named_tensors(step, recorder.root).items()})
    trace = assemble(
        recorder,
        record.memory,
        origin="observed",
        first_event=record.first_event,
        first_op=0,
        model=name,
        settings=config.to_plain(step.settings),
        num_parameters=sum(parameter.numel() for parameter in step.model.parameters()),
        about=about_step(step),
        target=_target(device),
        notes=tuple(notes),
    )
    return _checked(trace, *peaks, record.num_unknown_frees)


def _checked(trace: StepTrace, allocated: int, reserved: int, num_unknown_frees: int) -> StepTrace:
    """The trace with a note for each figure in which it differs from the allocator's statistics."""
    found = []
    for what, ours, theirs in (
        ("max_memory_allocated", trace.peak_bytes, allocated),
        ("max_memory_reserved", trace.peak_reserved_bytes, reserved),
    ):
        if ours != theirs:
            found.append(
                f"the record's peak differs from torch.cuda.{what}(): {ours:,} against {theirs:,} bytes; threads that "
                "the profiler does not see may have allocated memory too"
            )
    if num_unknown_frees:
        found.append(f"{num_unknown_frees} blocks were freed whose allocation was not seen")
    return replace(trace, notes=(*trace.notes, *found))


def named_tensors(step: TrainingStep, root: str) -> Named:
    """Weights, optimizer state, gradients and the batch, by the address of their storage."""
    named: Named = {}

    def add(tensor: Tensor, role: Role) -> None:
        storage = compat.plain_storage(tensor)
        if storage is not None and storage.data_ptr():
            named[storage.data_ptr()] = (tensor, role)

    for tensor in tensors_in(step.batch):
        add(tensor, BATCH)
    for path, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            add(parameter.grad, Role(Category.GRADIENTS, path.rpartition(".")[0] or root, "gradient"))
    for tensor, role in chain(state_roles(step.model, step.optimizer), weight_roles(step.model, root)):
        add(tensor, role)
    return named


def used_blocks(
    segments: Iterable[Mapping[str, Any]], named: Named, workspaces: set[int], device: torch.device
) -> list[Block]:
    """The blocks in use in an allocator's snapshot, with their roles; a nameless one of a known size is a workspace."""
    workspace = Role(Category.WORKSPACE, "cublas", "workspace")
    older = Role(Category.TEMPORARIES, "(not of this step)", "alive before")
    found = []
    for segment in segments:
        if segment["device"] != device.index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                by_size = workspace if block["requested_size"] in workspaces else older
                tensor, role = named.get(address, (None, by_size))
                found.append(
                    Block(
                        address=address,
                        bytes=block["size"],
                        requested_bytes=block["requested_size"],
                        role=role,
                        shape=(block["requested_size"],) if tensor is None else tuple(tensor.shape),
                        dtype="uint8" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                    )
                )
            address += block["size"]  # blocks lie side by side and fill their segment
    return found


def workspace_sizes(device: torch.device) -> set[int]:
    """What cuBLAS and cuBLASLt take for good."""
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    sizes = {LT_WORKSPACE_BYTES, cublas_workspace_bytes(torch.cuda.get_device_capability(device), torch.__version__)}
    return sizes | ({parse_cublas_workspace_config(configured)} if configured else set())


def requests_in(entries: Iterable[Mapping[str, Any]]) -> list[Request]:
    """The allocations of an allocator's history."""
    return [
        Request(address=entry["addr"], bytes=entry["size"], source=_source(entry.get("frames", ())))
        for entry in entries
        if entry["action"] == "alloc"
    ]


def _source(frames: Iterable[Mapping[str, Any]]) -> str:
    return users_line((frame["filename"], frame["line"]) for frame in frames)


@contextmanager
def _history(marks: Marks, device: torch.device) -> Iterator[None]:
    """While active, the allocator keeps its history; an error for lack of memory tells of the end of it."""
    compat.start_allocator_history(device, MAX_ENTRIES)
    try:
        yield
    except torch.OutOfMemoryError as error:
        allocated, capacity = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[1]
        raise ObserveError(out_of_memory(marks, compat.allocator_history(device), allocated, capacity)) from error
    finally:
        compat.stop_allocator_history(device)


def out_of_memory(marks: Marks, entries: list[dict[str, Any]], allocated: int, capacity: int) -> str:
    """A sentence that says where in the step the device was full, what was asked of it, and what it gave last."""
    asked = next((entry for entry in reversed(entries) if entry["action"] == "oom"), None)
    size = "more memory" if asked is None else format_bytes(asked["size"])
    source = "" if asked is None else _source(asked.get("frames", ()))
    requests = requests_in(entries)[-NUM_LAST_EVENTS:]
    last = "; ".join(f"{format_bytes(request.bytes)} {request.source}".rstrip() for request in requests)
    return (
        f"the device ran out of memory in the {marks.phase or 'preparation'}{f' at {source}' if source else ''}, the "
        f"last module entered being {marks.last_module or '(none)'!r}: {size} was asked for with "
        f"{format_bytes(allocated)} allocated of {format_bytes(capacity)}. Last "
        f"allocations: {last or 'none'}. Use a smaller batch or activations='recompute', or lowtide.trace, which needs no memory."
    )


def _target(device: torch.device) -> Target:
    label = torch.cuda.get_device_name(device)
    free, capacity = torch.cuda.mem_get_info(device)
    known = {hardware.name for hardware in known_hardware()}
    short = label.split()[-1].lower()  # "NVIDIA H200" is the h200; one that is not known keeps its whole name
    return Target(
        card=short if short in known else label,
        torch_version=torch.__version__.split("+")[0],
        context_bytes=max(capacity - free - torch.cuda.memory_reserved(device), 0),
        capacity_bytes=capacity,
    )


def complete_changes(
    changes: list[Change], entries: Iterable[Mapping[str, Any]], blocks: Iterable[Block], reserved_bytes: int
) -> list[Change]:
    """All changes of memory, in order: the profiler's where it saw them, else made from the history's.

    The profiler sees memory change only in threads, and at times, that it watches. Autograd's device thread gives up its last
    references to a node's inputs after it has left the profiler's sight, so hundreds of frees of an ordinary backward are
    missing. The allocator's history misses nothing, but knows neither operators nor the true size of a block. Both list the
    same changes in the same order.

    Args:
        changes: What the profiler saw, in order of time.
        entries: The allocator's history over the same time, oldest first.
        blocks: What was in use before.
        reserved_bytes: What was reserved before.
    """
    sizes = {block.address: block.bytes for block in blocks}
    completed: list[Change] = []
    position = 0
    time_ns = changes[0].time_ns if changes else 0
    thread = changes[0].thread if changes else 0
    for entry in entries:
        if entry["action"] not in ("alloc", "free_completed"):
            continue
        is_free, address = entry["action"] == "free_completed", entry["addr"]
        seen = changes[position] if position < len(changes) else None
        if seen is not None and seen.address == address and (seen.bytes < 0) == is_free:
            position += 1
            change = seen
        else:
            size = sizes.get(address, 0) if is_free else -(-entry["size"] // _UNIT) * _UNIT
            change = Change(
                time_ns=time_ns,
                thread=thread,
                address=address,
                bytes=-size if is_free else size,
                reserved_bytes=reserved_bytes,
                op=None,
                inside="",
            )
        if is_free:
            sizes.pop(address, None)
        else:
            sizes[address] = change.bytes
        time_ns, thread, reserved_bytes = change.time_ns, change.thread, change.reserved_bytes
        completed.append(change)
    return completed
