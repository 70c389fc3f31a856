"""Moments in 8 bits, in torch's own operators; see Note [8-bit blocks] in `update_types`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.optim.update_types import BLOCK

SIGNED_STEPS = 127
UNSIGNED_STEPS = 255
SMALLEST_SCALE = 2.0**-124
"""A block whose largest magnitude is below this is a block of zeros: one over its scale is too large."""
LARGEST_TINY = 2.0**-126 - 2.0**-149
"""Up to this magnitude numbers count as zero: processors compute with them slowly, or take them for zero themselves."""

# Roots are counted in parts of these: powers of two, which keep the quotients below in the range of fp32.
SIGNED_UNIT = 32
UNSIGNED_UNIT = 128
SIGNED_SHARE = SIGNED_STEPS**2 / SIGNED_UNIT**2
UNSIGNED_SHARE = UNSIGNED_STEPS**4 / UNSIGNED_UNIT**4


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
        return _flush((codes.float() * (1 / UNSIGNED_STEPS)).square_().square_().mul_(spread))
    roots = codes.float() * (1 / SIGNED_STEPS)
    return _flush((roots * roots.abs()).mul_(spread))


def _flush(values: Tensor) -> Tensor:
    # By its name a function for networks: zero up to a magnitude, and everything else, a NaN too, as it is.
    return torch.nn.functional.hardshrink(values, LARGEST_TINY)
