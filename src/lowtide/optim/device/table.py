"""What the device's kernels are told of their pieces: one row of numbers and one of addresses for each.

Everything that changes from step to step, or from group to group, is a number in a row: a kernel is compiled once for a
rule and its formats, and one launch takes pieces with different rates. A row of a whole parameter begins as an elementwise
piece's does, so that both kernels read and write weights with the same code; it also says where the workspace has room
for its partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.optim.rules import Adam, ElementwiseRule, Sgd, matrix_shape, state_names
from lowtide.optim.update_types import MOST_STATES, AnyPiece, MatrixPiece, Moments, Piece, Rounding, addresses_of

COLUMNS = (
    "weight",
    "gradient",
    "kept",
    *(f"state_{slot}" for slot in range(MOST_STATES)),
    *(f"scale_{slot}" for slot in range(MOST_STATES)),
    "size",
    "key",
    "first_element",
    "end_tile",
)
"""Addresses; what the rounding keeps is a remainder or a master. Then the elements in the piece, and the tile after its
last, counted through all pieces."""
NUM_FLOATS = 8
"""What a rule needs at most; their order is that of `floats_of`."""
TILE = 2048
"""Elements that one program updates: 16 blocks of the 8-bit format."""
ALIGNMENT = 16
"""What addresses and sizes of wide loads and stores are multiples of."""
MATRIX_COLUMNS = (
    *COLUMNS,
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
MATRIX_FLOATS = ("factor", "lr", "decay", "amount", "eps", "clip_threshold", "num_elements")
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
    """In the order of `MATRIX_COLUMNS`, a row for each piece."""
    floats: list[list[float]] = field(default_factory=list)
    """In the order of `MATRIX_FLOATS`."""
    num_tiles: int = 0
    num_statistics: int = 0
    """Programs that move vectors."""
    num_partials: int = 0
    """Numbers of the workspace: a step size for each piece, and then the sums of each."""


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
        is_aligned=piece.weight.numel() % ALIGNMENT == 0 and _has_aligned_addresses(piece),
    )


def _has_aligned_addresses(piece: AnyPiece) -> bool:
    return all(address % ALIGNMENT == 0 for address in addresses_of(piece))


def rows_of(pieces: Sequence[Piece]) -> tuple[list[list[int]], int]:
    """The integers of each piece, and how many tiles there are."""
    integers, num_tiles = [], 0
    for piece in pieces:
        num_elements = piece.weight.numel()
        num_tiles += -(-num_elements // TILE)
        integers.append([*addresses_of(piece), num_elements, piece.key, piece.first_element, num_tiles])
    return integers, num_tiles


def floats_of(rule: ElementwiseRule, step: int, gradient_factor: float) -> list[float]:
    """A piece's numbers, computed in fp64, as torch does it, and rounded to fp32 once. The first three are those of every rule."""
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


def matrix_variant_of(piece: MatrixPiece, rounding: Rounding) -> MatrixVariant:
    """The kernels that a piece needs. A weight in fp32 is not rounded."""
    row_length = piece.shape[-1] if piece.is_matrix else piece.weight.numel()
    return MatrixVariant(
        rounding=Rounding.NEAREST if piece.weight.dtype is torch.float32 else rounding,
        weight=piece.weight.dtype,
        gradient=piece.gradient.dtype,
        is_vector=not piece.is_matrix,
        is_aligned=row_length % VECTOR_ELEMENTS == 0 and _has_aligned_addresses(piece),
    )


def batches_of(pieces: Sequence[MatrixPiece], rounding: Rounding, gradient_factor: float) -> Iterator[Batch]:
    """The pieces that are not empty, in as few batches as their variants and the workspace allow."""
    by_variant: dict[MatrixVariant, list[MatrixPiece]] = {}
    for piece in pieces:
        if piece.weight.numel():
            by_variant.setdefault(matrix_variant_of(piece, rounding), []).append(piece)
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
        elementwise = [*addresses_of(piece), piece.weight.numel(), piece.key, 0, batch.num_tiles]
        batch.integers.append([*elementwise, rows, columns, *offsets, batch.num_statistics])
        batch.floats.append(_matrix_floats(piece, gradient_factor))
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
    """Numbers of sums: over rows by tile, over columns by tile, over the vector of rows, and of the update's squares by tile."""
    rows, columns = _grid(shape)
    down, across = _tiles_down(rows), _tiles_across(columns)
    if len(shape) <= 1:
        return 0, 0, 0, down * across
    return rows * across, columns * down, -(-rows // STATISTICS), down * across


def _tiles_down(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _tiles_across(columns: int) -> int:
    return -(-columns // TILE_COLUMNS)


def _matrix_floats(piece: MatrixPiece, gradient_factor: float) -> list[float]:
    """Computed in fp64 and rounded to fp32 once."""
    rule = piece.rule
    decay, amount = 1.0 - rule.lr * rule.weight_decay, 1.0 - rule.beta2(piece.step)
    return [gradient_factor, rule.lr, decay, amount, rule.eps, rule.clip_threshold, float(piece.weight.numel())]
