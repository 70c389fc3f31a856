"""What stands for a saved tensor while its group's forward is past and its backward is still to come, and the memory behind it.

It is the tensor itself (`Held`), or, where it goes to the host and comes back, a `Span` of memory. A tensor usually goes with
its whole storage: several views of one storage (queries, keys and values of one matmul, a matrix and its transpose) go once
and come back as they were. A small view of a large storage goes alone, and comes back without the gaps that it had there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lowtide import compat
from lowtide.errors import SavedTensorChangedError

MAX_SPREAD = 2
"""A view that lies scattered over more than so many times its bytes comes back dense: its gaps would be memory, too."""
MAX_STORAGE_SHARE = 4
"""A storage of up to so many times the tensor's bytes goes as a whole. Three views of one matmul are the usual case."""


class Saved(Protocol):
    """In place of a tensor that autograd, or a checkpoint, wanted to keep."""

    def peek(self) -> torch.Tensor:
        """The tensor, which will be asked for again in this backward."""

    def take(self) -> torch.Tensor:
        """The tensor, for its use in this backward."""


def take(saved: Saved) -> torch.Tensor:
    """The tensor, for its use in this backward: what hooks on saved tensors call."""
    return saved.take()


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

    take = peek


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else compat.version_of(tensor)


def changed(dtype: torch.dtype, size: Sequence[int]) -> SavedTensorChangedError:
    """The error for a tensor that was written to after it was saved. Under hooks torch does not look itself."""
    return SavedTensorChangedError(
        f"a tensor of {dtype} {tuple(size)} that a group's backward needs was written to in place after it "
        "was saved; write the operation out of place (x = x + y for x += y), or give the group the policy Keep"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this geometry over the storage of another."""
        with compat.without_torch_function():
            return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
                memory.untyped_storage(), self.offset, self.size, self.stride
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What goes: a whole storage, or one view of it."""

    num_bytes: int
    part: Geometry | None
    """The part that goes, without repetition by strides of 0; None for the whole storage."""

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is copied to the host."""
        whole = Geometry(dtype=torch.uint8, size=(self.num_bytes,), stride=(1,), offset=0)
        return (self.part or whole).over(tensor)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The host's bytes, of the shape of the source."""
        return buffer if self.part is None else buffer.view(self.part.dtype).view(self.part.size)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory on the device to copy it back to."""
        if self.part is None:
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        return torch.empty_strided(self.part.size, _near(self.part), dtype=self.part.dtype, device=device)

    def restored(self, geometry: Geometry, memory: torch.Tensor, *, is_source: bool) -> torch.Tensor:
        """The tensor of that geometry over the source, or over memory that was made by `empty`."""
        if self.part is None or is_source:
            return geometry.over(memory)
        # Places that share memory go on doing so.
        stride = tuple(new if old else 0 for new, old in zip(_near(self.part), geometry.stride, strict=True))
        return Geometry(dtype=geometry.dtype, size=geometry.size, stride=stride, offset=0).over(memory)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The place of the tensor in its storage."""
    return Geometry(
        dtype=tensor.dtype,
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def span_of(tensor: torch.Tensor) -> Span | None:
    """What would go to the host for a tensor; None where it must stay: it has no plain memory, or overlaps itself."""
    # A tensor of a trace stands for a plain one.
    is_plain = type(tensor) is torch.Tensor or compat.is_stand_in(tensor)
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return None
    storage = compat.plain_storage(tensor)
    if storage is None or not storage.nbytes() or not tensor.numel():
        return None
    size = tuple(1 if stride == 0 else count for count, stride in zip(tensor.size(), tensor.stride(), strict=True))
    part_bytes = math.prod(size) * tensor.element_size()
    if storage.nbytes() <= MAX_STORAGE_SHARE * part_bytes:
        return Span(num_bytes=storage.nbytes(), part=None)
    if _overlaps(size, tuple(tensor.stride())):
        return None
    return Span(num_bytes=part_bytes, part=replace(geometry_of(tensor), size=size))


def _near(part: Geometry) -> tuple[int, ...]:
    """The strides with which a part comes back: its own, or dense ones in the same order of dimensions."""
    num_elements = math.prod(part.size)
    reach = 1 + sum((count - 1) * step for count, step in zip(part.size, part.stride, strict=True))
    if reach <= MAX_SPREAD * num_elements:
        return part.stride
    dense = list(part.stride)
    step = 1
    for dim in sorted(range(len(dense)), key=lambda dim: (part.stride[dim], -dim)):
        if part.size[dim] > 1:
            dense[dim] = step
            step *= part.size[dim]
    return tuple(dense)


def _overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor may share memory."""
    reached = 0
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1):
        if step <= reached:
            return True
        reached += step * (count - 1)
    return False
