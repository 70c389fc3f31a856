"""GhostMode: runs a training step on ghosts and tells the recorder what a CUDA card would have allocated.

Every operator below autograd passes through here: shapes come from torch's own meta functions, values from the host where
they are known, extra memory of the CUDA libraries from `costs`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import BatchMismatchError, LowtideError, MissingKernelError, ValueReadError
from lowtide.tracing.ghost import contents
from lowtide.tracing.ghost.assumptions import assumed
from lowtide.tracing.ghost.operators import Operator, describe
from lowtide.tracing.ghost.shapes import SHAPES
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.ghost.value_shapes import VALUE_SHAPES
from lowtide.tracing.ghost.values import MAX_ELEMENTS, Known
from lowtide.tracing.recorder import Life, Recorder
from lowtide.tracing.step_trace import Category, Phase

META = torch.device("meta")
HOST = torch.device("cpu")
HOST_GHOST_BYTES = 2**20
"""Host tensors above this that the step makes (offloaded activations) become ghosts too."""

SAME_TYPES = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.mv", "aten.dot"})
"""Operators that refuse arguments of different types on CUDA; torch's shape functions let them pass."""

INDEX_PUTS = ("aten.index_put", "aten.index_put_", "aten._index_put_impl_")

aten = torch.ops.aten


class Costs(Protocol):
    """What the card's libraries allocate around an operator."""

    def lasting(self, op: Operator, args: tuple[Any, ...]) -> Iterable[tuple[str, int]]:
        """Workspaces this call takes for good: (owner, bytes)."""
        ...

    def passing(self, op: Operator, args: tuple[Any, ...], out: Any) -> list[list[int]]:
        """Bytes needed while the operator runs, beside its outputs: in stages, each freed before the next."""
        ...

    def seconds(self, op: Operator, args: tuple[Any, ...], out: Any) -> float:
        """Estimated time on the card."""
        ...


