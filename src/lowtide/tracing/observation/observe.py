"""`lowtide.observe`: the memory of a training step, from running it.

On the host a dispatch mode sees every storage that real tensors bring and take. Bytes are the storages' own there: the host's
allocator is not modelled, so what is reserved is what is allocated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat, config
from lowtide.errors import ConfigError, ObserveError
from lowtide.tracing import training_step
from lowtide.tracing.assemble import assemble, exact
from lowtide.tracing.attention.use import attention_watch
from lowtide.tracing.observation.on_cuda import observe_on_cuda
from lowtide.tracing.recorder import BATCH, PLUMBING, Life, Role, StorageRecorder, state_roles, weight_roles
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace, Target
from lowtide.tracing.training_step import TrainingStep, about_step, tensors_in, watch_gradients, watch_modules
from lowtide.units import format_bytes

NUM_LAST_EVENTS = 5
"""How many allocations an out-of-memory error tells of."""


class HostMode(compat.WatchingMode):
    """Runs every operator as it is, and tells the recorder what it made, read and wrote. Holds no tensor."""

    def __init__(self, recorder: StorageRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.recorder = recorder
        self._lives: dict[int, Life] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper subclass first takes itself apart; its inner tensors come back here and are the ones with memory.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        op = self.recorder.begin_op(str(getattr(func, "overloadpacket", func)))
        for tensor in tensors_in((args, kwargs or {})):
            self._use(tensor, op, is_input=True)
            del tensor  # it must have no owner here when its owners are counted
        summed = self._life_of_sum(func, args)
        result = func(*args, **(kwargs or {}))
        if summed is not None:
            self._adopt(summed, result)
        # The arguments again: `out=` and `resize_` may have given one its memory.
        for tensor in tensors_in((result, args)):
            self._use(tensor, op, is_input=False)
        return result

    def place(self, tensor: Tensor, role: Role) -> None:
        """Give a tensor's storage its role, and a life that began before the step if it has none."""
        life = self._see(tensor)
        if life is not None and life.category is not Category.GRADIENTS:
            life.take_role(role)
            life.describe(tuple(tensor.shape), life.dtype)

    def mark_gradient(self, gradient: Tensor) -> None:
        """A gradient is complete."""
        life = self._see(gradient)
        if life is not None:
            life.classify(Category.GRADIENTS)

    def close(self) -> None:
        """Let go of every storage."""
        self.recorder.close()
        self._lives.clear()

    def _use(self, tensor: Tensor, op: int, *, is_input: bool) -> None:
        is_known = self._find(tensor) is not None
        life = self._see(tensor)
        if life is None:
            return
        if is_input and not is_known:
            # No operator under the mode made it: a constant of the model's code, or what another thread brought.
            life.classify(Category.TEMPORARIES)
            life.rename(life.module, "(made elsewhere)", "")
        self.recorder.use(life, op)

    def _find(self, tensor: Tensor) -> Life | None:
        storage = compat.plain_storage(tensor)
        life = None if storage is None else self._lives.get(id(storage))
        return None if life is None or life.died_event is not None else life

    def _see(self, tensor: Tensor) -> Life | None:
        """The life of a tensor's storage, which begins now if it is new or has been resized; None without memory."""
        storage = compat.plain_storage(tensor)
        if storage is None or storage.device.type != "cpu":
            return None
        life = self._lives.get(id(storage))
        if life is not None and life.died_event is None:
            if life.requested_bytes == storage.nbytes():
                return life
            self.recorder.end(life)
        dtype = str(tensor.dtype).removeprefix("torch.")
        life = self.recorder.allocate(storage.nbytes(), tuple(tensor.shape), dtype, storage=storage)
        self._lives[id(storage)] = life
        return life

    def _life_of_sum(self, func: Any, args: Any) -> Life | None:
        """The life of a gradient that autograd would have added to in place, were it not watched; None otherwise.

        The sum is computed as autograd asked for it, and takes over the life of its first term: the bytes are those of an
        unwatched step.
        """
        if func is not torch.ops.aten.add.Tensor or self.recorder.phase is not Phase.BACKWARD:
            return None
        is_sum = compat.is_called_from_engine(PLUMBING, has_own_thread=False) and compat.would_sum_in_place(args)
        return self._find(args[0]) if is_sum else None

    def _adopt(self, life: Life, result: Tensor) -> None:
        storage = compat.plain_storage(result)
        if storage is None or storage.nbytes() != life.requested_bytes:
            return
        self.recorder.follow(life, storage)
        self._lives[id(storage)] = life


