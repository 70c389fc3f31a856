"""How the device kernel reads and writes numbers, in Triton: the formats of `update_types` for a tile of a piece."""
# Triton has no types, and is not installed where there is no GPU.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, misc, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, SIM300  Triton's way to write constants

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.optim.device_table import COLUMNS
from lowtide.optim.eight_bit import SIGNED_SHARE, SIGNED_UNIT, SMALLEST_SCALE, UNSIGNED_SHARE, UNSIGNED_UNIT
from lowtide.optim.update_types import Moments, Rounding

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
_WEIGHT = tl.constexpr(COLUMNS.index("weight"))
_KEPT = tl.constexpr(COLUMNS.index("kept"))
_STATE = tl.constexpr(COLUMNS.index("state_0"))
_SCALE = tl.constexpr(COLUMNS.index("scale_0"))
_KEY = tl.constexpr(COLUMNS.index("key"))
_FIRST = tl.constexpr(COLUMNS.index("first_element"))


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
    """The bits of the nearest bf16, halves to even."""
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
