"""Updates on a GPU: one launch for all pieces of a kind, and torch's own operators where there is no Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.optim import reference
from lowtide.optim.device_table import Variant, rows_of, variant_of
from lowtide.optim.piece_check import check_pieces
from lowtide.optim.update_types import Moments, Piece, Rounding


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


def can_launch(device: torch.device) -> bool:
    """Whether updates there are launches; on a GPU without Triton they are not, and a warning says so once."""
    if device.type != "cuda":
        return False
    if not has_triton():
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
    check_pieces(pieces, rounding=rounding, moments=moments)
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
    from lowtide.optim.device_triton import launch

    device = pieces[0].weight.device
    factor, number = (gradient_factor, 1.0) if isinstance(gradient_factor, Tensor) else (None, gradient_factor)
    by_variant: dict[Variant, list[Piece]] = {}
    for piece in pieces:
        by_variant.setdefault(variant_of(piece, rounding, moments), []).append(piece)
    # Triton launches on the current device, which need not be that of the pieces.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for variant, alike in by_variant.items():
            integers, floats, num_tiles = rows_of(alike, number)
            if num_tiles:
                table, numbers = send(integers, torch.int64, device), send(floats, torch.float32, device)
                launch(variant, table, numbers, factor, num_tiles)
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])


def send(rows: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of numbers, on the device."""
    # Pinned, so that the copy waits for nothing. torch keeps the host's memory until the copy is done.
    on_gpu = device.type == "cuda"
    return torch.tensor(rows, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
