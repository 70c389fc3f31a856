"""Updates on a GPU: one launch for all pieces of a kind, a few for whole parameters, and torch's own operators elsewhere.

Pieces are checked first: a kernel given anything else than what its formats need would write where it must not.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lowtide import compat
from lowtide.optim import reference
from lowtide.optim.device.table import (
    ALIGNMENT,
    COLUMNS,
    NUM_FLOATS,
    Variant,
    batches_of,
    floats_of,
    rows_of,
    variant_of,
)
from lowtide.optim.update_types import (
    MatrixPiece,
    Moments,
    Piece,
    Rounding,
    Turn,
    addresses_of,
    check_pieces,
)

_WEIGHT, _GRADIENT, _KEY = map(COLUMNS.index, ("weight", "gradient", "key"))


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
) -> Launches | None:
    """What `reference.update` does, within fp32 rounding, in one pass over memory and without temporaries.

    Nothing is waited for. On a GPU without Triton, which is warned of, and on other devices it is the reference itself:
    several times slower, with a few fp32 copies of one piece in passing.

    Args:
        pieces: Parameters or slices of them, on one device.
        rounding: How results land in weights of 16 bits.
        moments: How state is stored.
        gradient_factor: What gradients are multiplied by in fp32: a number, or a tensor of one fp32 element on the
            device. Where that is a NaN nothing is changed: the device itself leaves the update out.

    Returns:
        What makes the next update of the same parameters; None where it is the reference.

    Raises:
        BadPieceError: A piece does not hold what its formats need, or is not on the others' device.
    """
    if not pieces:
        return None
    device = pieces[0].weight.device
    check_pieces(pieces, rounding=rounding, moments=moments, device=device)
    if not can_launch(device):
        reference.update(pieces, rounding=rounding, moments=moments, gradient_factor=gradient_factor)
        return None
    return launch_all(pieces, rounding=rounding, moments=moments, gradient_factor=gradient_factor)


def launch_all(
    pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float | Tensor
) -> Launches:
    """One launch for each variant among pieces that were checked."""
    launches = Launches(pieces, rounding, moments)
    launches.run(Turn.of(pieces), gradient_factor)
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])
    return launches


@dataclass(frozen=True, slots=True)
class _Part:
    """The pieces of one variant: their numbers, and the table of them, in one memory that goes to the device in one copy."""

    variant: Variant
    places: list[int]
    """Which of all pieces they are."""
    num_tiles: int
    memory: Tensor
    numbers: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    table: np.ndarray[tuple[int, int], np.dtype[np.int64]]

    @classmethod
    def of(cls, variant: Variant, places: list[int], pieces: Sequence[Piece]) -> _Part:
        """The numbers stand first: their size keeps the table aligned."""
        rows, num_tiles = rows_of([pieces[place] for place in places])
        number_bytes = 4 * NUM_FLOATS * len(rows)
        memory = torch.empty(number_bytes + 8 * len(COLUMNS) * len(rows), dtype=torch.uint8, device="cpu")
        flat = memory.numpy()
        table = flat[number_bytes:].view(np.int64).reshape(len(rows), -1)
        table[:] = rows
        return cls(
            variant, places, num_tiles, memory, flat[:number_bytes].view(np.float32).reshape(len(rows), -1), table
        )

    def sent(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table and the numbers, on the device."""
        # Pinned, so that the copy waits for nothing. torch keeps the host's memory until the copy is done.
        on_gpu = device.type == "cuda"
        pinned = torch.empty(len(self.memory), dtype=torch.uint8, device="cpu", pin_memory=on_gpu).copy_(self.memory)
        numbers, table = pinned.to(device, non_blocking=on_gpu).split([self.numbers.nbytes, self.table.nbytes])
        return table.view(torch.int64).view(self.table.shape), numbers.view(torch.float32).view(self.numbers.shape)


class Launches:
    """The launches of an update of pieces that were checked; see `Repeatable`."""

    def __init__(self, pieces: Sequence[Piece], rounding: Rounding, moments: Moments) -> None:
        self._device = pieces[0].weight.device
        variants = [variant_of(piece, rounding, moments) for piece in pieces]
        self._parts = [
            _Part.of(kind, [place for place, variant in enumerate(variants) if variant == kind], pieces)
            for kind in dict.fromkeys(variants)
        ]
        # Weights and gradients may lie elsewhere the next time; the rest and the sizes stay.
        self._is_aligned = [variant.is_aligned for variant in variants]
        self._can_be_aligned = [
            not any(number % ALIGNMENT for number in (*addresses_of(piece)[2:], piece.weight.numel()))
            for piece in pieces
        ]

    def fits(self, turn: Turn) -> bool:
        """Whether as many of these addresses allow wide loads and stores."""
        addresses = zip(turn.weights, turn.gradients, self._can_be_aligned, strict=True)
        return self._is_aligned == [can and not (one | other) % ALIGNMENT for one, other, can in addresses]

    def run(self, turn: Turn, gradient_factor: float | Tensor) -> None:
        """Launch. The caller counts the weights as written: a backward through the old values is caught so."""
        from lowtide.optim.device.triton import launch

        factor, number = _factor_of(gradient_factor)
        made: dict[tuple[int, int], list[float]] = {}  # by the rule's id: most pieces have the same
        for rule, step in turn.rules:
            if (id(rule), step) not in made:
                made[id(rule), step] = floats_of(rule, step, number)
        # Not by numpy, which warns of numbers beyond fp32.
        rows = dict(zip(made, torch.tensor([*made.values()], dtype=torch.float32, device="cpu").numpy(), strict=True))
        with _current(self._device):
            for part in self._parts:
                part.table[:, _WEIGHT] = [turn.weights[place] for place in part.places]
                part.table[:, _GRADIENT] = [turn.gradients[place] for place in part.places]
                part.table[:, _KEY] = [turn.keys[place] for place in part.places]
                chosen = [turn.rules[place] for place in part.places]
                part.numbers[:] = [rows[id(rule), step] for rule, step in chosen] if len(rows) > 1 else [*rows.values()]
                if part.num_tiles:
                    launch(part.variant, *part.sent(self._device), factor, part.num_tiles)


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
    if not pieces:
        return
    device = pieces[0].weight.device
    check_pieces(pieces, rounding=rounding, device=device)
    with torch.no_grad():
        ordered = [piece if _is_in_order(piece) else _in_order(piece) for piece in pieces]
        if can_launch(device):
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
    device = pieces[0].weight.device
    with _current(device):
        for batch in batches_of(pieces, rounding, number):
            table, numbers = _send(batch.integers, torch.int64, device), _send(batch.floats, torch.float32, device)
            workspace = torch.empty(batch.num_partials, dtype=torch.float32, device=device)
            launch(batch, table, numbers, workspace, factor)
    # As for any operation in place: a backward through the old values is caught.
    torch.autograd.graph.increment_version([piece.weight for piece in pieces])


def _factor_of(gradient_factor: float | Tensor) -> tuple[Tensor | None, float]:
    """The factor that the device reads itself, and the number that rows have."""
    return (gradient_factor, 1.0) if isinstance(gradient_factor, Tensor) else (None, gradient_factor)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the pieces."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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
