"""What share of memory each category takes over the step, and whether a well-known rule of thumb holds for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.tracing.clock import clock_of, durations
from lowtide.tracing.step_trace import Allocation, Category, Phase, StepTrace
from lowtide.units import format_bytes

RULE_OF_THUMB = {Category.OPTIMIZER: 0.80, Category.GRADIENTS: 0.10, Category.WEIGHTS: 0.05}
"""Often quoted for training with Adam; the rest, and mostly attention scores, would be intermediate results."""
TOLERANCE = 0.10
"""Both sides of the rule's "roughly": shares within ten points of it count as holding."""
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One category's part of all allocated bytes, from 0 to 1."""

    category: Category
    average: float
    """Over the step, weighted by time."""
    at_peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """Whether the rule of thumb holds, and why."""

    holds: bool
    scores_dominate: bool
    """Whether attention scores are more than half of the activations and temporaries at their highest."""
    sentence: str


def category_shares(trace: StepTrace) -> tuple[Share, ...]:
    """The share of each category, averaged over the step and at the peak; each of the two sums to 1."""
    lengths = durations(trace, clock_of(trace))
    if not lengths.sum():
        lengths = np.ones_like(lengths)
    areas = {category: float(curve @ lengths) for category, curve in trace.stacked.items()}
    whole, peak = max(sum(areas.values()), 1e-30), max(trace.peak_bytes, 1)
    at_peak = trace.at_peak
    return tuple(
        Share(category=category, average=areas[category] / whole, at_peak=at_peak[category] / peak)
        for category in Category
    )


def check_rule(trace: StepTrace, shares: tuple[Share, ...]) -> RuleCheck:
    """Compare the averages over the step with the rule of thumb."""
    average = {share.category: share.average for share in shares}
    holds = all(abs(average[category] - rule) <= TOLERANCE for category, rule in RULE_OF_THUMB.items())
    scores, kept = _scores_and_intermediates(trace)
    dominate = 2 * scores > kept
    rule = ", ".join(f"{_NAMES[category]} {share:.0%}" for category, share in RULE_OF_THUMB.items())
    ours = ", ".join(f"{average[category]:.0%}" for category in RULE_OF_THUMB)
    sentence = f"The rule of thumb ({rule}, attention scores most of the rest) "
    sentence += "holds" if holds and dominate else "holds only in part" if holds else "does not hold"
    sentence += f" for this step, which averages {ours}: {_why(trace, average)}, and {_about_scores(scores, kept)}."
    return RuleCheck(holds=holds, scores_dominate=dominate, sentence=sentence)


_NAMES = {Category.OPTIMIZER: "optimizer states", Category.GRADIENTS: "gradients", Category.WEIGHTS: "weights"}


def _why(trace: StepTrace, average: dict[Category, float]) -> str:
    intermediate = average[Category.ACTIVATIONS] + average[Category.TEMPORARIES]
    start = trace.by_category_at(-1)
    weights, state = start[Category.WEIGHTS], start[Category.OPTIMIZER]
    clauses = [f"activations and temporaries take {intermediate:.0%}"]
    if average[Category.WORKSPACE] >= TOLERANCE:
        clauses.append(f"workspaces {average[Category.WORKSPACE]:.0%}")
    if state * 20 < weights:
        clauses.append(
            f"the optimizer keeps almost no state ({format_bytes(state)} for {format_bytes(weights)} of weights)"
        )
    elif weights:
        # 80 to 5 is more than even an fp32 master and two fp32 moments beside bf16 weights, which are 6 to 1.
        clauses.append(
            f"the state ({_main_dtype(trace, Category.OPTIMIZER)}) is {state / weights:.1f} times the weights "
            f"({_main_dtype(trace, Category.WEIGHTS)}) where the rule has 16 times"
        )
    return ", ".join(clauses)


def _main_dtype(trace: StepTrace, category: Category) -> str:
    """The dtype that holds most of a category's bytes before the step."""
    sizes: dict[str, int] = {}
    for allocation in trace.alive_at(-1):
        if allocation.category is category:
            sizes[allocation.dtype] = sizes.get(allocation.dtype, 0) + allocation.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _about_scores(scores: int, kept: int) -> str:
    if not scores:
        return "no attention scores are kept at all"
    return f"attention scores are {format_bytes(scores)} of {format_bytes(kept)} of them at their highest"


def _scores_and_intermediates(trace: StepTrace) -> tuple[int, int]:
    """Bytes of attention scores, and of all activations and temporaries, where the latter are highest."""
    intermediate = trace.stacked[Category.ACTIVATIONS] + trace.stacked[Category.TEMPORARIES]
    highest = int(np.argmax(intermediate))
    return sum(item.bytes for item in attention_scores(trace, highest - 1)), int(intermediate[highest])


def attention_scores(trace: StepTrace, event: int) -> list[Allocation]:
    """The matrices of queries by keys alive after an event: softmaxes inside a module and neighbours of their size."""
    sides = {
        (item.module, item.shape[-2:])
        for item in trace.allocations
        if item.op in _SOFTMAX and len(item.shape) >= 3 and item.phase is not Phase.LOSS
    }
    return [
        item
        for item in trace.alive_at(event)
        if item.category in (Category.ACTIVATIONS, Category.TEMPORARIES)
        and len(item.shape) >= 3
        and (item.module, item.shape[-2:]) in sides
    ]
