"""Scaled dot product attention: the backend a step takes, how often and why, and what that one allocates.

Layouts and shapes of the fused kernels' outputs and scratch were read off an H200 (torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.hardware import release_of
from lowtide.tracing.attention.rules import (
    HOST,
    AttentionCall,
    Backend,
    call_of,
    choose,
    describe,
    enabled_backends,
    refusals,
    ways_out,
)
from lowtide.tracing.step_trace import Phase, StepTrace
from lowtide.tracing.training_step import watch_modules

WRITTEN_OUT = "written out"
"""Stands for a backend where the model computes scores and softmax itself, instead of calling torch's attention."""

_OPERATORS = {
    "aten._scaled_dot_product_cudnn_attention": Backend.CUDNN,
    "aten._scaled_dot_product_flash_attention": Backend.FLASH,
    "aten._scaled_dot_product_flash_attention_for_cpu": Backend.FLASH,
    "aten._scaled_dot_product_efficient_attention": Backend.EFFICIENT,
    "aten._safe_softmax": Backend.MATH,
}
_RUNS_ON = "attention runs on the {} backend"
_FALLS_BACK = "falls back to the math backend"
"""In each note on a call that runs on math unasked."""
_MAX_FALLBACKS = 3
"""Calls told of one by one: layers of a model call alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """One backend of a step."""

    backend: str
    """`cudnn`, `flash`, `efficient`, `math` or `written out`."""
    num_calls: int
    """In the forward; those that the backward repeats are not counted again."""
    reason: str
    """Why no better backend took the calls, where that is known; "" otherwise."""

    @property
    def text(self) -> str:
        """`cudnn (26 calls)`, with the reason where there is one."""
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"{self.backend} ({calls}{f'; {self.reason}' if self.reason else ''})"


def backend_of(operator: str) -> Backend | None:
    """The backend whose forward an operator is; None for any other operator."""
    return _OPERATORS.get(operator)


def attention_use(trace: StepTrace) -> tuple[AttentionUse, ...]:
    """The backends a step ran on, the one with most calls first; empty for a step without attention.

    Example:
        >>> import torch, lowtide
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> step = lowtide.trace(source.build(torch.bfloat16), source.make_batch("8x128"))
        >>> [use.text for use in attention_use(step)]
        ['cudnn (4 calls)']
    """
    counts: dict[str, int] = {}
    for op in trace.ops:
        # A recomputation runs the same calls again: the backward says nothing new.
        if op.phase is not Phase.BACKWARD and (backend := backend_of(op.name)) is not None:
            counts[backend] = counts.get(backend, 0) + 1
    by_hand = sum(
        item.op == "aten._softmax" and len(item.shape) == 4 and item.phase is Phase.FORWARD
        for item in trace.allocations
    )
    if by_hand:
        counts[WRITTEN_OUT] = by_hand
    found = [AttentionUse(backend=name, num_calls=count, reason=_reason(trace, name)) for name, count in counts.items()]
    return tuple(sorted(found, key=lambda use: -use.num_calls))


def fallbacks(trace: StepTrace) -> tuple[str, ...]:
    """The notes on calls that fell back to math unasked: which call, and what to change."""
    return tuple(note for note in trace.notes if _FALLS_BACK in note)


def _backend_note(backend: Backend, reason: str) -> str:
    """The note of a trace that names a backend, and why no better one was taken."""
    return _RUNS_ON.format(backend) + (f" ({reason})" if reason else "")


def is_on_attention(note: str) -> bool:
    """Whether a note is one that `attention_use` or `fallbacks` gives back."""
    return _FALLS_BACK in note or note.startswith(_RUNS_ON.partition("{")[0])


def _reason(trace: StepTrace, backend: str) -> str:
    start = _RUNS_ON.format(backend)
    note = next((note for note in trace.notes if note.startswith(start)), "")
    return note.removeprefix(start).strip().removeprefix("(").removesuffix(")")


class AttentionChoices:
    """Chooses as torch would on a device, or on the host, and remembers why."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int]) -> None:
        self._capability = capability
        self._version = torch_version
        self.chosen: dict[Backend, str] = {}
        """Backends used so far, each with the reason why no better one was (empty for the best)."""
        self._fallbacks: dict[str, str] = {}

    @property
    def is_on_host(self) -> bool:
        """Whether the host is to run the calls."""
        return self._capability == HOST

    def choose(self, call: AttentionCall, module: str) -> Backend:
        """The backend of a call made in a module."""
        enabled = enabled_backends()
        backend = choose(call, self._capability, self._version, enabled)
        if backend is not Backend.MATH:
            self.chosen.setdefault(backend, "")
            return backend
        is_asked_for = enabled <= {Backend.MATH}
        if backend not in self.chosen:
            self.chosen[backend] = "" if is_asked_for else refusals(call, self._capability, backend)
        if not is_asked_for:
            self._remember(call, module)
        return backend

    def notes(self) -> list[str]:
        """One note for each backend, then one for each kind of call that fell back to math."""
        return [*(_backend_note(backend, reason) for backend, reason in self.chosen.items()), *self._fallbacks.values()]

    def notes_on_math(self) -> list[str]:
        """The notes that are about the math backend."""
        of_math = [_backend_note(backend, reason) for backend, reason in self.chosen.items() if backend is Backend.MATH]
        return [*of_math, *self._fallbacks.values()]

    def _remember(self, call: AttentionCall, module: str) -> None:
        words = describe(call)
        if words in self._fallbacks or len(self._fallbacks) == _MAX_FALLBACKS:
            return
        ways = ways_out(call, self._capability, self._version)
        advice = "; ".join(ways) if ways else "no single change of its arguments lets a fused backend take it"
        where = f" in {module!r}" if module else ""
        self._fallbacks[words] = f"the attention{where} ({words}) {_FALLS_BACK}: {advice}"


