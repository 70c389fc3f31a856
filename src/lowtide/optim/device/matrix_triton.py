"""Adafactor on a GPU, in Triton: five launches for many matrices, and nothing of a matrix's size is made.

    sums        of rows and of columns, by tile
    statistics  the tiles' sums are added, and the two vectors are moved
    norms       squares of the update are summed, by tile
    steps       one number for each piece: how far it goes
    apply       the weight is moved

Vectors have three of them: their `sums` move the second moment, which is whole, and sum the update's squares at once.
Every sum is in a fixed order, without atomics. Arithmetic is fp32, not fused, with divisions and roots rounded to nearest;
what is compiled for a format is `apply` alone, so that the format of the weight does not change a bit of the rest. The
gradient is read three times and the weight once: see Note [Adafactor in two vectors].
"""
# Triton has no types, and is not installed where there is no GPU.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, misc, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, SIM300  Triton's way to write constants

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowtide.optim.device.table import (
    MATRIX_COLUMNS,
    MATRIX_FLOATS,
    STATISTICS,
    TILE_COLUMNS,
    TILE_ROWS,
    VECTOR_ELEMENTS,
    Batch,
)
from lowtide.optim.device.triton import TYPES, lerp, pointer_in, read_bf16, read_weight, write_weight

NUM_WARPS = 4
# Kernels may read only such globals as are constants by type.
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_TILE_COLUMNS = tl.constexpr(TILE_COLUMNS)
_STRIP = tl.constexpr(8)  # rows at a time: 16 elements for each thread
_STATISTICS = tl.constexpr(STATISTICS)
_PARTIALS = tl.constexpr(32)  # of each number of a vector at a time
_LONG = tl.constexpr(1024)
_VECTOR = tl.constexpr(VECTOR_ELEMENTS)
_NUM_COLUMNS = tl.constexpr(len(MATRIX_COLUMNS))
_NUM_FLOATS = tl.constexpr(len(MATRIX_FLOATS))
_GRADIENT = tl.constexpr(MATRIX_COLUMNS.index("gradient"))
_ROW_STATE = tl.constexpr(MATRIX_COLUMNS.index("state_0"))
_COLUMN_STATE = tl.constexpr(MATRIX_COLUMNS.index("state_1"))
_SIZE = tl.constexpr(MATRIX_COLUMNS.index("size"))
_END_TILE = tl.constexpr(MATRIX_COLUMNS.index("end_tile"))
_ROWS = tl.constexpr(MATRIX_COLUMNS.index("rows"))
_COLUMNS = tl.constexpr(MATRIX_COLUMNS.index("columns"))
_ROW_SUMS = tl.constexpr(MATRIX_COLUMNS.index("row_sums"))
_COLUMN_SUMS = tl.constexpr(MATRIX_COLUMNS.index("column_sums"))
_TOTALS = tl.constexpr(MATRIX_COLUMNS.index("totals"))
_NORMS = tl.constexpr(MATRIX_COLUMNS.index("norms"))
_END_STATISTIC = tl.constexpr(MATRIX_COLUMNS.index("end_statistic"))
_FACTOR = tl.constexpr(MATRIX_FLOATS.index("factor"))
_LR = tl.constexpr(MATRIX_FLOATS.index("lr"))
_DECAY = tl.constexpr(MATRIX_FLOATS.index("decay"))
_AMOUNT = tl.constexpr(MATRIX_FLOATS.index("amount"))
_EPS = tl.constexpr(MATRIX_FLOATS.index("eps"))
_CLIP = tl.constexpr(MATRIX_FLOATS.index("clip_threshold"))
_NUM_ELEMENTS = tl.constexpr(MATRIX_FLOATS.index("num_elements"))


@triton.jit
def _find_piece(table, num_pieces, program, END: tl.constexpr):
    """The first piece that ends after this program, and the program's number in it."""
    low = 0
    high = num_pieces - 1
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(table + middle * _NUM_COLUMNS + END) <= program
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    first = tl.load(table + (low - 1) * _NUM_COLUMNS + END, mask=low > 0, other=0)
    return low, program - first


