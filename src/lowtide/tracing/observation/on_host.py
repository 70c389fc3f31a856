"""Observe a step on the host: every storage that real tensors bring and take, through a dispatch mode.

Bytes are the storages' own: the host's allocator is not modelled, so what is reserved is what is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowtide import compat, config
from lowtide.errors import ObserveError
from lowtide.tracing.assemble import assemble, exact
from lowtide.tracing.recorder import BATCH, PLUMBING, Life, Role, StorageRecorder, state_roles, weight_roles
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
