"""What the arguments of an operator are: ghosts, meta tensors for the shapes, known values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.ghost.values import MAX_ELEMENTS, Known

META = torch.device("meta")
HOST = torch.device("cpu")


def collect_ghosts(values: Iterable[Any], found: list[Ghost]) -> None:
    """Add the ghosts among them, however deep."""
    for value in values:
        if isinstance(value, Ghost):
            found.append(value)
        elif isinstance(value, list | tuple):
            collect_ghosts(value, found)


def to_meta(value: Any) -> Any:
    """The argument with every tensor replaced by one on meta: what torch's shape functions take."""
    if isinstance(value, Ghost):
        return value.inner
    if isinstance(value, Tensor):
        return value if value.device.type == "meta" else value.detach().to(META)
    if isinstance(value, list | tuple):
        return type(value)(to_meta(item) for item in value) if type(value) in (list, tuple) else value
    return value


def to_known(value: Any) -> Any:
    """The argument with every tensor replaced by its known value; None where one is not known."""
    if isinstance(value, Ghost):
        return value.value() if value.numel() <= MAX_ELEMENTS else None
    if isinstance(value, Tensor):
        return Known(value.detach())
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            known = to_known(item)
            if known is None and item is not None:
                return None
            items.append(known)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        resolved = {}
        for key, item in value.items():
            known = to_known(item)
            if known is None and item is not None:
                return None
            resolved[key] = known
        return resolved
    return value
