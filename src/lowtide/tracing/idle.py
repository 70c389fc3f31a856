"""How long tensors lie idle between their uses: the memory that recomputation, offload and streaming can win back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from lowtide.tracing.alive import describe, group_alike
from lowtide.tracing.clock import Clock, clock_of
from lowtide.tracing.step_trace import Allocation, Category, Phase, StepTrace

LARGE_SHARE = 1e-4
"""Of the peak: a smaller tensor is not worth a decision of its own."""


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
    """Of all of them together."""
    idle_s: float
    """Seconds one of them lies idle between its uses, on average; what outlives the step waits for the next one too."""
    idle_share: float
    """The same as a share of the step."""
    byte_seconds: float
    """Bytes times idle seconds, summed over all of them."""
    next_phase: Phase
    """Where the use is that ends the longest wait of the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCounts:
    """Large tensors alive at the peak, by how many passes use them: a forward with its loss, a backward, an update."""

    once: int
    twice: int
    more: int
    forward_and_backward: int
    """Of those used twice: in a forward and in the backward after it."""
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
    passes = _pass_of_each_op(trace)
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


def _pass_of_each_op(trace: StepTrace) -> list[tuple[int, str]]:
    passes: list[tuple[int, str]] = []
    for op in trace.ops:
        kind = "forward" if op.phase in (Phase.FORWARD, Phase.LOSS) else op.phase.value
        number = passes[-1][0] if passes else 0
        passes.append((number if passes and passes[-1][1] == kind else number + 1, kind))
    return passes


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
    kind = describe(alike)
    return IdleGroup(
        category=kind.category,
        module=kind.module,
        op=kind.op,
        source=kind.source,
        shape=kind.shape,
        dtype=kind.dtype,
        count=kind.count,
        bytes=kind.bytes,
        idle_s=mean,
        idle_share=mean / clock.total if clock.total else 0.0,
        byte_seconds=sum(seconds * allocation.bytes for seconds, allocation in zip(idle, alike, strict=True)),
        next_phase=trace.ops[longest[1]].phase,
    )
