"""What operators return: ghosts of new or shared memory, gradients summed in place, and values where they can be known.

The recorder is told which memory is new, used or written to. Where a value depends on weights, the trace takes what a healthy
step would show (checks pass, numbers are finite, routers are in balance), as a recipe that is evaluated only if the step reads
it, and only then says so in a note.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.operators import HOST, META, Operator, describe, to_known, to_meta
from lowtide.tracing.ghost.tensor import Ghost, Known, balanced_choice
from lowtide.tracing.recorder import PLUMBING, Life, StorageRecorder
from lowtide.tracing.step_trace import Phase

aten = torch.ops.aten
_ADD = aten.add.Tensor
CHECKS = "checks of values that depend on weights were taken to pass: `.all()` to be true, `.any()` to be false"
FINITE = "values that depend on weights were taken to be finite"
BALANCE = "choices that depend on weights (a router's topk, argmax or max) were taken to be spread evenly"
_CHECKS = {"aten.all": True, "aten._is_all_true": True, "aten.any": False, "aten._is_any_true": False}
INDEX_PUTS = ("aten.index_put", "aten.index_put_", "aten._index_put_impl_")


class Maker:
    """Makes the ghosts of one trace; a storage has one life, however many ghosts look at it."""

    def __init__(self, recorder: StorageRecorder, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self._lives: dict[int, Life] = {}

    def place(self, inner: Tensor, *, known: Known | None = None, is_logged: bool = True) -> Ghost:
        """A ghost on the device for a meta tensor: of a new storage, or of one placed before."""
        return Ghost(inner, self.device, self.life_of(inner, on_device=True, is_logged=is_logged), known)

    def life_of(self, inner: Tensor, *, on_device: bool, is_logged: bool = True) -> Life:
        """The life of a meta tensor's storage, which begins now if it is new."""
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

    def wrap(self, op: Operator, args: Any, kwargs: Any, out: Any, values: Any, on_device: bool) -> Any:
        """What an operator returns: `out` are the meta tensors, `values` makes their values where they are known."""
        for position in op.writes:
            self.written(args[position] if position < len(args) else None, op, values)
        for name in op.written_names:
            self.written(kwargs.get(name), op, None)
        if isinstance(out, Tensor):
            returned = op.returns_written[0] if op.returns_written else None
            if returned is not None:
                return args[returned]
            if op.written_names:
                return kwargs[op.written_names[0]]
            return self.ghost(out, values and values(None), on_device)
        if isinstance(out, list | tuple):
            results = []
            for index, item in enumerate(out):
                returned = op.returns_written[index] if index < len(op.returns_written) else None
                if returned is not None and isinstance(item, Tensor):
                    results.append(args[returned])
                elif isinstance(item, Tensor) and item.device.type == "meta":
                    results.append(self.ghost(item, values and values(index), on_device))
                elif isinstance(item, list):
                    results.append([self.ghost(part, None, on_device) for part in item])
                else:
                    results.append(item)
            return type(out)(results) if type(out) in (list, tuple) else tuple(results)
        return out

    def ghost(self, inner: Tensor, known: Known | None, on_device: bool) -> Ghost:
        """For a meta tensor that the operator at hand returns: of new memory, or of what it shares."""
        life = self.life_of(inner, on_device=on_device)
        self.recorder.use(life, len(self.recorder.op_names) - 1)
        return Ghost(inner, self.device if life.on_device else HOST, life, known)

    def written(self, target: Any, op: Operator, values: Any) -> None:
        """An operator has written to an argument: what it holds is another value now, or none that is known."""
        for ghost in target if isinstance(target, list | tuple) else (target,):
            if isinstance(ghost, Ghost):
                known = values(None) if values is not None and ghost is target and len(op.writes) == 1 else None
                ghost.write(known)


