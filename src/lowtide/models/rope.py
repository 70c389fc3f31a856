"""Rotary position embedding (Su et al. 2021): queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(length: int, head_size: int, *, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, `[length, head_size]` each, in fp32.

    Made anew in every forward instead of kept as buffers: they are small, and a model that was built on the meta device
    then needs nothing restored. Angles need fp32: bf16 cannot tell neighbouring positions apart beyond 256.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_size / 2) of `x`, `[batch, heads, length, head_size]`, by its position's angle.

    The tables take the dtype of `x`, else fp32 tables would promote bf16 queries and keys and double their bytes.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
