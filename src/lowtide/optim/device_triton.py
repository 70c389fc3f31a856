"""One launch that updates many pieces, in Triton: every number is read once and written once.

A program finds its piece by the table's running count of tiles, and updates one tile of it. Arithmetic is fp32, not
fused, with divisions and roots rounded to nearest, so that the format of the weight does not change a bit of it.
"""
# Triton has no types, and is not installed where there is no GPU.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, misc, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, SIM300  Triton's way to write constants

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.optim.device_formats import pointer_in, read_bf16, read_moment, read_weight, write_moment, write_weight
from lowtide.optim.device_table import COLUMNS, NUM_FLOATS, TILE, Variant
from lowtide.optim.update_types import BLOCK

NUM_WARPS = 4
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of torch's types."""
# Kernels may read only such globals as are constants by type.
_ROWS = tl.constexpr(TILE // BLOCK)
_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)
_NUM_COLUMNS = tl.constexpr(len(COLUMNS))
_NUM_FLOATS = tl.constexpr(NUM_FLOATS)
_GRADIENT = tl.constexpr(COLUMNS.index("gradient"))
_SIZE = tl.constexpr(COLUMNS.index("size"))
_END = tl.constexpr(COLUMNS.index("end_tile"))


@triton.jit
def lerp(start, end, weight):
    """From `start` towards `end`."""
    # As torch has it: each form is exact at its own end.
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _find_piece(table, num_pieces, tile):
    """The first piece that ends after this tile."""
    low = 0
    high = num_pieces - 1
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(table + middle * _NUM_COLUMNS + _END) <= tile
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _update_kernel(
    table, floats, factor_pointer, num_pieces,
    RULE: tl.constexpr, ROUNDING: tl.constexpr, MOMENTS: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
    NUM_STATES: tl.constexpr, IS_DECOUPLED: tl.constexpr, NESTEROV: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    piece = _find_piece(table, num_pieces, tile)
    row = table + piece * _NUM_COLUMNS
    numbers = floats + piece * _NUM_FLOATS
    first_tile = tl.load(row - _NUM_COLUMNS + _END, mask=piece > 0, other=0)
    size = tl.load(row + _SIZE)
    if HAS_FACTOR:
        factor = tl.load(factor_pointer)
        size = tl.where(factor == factor, size, 0)  # a NaN: nothing is written
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    block = (tile - first_tile) * _ROWS + tl.arange(0, _ROWS)
    has_block = block * _BLOCK < size
    where = (tile - first_tile) * _TILE + tl.arange(0, _ROWS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = where < size

    weight = read_weight(row, where, inside, WEIGHT, ROUNDING, IS_ALIGNED)
    if GRADIENT == tl.bfloat16:
        gradient = read_bf16(pointer_in(row, _GRADIENT, tl.int16, IS_ALIGNED) + where, inside)
    else:
        gradient = tl.load(pointer_in(row, _GRADIENT, GRADIENT, IS_ALIGNED) + where, mask=inside, other=0.0).to(
            tl.float32
        )
    gradient *= tl.load(numbers)
    if HAS_FACTOR:
        gradient *= factor
    lr = tl.load(numbers + 1)
    decay = tl.load(numbers + 2)

    if RULE == "adam":
        if IS_DECOUPLED:
            weight *= decay
        else:
            gradient = tl.where(decay == 0.0, gradient, gradient + decay * weight)
        average = read_moment(row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
        average = lerp(average, gradient, tl.load(numbers + 3))
        write_moment(average, row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
        square = read_moment(row, where, inside, block, has_block, 1, True, MOMENTS, IS_ALIGNED)
        square = square * tl.load(numbers + 4) + tl.load(numbers + 5) * gradient * gradient
        write_moment(square, row, where, inside, block, has_block, 1, True, MOMENTS, IS_ALIGNED)
        if NUM_STATES == 3:
            largest = read_moment(row, where, inside, block, has_block, 2, True, MOMENTS, IS_ALIGNED)
            # The second of the two where it is a NaN, as torch has it; `maximum` would take the number.
            square = tl.where(largest >= square, largest, tl.where(largest == largest, square, largest))
            write_moment(square, row, where, inside, block, has_block, 2, True, MOMENTS, IS_ALIGNED)
        denominator = tl.div_rn(tl.sqrt_rn(square), tl.load(numbers + 6)) + tl.load(numbers + 7)
        weight -= tl.div_rn(lr * average, denominator)
    elif RULE == "sgd":
        gradient = tl.where(decay == 0.0, gradient, gradient + decay * weight)
        if NUM_STATES == 1:
            momentum = tl.load(numbers + 3)
            buffer = read_moment(row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
            moved = buffer * momentum + tl.load(numbers + 4) * gradient
            buffer = tl.where(tl.load(numbers + 5) > 0.0, gradient, moved)
            write_moment(buffer, row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
            if NESTEROV:
                gradient += momentum * buffer
            else:
                gradient = buffer
        weight -= lr * gradient
    else:
        weight *= decay
        average = read_moment(row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
        direction = lerp(average, gradient, tl.load(numbers + 3))
        # Zero and NaN stand for themselves.
        weight -= lr * tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, direction))
        average = lerp(average, gradient, tl.load(numbers + 4))
        write_moment(average, row, where, inside, block, has_block, 0, False, MOMENTS, IS_ALIGNED)
    write_weight(weight, row, where, inside, WEIGHT, ROUNDING, IS_ALIGNED)


def constants_of(variant: Variant, *, has_factor: bool) -> dict[str, object]:
    """What a kernel is compiled for, by the names of its arguments."""
    return {
        "RULE": variant.rule,
        "ROUNDING": variant.rounding.value,
        "MOMENTS": variant.moments.value,
        "WEIGHT": TYPES[variant.weight],
        "GRADIENT": TYPES[variant.gradient],
        "NUM_STATES": variant.num_states,
        "IS_DECOUPLED": variant.is_decoupled,
        "NESTEROV": variant.nesterov,
        "IS_ALIGNED": variant.is_aligned,
        "HAS_FACTOR": has_factor,
    }


def launch(variant: Variant, table: Tensor, floats: Tensor, factor: Tensor | None, num_tiles: int) -> None:
    """Update the pieces of a table, which is on the device already."""
    _update_kernel[(num_tiles,)](
        table,
        floats,
        floats if factor is None else factor,
        table.shape[0],
        **constants_of(variant, has_factor=factor is not None),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
