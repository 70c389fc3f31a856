"""Job: a prediction to make, as it travels to the tracing subprocess.

A model, its batch, its optimizer and its hooks go there without their memory. Everything travels through cloudpickle; tensors
travel as descriptions (size, strides, type, which storage) and, where they are small or hold integers, with their values. On
arrival each becomes a ghost, the same object wherever it is referred to.
"""

from __future__ import annotations

import contextvars
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import TraceError
from lowtide.hardware import Hardware
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.settings import StepContext, StepSettings
from lowtide.tracing.training_step import Loss, OptimizerFactory, tensors_in

MAX_VALUE_ELEMENTS = 2**22
"""Integer and boolean tensors up to this size travel with their values: ids, masks, positions."""
MAX_FLOAT_ELEMENTS = 4096
"""Floating point ones: frequencies, scalars; never weights."""
MAX_BATCH_ELEMENTS = 2**24
"""Floating point ones of the batch: models drop padded images and mask targets by their values."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prediction to make. `payload` packs (model, batch, optimizer or factory, loss)."""

    name: str
    payload: bytes
    settings: StepSettings
    hardware: Hardware
    torch_version: str
    allocator: AllocatorSettings
    if_full: AllocatorSettings | None = None
    """Settings of a second replay, if the step does not fit in the limit of the first: its needs are then worth knowing. None
    raises instead."""


@dataclass(slots=True)
class Contents:
    """What a job's payload holds."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | OptimizerFactory | None
    loss: Loss | None
    context: StepContext | None = None


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor as it crosses the process boundary: its form, and its values where they are few."""

    key: int
    storage_key: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool
    values: bytes | None


class _Packer(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Replaces tensors by descriptions, and remembers which ones carry hooks."""

    def __init__(self, file: io.BytesIO, batch: Any = None) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}
        self._batch = {id(tensor) for tensor in tensors_in(batch)}

    def reducer_override(self, obj: Any) -> Any:
        found = compat.operator_path(obj)
        if found is not None:
            return compat.operator_at, (found,)
        if _is_context_variable(obj):
            # A function sent by value (a hook that is a closure) brings the globals it uses; these belong to a process.
            home = _home_of(obj)
            return NotImplemented if home is None else (_global_at, home)
        original = compat.uncompiled(obj)
        if original is not None:
            return _same, (original,)
        names = compat.parametrized_names(obj)
        if names is not None:
            # The class was made for this one module and refuses to be pickled; it is made again.
            return compat.rebuild_parametrized, (type(obj).__mro__[1], names), dict(vars(obj))
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> TensorDescription | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors[id(obj)] = obj  # kept alive, so that the id stays its own
        return _describe(obj, MAX_BATCH_ELEMENTS if id(obj) in self._batch else MAX_FLOAT_ELEMENTS)


def _is_context_variable(value: object) -> bool:
    """Whether a value is a context variable, or a wrapper around one as transformers has it."""
    if isinstance(value, contextvars.ContextVar):
        return True
    return not isinstance(value, type | types.ModuleType) and any(
        isinstance(held, contextvars.ContextVar) for held in getattr(value, "__dict__", {}).values()
    )


def _same(value: Any) -> Any:
    return value


def _home_of(value: object) -> tuple[str, str] | None:
    """The module and the name under which a global can be imported."""
    for module_name, module in list(sys.modules.items()):
        for name, candidate in list(getattr(module, "__dict__", {}).items()):
            if candidate is value:
                return module_name, name
    return None


def _global_at(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)


def _describe(tensor: Tensor, max_float_elements: int) -> TensorDescription:
    storage = tensor.untyped_storage()
    values = None
    if tensor.device.type != "meta":
        limit = max_float_elements if tensor.is_floating_point() else MAX_VALUE_ELEMENTS
        if tensor.numel() <= limit and not isinstance(tensor, torch.nn.Parameter):
            buffer = io.BytesIO()
            # A clone: a slice would be saved with the whole storage it is a part of.
            torch.save(tensor.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
            values = buffer.getvalue()
    return TensorDescription(
        key=id(tensor),
        storage_key=storage._cdata,
        storage_bytes=storage.nbytes(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        is_parameter=isinstance(tensor, torch.nn.Parameter),
        values=values,
    )


def pack(payload: Any, batch: Any = None) -> bytes:
    """The payload as bytes: no more than some kilobytes per layer, whatever the model's size.

    `batch` is the part of it whose floating point values go along.
    """
    file = io.BytesIO()
    packer = _Packer(file, batch)
    try:
        packer.dump(payload)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise TraceError(
            f"the model, the batch, the optimizer or the loss cannot be sent to the tracing subprocess: {error}. Keep open "
            "files, locks, loaders and the like out of them (as arguments of the loop, not attributes of the model)."
        ) from error
    hooks = [
        (tensor, tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        for tensor in list(packer.tensors.values())
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    ]
    # Hooks refer back to tensors and optimizers, so they follow in the same pickle, where those are known already.
    packer.dump(hooks)
    return file.getvalue()


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, make: Callable[[TensorDescription, Tensor | None], Tensor]) -> None:
        super().__init__(file)
        self._make = make
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, description: TensorDescription) -> Tensor:
        tensor = self._made.get(description.key)
        if tensor is None:
            values = (
                None if description.values is None else torch.load(io.BytesIO(description.values), weights_only=True)
            )
            tensor = self._made[description.key] = self._make(description, values)
        return tensor


def unpack(data: bytes, make: Callable[[TensorDescription, Tensor | None], Tensor]) -> Any:
    """The payload again; `make` turns descriptions into tensors."""
    file = io.BytesIO(data)
    unpacker = _Unpacker(file, make)
    payload = unpacker.load()
    for tensor, hooks, post_hooks in unpacker.load():
        for hook in (hooks or {}).values():
            tensor.register_hook(hook)
        for hook in (post_hooks or {}).values():
            tensor.register_post_accumulate_grad_hook(hook)
    return payload