class GradientSums:
    """Makes the sums of one trace in place: under a dispatch mode autograd never does, so they would take memory they do not."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._sole_owner_count: int | None = None
        """References to a gradient that only the engine holds; None: the next sum shows it."""

    def learn_from(self, probe: GradientSums) -> None:
        """Take over what a sum without other owners has shown."""
        assert probe._sole_owner_count is not None, "autograd no longer sums gradients through add.Tensor"
        self._sole_owner_count = probe._sole_owner_count

    def in_place(self, func: Any, args: Any) -> Ghost | None:
        """The first term, which now holds the sum; None where something else has a reference to it, or it is no such sum.

        It is one where autograd's engine itself adds two gradients: in the backward, with no Python code calling.
        """
        recorder = self._maker.recorder
        is_in_backward = func is _ADD and recorder.phase is Phase.BACKWARD
        if not is_in_backward or not compat.is_called_from_engine(PLUMBING, has_own_thread=True):
            return None
        old = args[0]
        if not isinstance(old, Ghost) or compat.num_storage_owners(old.inner) > 1:
            return None
        owners = compat.reference_count(old) + sys.getrefcount(old)  # in C++, and of its Python object: a user's hook
        if self._sole_owner_count is None:
            self._sole_owner_count = owners
        if owners > self._sole_owner_count:
            return None
        self._maker.written(old, describe(aten.add_.Tensor), None)
        return old


class ValueReader:
    """Finds the values of one trace's tensors.

    Args:
        maker: Makes the ghosts of what was read.
        note: Is told of assumptions made on the way.
    """

    def __init__(self, maker: Maker, note: Callable[[str], None]) -> None:
        self._maker, self._note = maker, note

    def values(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """A maker of the outputs' values, None where they are not known."""
        known_args = None if op.is_chance else to_known(args)
        if known_args is None or (known_kwargs := to_known(kwargs)) is None:
            return None
        if known_kwargs.get("device") is not None:
            known_kwargs["device"] = HOST
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

    def read(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """An operator that needs values: its real result where they are known."""
        values = self.values(func, op, args, kwargs)
        if values is None:
            if op.name in INDEX_PUTS and to_known(args[1]) is None:
                # Whichever elements are meant: the result has the shape of what is written to.
                if not op.writes:
                    return self._maker.ghost(torch.empty_like(args[0].inner), None, on_device=True)
                self._maker.written(args[0], op, None)
                return args[0]
            if op.name.startswith("aten.index") and (known_indices := to_known(args[1])) is not None:
                return self._index_by_mask(func, op, args, kwargs, known_indices)
            if op.name == "aten.masked_select" and (mask := to_known(args[1])) is not None:
                # How many are selected is known, though not which values.
                count = int(mask.get().expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
                return self._maker.ghost(torch.empty(count, dtype=args[0].dtype, device=META), None, on_device=True)
            if op.name == "aten._local_scalar_dense" and self._maker.recorder.phase is Phase.UPDATE:
                # Adafactor scales by the norm of the weights: a number that changes no shape and no lifetime.
                self._note("numbers that the optimizer reads back from the device were taken to be 1")
                return 1.0
            module = self._maker.recorder.op_modules[-1]
            source = self._maker.recorder.op_sources[-1] or self._maker.recorder.line()
            raise ValueReadError(
                f"{op.name} reads the values of a tensor in {module!r}{f' ({source})' if source else ''}, and they depend on "
                "weights or chance, which a prediction does not have. Use lowtide.observe on a machine with a GPU, or "
                "take the read out of the step (log losses after it, keep control flow free of tensor values).",
                module=module,
                op=op.name,
            )
        if op.writes:
            self._maker.written(args[0], op, values)
            return args[0]
        result = values(None).get()
        if isinstance(result, list | tuple):
            return tuple(map(self._known, result))
        return self._known(result) if isinstance(result, Tensor) else result

    def _known(self, value: Tensor) -> Ghost:
        return self._maker.ghost(value.to(META), Known(value), on_device=True)

    def _index_by_mask(self, func: Any, op: Operator, args: Any, kwargs: Any, indices: Any) -> Any:
        """Indexing with a known boolean mask: the mask becomes the rows it selects, as the CUDA kernel does itself."""
        rows: list[Any] = []
        for index in indices:
            value = index.get() if isinstance(index, Known) else index
            if isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
                rows += map(self._known, value.nonzero(as_tuple=True))
            elif isinstance(value, Tensor):
                rows.append(self._known(value))
            else:
                rows.append(value)
        new_args = (args[0], rows, *args[2:])
        out = func(*to_meta(new_args), **{key: to_meta(value) for key, value in kwargs.items()})
        return self._maker.wrap(op, new_args, kwargs, out, None, on_device=True)

    def assume(self, op: Operator, args: Any, result: Any) -> None:
        """Take values for known that a trained model would have, where the step goes on by them."""
        if op.name in _CHECKS and result.dim() == 0:
            result.know(self._filled((), _CHECKS[op.name], CHECKS))
        elif op.name in ("aten.isnan", "aten.isinf"):
            result.know(self._filled(result.shape, False, FINITE))
        elif op.name in ("aten.topk", "aten.argmax", "aten.max"):
            self._assume_choice(op, args, result)

    def _filled(self, shape: tuple[int, ...], value: bool, text: str) -> Known:
        def make() -> Tensor:
            self._note(text)
            return torch.full(shape, value)

        return Known(func=make)

    def _assume_choice(self, op: Operator, args: Any, result: Any) -> None:
        """A choice along the last dimension: of some of its entries, or of the best one."""
        source = args[0]
        if op.name == "aten.topk":
            chosen, count, dim = result[1], args[1], args[2] if len(args) > 2 else -1
        else:
            is_pair = isinstance(result, list | tuple)
            if len(args) < 2 or not isinstance(args[1], int) or (op.name == "aten.max" and not is_pair):
                return  # over all elements, or the larger of two tensors
            chosen, count, dim = result[1] if is_pair else result, 1, args[1]
        if dim not in (-1, source.dim() - 1) or not source.dim() or count >= source.shape[-1]:
            return
        make = balanced_choice(source.shape[:-1], source.shape[-1], count)
        shape = chosen.shape  # not the tensor itself, which holds the recipe: the two would live until a collection

        def choose() -> Tensor:
            self._note(BALANCE)
            return make().view(shape)

        chosen.know(Known(func=choose))


def has_mask_index(op: Operator, args: Any) -> bool:
    """Whether an operator indexes by booleans: then its shape depends on their values."""
    if op.name not in ("aten.index", *INDEX_PUTS, "aten._unsafe_index"):
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
