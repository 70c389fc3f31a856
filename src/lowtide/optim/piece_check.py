"""Whether pieces hold what their formats need: a kernel given anything else would write where it must not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.errors import BadPieceError
from lowtide.optim.matrix_rules import MatrixPiece, statistic_sizes
from lowtide.optim.precision import rounding_for, state_names
from lowtide.optim.update_types import BLOCK, UNSIGNED, Moments, Numerics, Piece, Rounding

_Needed = tuple[str, Tensor | None, torch.dtype, int]
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def check_pieces(pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments) -> None:
    """Look at types, sizes and places; nothing is read.

    Raises:
        BadPieceError: A tensor is missing, of another type or size, not flat and dense, or elsewhere.
    """
    numerics = Numerics(rounding=rounding, moments=moments)
    for index, piece in enumerate(pieces):
        _check_types(piece, index)
        if piece.first_element % BLOCK:
            raise BadPieceError(f"piece {index} begins at element {piece.first_element}; cut at multiples of {BLOCK}")
        for what, tensor, dtype, num_elements in _needed(piece, rounding_for(piece.weight, numerics), moments):
            _check(f"the {what} of piece {index}", tensor, dtype, num_elements, pieces[0].weight.device)


def check_matrix_pieces(pieces: Sequence[MatrixPiece], *, rounding: Rounding) -> None:
    """As `check_pieces`, for rules that look at whole parameters.

    Raises:
        BadPieceError: A tensor is missing, of another type or size, not flat and dense, or elsewhere; or the piece is no
            whole parameter.
    """
    numerics = Numerics(rounding=rounding)
    for index, piece in enumerate(pieces):
        _check_types(piece, index)
        if piece.first_element or piece.weight.numel() != math.prod(piece.shape):
            raise BadPieceError(
                f"piece {index} begins at element {piece.first_element} and has {piece.weight.numel()} of the "
                f"{math.prod(piece.shape)} elements of its shape {piece.shape}; {type(piece.rule).__name__} looks at whole "
                "parameters: do not cut them"
            )
        needed = _needed_beside(piece, rounding_for(piece.weight, numerics))
        for name, num_elements in statistic_sizes(piece.shape).items():
            needed.append((name, piece.state.get(name), torch.float32, num_elements))
        for what, tensor, dtype, num_elements in needed:
            _check(f"the {what} of piece {index}", tensor, dtype, num_elements, pieces[0].weight.device)


def _check_types(piece: Piece | MatrixPiece, index: int) -> None:
    if piece.weight.dtype not in _FLOATS or piece.gradient.dtype not in _FLOATS:
        raise BadPieceError(
            f"piece {index} has a weight of {piece.weight.dtype} and a gradient of {piece.gradient.dtype}; updates "
            "take fp32, bf16 and fp16"
        )
    if piece.step < 1:
        raise BadPieceError(f"piece {index} is at step {piece.step}; the first step is 1")


def _needed_beside(piece: Piece | MatrixPiece, rounding: Rounding) -> list[_Needed]:
    """Every tensor of a piece but its states: what it is, itself, its type and its number of elements."""
    num_elements = piece.weight.numel()
    needed: list[_Needed] = [
        ("weight", piece.weight, piece.weight.dtype, num_elements),
        ("gradient", piece.gradient, piece.gradient.dtype, num_elements),
    ]
    if rounding is Rounding.EXACT:
        needed.append(("remainder", piece.remainder, torch.int16, num_elements))
    if rounding is Rounding.MASTER:
        needed.append(("master", piece.master, torch.float32, num_elements))
    return needed


def _needed(piece: Piece, rounding: Rounding, moments: Moments) -> list[_Needed]:
    num_elements = piece.weight.numel()
    needed = _needed_beside(piece, rounding)
    for name in state_names(piece.rule):
        if moments is Moments.INT8:
            code = torch.uint8 if name in UNSIGNED else torch.int8
            scale = f"{name}_scale"
            needed.append((name, piece.state.get(name), code, num_elements))
            needed.append((scale, piece.state.get(scale), torch.float32, -(-num_elements // BLOCK)))
        else:
            dtype = torch.float32 if moments is Moments.FP32 else torch.bfloat16
            needed.append((name, piece.state.get(name), dtype, num_elements))
    return needed


def _check(what: str, tensor: Tensor | None, dtype: torch.dtype, num_elements: int, device: torch.device) -> None:
    if tensor is None:
        raise BadPieceError(f"{what} is missing; its format needs {num_elements} elements of {dtype}")
    if tensor.dtype is not dtype or tensor.shape != (num_elements,) or not tensor.is_contiguous():
        raise BadPieceError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()}; it must be flat and "
            f"dense, with {num_elements} elements of {dtype}"
        )
    if tensor.device != device:
        raise BadPieceError(f"{what} is on {tensor.device}, and the first piece on {device}; bring them together")
