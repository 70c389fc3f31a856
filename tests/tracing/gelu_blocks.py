"""Blocks whose saved bytes can be counted: two matmuls and a gelu between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, WIDTH, WIDER = 512, 256, 1024
INNER = 4 * ROWS * WIDTH
"""Bytes of a block's input or output, 512 KiB: a block of the allocator by itself, so rounding changes nothing."""
WIDE = 4 * ROWS * WIDER
"""Bytes of what is inside of a block."""


class Block(nn.Module):
    """Up, gelu and down, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDER, bias=False), nn.Linear(WIDER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def batch() -> Tensor:
    """A batch in fp32."""
    return torch.randn(ROWS, WIDTH)
