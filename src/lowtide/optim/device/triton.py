"""One launch that updates many pieces, in Triton: every number is read once and written once.

A program finds its piece by the table's running count of tiles, and updates one tile of it. Arithmetic is fp32, not
fused, with divisions and roots rounded to nearest, so that the format of the weight does not change a bit of it. How a
tile is read and written in each format of `update_types` comes first; the kernels for whole parameters use it too.
"""
# Triton has no types, and is not installed where there is no GPU.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, misc, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, SIM300  Triton's way to write constants

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.optim.device.table import COLUMNS, NUM_FLOATS, TILE, Variant
from lowtide.optim.reference import SIGNED_SHARE, SIGNED_UNIT, SMALLEST_SCALE, UNSIGNED_SHARE, UNSIGNED_UNIT
from lowtide.optim.update_types import BLOCK, Moments, Rounding

NUM_WARPS = 4
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of torch's types."""
# Kernels may read only such globals as are constants by type.
_STOCHASTIC = tl.constexpr(Rounding.STOCHASTIC.value)
_EXACT = tl.constexpr(Rounding.EXACT.value)
_MASTER = tl.constexpr(Rounding.MASTER.value)
_FP32 = tl.constexpr(Moments.FP32.value)
_BF16 = tl.constexpr(Moments.BF16.value)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_SIGNED_SHARE = tl.constexpr(SIGNED_SHARE)
_SIGNED_UNIT = tl.constexpr(SIGNED_UNIT)
_UNSIGNED_SHARE = tl.constexpr(UNSIGNED_SHARE)
_UNSIGNED_UNIT = tl.constexpr(UNSIGNED_UNIT)
_ROWS = tl.constexpr(TILE // BLOCK)
_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)
_NUM_COLUMNS = tl.constexpr(len(COLUMNS))
_NUM_FLOATS = tl.constexpr(NUM_FLOATS)
_WEIGHT = tl.constexpr(COLUMNS.index("weight"))
_GRADIENT = tl.constexpr(COLUMNS.index("gradient"))
_KEPT = tl.constexpr(COLUMNS.index("kept"))
_STATE = tl.constexpr(COLUMNS.index("state_0"))
_SCALE = tl.constexpr(COLUMNS.index("scale_0"))
_SIZE = tl.constexpr(COLUMNS.index("size"))
_KEY = tl.constexpr(COLUMNS.index("key"))
_FIRST = tl.constexpr(COLUMNS.index("first_element"))
_END = tl.constexpr(COLUMNS.index("end_tile"))


