"""Reader: values of tensors where they can be known, and operators whose result depends on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.arguments import HOST, META, to_known, to_meta
from lowtide.tracing.ghost.assumptions import assumed
from lowtide.tracing.ghost.making import Maker
from lowtide.tracing.ghost.operators import Operator
from lowtide.tracing.ghost.values import Known
from lowtide.tracing.step_trace import Phase

INDEX_PUTS = ("aten.index_put", "aten.index_put_", "aten._index_put_impl_")


class Reader:
    """Of one trace.

    Args:
        maker: Makes the ghosts of what was read.
        notes: Assumptions made on the way, each once, in order.
    """

    def __init__(self, maker: Maker, notes: dict[str, None]) -> None:
        self._maker = maker
        self._notes = notes

    def values(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """A maker of the outputs' values, None where they are not known."""
        if op.is_chance:
            return None
        known_args = to_known(args)
        if known_args is None:
            return None
        known_kwargs = to_known(kwargs)
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

    def read(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """An operator that needs values: its real result where they are known."""
        values = self.values(func, op, args, kwargs)
        if values is None:
            if op.name in INDEX_PUTS and to_known(args[1]) is None:
                # Whichever elements are meant: the result has the shape of what is written to.
                written = (
                    None if op.writes else self._maker.ghost(torch.empty_like(args[0].inner), None, on_device=True)
                )
                self._maker.written(args[0] if op.writes else None, op, None)
                return args[0] if written is None else written
            if op.name.startswith("aten.index"):
                known_indices = to_known(args[1])
                if known_indices is not None:
                    return self._index_by_mask(func, op, args, kwargs, known_indices)
            if op.name == "aten.masked_select" and (mask := to_known(args[1])) is not None:
                # How many are selected is known, though not which values.
                count = int(mask.get().expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
                return self._maker.ghost(torch.empty(count, dtype=args[0].dtype, device=META), None, on_device=True)
            if op.name == "aten._local_scalar_dense" and self._maker.recorder.phase is Phase.UPDATE:
                # Adafactor scales by the norm of the weights: a number that changes no shape and no lifetime.
                self._notes["numbers that the optimizer reads back from the card were taken to be 1"] = None
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
        if not isinstance(result, Tensor | list | tuple):
            return result
        if isinstance(result, Tensor):
            return self._maker.ghost(result.to(META), Known(result), on_device=True)
        return tuple(self._maker.ghost(item.to(META), Known(item), on_device=True) for item in result)

    def _index_by_mask(self, func: Any, op: Operator, args: Any, kwargs: Any, indices: Any) -> Any:
        """Indexing with a known boolean mask: the mask becomes the rows it selects, as the CUDA kernel does itself."""
        rows: list[Any] = []
        for index in indices:
            value = index.get() if isinstance(index, Known) else index
            if isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
                rows += [
                    self._maker.ghost(row.to(META), Known(row), on_device=True) for row in value.nonzero(as_tuple=True)
                ]
            elif isinstance(value, Tensor):
                rows.append(self._maker.ghost(value.to(META), Known(value), on_device=True))
            else:
                rows.append(value)
        new_args = (args[0], rows, *args[2:])
        out = func(*to_meta(new_args), **{key: to_meta(value) for key, value in kwargs.items()})
        return self._maker.wrap(op, new_args, kwargs, out, None, on_device=True)

    def assume(self, op: Operator, args: Any, result: Any) -> None:
        """Take values for known that a trained model would have, where the step goes on by them."""
        found = assumed(op, args, result, lambda text: self._notes.setdefault(text))
        if found is not None:
            ghost, known = found
            ghost.known = known
            ghost.known_version = ghost.life.version


def has_mask_index(op: Operator, args: Any) -> bool:
    """Whether an operator indexes by booleans: then its shape depends on their values."""
    if op.name not in ("aten.index", *INDEX_PUTS, "aten._unsafe_index"):
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
