"""Wholes and pieces: optimizer state of parameters that are spread over ranks, put together and cut.

State that has the shape of a piece is elementwise, and belongs to the piece's elements. All other state (counts of steps) is the
same for all pieces of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lowtide.memory.chunk import ParameterSpec
from lowtide.memory.parts import Part, Piece
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.passes.spread import ChunkParts

Entries = dict[str, Any]
"""One parameter's optimizer state, as torch keeps it."""


def cut(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's elements of a tensor in the parameter's shape, in memory of their own."""
    spec, whole = piece.span.parameter, piece.whole
    flat = (
        value
        if value.stride() == whole.stride
        else torch.empty_strided(whole.shape, whole.stride, dtype=value.dtype, device=value.device).copy_(value)
    )
    elements = flat.as_strided((math.prod(whole.shape),), (1,))[piece.begin : piece.end].clone()
    return elements.as_strided(spec.shape, spec.stride)


def cut_entries(entries: Mapping[str, Any], piece: Piece) -> Entries:
    """The piece's part of a parameter's state."""
    return {
        key: cut(value, piece) if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.whole.shape else value
        for key, value in entries.items()
    }


def put_together(whole: ParameterSpec, found: Sequence[tuple[Piece, Mapping[str, Any]]]) -> Entries:
    """A parameter's state, from all of its pieces that have some.

    Example:
        >>> from lowtide.memory.chunk import ChunkSpec, Span
        >>> from lowtide.memory.parts import equal_parts
        >>> spec = ParameterSpec(name="w", shape=(8, 32), stride=(32, 1), dtype=torch.float32, requires_grad=True, nbytes=1024)
        >>> parts = equal_parts(ChunkSpec(name="", group="", spans=(Span(parameter=spec, offset_bytes=0),), nbytes=1024), 2)
        >>> value = torch.arange(256.0).view(8, 32)
        >>> pieces = [part.pieces[0] for part in parts]
        >>> again = put_together(spec, [(piece, {"step": 3, "mean": cut(value, piece)}) for piece in pieces])
        >>> again["step"], bool((again["mean"] == value).all())
        (3, True)
    """
    if not found:
        return {}
    piece, first = found[0]
    if piece.is_whole:
        return dict(first)
    entries: Entries = {}
    for key, value in first.items():
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != piece.span.parameter.shape:
            entries[key] = value
            continue
        flat = torch.empty(math.prod(whole.shape), dtype=value.dtype, device="cpu")
        for each, others in found:
            flat[each.begin : each.end] = others[key].reshape(-1)
        entries[key] = flat.as_strided(whole.shape, whole.stride)
    return entries


def whole_states(
    groups: Iterable[ManagedGroup], states: Mapping[int, Mapping[str, Any]], *, is_for_all: bool
) -> Iterable[tuple[ManagedParameter, Entries]]:
    """The state of each parameter that is spread, put together chunk by chunk; a collective call.

    Args:
        groups: All of the session's.
        states: What this rank has, by the `id` of the parameter.
        is_for_all: Whether all ranks get it; else the first of those that share the weights does, and the others nothing.
    """
    for group in groups:
        for chunk in group.stored.chunks if group.is_spread else ():
            parts = chunk.exchange
            assert isinstance(parts, ChunkParts)
            members = [managed for managed in group.members if managed.chunk is chunk]
            mine = {
                managed.spec.name: on_cpu(states[id(managed.parameter)])
                for managed in members
                if managed.has_piece and id(managed.parameter) in states
            }
            sharing = parts.spread.sharing
            found = sharing.exchange(mine) if is_for_all else sharing.collect(mine)
            for managed in members if found is not None else ():
                held = list(_held(managed.spec.name, parts.parts, found or ()))
                if held:
                    yield managed, put_together(managed.spec, held)


def _held(
    name: str, parts: Sequence[Part], found: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[Piece, Mapping[str, Any]]]:
    for part, states in zip(parts, found, strict=True):
        for piece in part.pieces:
            if piece.whole.name == name and name in states:
                yield piece, states[name]


def on_cpu(entries: Mapping[str, Any]) -> Entries:
    """The state with its tensors on the host, in memory of their own."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in entries.items()
    }
