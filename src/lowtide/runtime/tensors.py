"""Find tensors in what modules are given and give back: nested lists, tuples, dictionaries, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
