"""`lowtide.explain`: why the peak of a step is where it is, in sentences and in the numbers behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.tracing.attention.rules import Backend
from lowtide.tracing.attention.use import AttentionUse, attention_use, fallbacks
from lowtide.tracing.explanation import over_time
from lowtide.tracing.explanation.instant import (
    AliveGroup,
    Instant,
    Place,
    decisive_event,
    group_alive,
    instant_of,
    largest_alive,
    place_of,
    where,
)
from lowtide.tracing.step_trace import Allocation, Category, StepTrace
from lowtide.units import format_bytes, format_seconds

NUM_ROWS = 12
_CAUSE_SHARE = 0.10
"""Least share of the peak that the headline names."""
_WORDS = {
    Category.WEIGHTS: "weights",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.ACTIVATIONS: "activations kept for the backward",
    Category.TEMPORARIES: "temporaries",
    Category.WORKSPACE: "workspaces",
}
NOTABLE_SHARE = 0.05
"""Share of the peak; less is not worth a sentence."""
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where the peak is, what is alive there and for how long it waits."""

    model: str
    peak_bytes: int
    place: Place
    instant: Instant
    """What was running at the peak, exactly."""
    cause: Instant
    """What made the last tensor of some size that is alive there."""
    headline: str
    """The peak in one sentence."""
    at_peak: dict[Category, int]
    """Bytes by category; they sum to the peak."""
    alive: tuple[AliveGroup, ...]
    """The largest kinds of tensors alive at the peak, equal layers together."""
    largest: tuple[Allocation, ...]
    """The largest single tensors alive at the peak."""
    idle: tuple[over_time.IdleGroup, ...]
    """Kinds of tensors of the whole step with the most byte-seconds between their uses."""
    is_timed: bool
    """Whether idle times are seconds; otherwise they count ops."""
    passes: over_time.PassCounts
    shares: tuple[over_time.Share, ...]
    rule: over_time.RuleCheck
    remarks: tuple[str, ...]
    """What else stands out, one sentence each."""
    attention: tuple[AttentionUse, ...]
    """The backends that attention ran on; empty for a step without."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole explanation, most important first."""
        return (
            self.headline,
            _composition(self),
            *self.remarks,
            *(_attention(self),) * bool(self.attention),
            *(_idleness(self),) * bool(self.idle),
            self.passes.sentence,
            self.rule.sentence,
        )

    @property
    def text(self) -> str:
        """The sentences as paragraphs, with blank lines between them."""
        return "\n\n".join(self.sentences)


def explain(trace: StepTrace) -> Explanation:
    """Explain the peak of a step: where it is, what is alive there, how long it waits, and what stands out.

    A pure function of the trace, predicted or observed; it takes some milliseconds.

    Example:
        >>> import torch, lowtide
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> step = lowtide.trace(source.build(None), source.make_batch("8x128"), optimizer=torch.optim.AdamW)
        >>> explain(step).headline.startswith("The peak of 109.8 MiB is in the backward of the loss")
        True
    """
    shares = over_time.category_shares(trace)
    return Explanation(
        model=trace.model,
        peak_bytes=trace.peak_bytes,
        place=place_of(trace, trace.peak_event),
        instant=instant_of(trace, trace.peak_event),
        cause=instant_of(trace, decisive_event(trace)),
        headline=_headline(trace),
        at_peak=trace.at_peak,
        alive=tuple(group_alive(trace, trace.peak_event)[:NUM_ROWS]),
        largest=tuple(largest_alive(trace, trace.peak_event, NUM_ROWS)),
        idle=over_time.idle_tensors(trace, NUM_ROWS),
        is_timed=over_time.clock_of(trace).is_timed,
        passes=over_time.pass_counts(trace),
        shares=shares,
        rule=over_time.check_rule(trace, shares),
        remarks=remarks(trace),
        attention=attention_use(trace),
    )


def _headline(trace: StepTrace) -> str:
    cause, place = instant_of(trace, decisive_event(trace)), where(trace, trace.peak_event)
    at = ", ".join(part for part in (cause.module, cause.source) if part and not place.endswith(part))
    return f"The peak of {format_bytes(trace.peak_bytes)} is {place}{f' ({at})' if at else ''}: {_main_load(trace)}."


