"""GhostMode: runs a training step on ghosts and tells the recorder what a CUDA device would have allocated.

Every operator below autograd passes through here: shapes come from torch's own meta functions, values from the host where
they are known, extra memory of the CUDA libraries from `costs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import BatchMismatchError, LowtideError, MissingKernelError
from lowtide.tracing.ghost.costs import Costs
from lowtide.tracing.ghost.making import GradientSums, Maker, ValueReader, has_mask_index
from lowtide.tracing.ghost.operators import FREE, META, Course, Operator, collect_ghosts, describe, to_meta
from lowtide.tracing.ghost.shapes import SHAPES, VALUE_SHAPES, ShapeMemory
from lowtide.tracing.ghost.tensor import Ghost, Known
from lowtide.tracing.recorder import Life, StorageRecorder
from lowtide.tracing.step_trace import Category, Phase

HOST_GHOST_BYTES = 2**20
"""Host tensors above this that the step makes (offloaded activations) become ghosts too."""

SAME_TYPES = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.mv", "aten.dot"})
"""Operators that refuse arguments of different types on CUDA; torch's shape functions let them pass."""


class GhostMode(compat.PlainMode):
    """The dispatch mode of one trace.

    Args:
        recorder: Is told of everything.
        device: The ghost device.
        costs: Of the target.
        shapes: Functions in place of torch's own shape functions, by operator.
        on_fatal: Is told of an error in autograd's own thread: raised there it would abort the process (see `fail`).
    """

    def __init__(
        self,
        recorder: StorageRecorder,
        device: torch.device,
        costs: Costs,
        shapes: Mapping[Any, Callable[..., Any]] = SHAPES,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.device, self.costs, self._shapes = recorder, device, costs, shapes
        self.notes: dict[str, None] = {}
        """Assumptions made on the way, each once, in order."""
        self._on_fatal = on_fatal
        self._maker = Maker(recorder, device)
        self._reader = ValueReader(self._maker, self.note)
        self._sums = GradientSums(self._maker)
        self._remembered = ShapeMemory()

    def place(self, inner: Tensor, *, known: Known | None = None, is_logged: bool = True) -> Ghost:
        """A ghost on the device for a meta tensor: of a new storage, or of one placed before."""
        return self._maker.place(inner, known=known, is_logged=is_logged)

    def note(self, text: str) -> None:
        """An assumption was made; each is told once."""
        self.notes.setdefault(text)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._dispatch(func, args, kwargs or {})
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell of an error at once where raising it would lose it.

        Torch restores the current device while an exception passes through autograd's thread, through a Python guard that
        must not fail and does, since the exception is still set: the process is aborted without a word of the cause.
        """
        if self._on_fatal is not None and threading.current_thread() is not threading.main_thread():
            self._on_fatal(error)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        ghosts: list[Ghost] = []
        collect_ghosts(args, ghosts)
        if kwargs:
            collect_ghosts(kwargs.values(), ghosts)
        device = kwargs.get("device")
        if isinstance(device, str):
            device = torch.device(device)
        to_ghost = device is not None and device.type == self.device.type
        if not ghosts and not to_ghost:
            return self._on_host(func, args, kwargs)
        op = describe(func)
        number = self.recorder.begin_op(op.name)
        try:
            out = self._run(func, op, args, kwargs, ghosts, device)
        except LowtideError:
            raise
        except NotImplementedError as error:
            module = self.recorder.op_modules[number]
            raise MissingKernelError(
                f"{op.name}, called in {module!r}, has no shape function (meta kernel), so it cannot be traced without "
                f"running it: {_first_line(error)}. Register one with torch.library.register_fake, or use "
                "lowtide.observe on a machine with a GPU.",
                module=module,
                op=op.name,
            ) from error
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            module = self.recorder.op_modules[number]
            shapes = ", ".join(f"{list(ghost.shape)} {str(ghost.dtype).removeprefix('torch.')}" for ghost in ghosts)
            raise BatchMismatchError(
                f"{op.name} in {module!r} does not accept {shapes}: {_first_line(error)}. Check the batch's shapes and "
                "types against what the model expects.",
                module=module,
                op=op.name,
            ) from error
        for ghost in ghosts:
            self.recorder.use(ghost.life, number)
        return out

    def _run(
        self, func: Any, op: Operator, args: Any, kwargs: Any, ghosts: list[Ghost], device: torch.device | None
    ) -> Any:
        if op.reads_values or has_mask_index(op, args):
            special = self._reader.read(func, op, args, kwargs)
            if special is not NotImplemented:
                return special
        summed = self._sums.in_place(func, args)
        if summed is not None:
            return summed
        if op.name in ("aten.is_pinned", "aten.record_stream"):
            return False
        if op.is_view_in_place:
            return self._view_in_place(func, op, args, kwargs)
        on_device = device.type == self.device.type if device is not None else any(g.life.on_device for g in ghosts)
        if device is not None:
            kwargs = {**kwargs, "device": META}
            kwargs.pop("pin_memory", None)
        if op.name in SAME_TYPES and len({ghost.dtype for ghost in ghosts}) > 1:
            raise TypeError("all of them must have the same type")
        shapes = self._shapes.get(func)
        if func in VALUE_SHAPES:
            out = VALUE_SHAPES[func](*args, **kwargs)
        elif shapes is not None:
            out = shapes(*to_meta(args), **{key: to_meta(value) for key, value in kwargs.items()})
        elif op.name.startswith(("aten._fused_", "aten._foreach_")) and op.name.endswith("_"):
            # Optimizers' operators that write in place return nothing. The fused ones have no meta function, and that of the
            # others takes most of an update's time to compute shapes that are known.
            out = None
        else:
            out = self._remembered.call(func, to_meta(args), {key: to_meta(value) for key, value in kwargs.items()})
        values = self._reader.values(func, op, args, kwargs)
        num_lives = len(self.recorder.lives)
        course = self.costs.course(op) if on_device else None
        if course is not None:
            self._charge_lasting(op, args)
            self._follow(course(to_meta(args), out), makes_outputs=True)
            self.recorder.time_op(*self.costs.timed(op, to_meta(args), out))
            return self._maker.wrap(op, args, kwargs, out, values, on_device)
        result = self._maker.wrap(op, args, kwargs, out, values, on_device)
        is_view = len(self.recorder.lives) == num_lives and not op.writes and not op.written_names
        if on_device and not is_view:
            self.charge(op, args, result)
        if values is None and not op.writes and not op.written_names:
            self._reader.assume(op, args, result)
        return result

    def _view_in_place(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """`x.unsqueeze_(0)`: the shape of the ghost itself changes, and of the meta tensor inside; no byte does."""
        ghost, values = args[0], self._reader.values(func, op, args, kwargs)
        func(ghost.inner, *args[1:], **kwargs)
        with compat.without_dispatch():
            func(*args, **kwargs)
        ghost.know(None if values is None else values(None))
        return ghost

    def charge(self, op: Operator, args: Any, out: Any) -> None:
        """What the device's libraries need besides the outputs of an operator that runs."""
        self._charge_lasting(op, args)
        # The rules see the meta tensors: they may ask for views and layouts without being recorded.
        args, out = to_meta(args), to_meta(out)
        course = self.costs.course(op) or partial(self.costs.passing, op)
        self._follow(course(args, out), makes_outputs=False)
        self.recorder.time_op(*self.costs.timed(op, args, out))

    def _charge_lasting(self, op: Operator, args: Any) -> None:
        for owner, nbytes in self.costs.lasting(op, args):
            life = self.recorder.allocate(nbytes, (nbytes,), "uint8", category=Category.WORKSPACE)
            life.rename(owner, "workspace")

    def _follow(self, course: Course, *, makes_outputs: bool) -> None:
        """Take and free memory along a course."""
        taken: list[Life] = []
        for step in course:
            if isinstance(step, Tensor):
                if makes_outputs:
                    self._maker.life_of(step, on_device=True)  # ahead of `wrap`, which has the schema's order
            elif step == FREE:
                self.recorder.free(taken.pop())
            elif step:
                taken.append(self.recorder.allocate(step, (step,), "uint8", category=Category.WORKSPACE))
        for life in reversed(taken):
            self.recorder.free(life)

    def learn_owner_count(self) -> None:
        """Learn how many references a gradient has that only the engine holds: the wrappers around it count as well.

        The number depends on torch's version, so it is measured: in this graph the sum's first term has no other owner.
        """
        probe = GhostMode(StorageRecorder(), self.device, self.costs)
        with probe:
            leaf = probe.place(torch.empty(2, device=META)).requires_grad_()
            total = (leaf.sin() * leaf.cos()).sum()
            probe.recorder.begin_phase(Phase.BACKWARD)
            total.backward()
        self._sums.learn_from(probe._sums)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on real host tensors: run it, unless it would make a large one (an offload buffer)."""
        makers = ("aten.empty", "aten.empty_strided", "aten.zeros")
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # there is no device to pin it for
        is_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        if self.recorder.phase is not None and not is_meta and describe(func).name in makers:
            inner = func(*args, **{**{k: v for k, v in kwargs.items() if k != "pin_memory"}, "device": META})
            if inner.untyped_storage().nbytes() >= HOST_GHOST_BYTES:
                return self._maker.ghost(inner, None, on_device=False)
        return func(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__
