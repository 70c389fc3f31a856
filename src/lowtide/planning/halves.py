"""Half of a batch along its first dimension: what gradient accumulation runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def batch_size(batch: Any) -> int | None:
    """The first dimension that all tensors of a batch share, apart from those of size 1; None if they share none."""
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None


def half_of(batch: Any) -> Any:
    """The first half, as tensors of their own; `batch_size` must be even.

    Copies, because a view would bring the storage of the whole batch along.
    """
    size = batch_size(batch)
    assert size is not None, "ask batch_size first"
    assert size % 2 == 0, f"{size} has no half"
    return _map(
        batch, lambda tensor: tensor[: size // 2].clone() if tensor.dim() and tensor.shape[0] == size else tensor
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, change) for value in batch)
    return batch
