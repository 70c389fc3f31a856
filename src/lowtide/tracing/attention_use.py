"""Which attention backends a step ran on, how often, and why: read from the operators and the notes of its trace."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.tracing.attention_rules import Backend
from lowtide.tracing.step_trace import Phase, StepTrace

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
FALLS_BACK = "falls back to the math backend"
"""In each note on a call for which nobody asked for math."""


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
    """The notes on calls that fell back to math though nobody asked for it: which call, and what to change."""
    return tuple(note for note in trace.notes if FALLS_BACK in note)


def backend_note(backend: Backend, reason: str) -> str:
    """The note of a trace that names a backend, and why no better one was taken."""
    return _RUNS_ON.format(backend) + (f" ({reason})" if reason else "")


def is_on_attention(note: str) -> bool:
    """Whether a note is one that `attention_use` or `fallbacks` gives back."""
    return FALLS_BACK in note or note.startswith(_RUNS_ON.partition("{")[0])


def _reason(trace: StepTrace, backend: str) -> str:
    start = _RUNS_ON.format(backend)
    note = next((note for note in trace.notes if note.startswith(start)), "")
    return note.removeprefix(start).strip().removeprefix("(").removesuffix(")")
