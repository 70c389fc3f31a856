"""Memory over the time of a step: how long tensors lie idle between their uses, and what share each category takes.

Idle memory is what recomputation, offload and streaming can win back. The shares are compared with a well-known rule of
thumb.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lowtide.tracing.explanation.instant import describe_alike, group_alike
from lowtide.tracing.step_trace import Allocation, Category, Phase, StepTrace
from lowtide.units import format_bytes

Seconds = npt.NDArray[np.float64]
LARGE_SHARE = 1e-4
"""Share of the peak; a smaller tensor is not worth a decision of its own."""
RULE_OF_THUMB = {Category.OPTIMIZER: 0.80, Category.GRADIENTS: 0.10, Category.WEIGHTS: 0.05}
"""Often quoted for training with Adam; the rest, and mostly attention scores, would be intermediate results."""
TOLERANCE = 0.10
"""What the rule's "roughly" allows: it holds for shares within ten points of it."""
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_NAMES = {Category.OPTIMIZER: "optimizer states", Category.GRADIENTS: "gradients", Category.WEIGHTS: "weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Estimated times of one step; ops run one after the other, as they do on one stream."""

    starts: Seconds
    """Start of each op, and the end of the step as last value: `len(ops) + 1` values."""
    is_timed: bool
    """False where the trace holds no times: then each op counts as one."""

    @property
    def total(self) -> float:
        """Length of the step."""
        return float(self.starts[-1])

    def wait(self, first: int, then: int) -> float:
        """From the end of one op to the start of a later one."""
        return float(max(self.starts[then] - self.starts[first + 1], 0.0))


def clock_of(trace: StepTrace) -> Clock:
    """The clock of a trace."""
    seconds = np.array([op.seconds for op in trace.ops], dtype=np.float64)
    is_timed = bool(seconds.sum() > 0)
    if not is_timed:
        seconds = np.ones(len(trace.ops), dtype=np.float64)
    return Clock(starts=np.concatenate([[0.0], np.cumsum(seconds)]), is_timed=is_timed)


def durations(trace: StepTrace, clock: Clock) -> Seconds:
    """How long the step stays at each value of `trace.curve`; the sum is the length of the step."""
    # An op holds what it allocates from its start on, and what it frees until its end.
    times = [clock.starts[event.op + 1 if event.is_free else max(event.op, 0)] for event in trace.events]
    # Scratch that is freed before the op's outputs are made would run backwards in time.
    ordered = np.maximum.accumulate(np.array([0.0, *times], dtype=np.float64))
    return np.diff(np.append(ordered, max(clock.total, ordered[-1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGroup:
    """Tensors of equal layers, and how long they wait."""

    category: Category
    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    """Bytes of all of them together."""
    idle_s: float
    """Seconds one of them lies idle between its uses, on average; what outlives the step waits for the next one too."""
    idle_share: float
    """The same as a share of the step."""
    byte_seconds: float
    """Bytes times idle seconds, summed over all of them."""
    next_phase: Phase
    """The phase of the use that ends the longest wait of the first tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCounts:
    """Large tensors alive at the peak, by how many passes use them: a forward with its loss, a backward, an update."""

    once: int
    twice: int
    more: int
    forward_and_backward: int
    """Tensors that are used twice, in a forward and in the backward after it."""
    twice_bytes: int
    total_bytes: int

    @property
    def total(self) -> int:
        """All that were counted."""
        return self.once + self.twice + self.more

    @property
    def sentence(self) -> str:
        """The counts in words."""
        if not self.total:
            return "No use of a large tensor was recorded."
        share = self.twice_bytes / self.total_bytes
        return (
            f"Of the {self.total:,} large tensors alive at the peak {self.twice:,} ({share:.0%} of their bytes) are "
            f"used in exactly two passes, {self.forward_and_backward:,} of them in the forward and then in the "
            f"backward; {self.once:,} in one pass and {self.more:,} in three or more."
        )


def idle_tensors(trace: StepTrace, limit: int = 10) -> tuple[IdleGroup, ...]:
    """The tensors with the most byte-seconds idle, equal layers together, most first."""
    clock = clock_of(trace)
    groups = [_measure(trace, clock, alike) for alike in group_alike(_large(trace, trace.allocations))]
    ranked = sorted(groups, key=lambda group: (-group.byte_seconds, group.module, group.op))
    return tuple(group for group in ranked[:limit] if group.byte_seconds > 0)


def pass_counts(trace: StepTrace) -> PassCounts:
    """In how many passes the large tensors alive at the peak are used."""
    passes: list[tuple[int, str]] = []  # of each op, numbered
    for op in trace.ops:
        kind = "forward" if op.phase in (Phase.FORWARD, Phase.LOSS) else op.phase.value
        number = passes[-1][0] if passes else 0
        passes.append((number if passes and passes[-1][1] == kind else number + 1, kind))
    alive = list(_large(trace, trace.alive_at(trace.peak_event)))
    touched = [sorted({passes[use] for use in allocation.uses}) for allocation in alive]
    is_pair = [
        len(seen) == 2 and seen[0][1] == "forward" and seen[1] == (seen[0][0] + 1, "backward") for seen in touched
    ]
    return PassCounts(
        once=sum(len(seen) == 1 for seen in touched),
        twice=sum(len(seen) == 2 for seen in touched),
        more=sum(len(seen) > 2 for seen in touched),
        forward_and_backward=sum(is_pair),
        twice_bytes=sum(allocation.bytes for allocation, seen in zip(alive, touched, strict=True) if len(seen) == 2),
        total_bytes=sum(allocation.bytes for allocation in alive),
    )


def _large(trace: StepTrace, allocations: Iterable[Allocation]) -> Iterator[Allocation]:
    least = LARGE_SHARE * trace.peak_bytes
    for allocation in allocations:
        if allocation.uses and allocation.bytes >= least and allocation.category is not Category.WORKSPACE:
            yield allocation


def _waits(allocation: Allocation, clock: Clock) -> list[tuple[float, int]]:
    """Each wait between two uses, with the op that ends it."""
    uses = allocation.uses
    waits = [(clock.wait(first, then), then) for first, then in pairwise(uses)]
    if allocation.born is None and allocation.died is None:
        # It is there in the next step too, where its first use ends the wait that its last one began.
        around = clock.total - float(clock.starts[uses[-1] + 1]) + float(clock.starts[uses[0]])
        waits.append((around, uses[0]))
    return waits


def _measure(trace: StepTrace, clock: Clock, alike: list[Allocation]) -> IdleGroup:
    waits = [_waits(allocation, clock) for allocation in alike]
    idle = [sum(seconds for seconds, _ in of_one) for of_one in waits]
    mean = sum(idle) / len(idle)
    longest = max(waits[0], default=(0.0, alike[0].uses[0]))
    return IdleGroup(
        **asdict(describe_alike(alike)),
        idle_s=mean,
        idle_share=mean / clock.total if clock.total else 0.0,
        byte_seconds=sum(seconds * allocation.bytes for seconds, allocation in zip(idle, alike, strict=True)),
        next_phase=trace.ops[longest[1]].phase,
    )


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
    intermediate = trace.stacked[Category.ACTIVATIONS] + trace.stacked[Category.TEMPORARIES]
    highest = int(np.argmax(intermediate))
    scores, kept = sum(item.bytes for item in attention_scores(trace, highest - 1)), int(intermediate[highest])
    dominate = 2 * scores > kept
    about_scores = "no attention scores are kept at all"
    if scores:
        about_scores = f"attention scores are {format_bytes(scores)} of {format_bytes(kept)} of them at their highest"
    rule = ", ".join(f"{_NAMES[category]} {share:.0%}" for category, share in RULE_OF_THUMB.items())
    ours = ", ".join(f"{average[category]:.0%}" for category in RULE_OF_THUMB)
    sentence = f"The rule of thumb ({rule}, attention scores most of the rest) "
    sentence += "holds" if holds and dominate else "holds only in part" if holds else "does not hold"
    sentence += f" for this step, which averages {ours}: {_why(trace, average)}, and {about_scores}."
    return RuleCheck(holds=holds, scores_dominate=dominate, sentence=sentence)


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
        # 80 to 5 is more than even an fp32 master and two fp32 moments with bf16 weights, which are 6 to 1.
        clauses.append(
            f"the state ({_main_dtype(trace, Category.OPTIMIZER)}) is {state / weights:.1f} times the weights "
            f"({_main_dtype(trace, Category.WEIGHTS)}) where the rule has 16 times"
        )
    return ", ".join(clauses)


def _main_dtype(trace: StepTrace, category: Category) -> str:
    """The dtype that holds most of a category's bytes before the step."""
    sizes: Counter[str] = Counter()
    for allocation in trace.alive_at(-1):
        if allocation.category is category:
            sizes[allocation.dtype] += allocation.bytes
    return sizes.most_common(1)[0][0]


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