def observe_on_host(
    step: TrainingStep, *, name: str, steps: int, notes: list[str], on_progress: Callable[[str], None]
) -> StepTrace:
    """Run the step `steps` times on the host, the last time on record."""
    recorder = StorageRecorder()
    recorder.name_after(step.model, step.optimizer)
    mode = HostMode(recorder)
    compat.num_sole_references()  # tried before anything is recorded
    first_event = first_op = 0
    try:
        _place_all(mode, step)
        with mode, watch_modules(step.model, recorder), watch_gradients(step.model, mode.mark_gradient):
            for number in range(1, steps + 1):
                on_progress(f"running step {number} of {steps}")
                first_event, first_op = recorder.begin_step(is_detailed=number == steps)
                try:
                    step("cpu", recorder.begin_phase)
                except RuntimeError as error:
                    if "can't allocate memory" not in str(error):
                        raise
                    raise ObserveError(_out_of_memory(recorder, error)) from error
                for tensor, role in state_roles(step.model, step.optimizer):
                    mode.place(tensor, role)
        return assemble(
            recorder,
            exact(recorder),
            origin="observed",
            first_event=first_event,
            first_op=first_op,
            model=name,
            settings=config.to_plain(step.settings),
            num_parameters=sum(parameter.numel() for parameter in step.model.parameters()),
            about=about_step(step),
            target=Target(card="cpu", torch_version=torch.__version__.split("+")[0], context_bytes=0, capacity_bytes=0),
            notes=(*notes, "bytes are those of the tensors: scratch memory inside the host's kernels is not seen"),
        )
    finally:
        mode.close()


def _place_all(mode: HostMode, step: TrainingStep) -> None:
    for tensor, role in chain(weight_roles(step.model, mode.recorder.root), state_roles(step.model, step.optimizer)):
        mode.place(tensor, role)
    for parameter in step.model.parameters():
        if parameter.grad is not None:
            mode.mark_gradient(parameter.grad)
    for tensor in tensors_in(step.batch):
        mode.place(tensor, BATCH)


def _out_of_memory(recorder: StorageRecorder, error: RuntimeError) -> str:
    asked = next((int(word) for word in str(error).split() if word.isdigit()), None)
    size = "more memory" if asked is None else format_bytes(asked)
    memory = exact(recorder)
    last = [
        f"{life.module or '(outside the model)'} {life.op} {format_bytes(life.requested_bytes)}"
        for life in (recorder.lives[entry] for entry in recorder.log[-50:] if entry >= 0)
    ][-NUM_LAST_EVENTS:]
    return (
        f"the host ran out of memory: {recorder.op_names[-1]} in {recorder.op_modules[-1]!r}, in the "
        f"{recorder.phase or 'preparation'}, asked for {size} with {format_bytes(memory.allocated[-1])} in tensors "
        f"of the step. Last allocations: {'; '.join(last)}. Use a smaller batch, or lowtide.trace, which "
        "needs no memory."
    )


