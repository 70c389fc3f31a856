"""What stands out at the peak, one sentence each: copies of logits, copies of an update, scores, unused memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.tracing.attention_rules import Backend
from lowtide.tracing.attention_use import attention_use, fallbacks
from lowtide.tracing.shares import attention_scores
from lowtide.tracing.step_trace import Allocation, Category, StepTrace
from lowtide.units import format_bytes

NOTABLE_SHARE = 0.05
"""Of the peak: less is not worth a sentence."""
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Tensors at one instant that hold the same thing, or parts of it."""

    count: int
    bytes: int
    shape: tuple[int, ...]
    """Of the largest."""
    dtypes: tuple[str, ...]

    @property
    def number(self) -> str:
        """The count as a word."""
        return _NUMBERS[self.count] if self.count < len(_NUMBERS) else f"{self.count:,}"


def logits_shape(trace: StepTrace) -> tuple[int, ...] | None:
    """The shape of the largest log-softmax of a step; None without any."""
    shapes = [item.shape for item in trace.allocations if item.op == "aten._log_softmax" and len(item.shape) >= 2]
    return max(shapes, key=math.prod, default=None)


def logits_copies(trace: StepTrace, event: int) -> Copies | None:
    """Tensors of the logits' size alive after an event: the logits, their log-softmax, and the gradients of both."""
    shape = logits_shape(trace)
    if shape is None:
        return None
    size = math.prod(shape)
    # A loss that drops the last position leaves slightly smaller copies beside the logits.
    found = [
        item
        for item in trace.alive_at(event)
        if item.category in (Category.ACTIVATIONS, Category.TEMPORARIES)
        and item.shape[-1:] == shape[-1:]
        and 0.9 * size <= math.prod(item.shape) <= 1.1 * size
    ]
    return _copies(found)


def foreach_copies(trace: StepTrace, event: int) -> Copies | None:
    """What the foreach implementation of an update holds beside weights, gradients and state: a copy of all of them."""
    return _copies([item for item in trace.alive_at(event) if is_foreach_copy(item)])


def is_foreach_copy(item: Allocation) -> bool:
    """Whether an allocation is a temporary list of a foreach update."""
    return item.category is Category.TEMPORARIES and item.op.startswith("aten._foreach")


def remarks(trace: StepTrace) -> tuple[str, ...]:
    """The sentences that apply to a trace."""
    return tuple(
        sentence
        for sentence in (_logits(trace), _foreach(trace), _attention(trace), _unused(trace))
        if sentence is not None
    )


def _copies(found: list[Allocation]) -> Copies | None:
    if not found:
        return None
    largest = max(found, key=lambda item: item.bytes)
    dtypes = tuple(dict.fromkeys(item.dtype for item in found))
    return Copies(count=len(found), bytes=sum(item.bytes for item in found), shape=largest.shape, dtypes=dtypes)


def _share(trace: StepTrace, num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)}, {num_bytes / max(trace.peak_bytes, 1):.0%} of the peak"


def _logits(trace: StepTrace) -> str | None:
    copies = logits_copies(trace, trace.peak_event)
    if copies is None or copies.count < 2 or copies.bytes < NOTABLE_SHARE * trace.peak_bytes:
        return None
    return (
        f"{copies.number.capitalize()} tensors have the size of the logits {list(copies.shape)} at the peak "
        f"({_share(trace, copies.bytes)}): the loss is computed over all positions at once."
    )


def _foreach(trace: StepTrace) -> str | None:
    copies = foreach_copies(trace, trace.peak_event)
    if copies is None or copies.bytes < NOTABLE_SHARE * trace.peak_bytes:
        return None
    return (
        f"The foreach update holds {copies.number} temporary tensors at the peak ({_share(trace, copies.bytes)}), "
        "because it updates all parameters in one go; a fused or a for-loop step does not."
    )


def _attention(trace: StepTrace) -> str | None:
    use = next((use for use in attention_use(trace) if use.backend == Backend.MATH), None)
    if use is None:
        return None
    held = sum(item.bytes for item in attention_scores(trace, trace.peak_event))
    why = f" ({use.reason})" if use.reason else ""
    sentence = f"Attention runs on the math backend{why}, which stores the scores of each query with each key"
    told = "".join(f" {note[0].upper()}{note[1:]}." for note in fallbacks(trace))
    return f"{sentence}: {_share(trace, held)}.{told}"


def _unused(trace: StepTrace) -> str | None:
    unused = trace.peak_reserved_bytes - trace.peak_bytes
    if unused <= NOTABLE_SHARE * trace.peak_reserved_bytes:
        return None
    return (
        f"The allocator reserves {format_bytes(trace.peak_reserved_bytes)}, {format_bytes(unused)} more than is "
        "ever in use: blocks cached or split in sizes that no later request fits."
    )