class AttentionWatch(TorchFunctionMode):
    """A context around one step, which it does not change. Meant for a warm-up step: looking on costs time.

    Which backend ran is in the record of the step; torch does not say why, so the rules are asked.
    """

    def __init__(self, model: nn.Module, choices: AttentionChoices) -> None:
        super().__init__()
        self._choices = choices
        self._modules: list[str] = []
        self._paths = watch_modules(model, self)

    def __enter__(self) -> AttentionWatch:
        self._paths.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._paths.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.see(call_of(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def enter_module(self, path: str) -> None:
        """A module's forward begins."""
        self._modules.append(path)

    def leave_module(self, *, has_weights: bool) -> None:
        """The innermost module's forward ends."""
        self._modules.pop()

    def see(self, call: AttentionCall) -> None:
        """Record a call of attention."""
        if torch.is_autocast_enabled("cuda"):
            call = replace(call, dtype=torch.get_autocast_dtype("cuda"))  # it casts below the place we look at
        self._choices.choose(call, self._modules[-1] if self._modules else "")

    def explained(self, trace: StepTrace) -> StepTrace:
        """The trace of a later step with the reasons for math, where math did run."""
        if not any(use.backend == Backend.MATH for use in attention_use(trace)):
            return trace
        return replace(trace, notes=(*trace.notes, *self._choices.notes_on_math()))


def attention_watch(model: nn.Module, device: torch.device) -> AttentionWatch | None:
    """The watch for a model on its device; None where it cannot help.

    The host has backends of its own, and a compiled module would be compiled once for the watch and again without it.
    """
    if device.type != "cuda" or any(
        compat.compiled_original(module) is not None or compat.call_of(module) is not None for module in model.modules()
    ):
        return None
    return AttentionWatch(
        model, AttentionChoices(torch.cuda.get_device_capability(device), release_of(torch.__version__))
    )


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
