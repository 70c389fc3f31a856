"""Scaled dot product attention by the backend the target would take, and what that one allocates.

Layouts and shapes of the fused kernels' outputs and scratch were read off an H200 (torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.tracing.attention.rules import Backend, call_of
from lowtide.tracing.attention.use import AttentionChoices

aten = torch.ops.aten


class Attention:
    """Stands in for `aten::scaled_dot_product_attention` on the ghost device."""

    def __init__(self, choices: AttentionChoices, module: Callable[[], str]) -> None:
        self.choices, self._module = choices, module

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention, by the backend the target would take."""
        call = call_of(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        backend = self.choices.choose(call, self._module())
        options: dict[str, Any] = {"scale": scale if scale is not None else 1 / math.sqrt(query.size(-1))}
        if backend is Backend.CUDNN:
            mask = _as_bias(attn_mask, query, -65504.0)
            return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
                query, key, value, mask, call.needs_grad, dropout_p, is_causal, False, **options
            )[0]
        if backend is Backend.FLASH and self.choices.is_on_host:
            mask = _as_bias(attn_mask, query, float("-inf"))
            return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )[0]
        if backend is Backend.FLASH:
            padding = -query.size(-1) % 8
            if padding:
                query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
            out: Tensor = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, **options
            )[0]
            return out[..., : out.size(-1) - padding] if padding else out
        mask = _as_bias(attn_mask, query, float("-inf"))
        if backend is Backend.EFFICIENT:
            if mask is not None:
                mask = _aligned(mask).expand(query.size(0), query.size(1), query.size(2), key.size(2))
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, mask, call.needs_grad, dropout_p, is_causal, **options
            )[0]
        return _math(query, key, value, mask, dropout_p, is_causal, options["scale"], enable_gqa)


def _as_bias(mask: Tensor | None, query: Tensor, minimum: float) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low = torch.scalar_tensor(minimum, dtype=query.dtype, device=query.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device), low)


def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.size(-1)
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float, gqa: bool,
) -> Tensor:  # fmt: skip
    """The composite path, as torch spells it: half precision is raised to fp32, the mask is added in place."""
    dtype = query.dtype
    is_half = (
        dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    )
    if is_half:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale)
    raised = query, key, value  # torch holds them until it returns
    query = aten.mul.Scalar(query, factor)
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _as_bias(ones, query, float("-inf"))
        del ones
    if gqa and key.size(1) != query.size(1):
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
        value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    scores = torch.matmul(query, aten.mul.Scalar(key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    weights: Tensor = aten._safe_softmax(scores, -1)
    del scores
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    copy = weights.to(dtype)  # torch returns the weights too; the caller drops them
    out = torch.matmul(weights, value).to(dtype)
    del copy, raised
    return out


class TargetAttention(TorchFunctionMode):
    """Attention takes the backend it would take on a device, whose kernels save other tensors than the host's."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
