"""Adafactor in torch's own operators, band by band: what the device's kernels are held to, and what the host runs.

Arithmetic is fp32, without fused products, so that it does not depend on where a band begins. Temporaries are a few fp32
copies of one band, some MiB in all, however large the matrix; the gradient is read three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.optim.matrix_rules import COLUMN, ROW, MatrixPiece, matrix_shape
from lowtide.optim.reference import read_master, write_master
from lowtide.optim.update_types import (
    Rounding,
    is_left_out,
)

BAND_ELEMENTS = 1 << 18
"""Of a band, as far as whole rows go: 1 MiB in fp32, which stays in a core's cache between two operators."""


@torch.no_grad()
def update(pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor = 1.0) -> None:
    """Take one step of each piece's rule, in place; see Note [Adafactor in two vectors].

    Args:
        pieces: Whole parameters, in the order that their shape says.
        rounding: How results land in weights of 16 bits; an fp32 weight is not rounded.
        gradient_factor: What gradients are multiplied by in fp32: a number, or a tensor of one element on the pieces'
            device. Where it is a NaN nothing is changed.
    """
    if is_left_out(gradient_factor):
        return
    for piece in pieces:
        if not piece.weight.numel():
            continue
        _move_statistics(piece, gradient_factor)
        scales, size = _scales(piece)
        squares = torch.zeros((), dtype=torch.float64, device=piece.weight.device)
        for band in _bands(piece):
            squares += _row_sums(_direction(band, gradient_factor, scales).square_()).sum(dtype=torch.float64)
        mean = (squares / piece.weight.numel()).float()
        step = _step(piece, size, mean)
        for band in _bands(piece):
            _land(band, _direction(band, gradient_factor, scales).mul_(step), rounding)


def _move_statistics(piece: MatrixPiece, factor: float | Tensor) -> None:
    amount = 1.0 - piece.rule.beta2(piece.step)
    if not piece.is_matrix:
        for band in _bands(piece):
            squares = _gradient(band, factor).square_().add_(piece.rule.eps)
            band.state[ROW].lerp_(squares.view(-1), amount)
        return
    row, column = torch.empty_like(piece.state[ROW]), torch.zeros_like(piece.state[COLUMN])
    for band in _bands(piece):
        squares = _gradient(band, factor).square_().add_(piece.rule.eps)
        first_row = band.first_element // column.numel()
        row[first_row : first_row + squares.shape[0]] = _row_sums(squares)
        column += squares.sum(dim=0)
    piece.state[ROW].lerp_(row, amount)
    piece.state[COLUMN].lerp_(column, amount)


def _scales(piece: MatrixPiece) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """One over the roots of the two vectors, and the size that their product lacks; None for a vector."""
    if not piece.is_matrix:
        return None, None
    size = piece.state[ROW].sum(dtype=torch.float64).float().sqrt_()
    return (piece.state[ROW].rsqrt(), piece.state[COLUMN].rsqrt()), size


def _direction(band: MatrixPiece, factor: float | Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    gradient = _gradient(band, factor)
    if scales is None:
        return gradient.div_(band.state[ROW].sqrt())
    first_row = band.first_element // scales[1].numel()
    return gradient.mul_(torch.outer(scales[0][first_row : first_row + gradient.shape[0]], scales[1]))


def _row_sums(values: Tensor) -> Tensor:
    # A sum to one number is in fp64, here and elsewhere: torch splits it by threads, which does not show so.
    return values.sum(dim=1, dtype=torch.float64 if values.shape[0] == 1 else torch.float32)


def _step(piece: MatrixPiece, size: Tensor | None, mean: Tensor) -> Tensor:
    """What the direction is multiplied by; a NaN in the gradient is one here, and so in all of the weight."""
    root = mean.sqrt()
    if size is None:
        return piece.rule.lr / (root / piece.rule.clip_threshold).clamp_(min=1.0)
    return piece.rule.lr * size / (size * root / piece.rule.clip_threshold).clamp_(min=1.0)


def _land(band: MatrixPiece, moved: Tensor, rounding: Rounding) -> None:
    master = read_master(band, rounding)
    master.mul_(1.0 - band.rule.lr * band.rule.weight_decay).sub_(moved.view(-1))
    write_master(band, master, rounding)


def _gradient(band: MatrixPiece, factor: float | Tensor) -> Tensor:
    """An fp32 copy of a band's gradient, with its factor, in rows."""
    copied = band.gradient.to(torch.float32, copy=True).mul_(factor)
    return copied.view(-1, band.shape[-1]) if band.is_matrix else copied.view(1, -1)


def _bands(piece: MatrixPiece) -> Iterator[MatrixPiece]:
    """Some rows at a time, by the shape alone: in the order of memory, which is that of the rows."""
    columns = matrix_shape(piece.shape)[1] if piece.is_matrix else 1
    num_elements = max(1, BAND_ELEMENTS // columns) * columns
    total = math.prod(piece.shape)
    for first in range(0, total, num_elements):
        part = slice(first, min(first + num_elements, total))
        yield replace(
            piece,
            weight=piece.weight[part],
            gradient=piece.gradient[part],
            state=piece.state if piece.is_matrix else {ROW: piece.state[ROW][part]},
            remainder=None if piece.remainder is None else piece.remainder[part],
            master=None if piece.master is None else piece.master[part],
            first_element=first,
        )
