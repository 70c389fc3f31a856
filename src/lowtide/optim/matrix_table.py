"""What the device's kernels are told of whole parameters: rows of numbers, and room for partial sums.

A row begins as the elementwise kernel's rows do, so that both read and write weights with the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.optim.device_table import ALIGNMENT
from lowtide.optim.device_table import COLUMNS as ELEMENTWISE_COLUMNS
from lowtide.optim.matrix_rules import COLUMN, ROW, MatrixPiece, matrix_shape
from lowtide.optim.update_types import Rounding

COLUMNS = (
    *ELEMENTWISE_COLUMNS,
    "rows",
    "columns",
    "row_sums",
    "column_sums",
    "totals",
    "norms",
    "end_statistic",
)
"""`state_0` is the vector of rows and `state_1` that of columns. A vector lies in rows of `TILE_COLUMNS`. The four before the
last say where the workspace has sums: of rows by tile, of columns by tile, of the vector of rows, and of squares of the
update by tile."""
FLOATS = ("factor", "lr", "decay", "amount", "eps", "clip_threshold", "num_elements")
TILE_ROWS, TILE_COLUMNS = 64, 256
"""What one program sums or updates. Partial sums are 1/64 + 1/256 of the elements, a fiftieth of a matrix in fp32, where
rows are long; of rows shorter than a tile each has a sum of its own, and a matrix of 64 columns is partial sums to 3%."""
STATISTICS = 64
"""Numbers of a vector that one program moves."""
WORKSPACE_BYTES = 8 << 20
"""For the partial sums of a batch of matrices, unless one needs more by itself. Fewer launches want more."""
VECTOR_ELEMENTS = 8
"""What the length of rows must be a multiple of for wide loads and stores: 16 bytes in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixVariant:
    """What kernels are compiled for. Pieces of one variant share launches."""

    rounding: Rounding
    weight: torch.dtype
    gradient: torch.dtype
    is_vector: bool
    is_aligned: bool
    """Whether addresses and rows allow wide loads and stores."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Pieces that share launches."""

    variant: MatrixVariant
    integers: list[list[int]] = field(default_factory=list)
    """In the order of `COLUMNS`, a row for each piece."""
    floats: list[list[float]] = field(default_factory=list)
    """In the order of `FLOATS`."""
    num_tiles: int = 0
    num_statistics: int = 0
    """Programs that move vectors."""
    num_partials: int = 0
    """Numbers of the workspace: a step size for each piece, and then the sums of each."""


def batches_of(pieces: Sequence[MatrixPiece], rounding: Rounding, gradient_factor: float) -> Iterator[Batch]:
    """The pieces that are not empty, in as few batches as their variants and the workspace allow."""
    by_variant: dict[MatrixVariant, list[MatrixPiece]] = {}
    for piece in pieces:
        if piece.weight.numel():
            by_variant.setdefault(variant_of(piece, rounding), []).append(piece)
    for variant, alike in by_variant.items():
        together: list[MatrixPiece] = []
        num_bytes = 0
        for piece in alike:
            needed = 4 * (1 + num_partials(piece.shape))
            if together and num_bytes + needed > WORKSPACE_BYTES:
                yield _batch(variant, together, gradient_factor)
                together, num_bytes = [], 0
            together.append(piece)
            num_bytes += needed
        yield _batch(variant, together, gradient_factor)


def variant_of(piece: MatrixPiece, rounding: Rounding) -> MatrixVariant:
    """The kernels that a piece needs. A weight in fp32 is not rounded."""
    addresses = [tensor.data_ptr() for tensor in _tensors(piece) if tensor is not None]
    row_length = piece.shape[-1] if piece.is_matrix else piece.weight.numel()
    return MatrixVariant(
        rounding=Rounding.NEAREST if piece.weight.dtype is torch.float32 else rounding,
        weight=piece.weight.dtype,
        gradient=piece.gradient.dtype,
        is_vector=not piece.is_matrix,
        is_aligned=row_length % VECTOR_ELEMENTS == 0 and all(address % ALIGNMENT == 0 for address in addresses),
    )


def _batch(variant: MatrixVariant, pieces: Sequence[MatrixPiece], gradient_factor: float) -> Batch:
    batch = Batch(variant=variant, num_partials=len(pieces))
    for piece in pieces:
        rows, columns = _grid(piece.shape)
        batch.num_tiles += _tiles_down(rows) * _tiles_across(columns)
        offsets = []
        for count in _num_partials(piece.shape):
            offsets.append(batch.num_partials)
            batch.num_partials += count
        if piece.is_matrix:
            batch.num_statistics += -(-rows // STATISTICS) - (-columns // STATISTICS)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(piece)]
        addresses += [0] * (ELEMENTWISE_COLUMNS.index("size") - len(addresses))
        elementwise = [*addresses, piece.weight.numel(), piece.key, 0, batch.num_tiles]
        batch.integers.append([*elementwise, rows, columns, *offsets, batch.num_statistics])
        batch.floats.append(_floats(piece, gradient_factor))
    return batch


def num_partials(shape: Sequence[int]) -> int:
    """How many numbers the workspace has for a parameter of this shape.

    Example:
        >>> num_partials((2048, 5400)) / (2048 * 5400)  # where rows are long, a fiftieth
        0.019765625
    """
    return sum(_num_partials(shape))


def _grid(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns as the kernels see them."""
    if len(shape) > 1:
        return matrix_shape(shape)
    return -(-math.prod(shape) // TILE_COLUMNS), TILE_COLUMNS


def _num_partials(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Of rows by tile, of columns by tile, of the vector of rows, and of squares of the update by tile."""
    rows, columns = _grid(shape)
    down, across = _tiles_down(rows), _tiles_across(columns)
    if len(shape) <= 1:
        return 0, 0, 0, down * across
    return rows * across, columns * down, -(-rows // STATISTICS), down * across


def _tiles_down(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _tiles_across(columns: int) -> int:
    return -(-columns // TILE_COLUMNS)


def _tensors(piece: MatrixPiece) -> list[torch.Tensor | None]:
    """In the order of the addresses."""
    kept = piece.master if piece.remainder is None else piece.remainder
    return [piece.weight, piece.gradient, kept, piece.state[ROW], piece.state.get(COLUMN)]


def _floats(piece: MatrixPiece, gradient_factor: float) -> list[float]:
    """Computed in fp64 and rounded to fp32 once."""
    rule = piece.rule
    decay, amount = 1.0 - rule.lr * rule.weight_decay, 1.0 - rule.beta2(piece.step)
    return [gradient_factor, rule.lr, decay, amount, rule.eps, rule.clip_threshold, float(piece.weight.numel())]
