"""Rules that look at a parameter as a whole, as plain data: Adafactor, and the pieces that it is given.

Note [Adafactor in two vectors]
A tensor with two dimensions or more is a matrix, of rows as long as its last dimension; its second moment is kept as the
sums of its rows and of its columns. Step t takes the gradient g, in fp32 and with its factor, and `s = g * g + eps`:

    beta2 = min(1 - t ** decay_rate, max_beta2)
    row  <- beta2 * row + (1 - beta2) * (sums of s over each row);    col likewise
    d     = g * (row ** -0.5 * col ** -0.5)                            the direction, up to a factor
    size  = sqrt(sum of row)                                           that factor
    step  = lr * size / max(1, size * sqrt(mean of d * d) / clip_threshold)
    weight <- weight * (1 - lr * weight_decay) - step * d

A vector or a number keeps its second moment whole, under `row`: there `d = g / sqrt(row)`, and `size` is 1. Nothing of the
weight's size is made: d is computed twice, from the gradient, and lands in the weight as the rounding says. The vectors
are fp32 whatever the weight is, and whatever format was chosen for moments: they are a thousandth of it.

Note [The order of sums]
A sum in fp32 depends on its order. The reference sums bands of rows, `BAND_ELEMENTS` elements long, and adds the bands
from the first to the last; the device sums tiles, and then the tiles. So each gives the same bits every time, wherever
chunks begin and end, and both agree within fp32 rounding. In each the sums do not depend on the weight's format, so that
an exact bf16 weight is the master bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.optim.precision import state_names
from lowtide.optim.update_types import ElementwiseRule, Moments

ROW = "row"
COLUMN = "col"
STATISTICS = frozenset({ROW, COLUMN})
"""States that are fp32 whatever format was chosen for moments; named as `lowtide.optim.Adafactor` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """`lowtide.optim.Adafactor`; see Note [Adafactor in two vectors]."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-30
    decay_rate: float = -0.8
    max_beta2: float = 0.999
    clip_threshold: float = 1.0

    def beta2(self, step: int) -> float:
        """How much of the second moment stays in this step."""
        return min(1.0 - math.pow(step, self.decay_rate), self.max_beta2)


Rule = ElementwiseRule | Adafactor
"""What the kernels run."""


@dataclass(slots=True, kw_only=True)
class MatrixPiece:
    """One whole parameter to be updated in place. All tensors are flat, dense and of one device."""

    weight: torch.Tensor
    """fp32, bf16 or fp16; in the order of its memory."""
    gradient: torch.Tensor
    """fp32, bf16 or fp16, in the weight's order; not changed."""
    state: dict[str, torch.Tensor]
    """By name, fp32: of the sizes that `statistic_sizes` says."""
    rule: Adafactor
    step: int
    """Of this update, from 1."""
    shape: tuple[int, ...]
    """Of the parameter."""
    stride: tuple[int, ...]
    """In elements: a dense weight may lie in another order than its shape says."""
    remainder: torch.Tensor | None = None
    """int16, with EXACT; in the weight's order."""
    master: torch.Tensor | None = None
    """fp32, with MASTER; in the weight's order."""
    key: int = 0
    """32 bits, with STOCHASTIC: another for each parameter and step; see `random_bits`."""
    first_element: int = 0
    """Where a band of it begins; a whole parameter begins at 0."""

    @property
    def is_matrix(self) -> bool:
        """Whether its second moment is two vectors."""
        return len(self.shape) > 1


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of two dimensions or more, as `lowtide.optim.Adafactor` sees it.

    Example:
        >>> matrix_shape((4, 3, 2, 5))
        (24, 5)
    """
    return math.prod(shape[:-1]), shape[-1]


def statistic_sizes(shape: Sequence[int]) -> dict[str, int]:
    """The states of a parameter of this shape, and how many numbers each has.

    Example:
        >>> statistic_sizes((2048, 5400)), statistic_sizes((7,)), statistic_sizes(())
        ({'row': 2048, 'col': 5400}, {'row': 7}, {'row': 1})
    """
    if len(shape) < 2:
        return {ROW: math.prod(shape)}
    rows, columns = matrix_shape(shape)
    return {ROW: rows, COLUMN: columns}


def names_of_states(rule: Rule, shape: Sequence[int]) -> tuple[str, ...]:
    """The states that a rule keeps for a parameter of this shape."""
    return tuple(statistic_sizes(shape)) if isinstance(rule, Adafactor) else state_names(rule)


def stored_as(name: str, moments: Moments) -> Moments:
    """The format of a state, where `moments` was asked for."""
    return Moments.FP32 if name in STATISTICS else moments
