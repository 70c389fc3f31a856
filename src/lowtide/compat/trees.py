"""Nested values, taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def flatten(value: object) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and the structure that `unflatten` puts them back into."""
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Undo `flatten`: new containers around the leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)
