"""Offloading of ghosts: the places where a stash looks at memory, for tensors that have none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowtide.activations import saved, stash
from lowtide.activations.saved import MAX_STORAGE_SHARE, Geometry, Span
from lowtide.tracing.ghost.tensor import Ghost


def accept_ghosts() -> None:
    """Make stashes take ghosts in this process: they take plain tensors only, whose storages they copy byte by byte."""
    plain_span, plain_over = saved.span_of, Geometry.over

    def span_of(tensor: Tensor) -> Span | None:
        return _span_of(tensor) if isinstance(tensor, Ghost) else plain_span(tensor)

    def over(geometry: Geometry, memory: Tensor) -> Tensor:
        if not isinstance(memory, Ghost):
            return plain_over(geometry, memory)
        inner = torch.empty(0, dtype=geometry.dtype, device="meta").set_(
            memory.untyped_storage(), geometry.offset, geometry.size, geometry.stride
        )
        return Ghost(inner, memory.device, memory.life)

    stash.span_of = span_of  # type: ignore[attr-defined]  # imported there by name
    Geometry.over = over  # type: ignore[method-assign, assignment]  # its first argument has another name


def _span_of(ghost: Ghost) -> Span | None:
    """As `activations.saved.span_of`, but for ghosts."""
    size = tuple(1 if stride == 0 else count for count, stride in zip(ghost.size(), ghost.stride(), strict=True))
    num_bytes = ghost.untyped_storage().nbytes()
    part_bytes = math.prod(size) * ghost.element_size()
    if not num_bytes or not part_bytes:
        return None
    if num_bytes <= MAX_STORAGE_SHARE * part_bytes:
        return Span(num_bytes=num_bytes, part=None)
    if saved.overlaps(size, tuple(ghost.stride())):
        return None
    part = Geometry(dtype=ghost.dtype, size=size, stride=tuple(ghost.stride()), offset=int(ghost.storage_offset()))
    return Span(num_bytes=part_bytes, part=part)
