"""Scaled dot product attention as a CUDA card runs it: which backend torch would pick, and what each one allocates.

The choice follows the filters in torch's `sdp_utils.cpp`; it decides between a peak with and without the T x T matrix. Layouts
and shapes of the fused kernels' outputs and scratch were read off an H200 (torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Backend(enum.StrEnum):
    """Who computes the attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class Call:
    """The facts of one attention call that the choice depends on."""

    dtype: torch.dtype
    query: tuple[int, ...]
    """Batch, heads, queries, head size."""
    key: tuple[int, ...]
    value: tuple[int, ...]
    last_strides: tuple[int, ...]
    """Of query, key, value and mask."""
    mask: tuple[int, ...] | None
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    enable_gqa: bool
    needs_grad: bool


def choose(
    call: Call, capability: tuple[int, int], torch_version: tuple[int, int], enabled: frozenset[Backend]
) -> Backend:
    """The first backend in torch's order of preference that takes the call."""
    prefers_cudnn = capability[0] in (9, 10) and torch_version >= (2, 10)
    order = [Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    order.insert(0 if prefers_cudnn else 2, Backend.CUDNN)
    for backend in order:
        if backend in enabled and why_not(backend, call, capability) is None:
            return backend
    return Backend.MATH


def why_not(backend: Backend, call: Call, capability: tuple[int, int]) -> str | None:
    """The reason a backend refuses a call, None where it takes it."""
    if backend is Backend.MATH:
        return None
    if len(call.query) != 4 or len(call.key) != 4 or len(call.value) != 4:
        return "query, key and value need four dimensions (batch, heads, length, head size)"
    if 0 in (call.query[2], call.key[2]):
        return "a sequence has length zero"
    if any(stride != 1 for stride in call.last_strides):
        return "the last dimension of query, key, value and mask must be contiguous"
    if call.query[0] != call.key[0] or call.query[0] != call.value[0]:
        return "the batch sizes differ"
    same_heads = call.query[1] == call.key[1] == call.value[1]
    if not same_heads:
        if not call.enable_gqa:
            return "the numbers of heads differ and enable_gqa is off"
        if backend is Backend.EFFICIENT:
            return "it does not take grouped key and value heads"
    head, value_head = call.query[3], call.value[3]
    is_half = call.dtype in (torch.float16, torch.bfloat16)
    if backend is Backend.EFFICIENT:
        alignment = (8 if is_half else 4) if capability[0] >= 8 else (8 if is_half else 1)
        if call.dtype not in (torch.float16, torch.float32, torch.bfloat16):
            return f"it does not take {call.dtype}"
        if call.dtype is torch.bfloat16 and capability[0] < 8:
            return "bfloat16 needs a card of compute capability 8.0 or newer"
        if head % alignment or value_head % alignment:
            return f"the head size {head} is not a multiple of {alignment}"
        return None
    if not is_half or (call.dtype is torch.bfloat16 and capability[0] < 8):
        return f"it takes half precision only, not {str(call.dtype).removeprefix('torch.')}"
    if capability[0] < 8:
        return "it needs a card of compute capability 8.0 or newer"
    if backend is Backend.FLASH:
        if call.mask is not None:
            return "it takes no mask"
        if head != value_head or head > 256:
            return f"the head size {head} is above 256 or differs from the values' {value_head}"
        if call.is_causal and call.query[2] != call.key[2]:
            return "causal attention needs as many queries as keys"
        if call.needs_grad and (8, 6) <= capability <= (8, 9) and (192 < head <= 224 or (head > 224 and call.dropout)):
            return f"it cannot train with head size {head} on this card"
        return None
    if call.mask is not None:
        if call.mask_needs_grad:
            return "the mask needs a gradient"
        if len(call.mask) not in (2, 4):
            return f"a mask of {len(call.mask)} dimensions is not taken"
    if head > 128 or value_head > 128 or head % 8 or value_head % 8:
        return f"the head size {head} is above 128 or not a multiple of 8"
    if call.key[2] == 1 or (call.dropout and call.query[2] == 1):
        return "a sequence has length one"
    return None


class Attention:
    """Stands in for `aten::scaled_dot_product_attention` on the ghost device."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int]) -> None:
        self._capability = capability
        self._version = torch_version
        self.chosen: dict[Backend, str] = {}
        """Backends used so far, each with the reason why no better one was (empty for the best)."""

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
        """Attention, by the backend the target card would take."""
        call = Call(
            dtype=query.dtype,
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            last_strides=tuple(
                t.stride(-1) for t in (query, key, value, attn_mask) if t is not None and t.size(-1) != 1
            ),
            mask=None if attn_mask is None else tuple(attn_mask.shape),
            mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        )
        backend = choose(call, self._capability, self._version, _enabled())
        if backend not in self.chosen:
            better = list(Backend)[: list(Backend).index(backend)]
            reasons = [f"{b} does not take it: {r}" for b in better if (r := why_not(b, call, self._capability))]
            self.chosen[backend] = "; ".join(reasons) if backend is Backend.MATH else ""
        options: dict[str, Any] = {"scale": scale if scale is not None else 1 / math.sqrt(query.size(-1))}
        if backend is Backend.CUDNN:
            mask = _as_bias(attn_mask, query, -65504.0)
            return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
                query, key, value, mask, call.needs_grad, dropout_p, is_causal, False, **options
            )[0]
        if backend is Backend.FLASH:
            padding = -query.size(-1) % 8
            if padding:
                query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
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


def _enabled() -> frozenset[Backend]:
    """What `torch.nn.attention.sdpa_kernel` and the global switches allow at this moment."""
    switches = {
        Backend.CUDNN: torch.backends.cuda.cudnn_sdp_enabled(),
        Backend.FLASH: torch.backends.cuda.flash_sdp_enabled(),
        Backend.EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
        Backend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return frozenset(backend for backend, is_on in switches.items() if is_on)


def _as_bias(mask: Tensor | None, query: Tensor, minimum: float) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low = torch.scalar_tensor(minimum, dtype=query.dtype, device=query.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device), low)


def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.size(-1)
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
    gqa: bool,
) -> Tensor:
    """The composite path, as torch spells it: half precision is raised to fp32, the mask is added in place."""
    dtype = query.dtype
    is_half = (
        dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    )
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _as_bias(ones, query, float("-inf"))
        del ones
    if is_half:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale)
    query = aten.mul.Scalar(query, factor)
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
    del copy
    return out