def _main_load(trace: StepTrace) -> str:
    """What fills the peak, in the words that help most: a thing held several times over, else the main categories."""
    least = _CAUSE_SHARE * trace.peak_bytes
    logits = logits_copies(trace, trace.peak_event)
    if logits is not None and logits.count > 1 and logits.bytes >= least:
        dtypes = " and ".join(logits.dtypes)
        held = f"{format_bytes(logits.bytes)}, {logits.bytes / trace.peak_bytes:.0%}"
        return f"{logits.number} copies of the logits {list(logits.shape)} in {dtypes} are alive at once ({held} of it)"
    foreach = foreach_copies(trace, trace.peak_event)
    if foreach is not None and foreach.bytes >= least:
        copies = f"{format_bytes(foreach.bytes)} of temporary copies"
        return f"the foreach update holds {copies} beside weights, gradients and state"
    by_size = sorted(trace.at_peak.items(), key=lambda item: -item[1])
    main = [f"{format_bytes(size)} of {_WORDS[category]}" for category, size in by_size[:3] if size >= least]
    return " and ".join([", ".join(main[:-1]), main[-1]] if len(main) > 1 else main) + " are alive"


def _composition(explanation: Explanation) -> str:
    whole = max(explanation.peak_bytes, 1)
    parts = [
        f"{category.value} {format_bytes(size)} ({size / whole:.0%})"
        for category, size in sorted(explanation.at_peak.items(), key=lambda item: -item[1])
        if size >= whole / 200
    ]
    sentence = f"Alive there: {', '.join(parts)}"
    if explanation.alive:
        kind = explanation.alive[0]
        sentence += f"; the largest kind is {_label(kind)}, {list(kind.shape)} {kind.dtype}, {format_bytes(kind.bytes)}"
    return sentence + "."


def _label(kind: AliveGroup | over_time.IdleGroup) -> str:
    return f"{kind.module or '(outside the model)'} {kind.op}{f' x{kind.count}' if kind.count > 1 else ''}"


def _attention(explanation: Explanation) -> str:
    # Reasons are told by the remark on the math backend.
    uses = [f"{use.backend} ({use.num_calls} call{'' if use.num_calls == 1 else 's'})" for use in explanation.attention]
    return f"Attention: {', '.join(uses)}."


def _idleness(explanation: Explanation) -> str:
    kind = explanation.idle[0]
    waits = f"{kind.idle_share:.1%} of the step"
    if explanation.is_timed:
        waits = f"{format_seconds(kind.idle_s)} ({waits})"
    return (
        f"Most idle is {_label(kind)} ({kind.category.value}, {format_bytes(kind.bytes)}): each lies unused for {waits}, "
        f"mostly until the {kind.next_phase.value}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Tensors at one instant that hold the same thing, or parts of it."""

    count: int
    bytes: int
    shape: tuple[int, ...]
    """Shape of the largest copy."""
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
    # A loss that drops the last position leaves slightly smaller copies next to the logits.
    found = [
        item
        for item in trace.alive_at(event)
        if item.category in (Category.ACTIVATIONS, Category.TEMPORARIES)
        and item.shape[-1:] == shape[-1:]
        and 0.9 * size <= math.prod(item.shape) <= 1.1 * size
    ]
    return _copies(found)


def foreach_copies(trace: StepTrace, event: int) -> Copies | None:
    """What the foreach implementation of an update holds besides weights, gradients and state: a copy of all of them."""
    return _copies([item for item in trace.alive_at(event) if is_foreach_copy(item)])


def is_foreach_copy(item: Allocation) -> bool:
    """Whether an allocation is a temporary list of a foreach update."""
    return item.category is Category.TEMPORARIES and item.op.startswith("aten._foreach")


def remarks(trace: StepTrace) -> tuple[str, ...]:
    """The sentences that apply to a trace."""
    return tuple(filter(None, (_logits(trace), _foreach(trace), _math_attention(trace), _unused(trace))))


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


def _math_attention(trace: StepTrace) -> str | None:
    use = next((use for use in attention_use(trace) if use.backend == Backend.MATH), None)
    if use is None:
        return None
    held = sum(item.bytes for item in over_time.attention_scores(trace, trace.peak_event))
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