def observe(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | training_step.OptimizerFactory | None = None,
    loss: training_step.Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    steps: int = 3,
    name: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> StepTrace:
    """Run a training step for real and record what it allocates, when, and for which module.

    **The model is trained**: its weights, its buffers and the optimizer's state change by `steps` steps on this batch,
    and gradients that existed before are used up. Observe a copy, or before training begins. Hooks, checkpointing and
    flags that the settings ask for are taken off again, and gradients are cleared.

    On a CUDA device the record is the allocator's own: its peaks are `torch.cuda.max_memory_allocated()` and
    `max_memory_reserved()` of that step. On the host it counts the bytes of the tensors, which is not what a device
    would use.

    Args:
        model: On one device, in the precision and the mode (`train()`) it is trained in.
        batch: A mapping, for which `model(**batch).loss` is the loss; anything else together with `loss`. Moved to the
            model's device where it is elsewhere.
        optimizer: The optimizer, or a function from parameters to one; None runs forward and backward alone.
        loss: `lambda model, batch: ...`, where the batch alone does not say.
        autocast: `bfloat16` or `float16`, as text or as torch's own, if forward and loss run under `torch.autocast`.
        settings: Everything else about the step. `precision` must be the one the model has.
        steps: How many to run; the last one is recorded. The first is never like the others: it makes the optimizer's
            state and, on CUDA, the workspaces.
        name: Shown in reports; the model's class by default.
        on_progress: Is told what is being done.

    Raises:
        ObserveError: The model is on the meta device or on several, or memory ran out.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(100, 10), torch.ones(5, 100)
        >>> result = observe(model, batch, loss=lambda model, x: model(x).sum(), optimizer=torch.optim.AdamW)
        >>> result.origin, result.at_peak["weights"]  # 1010 parameters of 4 bytes
        ('observed', 4040)
    """
    settings = settings or StepSettings()
    if autocast is not None:
        settings = replace(settings, autocast=str(autocast))
    if steps < 2:
        raise ConfigError(f"steps must be at least 2, one to warm up and one to record, got {steps}", key="steps")
    _check_precision(model, settings)
    device = device_of(model)
    batch, moved = move_batch(batch, device)
    notes = [f"the batch was moved from {', '.join(sorted(map(str, moved)))} to {device}"] if moved else []
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    watch = attention_watch(model, device)
    step = training_step.TrainingStep(model, batch, optimizer, loss, settings, around_first=watch)
    if (idle := training_step.autocast_note(step, has_cast=True)) is not None:
        notes.append(idle)
        warnings.warn(idle, stacklevel=2)
    run = observe_on_host if device.type == "cpu" else observe_on_cuda
    with applied(model, optimizer, settings):
        trace = run(
            step,
            name=name or type(model).__name__,
            steps=steps,
            notes=notes,
            on_progress=on_progress or (lambda _: None),
        )
    return trace if watch is None else watch.explained(trace)


def device_of(model: nn.Module) -> torch.device:
    """The one device that a model is on.

    Raises:
        ObserveError: It is on several, on the meta device, or on one that cannot be observed.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.device, name)
    kind = type(model).__name__
    if torch.device("meta") in found:
        raise ObserveError(
            f"{found[torch.device('meta')]!r} of {kind} is on the meta device, which has shapes and no memory: there "
            "is nothing to run. Use lowtide.trace to predict the step, or load weights into model.to_empty(device=...)."
        )
    if len(found) > 1:
        places = ", ".join(f"{device} (such as {name!r})" for device, name in found.items())
        raise ObserveError(
            f"{kind} is on {len(found)} devices: {places}. A step is observed on one: move it with model.to(...)."
        )
    device = next(iter(found), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ObserveError(
            f"{kind} is on {device}; only steps on cpu and cuda can be observed. Move it with model.to(...)."
        )
    return device


def move_batch(batch: Any, device: torch.device) -> tuple[Any, set[torch.device]]:
    """The batch with its tensors on the device, and where those that had to move came from."""
    moved: set[torch.device] = set()

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device == device:
                return value
            if value.device.type == "meta":
                raise ObserveError(
                    f"the batch has a tensor of shape {list(value.shape)} on the meta device, which has no values to "
                    "run on. Make the batch on the host or on the model's device."
                )
            moved.add(value.device)
            return value.to(device)
        if isinstance(value, Mapping):
            return {key: move(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(move(item) for item in value)
        return value

    on_device = move(batch)
    return (on_device if moved else batch), moved


def _check_precision(model: nn.Module, settings: StepSettings) -> None:
    """An observed model is not converted behind its owner's back.

    Raises:
        ConfigError: The settings ask for a precision that the model does not have.
    """
    if settings.precision is None:
        return
    wanted = getattr(torch, settings.precision)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != wanted:
            raise ConfigError(
                f"precision is {settings.precision}, but {name!r} is {str(parameter.dtype).removeprefix('torch.')}: "
                f"observe runs the model as it is. Convert it first with model.to(torch.{settings.precision}).",
                key="precision",
            )


@contextlib.contextmanager
def applied(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: StepSettings) -> Iterator[None]:
    """Put the settings on a real model and its optimizer; afterwards both are as they came, and no gradient is left."""
    flags = [{key: group.get(key) for key in ("foreach", "fused") if key in group} for group in _groups(optimizer)]
    hooks = [(parameter, set(compat.post_accumulate_hooks(parameter))) for parameter in model.parameters()]
    try:
        if optimizer is not None and settings.implementation is not None:
            training_step.choose_implementation(optimizer, settings.implementation)
        if optimizer is not None and settings.update is UpdateSchedule.IN_BACKWARD:
            training_step.update_in_backward(optimizer)
        with training_step.activations_applied(model, settings):
            yield
    finally:
        for group, old in zip(_groups(optimizer), flags, strict=True):
            group.update(old.items())
        for parameter, known in hooks:
            for number in set(compat.post_accumulate_hooks(parameter)) - known:
                del compat.post_accumulate_hooks(parameter)[number]
        model.zero_grad(set_to_none=True)


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups
