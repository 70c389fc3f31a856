"""`lowtide.explain`: why the peak of a step is where it is, in sentences and in the numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.tracing.alive import AliveGroup, group_alive, largest_alive
from lowtide.tracing.attention_use import AttentionUse, attention_use
from lowtide.tracing.clock import clock_of
from lowtide.tracing.idle import IdleGroup, PassCounts, idle_tensors, pass_counts
from lowtide.tracing.instant import Instant, decisive_event, instant_of
from lowtide.tracing.place import Place, place_of, where
from lowtide.tracing.remarks import foreach_copies, logits_copies, remarks
from lowtide.tracing.shares import RuleCheck, Share, category_shares, check_rule
from lowtide.tracing.step_trace import Allocation, Category, StepTrace
from lowtide.units import format_bytes, format_seconds

NUM_ROWS = 12
_CAUSE_SHARE = 0.10
"""Of the peak: what the headline names takes at least this much."""


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
    """The largest single ones."""
    idle: tuple[IdleGroup, ...]
    """Those of the whole step with the most byte-seconds between their uses."""
    is_timed: bool
    """Whether idle times are seconds; otherwise they count ops."""
    passes: PassCounts
    shares: tuple[Share, ...]
    rule: RuleCheck
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
    shares = category_shares(trace)
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
        idle=idle_tensors(trace, NUM_ROWS),
        is_timed=clock_of(trace).is_timed,
        passes=pass_counts(trace),
        shares=shares,
        rule=check_rule(trace, shares),
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


_WORDS = {
    Category.WEIGHTS: "weights",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.ACTIVATIONS: "activations kept for the backward",
    Category.TEMPORARIES: "temporaries",
    Category.WORKSPACE: "workspaces",
}


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
        times = f" x{kind.count}" if kind.count > 1 else ""
        label = f"{kind.module or '(outside the model)'} {kind.op}{times}"
        sentence += f"; the largest kind is {label}, {list(kind.shape)} {kind.dtype}, {format_bytes(kind.bytes)}"
    return sentence + "."


def _attention(explanation: Explanation) -> str:
    # Reasons are told by the remark on the math backend.
    uses = [f"{use.backend} ({use.num_calls} call{'' if use.num_calls == 1 else 's'})" for use in explanation.attention]
    return f"Attention: {', '.join(uses)}."


def _idleness(explanation: Explanation) -> str:
    kind = explanation.idle[0]
    times = f" x{kind.count}" if kind.count > 1 else ""
    label = f"{kind.module or '(outside the model)'} {kind.op}{times}"
    waits = f"{kind.idle_share:.1%} of the step"
    if explanation.is_timed:
        waits = f"{format_seconds(kind.idle_s)} ({waits})"
    return (
        f"Most idle is {label} ({kind.category.value}, {format_bytes(kind.bytes)}): each lies unused for {waits}, "
        f"mostly until the {kind.next_phase.value}."
    )
