"""Whole parameters for the tests of matrix rules: weights with their state, and pieces with the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.optim.reference import join
from lowtide.optim.rules import Adafactor
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import MatrixPiece, Numerics, Rounding, update_key

RULE = Adafactor(lr=1e-2, weight_decay=0.1)
SHAPES: tuple[tuple[int, ...], ...] = ((70, 264), (3, 7), (300,), (5,), (), (4, 3, 2, 5), (0, 4), (2, 600), (70, 3))
"""More than a tile and less, aligned and not, and dimensions of every number."""
FORMATS = [
    (torch.float32, Rounding.NEAREST),
    *((torch.bfloat16, rounding) for rounding in Rounding),
    (torch.float16, Rounding.NEAREST),
    (torch.float16, Rounding.MASTER),
]

Item = tuple[Tensor, ParameterState]


def items(
    dtype: torch.dtype, rounding: Rounding, device: str = "cpu", shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Item]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [(weight, new_state(weight, RULE, Numerics(rounding=rounding))) for weight in weights]


def gradient_for(weight: Tensor, step: int, index: int = 0) -> Tensor:
    """A gradient of another size in each step, so that updates are clipped."""
    generator = torch.Generator().manual_seed(100 * step + index)
    values = torch.randn(weight.shape, generator=generator) * (0.1 + step % 7)
    return torch.empty_like(weight, dtype=torch.float32).copy_(values)


def piece_of(item: Item, gradient: Tensor, step: int, rule: Adafactor = RULE, **more: Any) -> MatrixPiece:
    weight, state = item
    return MatrixPiece(
        weight=flat(weight),
        gradient=flat(gradient),
        state=state.tensors,
        rule=rule,
        step=step,
        shape=tuple(weight.shape),
        stride=weight.stride(),
        remainder=state.remainder,
        master=state.master,
        **more,
    )


def pieces(
    parts: Sequence[Item], step: int, dtype: torch.dtype = torch.float32, rule: Adafactor = RULE
) -> list[MatrixPiece]:
    return [
        piece_of(item, gradient_for(item[0], step, index).to(dtype), step, rule, key=update_key(0, index, step))
        for index, item in enumerate(parts)
    ]


def value_of(item: Item) -> Tensor:
    """What the weight is, with what its rounding keeps."""
    weight, state = item
    if state.remainder is not None:
        return join(flat(weight), state.remainder)
    return flat(weight).float() if state.master is None else state.master


def flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
