"""Ghost: a tensor with a shape, a type and a storage of its own, and no memory.

A wrapper around a meta tensor. Torch sees a tensor on the ghost device (or on the host, for what an offloading step keeps
there); the meta tensor inside says which ghosts share a storage and lets torch's own shape functions do the arithmetic.

Values are known where they follow from the batch and from constants alone. Models look at token ids, masks and positions (is
the mask all ones? which rows are hit?), so the trace takes the branch the real step takes. They are recipes, computed on the
host, and only when they are read. Models build masks and positions piece by piece (`mask[:, 0] = 1`), and look at the whole
afterwards: the values of a whole storage are kept too, so that a write through one view is seen through all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide import compat

if TYPE_CHECKING:
    from lowtide.tracing.recorder import Life

MAX_ELEMENTS = 2**27
"""Above this a value is not computed: a quarter of a GiB of booleans takes a second on the host, more is not worth it."""


@dataclass(slots=True, eq=False, repr=False)
class Known:
    """The value of one tensor as a recipe: an operator and its arguments, evaluated at most once."""

    tensor: Tensor | None = None
    func: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: int | None = None
    """Which of the operator's outputs; None where it has one."""

    def get(self) -> Tensor:
        """The value on the host."""
        if self.tensor is None:
            assert self.func is not None
            kwargs = {key: _resolve(value) for key, value in self.kwargs.items()}
            result = self.func(*_resolve(self.args), **kwargs)
            self.tensor = result if self.output is None else result[self.output]
            self.func, self.args, self.kwargs = None, (), {}
        assert self.tensor is not None
        return self.tensor


def _resolve(value: Any) -> Any:
    if isinstance(value, Known):
        return value.get()
    if isinstance(value, list | tuple):
        return type(value)(_resolve(item) for item in value)
    return value


def balanced_choice(rows: torch.Size, choices: int, count: int) -> Callable[[], Tensor]:
    """Indices as a router in balance would pick them: every choice equally often, `count` different ones a row."""

    def make() -> Tensor:
        total = rows.numel()
        flat = torch.arange(total * count).view(total, count) % choices
        return flat.view(*rows, count)

    return make


def _look(content: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    return content.reshape(-1).as_strided(size, stride, offset)


def _patch(content: Tensor, values: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    flat = content.reshape(-1).clone()
    flat.as_strided(size, stride, offset).copy_(values)
    return flat


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
        if known is not None and life.version == 0 and life.content is None and ghost._is_whole():
            life.fill((known, ghost.dtype))  # the first tensor of a new storage
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
        return self.known if self.known_version == self.life.version else self._seen_through()

    def write(self, known: Known | None) -> None:
        """The tensor was written to, with these values; None where they are not known."""
        before, after = self.life.known_content, None
        if known is not None and self._is_whole():
            after = (known, self.dtype)
        elif known is not None and before is not None and before[1] is self.dtype:
            patched = Known(func=_patch, args=(before[0], known, self.size(), self.stride(), self.storage_offset()))
            after = (patched, self.dtype)
        self.life.write(after)
        self.know(known)

    def know(self, known: Known | None) -> None:
        """These are the values now; None where they are not known."""
        self.known, self.known_version = known, self.life.version

    def move_to(self, memory: Tensor, offset: int, life: Life) -> None:
        """Look at other memory: at `offset` of a meta tensor whose storage has this life."""
        self.inner.set_(memory.untyped_storage(), offset, self.shape, self.stride())
        self.life = life

    def _seen_through(self) -> Known | None:
        """The values of a tensor whose storage has been written to through another one; None where they are not known."""
        content = self.life.known_content
        if content is None or content[1] is not self.dtype:
            return None
        if self.inner.untyped_storage().nbytes() > MAX_ELEMENTS:
            return None
        return Known(func=_look, args=(content[0], self.size(), self.stride(), self.storage_offset()))

    def _is_whole(self) -> bool:
        inner = self.inner
        return (
            inner.is_contiguous() and inner.storage_offset() == 0 and inner.untyped_storage().nbytes() == inner.nbytes
        )

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
