"""Wholes and pieces: values and optimizer state of parameters that are spread over ranks, put together and cut.

State that has the shape of a piece is elementwise, and belongs to the piece's elements. So does each tensor that our own kernels
keep: they are flat, in the order of the weight's memory, and pieces begin where a block of an 8-bit state does. All other state
(counts of steps) is the same for all pieces of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.memory.chunk import ParameterSpec
from lowtide.memory.parts import Part, Piece
from lowtide.optim.state import ParameterState
from lowtide.optim.update_types import BLOCK, SCALE
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.passes.spread import ChunkParts

Entries = dict[Any, Any]
"""One parameter's optimizer state, as torch keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """A parameter and what its updates keep, as a whole or of a piece."""

    weight: torch.Tensor | None = None
    state: Entries | ParameterState | None = None

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        """The same with other tensors, such as copies on the host."""
        weight = None if self.weight is None else change(self.weight)
        if isinstance(self.state, ParameterState):
            return Values(
                weight=weight, state=self.state.with_tensors([change(each) for each in self.state.all_tensors()])
            )
        state = None if self.state is None else {key: _each(change, value) for key, value in self.state.items()}
        return Values(weight=weight, state=state)


def _each(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return change(value) if isinstance(value, torch.Tensor) else value


def copied(value: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in memory of its own."""
    return value.detach().to("cpu", copy=True)


def described(value: torch.Tensor) -> torch.Tensor:
    """A tensor without values that looks the same; one number stays what it is."""
    return (
        copied(value)
        if not value.dim()
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    )


# -- cut ---------------------------------------------------------------------------------------------------------------


def cut(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's elements of a tensor in the parameter's shape, in memory of their own."""
    spec, whole = piece.span.parameter, piece.whole
    if value.stride() != whole.stride:
        value = torch.empty_strided(whole.shape, whole.stride, dtype=value.dtype, device=value.device).copy_(value)
    elements = value.as_strided((math.prod(whole.shape),), (1,), value.storage_offset())[
        piece.begin : piece.end
    ].clone()
    return elements.as_strided(spec.shape, spec.stride)


def cut_state(state: Entries | ParameterState, piece: Piece) -> Entries | ParameterState:
    """The piece's part of a parameter's state."""
    if piece.is_whole:
        return state
    if isinstance(state, ParameterState):
        found = replace(state, tensors={name: _slice(name, each, piece) for name, each in state.tensors.items()})
        found.remainder = None if state.remainder is None else _slice("", state.remainder, piece)
        found.master = None if state.master is None else _slice("", state.master, piece)
        found.replace_tensors(found.all_tensors())
        return found
    return {
        key: cut(value, piece) if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.whole.shape else value
        for key, value in state.items()
    }


def _slice(name: str, flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    unit = BLOCK if name.endswith(SCALE) else 1
    return flat[piece.begin // unit : -(-piece.end // unit)].clone()


# -- put together ------------------------------------------------------------------------------------------------------


def put_together(whole: ParameterSpec, found: Sequence[tuple[Piece, Values]]) -> Values:
    """A parameter's values, from all of its pieces, in order.

    Example:
        >>> from lowtide.memory.chunk import ChunkSpec, Span
        >>> from lowtide.memory.parts import equal_parts
        >>> spec = ParameterSpec(name="w", shape=(8, 32), stride=(32, 1), dtype=torch.float32, requires_grad=True, nbytes=1024)
        >>> parts = equal_parts(ChunkSpec(name="", group="", spans=(Span(parameter=spec, offset_bytes=0),), nbytes=1024), 2)
        >>> value = torch.arange(256.0).view(8, 32)
        >>> pieces = [part.pieces[0] for part in parts]
        >>> again = put_together(spec, [(each, Values(weight=cut(value, each), state={"step": 3})) for each in pieces])
        >>> again.state, bool((again.weight == value).all())
        ({'step': 3}, True)
    """
    if not found or found[0][0].is_whole:
        return found[0][1] if found else Values()
    pieces, values = [piece for piece, _ in found], [each for _, each in found]
    weights = [each.weight for each in values if each.weight is not None]
    weight = _joined(whole, weights) if weights else None
    first = values[0].state
    if first is None:
        return Values(weight=weight)
    if isinstance(first, ParameterState):
        alike = zip(
            *(each.state.all_tensors() for each in values if isinstance(each.state, ParameterState)), strict=True
        )
        return Values(weight=weight, state=first.with_tensors([torch.cat(tensors) for tensors in alike]))
    state: Entries = {}
    for key, value in first.items():
        is_elementwise = isinstance(value, torch.Tensor) and tuple(value.shape) == pieces[0].span.parameter.shape
        parts = [each.state[key] for each in values if isinstance(each.state, dict)] if is_elementwise else []
        state[key] = _joined(whole, parts) if is_elementwise else value
    return Values(weight=weight, state=state)


def _joined(whole: ParameterSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts]).as_strided(whole.shape, whole.stride)


def whole_values(
    groups: Iterable[ManagedGroup], values_of: Callable[[ManagedParameter], Values], *, is_for_all: bool
) -> Iterator[tuple[ManagedParameter, Values]]:
    """The values of each parameter that is spread, put together chunk by chunk; a collective call.

    Args:
        groups: All of the session's.
        values_of: What this rank has of a parameter.
        is_for_all: Whether all ranks get them; else the first of those that share the weights does, and the others nothing.
    """
    for group in groups:
        for chunk in group.stored.chunks if group.is_spread else ():
            parts = chunk.exchange
            assert isinstance(parts, ChunkParts)
            members = [managed for managed in group.members if managed.chunk is chunk]
            mine = {managed.spec.name: values_of(managed) for managed in members if managed.piece is not None}
            sharing = parts.spread.sharing
            found = sharing.exchange(mine) if is_for_all else sharing.collect(mine)
            for managed in members if found is not None else ():
                yield managed, put_together(managed.spec, list(_held(managed.spec.name, parts.parts, found or ())))


def _held(name: str, parts: Sequence[Part], found: Sequence[Mapping[str, Values]]) -> Iterator[tuple[Piece, Values]]:
    for part, values in zip(parts, found, strict=True):
        for piece in part.pieces:
            if piece.whole.name == name:
                yield piece, values[name]
