"""Updates on a GPU: one launch for all pieces of a kind, a few for whole parameters, and torch's own operators elsewhere.

Pieces are checked first: a kernel given anything else than what its formats need would write where it must not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import BadPieceError
from lowtide.optim import reference
from lowtide.optim.device.table import Variant, batches_of, rows_of, variant_of
from lowtide.optim.update_types import (
    BLOCK,
    UNSIGNED,
    MatrixPiece,
    Moments,
    Numerics,
    Piece,
    Rounding,
    rounding_for,
    state_names,
    statistic_sizes,
)


def can_launch(device: torch.device) -> bool:
    """Whether updates there are launches; on a GPU without Triton they are not, and a warning says so once."""
    if device.type != "cuda":
        return False
    if not compat.has_triton():
        _warn_once()
        return False
    return True


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "device updates run through torch's operators, several times slower than the Triton kernels and with fp32 copies "
        "in passing: the package 'triton' is not installed; run: pip install triton",
        RuntimeWarning,
        stacklevel=3,
    )


def update(
    pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float | Tensor = 1.0
) -> None:
    """What `reference.update` does, within fp32 rounding, in one pass over memory and without temporaries.

    Nothing is waited for. On a GPU without Triton, which is warned of, and on other devices it is the reference itself:
    several times slower, with a few fp32 copies of one piece in passing.

    Args:
        pieces: Parameters or slices of them, on one device.
        rounding: How results land in weights of 16 bits.
        moments: How state is stored.
        gradient_factor: What gradients are multiplied by in fp32: a number, or a tensor of one fp32 element on the
            device. Where that is a NaN nothing is changed: the device itself leaves the update out.

    Raises:
        BadPieceError: A piece does not hold what its formats need, or is not on the others' device.
    """
    _check_pieces(pieces, rounding=rounding, moments=moments)
    if not pieces:
        return
    if not can_launch(pieces[0].weight.device):
        reference.update(pieces, rounding=rounding, moments=moments, gradient_factor=gradient_factor)
        return
    launch_all(pieces, rounding=rounding, moments=moments, gradient_factor=gradient_factor)


def launch_all(
    pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float | Tensor
) -> None:
    """One launch for each variant among pieces that were checked."""
    from lowtide.optim.device.triton import launch

    by_variant: dict[Variant, list[Piece]] = {}
    for piece in pieces:
        by_variant.setdefault(variant_of(piece, rounding, moments), []).append(piece)
    factor, number = _factor_of(gradient_factor)
    with _launching(pieces) as device:
        for variant, alike in by_variant.items():
            integers, floats, num_tiles = rows_of(alike, number)
            if num_tiles:
                table, numbers = _send(integers, torch.int64, device), _send(floats, torch.float32, device)
                launch(variant, table, numbers, factor, num_tiles)


def update_matrices(
    pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor = 1.0
) -> None:
    """What `reference.update_matrices` does, within fp32 rounding on a GPU and the same elsewhere. Nothing is waited for.

    A GPU without Triton, which is warned of, is as any other device.

    Temporaries: on a GPU partial sums, at most `WORKSPACE_BYTES` or, where that is more, those of the largest matrix, see
    `num_partials`; elsewhere some MiB. A weight whose memory is in another order than its shape says, such as a convolution's
    in channels_last, is copied whole, with its gradient.

    Args:
        pieces: Whole parameters, on one device.
        rounding: How results land in weights of 16 bits.
        gradient_factor: What gradients are multiplied by in fp32: a number, or a tensor of one fp32 element on the
            device. Where that is a NaN nothing is changed: the device itself leaves the update out.

    Raises:
        BadPieceError: A piece does not hold what its formats need, or is not on the others' device.
    """
    _check_matrix_pieces(pieces, rounding=rounding)
    with torch.no_grad():
        ordered = [piece if _is_in_order(piece) else _in_order(piece) for piece in pieces]
        if pieces and can_launch(pieces[0].weight.device):
            launch_matrices(ordered, rounding=rounding, gradient_factor=gradient_factor)
        else:
            reference.update_matrices(ordered, rounding=rounding, gradient_factor=gradient_factor)
        for piece, other in zip(pieces, ordered, strict=True):
            if other is not piece:
                _put_back(piece, other)


def launch_matrices(pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor) -> None:
    """Five launches for each batch of matrices and three for each of vectors, which were checked, in the order of their shape."""
    from lowtide.optim.device.matrix_triton import launch

    factor, number = _factor_of(gradient_factor)
    with _launching(pieces) as device:
        for batch in batches_of(pieces, rounding, number):
            table, numbers = _send(batch.integers, torch.int64, device), _send(batch.floats, torch.float32, device)
            workspace = torch.empty(batch.num_partials, dtype=torch.float32, device=device)
            launch(batch, table, numbers, workspace, factor)


def _factor_of(gradient_factor: float | Tensor) -> tuple[Tensor | None, float]:
    """The factor that the device reads itself, and the number that rows have."""
    return (gradient_factor, 1.0) if isinstance(gradient_factor, Tensor) else (None, gradient_factor)


@contextlib.contextmanager
def _launching(pieces: Sequence[Piece] | Sequence[MatrixPiece]) -> Iterator[torch.device]:
    """The pieces' device; afterwards their weights count as written."""
    device = pieces[0].weight.device
    # Triton launches on the current device, which need not be that of the pieces.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield device
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])


def _send(rows: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of numbers, on the device."""
    # Pinned, so that the copy waits for nothing. torch keeps the host's memory until the copy is done.
    on_gpu = device.type == "cuda"
    return torch.tensor(rows, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def _is_in_order(piece: MatrixPiece) -> bool:
    """Whether its memory is in the order of its shape; how far apart a single element's neighbours are says nothing."""
    expected = 1
    for length, stride in zip(reversed(piece.shape), reversed(piece.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _in_order(piece: MatrixPiece) -> MatrixPiece:
    """A copy of it whose memory is in the order of its shape; the states, which are so always, are its own."""

    def copied(flat: Tensor) -> Tensor:
        return flat.as_strided(piece.shape, piece.stride).contiguous().view(-1)

    return replace(
        piece,
        weight=copied(piece.weight),
        gradient=copied(piece.gradient),
        remainder=None if piece.remainder is None else copied(piece.remainder),
        master=None if piece.master is None else copied(piece.master),
    )


def _put_back(piece: MatrixPiece, other: MatrixPiece) -> None:
    for flat, changed in (
        (piece.weight, other.weight),
        (piece.remainder, other.remainder),
        (piece.master, other.master),
    ):
        if flat is not None and changed is not None:
            flat.as_strided(piece.shape, piece.stride).copy_(changed.view(piece.shape))


_Needed = tuple[str, Tensor | None, torch.dtype, int]
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _check_pieces(pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments) -> None:
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


def _check_matrix_pieces(pieces: Sequence[MatrixPiece], *, rounding: Rounding) -> None:
    """As `_check_pieces`, for rules that look at whole parameters.

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
