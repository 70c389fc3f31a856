"""Predict a step on ghosts: the part that runs inside the tracing subprocess."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide import compat, config
from lowtide.errors import ConfigError
from lowtide.hardware import Source
from lowtide.tracing import training_step
from lowtide.tracing.allocator import AllocatorFullError
from lowtide.tracing.assemble import MemoryLog, assemble, exact, replay
from lowtide.tracing.compiled.groups import GhostCompiler
from lowtide.tracing.ghost import recurrent
from lowtide.tracing.ghost.device import GhostMover, LiteralDevices, cuda_functions
from lowtide.tracing.ghost.machine import GhostMachine
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.tensor import Ghost, Known
from lowtide.tracing.prediction.job import Contents, Job, TensorDescription, unpack
from lowtide.tracing.recorder import BATCH, StorageRecorder, state_roles, weight_roles
from lowtide.tracing.settings import DeviceMemory, StepContext, UpdateSchedule
from lowtide.tracing.step_trace import Category, StepTrace, Target
from lowtide.units import format_bytes

CHUNKED_LOSS_NOTE = "the chunked loss is taken to run its kernel for CUDA, which needs Triton"
"""For a trace with a chunked loss."""


def predict(
    job: Job,
    on_progress: Callable[[str], None] = lambda _: None,
    on_fatal: Callable[[BaseException], None] | None = None,
) -> StepTrace:
    """Run the step on ghosts until it repeats itself, the last time on record, and assemble the trace.

    `on_fatal` is told of errors that cannot be raised (see `GhostMode.fail`).
    """
    machine = GhostMachine.get()
    recorder = StorageRecorder()
    mode = machine.mode_for(recorder, job.hardware, job.torch_version, on_fatal)
    with mode, LiteralDevices(machine.device), cuda_functions(job.hardware):
        on_progress("placing the model")
        step, context = _prepare(job, mode)
        recorder.name_after(step.model, step.optimizer)
        for tensor, role in weight_roles(step.model, recorder.root):
            if isinstance(tensor, Ghost):
                tensor.life.rename(role.module, role.op)
        compiler = GhostCompiler(mode, machine.attention, job.torch_version)
        mover = GhostMover(machine.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                training_step.activations_applied(step.model, job.settings, mover=mover, compile_group=compiler)
            )
            if context is not None:
                stack.enter_context(context.around(step.model, DeviceMemory(recorder, mover, mode.fail)))
            first_event, first_op = _run_steps(step, mode, job, context, on_progress)
            offloaded_bytes = {} if context is None else context.offloaded_bytes()
    recorder.close()
    on_progress("replaying the allocator")
    memory, full = _replay(recorder, job, first_event, on_progress)
    chunked = CHUNKED_LOSS_NOTE if job.settings.chunked_loss else None
    idle = training_step.autocast_note(step, has_cast=machine.has_cast)
    notes = [*mode.notes, *machine.attention.choices.notes(), *filter(None, (chunked, idle, job.hardware.note, full))]
    return assemble(
        recorder,
        memory,
        origin="predicted",
        first_event=first_event,
        first_op=first_op,
        model=job.name,
        settings=config.to_plain(job.settings),
        num_parameters=sum(parameter.numel() for parameter in step.model.parameters()),
        about=training_step.about_step(step),
        target=Target(
            card=job.hardware.name,
            torch_version=job.torch_version,
            context_bytes=job.hardware.context_bytes,
            capacity_bytes=job.hardware.memory_bytes,
            launch_s=0.0 if job.hardware.is_host else job.hardware.launch_s,
            is_context_assumed=job.hardware.context_source is Source.ASSUMED,
        ),
        notes=tuple(notes),
        offloaded_bytes=offloaded_bytes,
    )


def _replay(
    recorder: StorageRecorder, job: Job, first_event: int, on_progress: Callable[[str], None]
) -> tuple[MemoryLog, str | None]:
    """What the allocator does, and a note where its limit had to be lifted."""
    if job.hardware.is_host:  # its allocator rounds nothing, and caches nothing
        return exact(recorder), None
    try:
        return replay(recorder, job.allocator, first_event), None
    except AllocatorFullError:
        if job.if_full is None:
            raise
    on_progress("the budget does not hold the step; tracing it without")
    limit = format_bytes(job.allocator.allowed_bytes or 0)
    note = f"the plan's device_memory of {limit} does not hold the step: traced without that limit"
    return replay(recorder, job.if_full, first_event), note


def _run_steps(
    step: training_step.TrainingStep,
    mode: GhostMode,
    job: Job,
    context: StepContext | None,
    on_progress: Callable[[str], None],
) -> tuple[int, int]:
    """Run all steps; returns where in the record the events and the ops of the last begin."""
    recorder, device_type = mode.recorder, mode.device.type

    def mark_gradient(gradient: Tensor) -> None:
        if isinstance(gradient, Ghost):
            gradient.life.classify(Category.GRADIENTS)

    with training_step.watch_modules(step.model, recorder), training_step.watch_gradients(step.model, mark_gradient):
        recorder.begin_step(is_detailed=False)
        on_progress("tracing the first step")
        for _ in range(1 if context is None else context.num_warm_up_steps):
            step(device_type, recorder.begin_phase)
            _name_optimizer_state(step)
        for tensor, role in state_roles(step.model, step.optimizer) if job.hardware.is_host else ():
            # Counters of steps are host tensors wherever the weights are: here they share the memory that is predicted.
            if not isinstance(tensor, Ghost) and tensor.device.type == "cpu":
                dtype = str(tensor.dtype).removeprefix("torch.")
                recorder.allocate(tensor.nbytes, tuple(tensor.shape), dtype).take_role(role)
        first_event, first_op = recorder.begin_step(is_detailed=True)
        on_progress("tracing the steady step")
        step(device_type, recorder.begin_phase)
        _name_optimizer_state(step)
    return first_event, first_op


def _prepare(job: Job, mode: GhostMode) -> tuple[training_step.TrainingStep, StepContext | None]:
    dtype = None if job.settings.precision is None else getattr(torch, job.settings.precision)
    contents: Contents = unpack(job.payload, _Arrivals(mode, dtype))
    model = contents.model
    compat.restore_registrations(model)
    placed = [] if contents.context is None else contents.context.placed(model)
    elsewhere = {parameter.life.number for parameter in placed if isinstance(parameter, Ghost)}
    for module, tensors in _placement_order(model):
        for tensor in tensors:
            tensor.life.classify(Category.WEIGHTS)
            if tensor.life.number not in elsewhere:
                mode.recorder.log_birth(tensor.life)
        if isinstance(module, nn.RNNBase) and not job.hardware.is_host:
            _lay_flat([weight for weight in tensors if weight.life.number not in elsewhere], mode)
    if isinstance(contents.optimizer, torch.optim.Optimizer):
        for state, role in state_roles(model, contents.optimizer):  # of one that has stepped already
            if isinstance(state, Ghost) and not state.life.is_logged:
                mode.recorder.log_birth(state.life)
                state.life.take_role(role)
    for life in list(mode.recorder.lives):  # the batch and whatever else came along, after the model
        if not life.is_logged and life.died_event is None and life.number not in elsewhere:
            life.take_role(BATCH)
            mode.recorder.log_birth(life)
    optimizer = contents.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS runs the forward and the backward itself, as often as it likes (its step needs a closure), so there is no "
            "one step to predict; trace with another optimizer, or observe a run",
            key="optimizer",
        )
    if optimizer is not None and job.settings.implementation is not None:
        training_step.choose_implementation(optimizer, job.settings.implementation)
    elif optimizer is not None and job.hardware.is_host:
        training_step.choose_as_on_host(optimizer)
    if optimizer is not None and job.settings.update is UpdateSchedule.IN_BACKWARD:
        training_step.update_in_backward(optimizer)
    return training_step.TrainingStep(model, contents.batch, optimizer, contents.loss, job.settings), contents.context


class _Arrivals:
    """Makes ghosts of the tensors that a job describes; those that shared a storage share one again.

    Args:
        mode: Of the trace.
        dtype: Floating point tensors are converted to; None leaves them as they are.
    """

    def __init__(self, mode: GhostMode, dtype: torch.dtype | None) -> None:
        self._mode, self._dtype = mode, dtype
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, description: TensorDescription, values: Tensor | None) -> Tensor:
        is_converted = self._dtype is not None and description.dtype.is_floating_point
        dtype = self._dtype if is_converted and self._dtype is not None else description.dtype
        storage = self._storages.get(description.storage_key)
        if storage is None:
            num_bytes = description.storage_bytes // description.dtype.itemsize * dtype.itemsize
            storage = torch.UntypedStorage(num_bytes if is_converted else description.storage_bytes, device="meta")
            self._storages[description.storage_key] = storage
        inner = compat.meta_tensor_over(storage, dtype, description.shape, description.stride, description.offset)
        known = None if values is None else Known(values.to(dtype))
        ghost = self._mode.place(inner, known=known, is_logged=False)
        ghost.life.describe(description.shape, str(dtype).removeprefix("torch."))
        if description.is_parameter:
            ghost._is_param = True
        if description.requires_grad:
            ghost.requires_grad_()
        return ghost


def _placement_order(model: nn.Module) -> list[tuple[nn.Module, list[Ghost]]]:
    """Parameters and buffers in the order `model.to(device)` moves them: children first."""
    seen: set[int] = set()
    order: list[tuple[nn.Module, list[Ghost]]] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if isinstance(t, Ghost)]
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
        seen.update(new)
        order.append((module, list(new.values())))

    visit(model)
    return order


def _lay_flat(weights: list[Ghost], mode: GhostMode) -> None:
    """Move a recurrent layer's weights into one buffer, as torch does when the layer comes to the device."""
    dtypes, lives = {weight.dtype for weight in weights}, {weight.life.number for weight in weights}
    if len(dtypes) != 1 or not dtypes <= set(recurrent.FLAT_TYPES) or len(lives) != len(weights):
        return
    flat = torch.empty(sum(weight.numel() for weight in weights), dtype=weights[0].dtype, device="meta")
    life, offset = mode.place(flat).life, 0
    life.classify(Category.WEIGHTS)
    for weight in weights:
        mode.recorder.free(weight.life)
        weight.move_to(flat, offset, life)
        offset += weight.numel()


def _name_optimizer_state(step: training_step.TrainingStep) -> None:
    for tensor, role in state_roles(step.model, step.optimizer):
        if isinstance(tensor, Ghost) and tensor.life.category is None:
            tensor.life.take_role(role)
