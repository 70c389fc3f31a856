"""Outputs of the fused attention kernels, in the layouts CUDA gives them: a later `.transpose(1, 2)` copies or not by that.

Each function makes meta tensors; the mode turns them into ghosts. Scratch memory is in `costs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
META = torch.device("meta")


def _like_query(query: Tensor, heads: int, length: int, size: int) -> Tensor:
    """Batch x heads x length x size, stored with the heads innermost but one: what the projections around it want."""
    batch = query.size(0)
    return torch.empty(batch, length, heads, size, dtype=query.dtype, device=META).transpose(1, 2)


def _same_layout(tensor: Tensor) -> Tensor:
    """A new tensor whose dimensions are stored in the same order, without gaps."""
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    packed = torch.empty([tensor.size(d) for d in order], dtype=tensor.dtype, device=META)
    return packed.permute([order.index(d) for d in range(tensor.dim())])


def _scalar() -> Tensor:
    return torch.empty((), dtype=torch.int64, device=META)


def cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Any, needs_sums: bool, *_: Any, **__: Any) -> tuple[Any, ...]:
    batch, heads, length, _size = query.shape
    out = _like_query(query, heads, length, value.size(3))
    sums = torch.empty(batch, heads, length, 1, dtype=torch.float32, device=META) if needs_sums else None
    return out, sums, None, None, length, key.size(2), _scalar(), _scalar(), None


def cudnn_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _same_layout(query), _same_layout(key), _same_layout(value)


def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    batch, heads, length, size = query.shape
    out = _like_query(query, heads, length, size)
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=META)
    state = torch.empty(2, dtype=torch.uint64, device=META)
    return out, sums, None, None, length, key.size(2), state, _scalar(), None


def flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(_like_query(t, t.size(1), t.size(2), t.size(3)) for t in (query, key, value))


def efficient(query: Tensor, key: Tensor, value: Tensor, mask: Any, needs_sums: bool, *_: Any, **__: Any) -> tuple[Any, ...]:
    batch, heads, length, _size = query.shape
    out = _like_query(query, heads, length, value.size(3))
    padded = -(-length // 32) * 32 if needs_sums else 0
    sums = torch.empty(batch, heads, padded, dtype=torch.float32, device=META)
    return out, sums, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, sums: Tensor, seed: Any,
    offset: Any, dropout: float, wanted: list[bool], *_: Any, **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    grads: list[Any] = [_like_query(t, t.size(1), t.size(2), t.size(3)) for t in (query, key, value)]
    if mask is not None and wanted[3]:
        length = mask.size(-1)
        padded = torch.empty(*mask.shape[:-1], -(-length // 16) * 16, dtype=query.dtype, device=META)
        grads.append(padded[..., :length])
    else:
        grads.append(None)
    return tuple(grads)


SHAPES: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