class GhostMode(compat.TorchDispatchMode):
    """The dispatch mode of one trace."""

    def __init__(self, recorder: Recorder, device: torch.device, costs: Costs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.device = device
        self.costs = costs
        self.notes: dict[str, None] = {}
        """Assumptions made on the way, each once, in order."""
        self.sole_owner_count: int | None = None
        self.on_fatal: Callable[[BaseException], None] | None = None
        """Is told of an error in autograd's own thread: raised there it would abort the process (see `fail`)."""
        self._lives: dict[int, Life] = {}

    # -- making ghosts -----------------------------------------------------------------------------------------------

    def place(self, inner: Tensor, *, known: Known | None = None, is_logged: bool = True) -> Ghost:
        """A ghost on the device for a meta tensor: of a new storage, or of one placed before."""
        ghost = Ghost(inner, self.device, self._life_of(inner, on_device=True, is_logged=is_logged), known)
        contents.begin(ghost)
        return ghost

    def _life_of(self, inner: Tensor, *, on_device: bool, is_logged: bool = True) -> Life:
        storage = inner.untyped_storage()
        key = storage._cdata
        life = self._lives.get(key)
        if life is None or life.died_event is not None:
            life = self.recorder.allocate(
                storage.nbytes(),
                tuple(inner.shape),
                str(inner.dtype).removeprefix("torch."),
                storage=storage,
                on_device=on_device,
                is_logged=is_logged,
            )
            self._lives[key] = life
        return life

    # -- dispatch ----------------------------------------------------------------------------------------------------

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
        if self.on_fatal is not None and threading.current_thread() is not threading.main_thread():
            self.on_fatal(error)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        ghosts: list[Ghost] = []
        _collect(args, ghosts)
        if kwargs:
            _collect(kwargs.values(), ghosts)
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
        if op.reads_values or _has_mask_index(op, args):
            special = self._read(func, op, args, kwargs)
            if special is not NotImplemented:
                return special
        if self._is_gradient_sum(func):
            summed = self._sum_in_place(args)
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
        shapes = SHAPES.get(func)
        if func in VALUE_SHAPES:
            out = VALUE_SHAPES[func](*args, **kwargs)
        elif shapes is not None:
            out = shapes(*_to_meta(args), **{key: _to_meta(value) for key, value in kwargs.items()})
        elif op.name.startswith(("aten._fused_", "aten._foreach_")) and op.name.endswith("_"):
            # Optimizers' operators that write in place return nothing. The fused ones have no meta function, and that of the
            # others takes most of an update's time to compute shapes that are known.
            out = None
        else:
            out = func(*_to_meta(args), **{key: _to_meta(value) for key, value in kwargs.items()})
        values = self._values(func, op, args, kwargs)
        num_lives = len(self.recorder.lives)
        result = self._wrap(op, args, kwargs, out, values, on_device)
        is_view = len(self.recorder.lives) == num_lives and not op.writes and not op.written_names
        if on_device and not is_view:
            self.charge(op, args, result)
        if values is None and not op.writes and not op.written_names:
            self._assume(op, args, result)
        return result

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _wrap(self, op: Operator, args: Any, kwargs: Any, out: Any, values: Any, on_device: bool) -> Any:
        for position in op.writes:
            self._written(args[position] if position < len(args) else None, op, values)
        for name in op.written_names:
            self._written(kwargs.get(name), op, None)
        if isinstance(out, Tensor):
            returned = op.returns_written[0] if op.returns_written else None
            if returned is not None:
                return args[returned]
            if op.written_names:
                return kwargs[op.written_names[0]]
            return self._ghost(out, values and values(None), on_device)
        if isinstance(out, list | tuple):
            results = []
            for index, item in enumerate(out):
                returned = op.returns_written[index] if index < len(op.returns_written) else None
                if returned is not None and isinstance(item, Tensor):
                    results.append(args[returned])
                elif isinstance(item, Tensor) and item.device.type == "meta":
                    results.append(self._ghost(item, values and values(index), on_device))
                elif isinstance(item, list):
                    results.append([self._ghost(part, None, on_device) for part in item])
                else:
                    results.append(item)
            return type(out)(results) if type(out) in (list, tuple) else tuple(results)
        return out

    def _ghost(self, inner: Tensor, known: Known | None, on_device: bool) -> Ghost:
        life = self._life_of(inner, on_device=on_device)
        self.recorder.use(life, len(self.recorder.op_names) - 1)
        ghost = Ghost(inner, self.device if life.on_device else HOST, life, known)
        contents.begin(ghost)
        return ghost

    def _view_in_place(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """`x.unsqueeze_(0)`: the shape of the ghost itself changes, and of the meta tensor inside; no byte does."""
        ghost, values = args[0], self._values(func, op, args, kwargs)
        func(ghost.inner, *args[1:], **kwargs)
        with compat.without_dispatch():
            func(*args, **kwargs)
        ghost.known = None if values is None else values(None)
        ghost.known_version = ghost.life.version
        return ghost

    def _written(self, target: Any, op: Operator, values: Any) -> None:
        for ghost in target if isinstance(target, list | tuple) else (target,):
            if isinstance(ghost, Ghost):
                known = values(None) if values is not None and ghost is target and len(op.writes) == 1 else None
                contents.written(ghost, known)

    def charge(self, op: Operator, args: Any, out: Any) -> None:
        """What the card's libraries need besides the outputs of an operator that runs."""
        for owner, nbytes in self.costs.lasting(op, args):
            life = self.recorder.allocate(nbytes, (nbytes,), "uint8", category=Category.WORKSPACE)
            life.module, life.op = owner, "workspace"
        # The rules see the meta tensors: they may ask for views and layouts without being recorded.
        args, out = _to_meta(args), _to_meta(out)
        for stage in self.costs.passing(op, args, out):
            scratch = [
                self.recorder.allocate(nbytes, (nbytes,), "uint8", category=Category.WORKSPACE)
                for nbytes in stage
                if nbytes > 0
            ]
            for life in reversed(scratch):
                self.recorder.free(life)
        self.recorder.op_seconds[-1] = self.costs.seconds(op, args, out)

    # -- values ------------------------------------------------------------------------------------------------------

    def _values(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """A maker of the outputs' values, None where they are not known."""
        if op.is_chance:
            return None
        known_args = _to_known(args)
        if known_args is None:
            return None
        known_kwargs = _to_known(kwargs)
        if known_kwargs is None:
            return None
        known_kwargs = {
            key: HOST if key == "device" and value is not None else value for key, value in known_kwargs.items()
        }
        if op.writes:
            # The recipe may be evaluated after more writes: it works on a copy of what it writes to.
            def run(*values: Any, **options: Any) -> Any:
                fresh = list(values)
                for position in op.writes:
                    if isinstance(fresh[position], Tensor):
                        fresh[position] = fresh[position].clone()
                return func(*fresh, **options)
        else:
            run = func
        return lambda output: Known(func=run, args=known_args, kwargs=known_kwargs, output=output)

    def _read(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """An operator that needs values: its real result where they are known."""
        values = self._values(func, op, args, kwargs)
        if values is None:
            if op.name in INDEX_PUTS and _to_known(args[1]) is None:
                # Whichever elements are meant: the result has the shape of what is written to.
                written = None if op.writes else self._ghost(torch.empty_like(args[0].inner), None, on_device=True)
                self._written(args[0] if op.writes else None, op, None)
                return args[0] if written is None else written
            if op.name.startswith("aten.index"):
                known_indices = _to_known(args[1])
                if known_indices is not None:
                    return self._index_by_mask(func, op, args, kwargs, known_indices)
            if op.name == "aten.masked_select" and (mask := _to_known(args[1])) is not None:
                # How many are selected is known, though not which values.
                count = int(mask.get().expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
                return self._ghost(torch.empty(count, dtype=args[0].dtype, device=META), None, on_device=True)
            if op.name == "aten._local_scalar_dense" and self.recorder.phase is Phase.UPDATE:
                # Adafactor scales by the norm of the weights: a number that changes no shape and no lifetime.
                self.notes["numbers that the optimizer reads back from the card were taken to be 1"] = None
                return 1.0
            module = self.recorder.op_modules[-1]
            source = self.recorder.op_sources[-1] or self.recorder.line()
            raise ValueReadError(
                f"{op.name} reads the values of a tensor in {module!r}{f' ({source})' if source else ''}, and they depend on "
                "weights or chance, which a prediction does not have. Use lowtide.observe on a machine with a GPU, or "
                "take the read out of the step (log losses after it, keep control flow free of tensor values).",
                module=module,
                op=op.name,
            )
        if op.writes:
            self._written(args[0], op, values)
            return args[0]
        result = values(None).get()
        if not isinstance(result, Tensor | list | tuple):
            return result
        if isinstance(result, Tensor):
            return self._ghost(result.to(META), Known(result), on_device=True)
        return tuple(self._ghost(item.to(META), Known(item), on_device=True) for item in result)

    def _index_by_mask(self, func: Any, op: Operator, args: Any, kwargs: Any, indices: Any) -> Any:
        """Indexing with a known boolean mask: the mask becomes the rows it selects, as the CUDA kernel does itself."""
        rows: list[Any] = []
        for index in indices:
            value = index.get() if isinstance(index, Known) else index
            if isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
                rows += [self._ghost(row.to(META), Known(row), on_device=True) for row in value.nonzero(as_tuple=True)]
            elif isinstance(value, Tensor):
                rows.append(self._ghost(value.to(META), Known(value), on_device=True))
            else:
                rows.append(value)
        new_args = (args[0], rows, *args[2:])
        out = func(*_to_meta(new_args), **{key: _to_meta(value) for key, value in kwargs.items()})
        return self._wrap(op, new_args, kwargs, out, None, on_device=True)

    def _assume(self, op: Operator, args: Any, result: Any) -> None:
        found = assumed(op, args, result, lambda text: self.notes.setdefault(text))
        if found is not None:
            ghost, known = found
            ghost.known = known
            ghost.known_version = ghost.life.version

    # -- the engine's sums -------------------------------------------------------------------------------------------

    def _is_gradient_sum(self, func: Any) -> bool:
        """Whether autograd's engine itself adds two gradients: in the backward, with no Python code calling."""
        return (
            func is aten.add.Tensor and self.recorder.phase is Phase.BACKWARD and self.recorder.is_called_from_engine()
        )

    def _sum_in_place(self, args: Any) -> Ghost | None:
        """Autograd adds gradients in place where it holds the only reference; under a dispatch mode it never does."""
        old = args[0]
        if not isinstance(old, Ghost) or compat.num_storage_owners(old.inner) > 1:
            return None
        owners = compat.reference_count(old) + sys.getrefcount(old)  # in C++, and of its Python object: a user's hook
        if self.sole_owner_count is None:
            self.sole_owner_count = owners
        if owners > self.sole_owner_count:
            return None
        self._written(old, describe(aten.add_.Tensor), None)
        return old

    def learn_owner_count(self) -> None:
        """Learn how many references a gradient has that only the engine holds: the wrappers around it count as well.

        The number depends on torch's version, so it is measured: in this graph the sum's first term has no other owner.
        """
        self.sole_owner_count = None
        recorder, self.recorder = self.recorder, Recorder()
        with self:
            leaf = self.place(torch.empty(2, device=META)).requires_grad_()
            total = (leaf.sin() * leaf.cos()).sum()
            self.recorder.phase = Phase.BACKWARD
            total.backward()
        self.recorder = recorder
        assert self.sole_owner_count is not None, "autograd no longer sums gradients through add.Tensor"

    # -- host tensors ------------------------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on real host tensors: run it, unless it would make a large one (an offload buffer)."""
        makers = ("aten.empty", "aten.empty_strided", "aten.zeros")
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # there is no card to pin it for
        is_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        if self.recorder.phase is not None and not is_meta and describe(func).name in makers:
            inner = func(*args, **{**{k: v for k, v in kwargs.items() if k != "pin_memory"}, "device": META})
            if inner.untyped_storage().nbytes() >= HOST_GHOST_BYTES:
                return self._ghost(inner, None, on_device=False)
        return func(*args, **kwargs)


def _collect(values: Iterable[Any], found: list[Ghost]) -> None:
    for value in values:
        if isinstance(value, Ghost):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Ghost):
        return value.inner
    if isinstance(value, Tensor):
        return value if value.device.type == "meta" else value.detach().to(META)
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value) if type(value) in (list, tuple) else value
    return value


def _to_known(value: Any) -> Any:
    """The argument with every tensor replaced by its known value; None where one is not known."""
    if isinstance(value, Ghost):
        return value.value() if value.numel() <= MAX_ELEMENTS else None
    if isinstance(value, Tensor):
        return Known(value.detach())
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            known = _to_known(item)
            if known is None and item is not None:
                return None
            items.append(known)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        resolved = {}
        for key, item in value.items():
            known = _to_known(item)
            if known is None and item is not None:
                return None
            resolved[key] = known
        return resolved
    return value


def _has_mask_index(op: Operator, args: Any) -> bool:
    if op.name not in (
        "aten.index",
        *INDEX_PUTS,
        "aten._unsafe_index",
    ):
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__
