"""Find and replace tensors in what modules are given and give back: nested lists, tuples, dictionaries, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide import compat


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object over the same memory, outside of autograd, with a version of its own."""
    with compat.without_torch_function():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors; containers in which nothing changes are given back themselves.

    Only plain lists, tuples (named ones too) and dictionaries are rebuilt: what else may hold tensors (a key-value
    cache) is an object with an identity, and stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        entries = [map_tensors(entry, function) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if type(value) is dict:
        mapped = {key: map_tensors(entry, function) for key, entry in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    return value
