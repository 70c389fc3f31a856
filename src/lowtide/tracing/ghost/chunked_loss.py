"""The chunked loss on ghosts: a product that CUDA has and the host has not."""

from __future__ import annotations

from torch import Tensor

from lowtide.activations.losses import chunks
from lowtide.tracing.ghost.device import NAME

NOTE = "the chunked loss is taken to run its kernel for CUDA, which needs Triton"
"""For a trace with a chunked loss."""


def accept_ghosts() -> None:
    """Let products of half precision into fp32 go the way of CUDA tensors in this process: without a temporary."""
    plain = chunks.accumulate_product

    def accumulate_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        if total.device.type != NAME or total.dtype == left.dtype:
            plain(total, left, right, is_first=is_first)
        else:
            total.zero_()  # whatever is written: values are not known, and nothing else is allocated

    # Where it is used: in the same module.
    chunks.accumulate_product = accumulate_product
