"""Maker: gives ghosts to what operators return, and tells the recorder which memory is new, used or written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.ghost import contents
from lowtide.tracing.ghost.arguments import HOST
from lowtide.tracing.ghost.operators import Operator
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.ghost.values import Known
from lowtide.tracing.recorder import Life, Recorder


class Maker:
    """Of the ghosts of one trace; a storage has one life, however many ghosts look at it."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self.device = device
        self._lives: dict[int, Life] = {}

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

    def begin(self, inner: Tensor, *, on_device: bool) -> None:
        """Allocate an output ahead of `wrap`, which takes outputs in the order of the operator's schema."""
        self._life_of(inner, on_device=on_device)

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
        life = self._life_of(inner, on_device=on_device)
        self.recorder.use(life, len(self.recorder.op_names) - 1)
        ghost = Ghost(inner, self.device if life.on_device else HOST, life, known)
        contents.begin(ghost)
        return ghost

    def written(self, target: Any, op: Operator, values: Any) -> None:
        """An operator has written to an argument: what it holds is another value now, or none that is known."""
        for ghost in target if isinstance(target, list | tuple) else (target,):
            if isinstance(ghost, Ghost):
                known = values(None) if values is not None and ghost is target and len(op.writes) == 1 else None
                contents.written(ghost, known)
