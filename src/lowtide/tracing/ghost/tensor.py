"""Ghost: a tensor with a shape, a type and a storage of its own, and no memory.

A wrapper around a meta tensor. Torch sees a tensor on the ghost device (or on the host, for what an offloading step keeps
there); the meta tensor inside says which ghosts share a storage and lets torch's own shape functions do the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.tracing.ghost import contents

if TYPE_CHECKING:
    from lowtide.tracing.ghost.values import Known
    from lowtide.tracing.recorder import Life


class Ghost(Tensor):
    """A tensor without memory. Made by the ghost mode only."""

    has_storage_of_its_own = True
    """For `compat.plain_storage`."""
    inner: Tensor  # type: ignore[assignment]
    """The meta tensor: size, strides, dtype, and which storage."""
    life: Life
    """The record of the storage, shared by all its views."""
    known: Known | None
    """How to compute its values, where they do not depend on weights or chance."""
    known_version: int
    """The storage's version the values belong to; a later write through another view makes them stale."""

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device, life: Life, known: Known | None = None) -> Ghost:
        """A ghost of a meta tensor on a device."""
        ghost: Ghost = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        ghost.inner = inner
        ghost.life = life
        ghost.known = known
        ghost.known_version = life.version
        return ghost

    def __init__(self, *args: Any) -> None:
        pass

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Models ask before they take a fused path; the ghost stands for a CUDA tensor."""
        return self.device.type == "ghost"

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the meta tensor inside: ghosts that share memory share it; each wrapper has one to itself."""
        return self.inner.untyped_storage()

    def value(self) -> Known | None:
        """How to compute the values, or None where they are not known (any more)."""
        return self.known if self.known_version == self.life.version else contents.seen_through(self)

    def tolist(self) -> Any:
        """The values as lists; torch refuses this for every subclass, known values or not."""
        return self._read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array; torch refuses this for every subclass, known values or not."""
        return self._read().numpy(force=force)

    def __format__(self, form: str) -> str:
        """Models make names of numbers (`f"expert_{index}"`); torch writes those of a subclass as it prints tensors."""
        known = self.value() if self.dim() == 0 else None
        return object.__format__(self, form) if known is None else format(self._read().item(), form)

    def _read(self) -> Tensor:
        known = self.value()
        if known is None:
            self.flatten()[0].item()  # the mode raises, and says where
        assert known is not None
        with compat.without_modes():
            return known.get()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Ghost({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was called on a ghost tensor outside the trace it belongs to")
