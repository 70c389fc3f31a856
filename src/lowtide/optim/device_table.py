"""What the device kernel is told of its pieces: one row of numbers and one of addresses for each.

Everything that changes from step to step, or from group to group, is a number in a row: a kernel is compiled once for a
rule and its formats, and one launch takes pieces with different rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.optim.precision import state_names
from lowtide.optim.update_types import Adam, ElementwiseRule, Moments, Piece, Rounding, Sgd

MAX_STATES = 3
COLUMNS = (
    "weight",
    "gradient",
    "kept",
    *(f"state_{slot}" for slot in range(MAX_STATES)),
    *(f"scale_{slot}" for slot in range(MAX_STATES)),
    "size",
    "key",
    "first_element",
    "end_tile",
)
"""Addresses; what the rounding keeps is a remainder or a master. Then the elements in the piece, and the tile after its
last, counted through all pieces."""
NUM_FLOATS = 8
"""What a rule needs at most; their order is that of `_floats`."""
TILE = 2048
"""Elements that one program updates: 16 blocks of the 8-bit format."""
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a kernel is compiled for. Pieces of one variant share a launch."""

    rule: str
    rounding: Rounding
    moments: Moments
    weight: torch.dtype
    gradient: torch.dtype
    num_states: int
    is_decoupled: bool = False
    nesterov: bool = False
    is_aligned: bool = True
    """Whether every address and size is a multiple of 16, so that loads and stores are wide."""


def variant_of(piece: Piece, rounding: Rounding, moments: Moments) -> Variant:
    """The kernel that a piece needs. A weight in fp32 is not rounded."""
    rule = piece.rule
    return Variant(
        rule=type(rule).__name__.lower(),
        rounding=Rounding.NEAREST if piece.weight.dtype is torch.float32 else rounding,
        moments=moments,
        weight=piece.weight.dtype,
        gradient=piece.gradient.dtype,
        num_states=len(state_names(rule)),
        is_decoupled=isinstance(rule, Adam) and rule.is_decoupled,
        nesterov=isinstance(rule, Sgd) and rule.nesterov,
        is_aligned=_is_aligned(piece),
    )


def rows_of(pieces: Sequence[Piece], gradient_factor: float) -> tuple[list[list[int]], list[list[float]], int]:
    """The integers and the floats of each piece, and how many tiles there are."""
    integers, floats, num_tiles = [], [], 0
    for piece in pieces:
        num_elements = piece.weight.numel()
        num_tiles += -(-num_elements // TILE)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(piece)]
        integers.append([*addresses, num_elements, piece.key, piece.first_element, num_tiles])
        floats.append(_floats(piece.rule, piece.step, gradient_factor))
    return integers, floats, num_tiles


def _is_aligned(piece: Piece) -> bool:
    addresses = (tensor.data_ptr() for tensor in _tensors(piece) if tensor is not None)
    return piece.weight.numel() % ALIGNMENT == 0 and all(address % ALIGNMENT == 0 for address in addresses)


def _tensors(piece: Piece) -> list[torch.Tensor | None]:
    """In the order of the addresses."""
    names = state_names(piece.rule)
    gap = [None] * (MAX_STATES - len(names))
    states = [piece.state[name] for name in names]
    scales = [piece.state.get(f"{name}_scale") for name in names]
    kept = piece.master if piece.remainder is None else piece.remainder
    return [piece.weight, piece.gradient, kept, *states, *gap, *scales, *gap]


def _floats(rule: ElementwiseRule, step: int, gradient_factor: float) -> list[float]:
    """Computed in fp64, as torch does it, and rounded to fp32 once. The first three are the same for each rule."""
    factor = -gradient_factor if rule.maximize else gradient_factor
    if isinstance(rule, Sgd):
        numbers = [rule.momentum, 1 - rule.dampening, float(step == 1)]
        return _padded([factor, rule.lr, rule.weight_decay, *numbers])
    if isinstance(rule, Adam):
        decay = 1 - rule.lr * rule.weight_decay if rule.is_decoupled else rule.weight_decay
        corrected_lr, correction = rule.lr / (1 - rule.beta1**step), (1 - rule.beta2**step) ** 0.5
        numbers = [1 - rule.beta1, rule.beta2, 1 - rule.beta2, correction, rule.eps]
        return _padded([factor, corrected_lr, decay, *numbers])
    return _padded([factor, rule.lr, 1 - rule.lr * rule.weight_decay, 1 - rule.beta1, 1 - rule.beta2])


def _padded(numbers: list[float]) -> list[float]:
    return numbers + [0.0] * (NUM_FLOATS - len(numbers))
