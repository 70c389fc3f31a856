"""The matrix products of a chunked head: sums over chunks, into buffers that exist, in the dtype of the sum."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE_NUMEL = 1 << 22
"""How much of a large buffer is worked on at a time where an operator would need a temporary of its size."""


def multiply_into(result: Tensor, left: Tensor, right: Tensor) -> None:
    """`result` becomes `left @ right`."""
    if result.dtype == left.dtype:
        torch.mm(left, right, out=result)
    else:
        result.copy_(torch.mm(left, right))


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """`total` becomes `left.T @ right`, and grows by that after the first time.

    Where `total` is fp32 and the factors are not, products are summed in fp32 and never rounded to their dtype.
    """
    transposed = left.t()
    if total.dtype == left.dtype:
        if is_first:
            torch.mm(transposed, right, out=total)
        else:
            total.addmm_(transposed, right)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        if is_first:
            torch.mm(transposed, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, transposed, right, out_dtype=torch.float32, out=total)
    else:
        # Processors have no product of bf16 into fp32: the factors are widened, a slice of the vocabulary at a time.
        wide = right.to(total.dtype)
        num_rows = max(1, SLICE_NUMEL // max(1, left.shape[0]))
        for start in range(0, total.shape[0], num_rows):
            part = total[start : start + num_rows]
            factor = transposed[start : start + num_rows].to(total.dtype)
            if is_first:
                torch.mm(factor, wide, out=part)
            else:
                part.addmm_(factor, wide)


def scaled(buffer: Tensor, factor: Tensor, dtype: torch.dtype, *, may_overwrite: bool) -> Tensor:
    """`buffer * factor` in a dtype, multiplied in the wider of both dtypes and rounded once.

    A factor without dimensions would be rounded to the buffer's dtype first: 1/3 in bf16 makes every gradient wrong by
    0.2%. So it has one dimension here.
    """
    result = buffer if may_overwrite and buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)
    factor = factor.reshape(1)
    if buffer.dtype == factor.dtype == dtype or buffer.device.type == "cuda":
        return torch.mul(buffer, factor, out=result)
    # The kernels of processors convert through temporaries of the whole size.
    source, target = buffer.view(-1), result.view(-1)
    for start in range(0, source.numel(), SLICE_NUMEL):
        torch.mul(source[start : start + SLICE_NUMEL], factor, out=target[start : start + SLICE_NUMEL])
    return result
