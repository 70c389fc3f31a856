"""Tensors over the same memory, over their own storage, beside another."""

from __future__ import annotations

import torch

from lowtide import compat
from lowtide.runtime.emulation.device import mark_of, set_mark


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object over the same memory, outside of autograd, with a version of its own."""
    with compat.without_torch_function():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory, with a storage that ends where the view does, and that keeps the memory alive.

    What torch saves and pickles is the storage: a view of a large buffer would carry its neighbours along. And as long
    as such a storage lives, somebody may look at the memory. The view must be dense.
    """
    with compat.without_torch_function():
        num_bytes, start = view.numel() * view.element_size(), view.storage_offset() * view.element_size()
        flat = torch.empty(0, dtype=torch.uint8, device=view.device)
        flat.set_(view.untyped_storage(), start, (num_bytes,), (1,))
        storage = compat.storage_over(flat)
        set_mark(storage, mark_of(view.untyped_storage()))
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """New memory of the same tier and shape, which holds nothing yet."""
    with compat.without_torch_function(), compat.without_modes():
        made = torch.empty_like(tensor, requires_grad=False)
        set_mark(made.untyped_storage(), mark_of(tensor.untyped_storage()))
    return made
