"""An instant of the step in names: its place in the step, what was running, and what is alive there.

"At the loss" and "in the backward of the loss" are where most peaks are, and what a technique can do there differs from
what it can do elsewhere: no gradient exists yet. Equal tensors of equal layers are counted together: a model of 32 layers
has 32 times the same activation at its peak, one by one they fill a screen and say nothing, together they are the line that
explains the peak.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.tracing.step_trace import Allocation, Category, Phase, StepTrace

_DECISIVE_SHARE = 1e-3
"""Share of the peak; an allocation below it is not what a person would call the cause of the peak."""
_NUMBERED_PART = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One instant of the step, in names."""

    phase: Phase | None
    """The phase of the step; None before it begins."""
    module: str
    op: str
    source: str

    @property
    def place(self) -> str:
        """Module and op on one line: `layers.3.mlp aten.mm`."""
        if self.phase is None:
            return "before the step begins"
        return " ".join(part for part in (self.module or "(outside the model)", self.op) if part)

    def __str__(self) -> str:
        return self.place if self.phase is None else f"{self.phase.value}, {self.place}"


def instant_of(trace: StepTrace, event: int) -> Instant:
    """What was running at an event (-1: before the step)."""
    if event < 0:
        return Instant(phase=None, module="", op="", source="")
    happened = trace.events[event]
    allocation = trace.allocations[happened.allocation]
    # An op without a name of its own (a workspace made before the first op) is known by what it allocated.
    running = trace.ops[happened.op] if happened.op >= 0 else None
    return Instant(
        phase=happened.phase,
        module=running.module if running else allocation.module,
        op=running.name if running else allocation.op,
        source=running.source if running else allocation.source,
    )


def decisive_event(trace: StepTrace) -> int:
    """The last event up to the peak that allocated a tensor of some size which is still alive there; -1 if none did.

    The peak's own event may be the 512 bytes of a scalar loss on top of tensors of gigabytes: true, but no answer to
    the question of what made the peak.
    """
    least = _DECISIVE_SHARE * trace.peak_bytes
    for index in range(trace.peak_event, -1, -1):
        allocation = trace.allocations[trace.events[index].allocation]
        is_alive = allocation.died is None or allocation.died > trace.peak_event
        if not trace.events[index].is_free and is_alive and allocation.bytes >= least:
            return index
    return trace.peak_event


class Place(enum.StrEnum):
    """Parts of a step, in order."""

    START = "start"
    """Before the first event."""
    FORWARD = "forward"
    LOSS = "loss"
    """After the last layer."""
    LOSS_BACKWARD = "loss backward"
    """From the loss back to the last layer: no weight has been read yet."""
    RECOMPUTE = "recompute"
    """A layer's forward, run again in the backward."""
    BACKWARD = "backward"
    UPDATE_IN_BACKWARD = "update in backward"
    UPDATE = "update"

    @property
    def is_before_gradients(self) -> bool:
        """Whether no gradient of this backward can exist yet."""
        return self in (Place.START, Place.FORWARD, Place.LOSS, Place.LOSS_BACKWARD)


_WORDS = {
    Place.START: "before the step begins",
    Place.FORWARD: "in the forward of {module}",
    Place.LOSS: "at the loss",
    Place.LOSS_BACKWARD: "in the backward of the loss",
    Place.RECOMPUTE: "in the backward, where {module} is recomputed",
    Place.BACKWARD: "in the backward of {module}",
    Place.UPDATE_IN_BACKWARD: "in an update inside the backward",
    Place.UPDATE: "in the update",
}


def place_of(trace: StepTrace, event: int) -> Place:
    """The place of an event (-1: before the step)."""
    if event < 0:
        return Place.START
    happened = trace.events[event]
    if happened.phase is not Phase.BACKWARD:
        return Place(happened.phase.value)
    allocation = trace.allocations[happened.allocation]
    if _is_before_layers(trace, happened.op):
        return Place.LOSS_BACKWARD
    if allocation.phase is Phase.BACKWARD and allocation.category is Category.ACTIVATIONS and not happened.is_free:
        return Place.RECOMPUTE
    return Place.UPDATE_IN_BACKWARD if _is_update(trace, happened.op) else Place.BACKWARD


def where(trace: StepTrace, event: int) -> str:
    """The place of an event, to follow "the peak is": `in the backward of layers.3.mlp`."""
    module = instant_of(trace, event).module or "code outside the model"
    return _WORDS[place_of(trace, event)].format(module=module)


def _is_before_layers(trace: StepTrace, op: int) -> bool:
    """Whether no weight has been read between the start of this backward and the end of an op."""
    uses = [allocation.uses for allocation in trace.allocations if allocation.category is Category.WEIGHTS]
    if not any(uses):
        return False  # an observation may know no uses; then nothing is claimed
    start = op
    while start > 0 and trace.ops[start - 1].phase is Phase.BACKWARD:
        start -= 1
    return not any(start <= use <= op for of_weight in uses for use in of_weight)


def _is_update(trace: StepTrace, op: int) -> bool:
    """Whether an op of the backward belongs to an update: it stands at the same line as one that touches state."""
    if trace.settings.get("update") != "in_backward":
        return False
    touching = {
        use for allocation in trace.allocations if allocation.category is Category.OPTIMIZER for use in allocation.uses
    }
    lines = {(trace.ops[use].module, trace.ops[use].source) for use in touching}
    return (trace.ops[op].module, trace.ops[op].source) in lines


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveGroup:
    """Allocations that differ only in the numbers of their module path."""

    category: Category
    module: str
    """With `*` for each number that differs: `layers.*.mlp`; as it is for a single allocation."""
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


def group_alike(allocations: Iterable[Allocation]) -> list[list[Allocation]]:
    """Sets of allocations that differ only in the numbers of their module path, in order of first appearance."""
    members: dict[tuple[object, ...], list[Allocation]] = {}
    for allocation in allocations:
        pattern = _NUMBERED_PART.sub("*", allocation.module)
        key = (allocation.category, pattern, allocation.op, allocation.source, allocation.shape, allocation.dtype)
        members.setdefault(key, []).append(allocation)
    return list(members.values())


def group_alive(trace: StepTrace, event: int) -> list[AliveGroup]:
    """All that is alive right after an event (-1: before the step), largest first; its bytes sum to the curve."""
    groups = [describe_alike(alike) for alike in group_alike(trace.alive_at(event))]
    return sorted(groups, key=lambda group: (-group.bytes, group.module, group.op))


def largest_alive(trace: StepTrace, event: int, limit: int) -> list[Allocation]:
    """The largest single allocations alive right after an event, largest first."""
    return sorted(trace.alive_at(event), key=lambda allocation: -allocation.bytes)[:limit]


def describe_alike(alike: list[Allocation]) -> AliveGroup:
    """One line for allocations that are alike, as `group_alike` gives them."""
    first = alike[0]
    # Only the numbers that really differ become a star: experts.0 of every layer reads layers.*.experts.0.
    columns = zip(*(allocation.module.split(".") for allocation in alike), strict=True)
    return AliveGroup(
        category=first.category,
        module=".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns),
        op=first.op,
        source=first.source,
        shape=first.shape,
        dtype=first.dtype,
        count=len(alike),
        bytes=sum(allocation.bytes for allocation in alike),
    )