@triton.jit
def _length(row, COLUMN: tl.constexpr, IS_ALIGNED: tl.constexpr):
    length = tl.load(row + COLUMN)
    if IS_ALIGNED:
        length = tl.multiple_of(length, _VECTOR)
    return length


@triton.jit
def _factor_of(numbers, factor_pointer, HAS_FACTOR: tl.constexpr):
    factor = tl.load(numbers + _FACTOR)
    if HAS_FACTOR:
        factor *= tl.load(factor_pointer)
    return factor


@triton.jit
def _unless_left_out(length, factor):
    """Nothing is written by an update whose factor is a NaN."""
    return tl.where(factor == factor, length, 0)


@triton.jit
def _read_gradient(row, where, inside, factor, GRADIENT: tl.constexpr, IS_ALIGNED: tl.constexpr):
    if GRADIENT == tl.bfloat16:
        gradient = read_bf16(pointer_in(row, _GRADIENT, tl.int16, IS_ALIGNED) + where, inside)
    else:
        pointer = pointer_in(row, _GRADIENT, GRADIENT, IS_ALIGNED)
        gradient = tl.load(pointer + where, mask=inside, other=0.0).to(tl.float32)
    return gradient * factor


@triton.jit
def _inverse_root(pointer, where, inside):
    """One over the roots of a vector's numbers."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.load(pointer + where, mask=inside, other=1.0)))


@triton.jit
def _direction(gradient, row, line, rows, column_scale):
    """What a matrix moves along, up to a factor; see Note [Adafactor in two vectors]."""
    row_scale = _inverse_root(pointer_in(row, _ROW_STATE, tl.float32, False), line, line < rows)
    return gradient * (row_scale[:, None] * column_scale[None, :])


@triton.jit
def _sums_kernel(
    table, floats, workspace, factor_pointer, num_pieces,
    IS_VECTOR: tl.constexpr, GRADIENT: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    piece, tile = _find_piece(table, num_pieces, tl.program_id(0), _END_TILE)
    row = table + piece * _NUM_COLUMNS
    numbers = floats + piece * _NUM_FLOATS
    rows = tl.load(row + _ROWS)
    columns = _length(row, _COLUMNS, IS_ALIGNED)
    size = _length(row, _SIZE, IS_ALIGNED)
    factor = _factor_of(numbers, factor_pointer, HAS_FACTOR)
    eps = tl.load(numbers + _EPS)
    amount = tl.load(numbers + _AMOUNT)
    across = tl.cdiv(columns, _TILE_COLUMNS)
    column = tile % across * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)
    row_sums = workspace + tl.load(row + _ROW_SUMS) + tile % across * rows
    sums = tl.zeros([_STRIP, _TILE_COLUMNS], tl.float32)
    for strip in range(0, _TILE_ROWS, _STRIP):
        line = tile // across * _TILE_ROWS + strip + tl.arange(0, _STRIP)
        where = line[:, None] * columns + column[None, :]
        inside = (line < rows)[:, None] & (column < columns)[None, :] & (where < size)
        gradient = _read_gradient(row, where, inside, factor, GRADIENT, IS_ALIGNED)
        squares = gradient * gradient + eps
        if IS_VECTOR:
            pointer = pointer_in(row, _ROW_STATE, tl.float32, IS_ALIGNED) + where
            moment = lerp(tl.load(pointer, mask=inside, other=1.0), squares, amount)
            tl.store(pointer, moment, mask=inside & (where < _unless_left_out(size, factor)))
            direction = tl.div_rn(gradient, tl.sqrt_rn(moment))
            sums += tl.where(inside, direction * direction, 0.0)
        else:
            squares = tl.where(inside, squares, 0.0)
            tl.store(row_sums + line, tl.sum(squares, axis=1), mask=line < rows)
            sums += squares
    by_column = tl.sum(sums, axis=0)
    if IS_VECTOR:
        tl.store(workspace + tl.load(row + _NORMS) + tile, tl.sum(by_column, axis=0))
    else:
        column_sums = workspace + tl.load(row + _COLUMN_SUMS) + tile // across * columns
        tl.store(column_sums + column, by_column, mask=column < columns)


@triton.jit
def _statistics_kernel(table, floats, workspace, factor_pointer, num_pieces, HAS_FACTOR: tl.constexpr):
    piece, number = _find_piece(table, num_pieces, tl.program_id(0), _END_STATISTIC)
    row = table + piece * _NUM_COLUMNS
    rows = tl.load(row + _ROWS)
    columns = tl.load(row + _COLUMNS)
    num_of_rows = tl.cdiv(rows, _STATISTICS)
    is_of_rows = number < num_of_rows
    length = tl.where(is_of_rows, rows, columns)
    partials = workspace + tl.where(is_of_rows, tl.load(row + _ROW_SUMS), tl.load(row + _COLUMN_SUMS))
    num_partials = tl.where(is_of_rows, tl.cdiv(columns, _TILE_COLUMNS), tl.cdiv(rows, _TILE_ROWS))
    address = tl.where(is_of_rows, tl.load(row + _ROW_STATE), tl.load(row + _COLUMN_STATE))
    state = address.to(tl.pointer_type(tl.float32))
    index = tl.where(is_of_rows, number, number - num_of_rows) * _STATISTICS + tl.arange(0, _STATISTICS)
    inside = index < length
    sums = tl.zeros([_PARTIALS, _STATISTICS], tl.float32)
    partial = tl.arange(0, _PARTIALS).to(tl.int64)
    num_left = num_partials
    while num_left > 0:
        mask = (partial < num_partials)[:, None] & inside[None, :]
        sums += tl.load(partials + partial[:, None] * length + index[None, :], mask=mask, other=0.0)
        partial += _PARTIALS
        num_left -= _PARTIALS
    numbers = floats + piece * _NUM_FLOATS
    factor = _factor_of(numbers, factor_pointer, HAS_FACTOR)
    moved = lerp(tl.load(state + index, mask=inside, other=0.0), tl.sum(sums, axis=0), tl.load(numbers + _AMOUNT))
    tl.store(state + index, moved, mask=index < _unless_left_out(length, factor))
    if is_of_rows:
        tl.store(workspace + tl.load(row + _TOTALS) + number, tl.sum(tl.where(inside, moved, 0.0), axis=0))


@triton.jit
def _norms_kernel(
    table, floats, workspace, factor_pointer, num_pieces,
    GRADIENT: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    piece, tile = _find_piece(table, num_pieces, tl.program_id(0), _END_TILE)
    row = table + piece * _NUM_COLUMNS
    rows = tl.load(row + _ROWS)
    columns = _length(row, _COLUMNS, IS_ALIGNED)
    factor = _factor_of(floats + piece * _NUM_FLOATS, factor_pointer, HAS_FACTOR)
    across = tl.cdiv(columns, _TILE_COLUMNS)
    column = tile % across * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)
    column_scale = _inverse_root(pointer_in(row, _COLUMN_STATE, tl.float32, False), column, column < columns)
    sums = tl.zeros([_STRIP, _TILE_COLUMNS], tl.float32)
    for strip in range(0, _TILE_ROWS, _STRIP):
        line = tile // across * _TILE_ROWS + strip + tl.arange(0, _STRIP)
        where = line[:, None] * columns + column[None, :]
        inside = (line < rows)[:, None] & (column < columns)[None, :]
        gradient = _read_gradient(row, where, inside, factor, GRADIENT, IS_ALIGNED)
        direction = _direction(gradient, row, line, rows, column_scale)
        sums += tl.where(inside, direction * direction, 0.0)
    tl.store(workspace + tl.load(row + _NORMS) + tile, tl.sum(tl.sum(sums, axis=0), axis=0))


@triton.jit
def _sum_of(pointer, count):
    """The sum of numbers in a row."""
    sums = tl.zeros([_LONG], tl.float32)
    index = tl.arange(0, _LONG).to(tl.int64)
    num_left = count
    while num_left > 0:
        sums += tl.load(pointer + index, mask=index < count, other=0.0)
        index += _LONG
        num_left -= _LONG
    return tl.sum(sums, axis=0)


@triton.jit
def _steps_kernel(table, floats, workspace, IS_VECTOR: tl.constexpr):
    piece = tl.program_id(0)
    row = table + piece * _NUM_COLUMNS
    numbers = floats + piece * _NUM_FLOATS
    rows = tl.load(row + _ROWS)
    columns = tl.load(row + _COLUMNS)
    num_tiles = tl.cdiv(rows, _TILE_ROWS) * tl.cdiv(columns, _TILE_COLUMNS)
    mean = tl.div_rn(_sum_of(workspace + tl.load(row + _NORMS), num_tiles), tl.load(numbers + _NUM_ELEMENTS))
    root = tl.sqrt_rn(mean)
    step = tl.load(numbers + _LR)
    if not IS_VECTOR:
        scale = tl.sqrt_rn(_sum_of(workspace + tl.load(row + _TOTALS), tl.cdiv(rows, _STATISTICS)))
        root *= scale
        step *= scale
    ratio = tl.div_rn(root, tl.load(numbers + _CLIP))
    # A NaN stays one, and is seen in all of the weight; `maximum` would take the number.
    ratio = tl.where(ratio > 1.0, ratio, tl.where(ratio == ratio, 1.0, ratio))
    tl.store(workspace + piece, tl.div_rn(step, ratio))


@triton.jit
def _apply_kernel(
    table, floats, workspace, factor_pointer, num_pieces,
    ROUNDING: tl.constexpr, WEIGHT: tl.constexpr,
    IS_VECTOR: tl.constexpr, GRADIENT: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    piece, tile = _find_piece(table, num_pieces, tl.program_id(0), _END_TILE)
    row = table + piece * _NUM_COLUMNS
    numbers = floats + piece * _NUM_FLOATS
    rows = tl.load(row + _ROWS)
    columns = _length(row, _COLUMNS, IS_ALIGNED)
    size = _length(row, _SIZE, IS_ALIGNED)
    factor = _factor_of(numbers, factor_pointer, HAS_FACTOR)
    decay = tl.load(numbers + _DECAY)
    step = tl.load(workspace + piece)
    across = tl.cdiv(columns, _TILE_COLUMNS)
    column = tile % across * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)
    if not IS_VECTOR:
        column_scale = _inverse_root(pointer_in(row, _COLUMN_STATE, tl.float32, False), column, column < columns)
    for strip in range(0, _TILE_ROWS, _STRIP):
        line = tile // across * _TILE_ROWS + strip + tl.arange(0, _STRIP)
        where = line[:, None] * columns + column[None, :]
        inside = (line < rows)[:, None] & (column < columns)[None, :] & (where < size)
        gradient = _read_gradient(row, where, inside, factor, GRADIENT, IS_ALIGNED)
        if IS_VECTOR:
            moment = tl.load(pointer_in(row, _ROW_STATE, tl.float32, IS_ALIGNED) + where, mask=inside, other=1.0)
            direction = tl.div_rn(gradient, tl.sqrt_rn(moment))
        else:
            direction = _direction(gradient, row, line, rows, column_scale)
        weight = read_weight(row, where, inside, WEIGHT, ROUNDING, IS_ALIGNED)
        weight = weight * decay - step * direction
        written = inside & (where < _unless_left_out(size, factor))
        write_weight(weight, row, where, written, WEIGHT, ROUNDING, IS_ALIGNED)


def launch(batch: Batch, table: Tensor, floats: Tensor, workspace: Tensor, factor: Tensor | None) -> None:
    """Update the pieces of a batch, whose rows are on the device already."""
    variant = batch.variant
    gradient = {
        "GRADIENT": TYPES[variant.gradient],
        "IS_ALIGNED": variant.is_aligned,
        "HAS_FACTOR": factor is not None,
    }
    kind = {"IS_VECTOR": variant.is_vector}
    weight = {"ROUNDING": variant.rounding.value, "WEIGHT": TYPES[variant.weight]}
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    common = (table, floats, workspace)
    tiles = (*common, floats if factor is None else factor, len(batch.integers))
    _sums_kernel[(batch.num_tiles,)](*tiles, **kind, **gradient, **options)
    if not variant.is_vector:
        _statistics_kernel[(batch.num_statistics,)](*tiles, HAS_FACTOR=factor is not None, **options)
        _norms_kernel[(batch.num_tiles,)](*tiles, **gradient, **options)
    _steps_kernel[(len(batch.integers),)](*common, **kind, **options)
    _apply_kernel[(batch.num_tiles,)](*tiles, **kind, **weight, **gradient, **options)
