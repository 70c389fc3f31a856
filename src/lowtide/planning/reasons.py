"""Why a technique saves what it saves: one sentence from the traces before and after it.

Nothing here is looked up in a table of savings. A technique has a *subject*, the tensors it acts on; what matters is how
much of the subject is alive at the peak, before and after, and where the peak goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.tracing.place import Place, place_of, where
from lowtide.tracing.step_trace import Allocation, Bytes, Category, StepTrace
from lowtide.units import format_bytes

NOTHING_SHARE = 0.005
"""Of the peak: a saving below it counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tensors a technique acts on."""

    noun: str
    """In the plural: `gradients`."""
    matches: Callable[[Allocation], bool]
    when_absent: Callable[[Place], str] = lambda place: "where none of them is alive"
    """Why none of them is alive at a peak there; follows "the peak is at the loss, "."""

    def bytes_at(self, trace: StepTrace, event: int) -> int:
        """Bytes of the subject alive right after an event."""
        return sum(allocation.bytes for allocation in trace.alive_at(event) if self.matches(allocation))

    def curve(self, trace: StepTrace) -> Bytes:
        """Bytes of the subject at each position of `trace.curve`."""
        matching = [self.matches(allocation) for allocation in trace.allocations]
        start = sum(
            item.bytes for item, fits in zip(trace.allocations, matching, strict=True) if fits and item.born is None
        )
        changes = [
            (-1 if event.is_free else 1) * trace.allocations[event.allocation].bytes * matching[event.allocation]
            for event in trace.events
        ]
        return np.cumsum(np.array([start, *changes], dtype=np.int64))


def is_nothing(before: StepTrace, after: StepTrace) -> bool:
    """Whether two peaks are the same for all that matters."""
    return abs(before.peak_bytes - after.peak_bytes) < NOTHING_SHARE * before.peak_bytes


def reason(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """One sentence on what the technique with this subject did to the peak."""
    held, left = (subject.bytes_at(trace, trace.peak_event) for trace in (before, after))
    if is_nothing(before, after):
        return _why_nothing(subject, before, after, held, left)
    noun = subject.noun
    if held < NOTHING_SHARE * before.peak_bytes and left < NOTHING_SHARE * after.peak_bytes:
        # Not the subject itself but what comes with it changed the peak.
        sentence = f"hardly any {noun} are alive at either peak, but other tensors change with them"
    else:
        verb = "fall" if left < held else "rise"
        sentence = f"the {noun} alive at the peak {verb} from {format_bytes(held)} to {format_bytes(left)}"
    return f"{sentence}{_other_changes(subject, before, after)}; {_move(before, after)}."


def _why_nothing(subject: Subject, before: StepTrace, after: StepTrace, held: int, left: int) -> str:
    here = f"the peak is {where(before, before.peak_event)}"
    if held < NOTHING_SHARE * before.peak_bytes:
        absent = subject.when_absent(place_of(before, before.peak_event))
        return f"{here}, {absent}{_elsewhere(subject, before)}."
    if held - left < NOTHING_SHARE * before.peak_bytes:
        return f"{here}, and the {subject.noun} alive there stay the same ({format_bytes(left)})."
    return (
        f"it takes {format_bytes(held - left)} of {subject.noun} away from the peak, but {_move(before, after)}, "
        f"as high as before{_other_changes(subject, before, after)}."
    )


def _elsewhere(subject: Subject, trace: StepTrace) -> str:
    """Where the subject does fill memory, and why that is not the peak."""
    curve = subject.curve(trace)
    most = int(curve.max())
    if most < NOTHING_SHARE * trace.peak_bytes:
        return f", and no more than {format_bytes(most)} of {subject.noun} exist at any time"
    # Of all moments at which nearly all of the subject is alive, the one where memory is highest.
    highest = int(np.argmax(np.where(curve >= 0.9 * most, trace.curve, 0)))
    total = format_bytes(int(trace.curve[highest]))
    place = where(trace, highest - 1)
    return f"; they reach {format_bytes(most)} {place}, where only {total} are alive in all"


def _other_changes(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """The categories outside the subject that change most at the peak, when they matter beside the saving."""
    changes = {
        category: tuple(
            sum(
                item.bytes
                for item in trace.alive_at(trace.peak_event)
                if item.category is category and not subject.matches(item)
            )
            for trace in (before, after)
        )
        for category in Category
    }
    least = 0.1 * max(abs(before.peak_bytes - after.peak_bytes), NOTHING_SHARE * before.peak_bytes)
    told = [
        f"{category.value} {'rise' if new > old else 'fall'} from {format_bytes(old)} to {format_bytes(new)}"
        for category, (old, new) in sorted(changes.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        if abs(new - old) >= least
    ]
    return f" ({', '.join(told[:2])})" if told else ""


def _move(before: StepTrace, after: StepTrace) -> str:
    old, new = where(before, before.peak_event), where(after, after.peak_event)
    return f"the peak stays {new}" if old == new else f"the peak moves from {_bare(old)} to {_bare(new)}"


def _bare(place: str) -> str:
    """`in the backward of x` as `the backward of x`."""
    return place.removeprefix("in ").removeprefix("at ").replace("before the step begins", "the start of the step")
