"""What stands for a saved tensor in the graph while its group's forward is past and its backward is still to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lowtide import compat
from lowtide.errors import SavedTensorChangedError


class Saved(Protocol):
    """In place of a tensor that autograd, or a checkpoint, wanted to keep."""

    def peek(self) -> torch.Tensor:
        """The tensor, which will be asked for again in this backward."""

    def take(self) -> torch.Tensor:
        """The tensor, for its use in this backward."""


class Held:
    """The tensor itself, on the device."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an output that its own node held with its history would never be freed.
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    def peek(self) -> torch.Tensor:
        """The tensor, unless it was written to since."""
        if version_of(self._tensor) != self._version:
            raise changed(self._tensor.dtype, self._tensor.shape)
        return self._tensor

    def take(self) -> torch.Tensor:
        """The tensor, unless it was written to since."""
        return self.peek()


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else compat.version_of(tensor)


def changed(dtype: torch.dtype, size: Sequence[int]) -> SavedTensorChangedError:
    """The error for a tensor that was written to after it was saved. Under hooks torch does not look itself."""
    return SavedTensorChangedError(
        f"a tensor of {dtype} {tuple(size)} that a group's backward needs was written to in place after it "
        "was saved; write the operation out of place (x = x + y for x += y), or give the group the policy Keep"
    )