@triton.jit
def pointer_in(row, COLUMN: tl.constexpr, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """An address of the piece's row, as a pointer."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(KIND))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _random_bits(key, index):
    x = index.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x & 0xFFFF).to(tl.int32)


@triton.jit
def _upper(values, added):
    """The upper half of each number's bits after something was added below it; a NaN stays one."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values == values, (bits + added) >> 16, 0x7FC0)


@triton.jit
def _nearest(values):
    """The bits of the nearest bf16, ties to even."""
    return _upper(values, 0x7FFF + ((values.to(tl.int32, bitcast=True) >> 16) & 1))


@triton.jit
def _flushed(values):
    """Zero for numbers that are too small to be normal; see Note [8-bit blocks]."""
    return tl.where(tl.abs(values) < 1.1754943508222875e-38, 0.0, values)


@triton.jit
def read_bf16(pointer, inside):
    """bf16 numbers in fp32, from a pointer to 16-bit integers."""
    bits = tl.load(pointer, mask=inside, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def read_moment(
    row, where, inside, block, has_block,
    SLOT: tl.constexpr, IS_UNSIGNED: tl.constexpr, MOMENTS: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """A state in fp32."""
    if MOMENTS == _FP32:
        value = tl.load(pointer_in(row, _STATE + SLOT, tl.float32, IS_ALIGNED) + where, mask=inside, other=0.0)
    elif MOMENTS == _BF16:
        value = read_bf16(pointer_in(row, _STATE + SLOT, tl.int16, IS_ALIGNED) + where, inside)
    else:
        scale = tl.load(pointer_in(row, _SCALE + SLOT, tl.float32, False) + block, mask=has_block, other=0.0)[:, None]
        if IS_UNSIGNED:
            code = tl.load(pointer_in(row, _STATE + SLOT, tl.uint8, IS_ALIGNED) + where, mask=inside, other=0)
            root = code.to(tl.float32) * (1.0 / 255.0)
            value = _flushed((root * root) * (root * root) * scale)
        else:
            code = tl.load(pointer_in(row, _STATE + SLOT, tl.int8, IS_ALIGNED) + where, mask=inside, other=0)
            root = code.to(tl.float32) * (1.0 / 127.0)
            value = _flushed(root * tl.abs(root) * scale)
    return value


@triton.jit
def write_moment(
    value, row, where, inside, block, has_block,
    SLOT: tl.constexpr, IS_UNSIGNED: tl.constexpr, MOMENTS: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """An fp32 state, stored in its format."""
    if MOMENTS == _FP32:
        tl.store(pointer_in(row, _STATE + SLOT, tl.float32, IS_ALIGNED) + where, value, mask=inside)
    elif MOMENTS == _BF16:
        pointer = pointer_in(row, _STATE + SLOT, tl.int16, IS_ALIGNED)
        tl.store(pointer + where, _nearest(value).to(tl.int16), mask=inside)
    else:
        magnitude = _flushed(tl.where(inside, tl.abs(value), 0.0))
        # Not the maximum alone: a NaN would not show in it.
        is_finite = tl.min((magnitude <= 3.4028234663852886e38).to(tl.int32), axis=1) > 0
        scale = tl.where(is_finite, tl.max(magnitude, axis=1), float("nan"))
        scale = tl.where(scale < _SMALLEST_SCALE, 0.0, scale)
        has_codes = scale > 0.0
        divisor = tl.where(has_codes, scale, 1.0)
        magnitude = tl.where(has_codes[:, None], magnitude, 0.0)
        # Any code next to the root, and then the next one if the share has reached the border to it: so the square root
        # may be the fast one.
        if IS_UNSIGNED:
            share = magnitude * tl.div_rn(_UNSIGNED_SHARE, divisor)[:, None]
            code = tl.floor(tl.sqrt(tl.sqrt(share)) * _UNSIGNED_UNIT)
            border = (code + 0.5) * (1.0 / _UNSIGNED_UNIT)
            code += ((border * border) * (border * border) <= share).to(tl.float32)
            code = tl.where(magnitude > 0.0, tl.maximum(code, 1.0), code).to(tl.int32).to(tl.uint8)
            tl.store(pointer_in(row, _STATE + SLOT, tl.uint8, IS_ALIGNED) + where, code, mask=inside)
        else:
            share = magnitude * tl.div_rn(_SIGNED_SHARE, divisor)[:, None]
            code = tl.floor(tl.sqrt(share) * _SIGNED_UNIT)
            border = (code + 0.5) * (1.0 / _SIGNED_UNIT)
            code += (border * border <= share).to(tl.float32)
            code = tl.where(value < 0.0, -code, code).to(tl.int32).to(tl.int8)
            tl.store(pointer_in(row, _STATE + SLOT, tl.int8, IS_ALIGNED) + where, code, mask=inside)
        tl.store(pointer_in(row, _SCALE + SLOT, tl.float32, False) + block, scale, mask=has_block)


@triton.jit
def read_weight(row, where, inside, WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """The weight in fp32, or what is kept of it beside."""
    if ROUNDING == _EXACT:
        upper = tl.load(pointer_in(row, _WEIGHT, tl.int16, IS_ALIGNED) + where, mask=inside, other=0).to(tl.int32)
        lower = tl.load(pointer_in(row, _KEPT, tl.int16, IS_ALIGNED) + where, mask=inside, other=0).to(tl.int32)
        value = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    elif ROUNDING == _MASTER:
        value = tl.load(pointer_in(row, _KEPT, tl.float32, IS_ALIGNED) + where, mask=inside, other=0.0)
    elif WEIGHT == tl.bfloat16:
        value = read_bf16(pointer_in(row, _WEIGHT, tl.int16, IS_ALIGNED) + where, inside)
    else:
        value = tl.load(pointer_in(row, _WEIGHT, WEIGHT, IS_ALIGNED) + where, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def write_weight(value, row, where, inside, WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """An fp32 result, rounded into the weight, and what is kept beside it."""
    if ROUNDING == _MASTER:
        tl.store(pointer_in(row, _KEPT, tl.float32, IS_ALIGNED) + where, value, mask=inside)
    if WEIGHT == tl.bfloat16:
        if ROUNDING == _EXACT:
            upper = _upper(value, 0x8000)
            lower = value.to(tl.int32, bitcast=True) - (upper << 16)
            lower = tl.where(value == value, lower, 0)
            tl.store(pointer_in(row, _KEPT, tl.int16, IS_ALIGNED) + where, lower.to(tl.int16), mask=inside)
        elif ROUNDING == _STOCHASTIC:
            upper = _upper(value, _random_bits(tl.load(row + _KEY), tl.load(row + _FIRST) + where))
        else:
            upper = _nearest(value)
        tl.store(pointer_in(row, _WEIGHT, tl.int16, IS_ALIGNED) + where, upper.to(tl.int16), mask=inside)
    else:
        tl.store(pointer_in(row, _WEIGHT, WEIGHT, IS_ALIGNED) + where, value.to(WEIGHT), mask=inside)


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


def _constants_of(variant: Variant, *, has_factor: bool) -> dict[str, object]:
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
        **_constants_of(variant, has_factor=factor is not None),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
