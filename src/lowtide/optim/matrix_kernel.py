"""Updates of whole parameters, wherever they lie: a few launches on a GPU, torch's own operators elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.optim import matrix_reference
from lowtide.optim.device_kernel import can_launch, send
from lowtide.optim.matrix_rules import MatrixPiece
from lowtide.optim.matrix_table import batches_of
from lowtide.optim.piece_check import check_matrix_pieces
from lowtide.optim.update_types import Rounding


def update(pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor = 1.0) -> None:
    """What `matrix_reference.update` does, within fp32 rounding on a GPU and the same elsewhere. Nothing is waited for.

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
    check_matrix_pieces(pieces, rounding=rounding)
    with torch.no_grad():
        ordered = [piece if _is_in_order(piece) else _in_order(piece) for piece in pieces]
        if pieces and can_launch(pieces[0].weight.device):
            launch_all(ordered, rounding=rounding, gradient_factor=gradient_factor)
        else:
            matrix_reference.update(ordered, rounding=rounding, gradient_factor=gradient_factor)
        for piece, other in zip(pieces, ordered, strict=True):
            if other is not piece:
                _put_back(piece, other)


def launch_all(pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor) -> None:
    """Five launches for each batch of matrices and three for each of vectors, which were checked, in the order of their shape."""
    from lowtide.optim.matrix_triton import launch

    device = pieces[0].weight.device
    factor, number = (gradient_factor, 1.0) if isinstance(gradient_factor, Tensor) else (None, gradient_factor)
    # Triton launches on the current device, which need not be that of the pieces.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for batch in batches_of(pieces, rounding, number):
            table, numbers = send(batch.integers, torch.int64, device), send(batch.floats, torch.float32, device)
            workspace = torch.empty(batch.num_partials, dtype=torch.float32, device=device)
            launch(batch, table, numbers, workspace, factor)
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])


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
