"""Which backend torch picks for a call of scaled dot product attention, and what would make it pick another.

The choice follows the filters in torch's `sdp_utils.cpp` for CUDA and `sdp_utils_cpp.cpp` for the host. It decides between a peak
with and without the matrix of each query's score with each key. Used on ghosts, and to say why a real run took the slow way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HOST = (0, 0)
"""Stands for the host where a compute capability is asked for."""


class Backend(enum.StrEnum):
    """Implementations of attention in torch."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The facts of one attention call that the choice depends on."""

    dtype: torch.dtype
    query: tuple[int, ...]
    """Batch, heads, queries, head size."""
    key: tuple[int, ...]
    value: tuple[int, ...]
    last_strides: tuple[int, ...]
    """Strides of the last dimension of query, key, value and mask."""
    mask: tuple[int, ...] | None
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    enable_gqa: bool
    needs_grad: bool


def choose(
    call: AttentionCall, capability: tuple[int, int], torch_version: tuple[int, int], enabled: frozenset[Backend]
) -> Backend:
    """The first backend in torch's order of preference that takes the call."""
    prefers_cudnn = capability[0] in (9, 10) and torch_version >= (2, 10)
    order = [Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    order.insert(0 if prefers_cudnn else 2, Backend.CUDNN)
    for backend in order:
        if backend in enabled and why_not(backend, call, capability) is None:
            return backend
    return Backend.MATH


def why_not(backend: Backend, call: AttentionCall, capability: tuple[int, int]) -> str | None:
    """The reason a backend refuses a call, None where it takes it."""
    if backend is Backend.MATH:
        return None
    if capability == HOST:
        return _why_not_on_host(backend, call)
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
            return "bfloat16 needs a GPU of compute capability 8.0 or newer"
        if head % alignment or value_head % alignment:
            return f"the head size {head} is not a multiple of {alignment}"
        return None
    if not is_half or (call.dtype is torch.bfloat16 and capability[0] < 8):
        return f"it takes half precision only, not {str(call.dtype).removeprefix('torch.')}"
    if capability[0] < 8:
        return "it needs a GPU of compute capability 8.0 or newer"
    if backend is Backend.FLASH:
        if call.mask is not None:
            return "it takes no mask"
        if head != value_head or head > 256:
            return f"the head size {head} is above 256 or differs from the values' {value_head}"
        if call.is_causal and call.query[2] != call.key[2]:
            return "causal attention needs as many queries as keys"
        if call.needs_grad and (8, 6) <= capability <= (8, 9) and (192 < head <= 224 or (head > 224 and call.dropout)):
            return f"it cannot train with head size {head} on this GPU"
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


def _why_not_on_host(backend: Backend, call: AttentionCall) -> str | None:
    """The host has one fused kernel, in all floating types."""
    if backend is not Backend.FLASH:
        return "the host does not have it"
    if call.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"it does not take {call.dtype}"
    if call.dropout:
        return "it takes no dropout"
    if len(call.query) != 4 or len(call.key) != 4 or len(call.value) != 4:
        return "query, key and value need four dimensions (batch, heads, length, head size)"
    if call.query[0] != call.key[0] or call.query[0] != call.value[0]:
        return "the batch sizes differ"
    if not call.query[1] == call.key[1] == call.value[1]:
        if not call.enable_gqa:
            return "the numbers of heads differ and enable_gqa is off"
        if call.key[1] != call.value[1] or call.query[1] % call.key[1]:
            return f"{call.query[1]} query heads cannot be shared by {call.key[1]} key and {call.value[1]} value heads"
    if call.mask is not None:
        if call.mask_needs_grad:
            return "the mask needs a gradient"
        whole = (call.query[0], call.query[1], call.query[2], call.key[2])
        fits = all(size in (1, full) for size, full in zip(call.mask, whole[-len(call.mask) :], strict=False))
        if len(call.mask) not in (2, 4) or not fits:
            return f"a mask {list(call.mask)} is not taken"
    if not call.query[3] == call.key[3] == call.value[3]:
        return f"the head sizes {call.query[3]}, {call.key[3]} and {call.value[3]} differ"
    if 0 in (call.query[2], call.key[2]):
        return "a sequence has length zero"
    if call.query[3] != 1 and any(stride != 1 for stride in call.last_strides[:3]):
        return "the last dimension of query, key and value must be contiguous"
    return None


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The facts of a call, from the arguments of `scaled_dot_product_attention`."""
    return AttentionCall(
        dtype=query.dtype,
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        last_strides=tuple(t.stride(-1) for t in (query, key, value, attn_mask) if t is not None and t.size(-1) != 1),
        mask=None if attn_mask is None else tuple(attn_mask.shape),
        mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
    )


def refusals(call: AttentionCall, capability: tuple[int, int], backend: Backend) -> str:
    """Why each backend that is better than the one taken refuses the call; "" where none refuses."""
    better = [Backend.FLASH] if capability == HOST else list(Backend)
    better = better[: better.index(backend)] if backend in better else better
    return "; ".join(f"{b} does not take it: {why}" for b in better if (why := why_not(b, call, capability)))


def describe(call: AttentionCall) -> str:
    """The call in a few words: `query [4, 16, 1024, 64] float32, 4 key heads, a mask [4, 1, 1024, 1024], dropout 0.1`."""
    words = [f"query {list(call.query)} {str(call.dtype).removeprefix('torch.')}"]
    if len(call.query) == len(call.key) == 4 and call.key[1] != call.query[1]:
        words.append(f"{call.key[1]} key heads")
    if call.mask is not None:
        words.append(f"a mask {list(call.mask)}{' that needs a gradient' if call.mask_needs_grad else ''}")
    if call.dropout:
        words.append(f"dropout {call.dropout:g}")
    return ", ".join(words)


def ways_out(call: AttentionCall, capability: tuple[int, int], torch_version: tuple[int, int]) -> tuple[str, ...]:
    """What to change, one thing at a time, so that a fused backend takes a call that falls back to math.

    Each is tried against the rules, so none is advice that does not help; several are not combined.
    """
    found = []
    for words, changed in _changes(call, capability):
        backend = choose(changed, capability, torch_version, frozenset(Backend))
        if backend is not Backend.MATH:
            found.append(f"{words} it runs on {backend}")
    return tuple(found)


def _changes(call: AttentionCall, capability: tuple[int, int]) -> Iterator[tuple[str, AttentionCall]]:
    yield "with all backends allowed", call
    half = torch.bfloat16 if capability[0] >= 8 else torch.float16
    if call.dtype is not half:
        yield f"in {str(half).removeprefix('torch.')} (autocast, or the model's own type)", replace(call, dtype=half)
    if len(call.query) == 3:
        batched = replace(call, query=(1, *call.query), key=(1, *call.key), value=(1, *call.value))
        yield "with a fourth dimension (unsqueeze(0))", batched
    if any(stride != 1 for stride in call.last_strides):
        contiguous = replace(call, last_strides=(1,) * len(call.last_strides))
        yield "with query, key, value and mask made contiguous in their last dimension", contiguous
    if call.mask is not None:
        plain = replace(call, mask=None, mask_needs_grad=False, last_strides=call.last_strides[:3])
        yield "without attn_mask (is_causal=True where the mask says no more than that)", plain
    if call.mask_needs_grad:
        yield "with a mask that needs no gradient", replace(call, mask_needs_grad=False)
    if len(call.query) == len(call.key) == len(call.value) == 4 and call.query[1] != call.key[1]:
        if not call.enable_gqa:
            yield "with enable_gqa=True", replace(call, enable_gqa=True)
        heads = call.query[1]
        repeated = replace(call, key=(call.key[0], heads, *call.key[2:]), value=(call.value[0], heads, *call.value[2:]))
        yield f"with key and value repeated to {heads} heads", repeated
    head = call.query[-1]
    if head % 8 and call.value[-1] == head:
        size = head + -head % 8
        padded = replace(
            call, query=(*call.query[:-1], size), key=(*call.key[:-1], size), value=(*call.value[:-1], size)
        )
        yield f"with the head size {head} padded to {size}", padded
    if call.dropout:
        yield "with dropout_p=0", replace(call, dropout=0.0)


def enabled_backends() -> frozenset[Backend]:
    """What `torch.nn.attention.sdpa_kernel` and the global switches allow now."""
    switches = {
        Backend.CUDNN: torch.backends.cuda.cudnn_sdp_enabled(),
        Backend.FLASH: torch.backends.cuda.flash_sdp_enabled(),
        Backend.EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
        Backend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return frozenset(backend for backend, is_on in switches.items() if is_on)
