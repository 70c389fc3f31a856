"""How numbers are stored, in torch's own operators: the exact format, stochastic rounding, moments of each width.

The definition that the kernels are held to; see the Notes in `update_types`. On any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.optim.update_types import BLOCK, UNSIGNED, Moments

_MASK = 0xFFFFFFFF
_HALF = 0x8000
_NAN_BITS = 0x7FC0
_SIGNED_STEPS = 127
_UNSIGNED_STEPS = 255
SMALLEST_SCALE = 2.0**-124
"""A block whose largest magnitude is below this is a block of zeros: one over its scale is too large."""
_LARGEST_TINY = 2.0**-126 - 2.0**-149
"""Up to this magnitude numbers count as zero: processors compute with them slowly, or take them for zero themselves."""
# Roots are counted in parts of these: powers of two, which keep the quotients below in the range of fp32.
SIGNED_UNIT = 32
UNSIGNED_UNIT = 128
SIGNED_SHARE = _SIGNED_STEPS**2 / SIGNED_UNIT**2
UNSIGNED_SHARE = _UNSIGNED_STEPS**4 / UNSIGNED_UNIT**4


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 weight and the int16 remainder of an fp32 tensor; see Note [The exact format].

    Example:
        >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2**-20]))
        >>> weight.tolist(), remainder.tolist()
        ([1.0, 1.0], [0, 8])
    """
    bits = master.view(torch.int32)
    # Only a NaN overflows here, and is replaced.
    upper = (bits + _HALF) >> 16
    remainder = bits - (upper << 16)
    is_nan = master.isnan()
    weight = upper.masked_fill_(is_nan, _NAN_BITS).to(torch.int16).view(torch.bfloat16)
    return weight, remainder.masked_fill_(is_nan, 0).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 number that `split` took apart."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def random_bits_of(key: int, first_element: int, num_elements: int, device: torch.device | str = "cpu") -> Tensor:
    """`random_bits` of elements in a row, as int64."""
    index = torch.arange(first_element, first_element + num_elements, dtype=torch.int64, device=device)
    # Every product of two 32-bit numbers below wraps around in 64 bits, and its lower half is right all the same.
    x = (index * 0x9E3779B9 + key).bitwise_and_(_MASK)
    x ^= x >> 16
    x = (x * 0x85EBCA6B).bitwise_and_(_MASK)
    x ^= x >> 13
    x = (x * 0xC2B2AE35).bitwise_and_(_MASK)
    x ^= x >> 16
    return x.bitwise_and_(0xFFFF)


def update_key(seed: int, parameter_index: int, step: int) -> int:
    """The `key` of a parameter's update in a step: 32 bits in which every argument shows.

    Example:
        >>> update_key(0, 3, 1) == update_key(0, 3, 1), update_key(0, 3, 1) == update_key(0, 1, 3)
        (True, False)
    """
    key = 0
    for part in (seed, parameter_index, step):
        key = (key ^ (part & _MASK)) * 0x9E3779B1 + 0x85EBCA77 & _MASK
        key ^= key >> 15
        key = key * 0xC2B2AE3D & _MASK
        key ^= key >> 13
    return key


def round_stochastic(values: Tensor, key: int, first_element: int = 0) -> Tensor:
    """A flat fp32 tensor in bf16, up or down by chance; see Note [Stochastic rounding].

    Example:
        >>> round_stochastic(torch.full((4,), 0.5), key=1).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    drawn = random_bits_of(key, first_element, values.numel(), values.device).to(torch.int32)
    upper = drawn.add_(values.view(torch.int32)) >> 16
    return upper.masked_fill_(values.isnan(), _NAN_BITS).to(torch.int16).view(torch.bfloat16)


def read_moment(name: str, state: dict[str, Tensor], moments: Moments) -> Tensor:
    """A state in fp32: itself where it is stored so, else a copy."""
    stored = state[name]
    if moments is Moments.INT8:
        return decode_blocks(stored, state[f"{name}_scale"])
    return stored.float()


def write_moment(name: str, value: Tensor, state: dict[str, Tensor], moments: Moments) -> None:
    """Store an fp32 state in place; nothing happens where it is stored there already."""
    stored = state[name]
    if moments is Moments.INT8:
        codes, scales = encode_blocks(value, is_unsigned=name in UNSIGNED)
        stored.copy_(codes)
        state[f"{name}_scale"].copy_(scales)
    elif value is not stored:
        stored.copy_(value)


def encode_blocks(values: Tensor, *, is_unsigned: bool) -> tuple[Tensor, Tensor]:
    """The codes of a flat fp32 tensor (int8, or uint8 for second moments), and the scale of each block.

    Measured by its block's largest element, the root of a first moment comes back within 1/254, the fourth root of a
    second moment within 1/510, or within 1/255 where it is the smallest that is not zero; fp32 rounding adds 1e-7.

    Example:
        >>> codes, scales = encode_blocks(torch.tensor([0.25, -1.0, 0.0]), is_unsigned=False)
        >>> codes.tolist(), scales.tolist()
        ([64, -127, 0], [1.0])
    """
    num_elements = values.numel()
    num_blocks = -(-num_elements // BLOCK)
    rows = torch.nn.functional.pad(values, (0, num_blocks * BLOCK - num_elements)).view(num_blocks, BLOCK)
    magnitudes = _flush(rows.abs())
    scales = magnitudes.amax(dim=1, keepdim=True) if num_blocks else values.new_zeros(0, 1)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    # For a block of zeros it is divided by infinity, for one with NaN by NaN, and those codes are made zero below. Not a
    # number by a tensor: torch would multiply by a reciprocal, and round twice.
    share = torch.full_like(scales, UNSIGNED_SHARE if is_unsigned else SIGNED_SHARE)
    shares = magnitudes * (share / torch.where(scales == 0, torch.inf, scales))
    if is_unsigned:
        codes = shares.sqrt().sqrt_().mul_(UNSIGNED_UNIT).floor_()
        codes += ((codes + 0.5) / UNSIGNED_UNIT).square_().square_().le_(shares)
        codes = torch.maximum(codes, magnitudes.sign_().mul_((scales > 0).float()))
    else:
        codes = shares.sqrt().mul_(SIGNED_UNIT).floor_()
        codes += ((codes + 0.5) / SIGNED_UNIT).square_().le_(shares)
        codes.copysign_(rows)
    codes = codes.nan_to_num_(nan=0.0).to(torch.uint8 if is_unsigned else torch.int8)
    return codes.view(-1)[:num_elements], scales.view(-1)


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of codes; which kind they are, their dtype says."""
    spread = scales.repeat_interleave(BLOCK)[: codes.numel()]
    if codes.dtype is torch.uint8:
        return _flush((codes.float() * (1 / _UNSIGNED_STEPS)).square_().square_().mul_(spread))
    roots = codes.float() * (1 / _SIGNED_STEPS)
    return _flush((roots * roots.abs()).mul_(spread))


def _flush(values: Tensor) -> Tensor:
    # By its name a function for networks: zero up to a magnitude, and everything else, a NaN too, as it is.
    return torch.nn.functional.hardshrink(values, _LARGEST_TINY)
