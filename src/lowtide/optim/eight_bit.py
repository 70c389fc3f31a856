"""Moments in 8 bits, in torch's own operators; see Note [8-bit blocks] in `update_types`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.optim.update_types import BLOCK

SIGNED_STEPS = 127
UNSIGNED_STEPS = 255


def encode_blocks(values: Tensor, *, is_unsigned: bool) -> tuple[Tensor, Tensor]:
    """The codes of a flat fp32 tensor (int8, or uint8 for second moments), and the scale of each block.

    Measured by its block's largest element, the root of a first moment comes back within 1/254, the fourth root of a
    second moment within 1/510, or within 1/255 where it is the smallest that is not zero.

    Example:
        >>> codes, scales = encode_blocks(torch.tensor([0.25, -1.0, 0.0]), is_unsigned=False)
        >>> codes.tolist(), scales.tolist()
        ([64, -127, 0], [1.0])
    """
    num_elements = values.numel()
    num_blocks = -(-num_elements // BLOCK)
    rows = torch.nn.functional.pad(values, (0, num_blocks * BLOCK - num_elements)).view(num_blocks, BLOCK)
    magnitudes = rows.abs()
    scales = magnitudes.amax(dim=1, keepdim=True) if num_blocks else values.new_zeros(0, 1)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # A block of zeros divides by one, and one with NaN by NaN: its codes are made zero below.
    ratios = magnitudes.div_(torch.where(scales == 0, 1.0, scales))
    if is_unsigned:
        codes = (ratios.sqrt().sqrt_() * UNSIGNED_STEPS).round_()
        codes = torch.where(rows > 0, codes.clamp_(min=1.0), codes)
    else:
        codes = (ratios.sqrt_() * SIGNED_STEPS).round_().copysign_(rows)
    codes = codes.nan_to_num_(nan=0.0).to(torch.uint8 if is_unsigned else torch.int8)
    return codes.view(-1)[:num_elements], scales.view(-1)


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of codes; which kind they are, their dtype says."""
    spread = scales.repeat_interleave(BLOCK)[: codes.numel()]
    if codes.dtype is torch.uint8:
        return (codes.float() / UNSIGNED_STEPS).square_().square_().mul_(spread)
    ratios = codes.float() / SIGNED_STEPS
    return (ratios * ratios.abs()).mul_(spread)
