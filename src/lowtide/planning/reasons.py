"""Why a technique saves what it saves: one sentence from the traces before and after it.

Nothing here is looked up in a table of savings. A technique has a *subject*, the tensors it acts on; what matters is
how much of the subject is alive at the peak, before and after, and where the peak goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.tracing.explanation.instant import Place, place_of, where
from lowtide.tracing.step_trace import Allocation, Bytes, Category, StepTrace
from lowtide.units import format_bytes

NOTHING_SHARE = 0.005
"""The share of the peak below which a saving counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tensors a technique acts on."""

    noun: str
    """In the plural: `gradients`."""
    matches: Callable[[Allocation], bool]
    when_absent: Callable[[Place], str] = lambda place: "where none of them is alive"
    """Why none of them is alive at a peak there; follows "the peak is at the loss, "."""
    when_ineffective: str = "not one allocation of the step changes"
    """What to say when the step is the same with the technique as without."""
    what_stays: Callable[[Allocation], bool] = lambda item: False
    """Those of them that the technique should have changed and did not; told with the saving."""
    why_stays: str = ""
    """Follows their bytes: `stay in float32`."""

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


def is_same(before: StepTrace, after: StepTrace) -> bool:
    """Whether two steps allocate the same at every instant: the technique never took effect."""
    return bool(np.array_equal(before.curve, after.curve))


def reason(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """One sentence on what the technique with this subject did to the peak."""
    held, left = (subject.bytes_at(trace, trace.peak_event) for trace in (before, after))
    if is_same(before, after):
        return f"{subject.when_ineffective}."
    if is_nothing(before, after):
        return _why_nothing(subject, before, after, held, left)
    noun = subject.noun
    if held < NOTHING_SHARE * before.peak_bytes and left < NOTHING_SHARE * after.peak_bytes:
        # Not the subject itself but what comes with it changed the peak.
        sentence = f"hardly any {noun} are alive at either peak, but other tensors change with them"
    else:
        verb = "fall" if left < held else "rise"
        sentence = f"the {noun} alive at the peak {verb} from {format_bytes(held)} to {format_bytes(left)}"
        sentence += _what_stays(subject, after)
    return f"{sentence}{_other_changes(subject, before, after)}; {_move(before, after)}."


def _what_stays(subject: Subject, after: StepTrace) -> str:
    stays = sum(item.bytes for item in after.alive_at(after.peak_event) if subject.what_stays(item))
    return f", of which {format_bytes(stays)} {subject.why_stays}" if stays >= 0.05 * after.peak_bytes else ""


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
    return f"; the {subject.noun} reach {format_bytes(most)} {place}, where only {total} are alive in all"


def _other_changes(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """The categories outside the subject that change most at the peak, when they matter beside the saving."""
    least = 0.1 * max(abs(before.peak_bytes - after.peak_bytes), NOTHING_SHARE * before.peak_bytes)
    old, new = (_outside(subject, trace) for trace in (before, after))
    partly = {item.category for item in before.allocations if subject.matches(item)}
    told = [
        f"{'other ' if category in partly else ''}{category.value} from {format_bytes(old[category])} "
        f"to {format_bytes(new[category])}"
        for category in sorted(Category, key=lambda category: -abs(new[category] - old[category]))
        if abs(new[category] - old[category]) >= least
    ]
    return f" ({', '.join(told[:2])})" if told else ""


def _outside(subject: Subject, trace: StepTrace) -> dict[Category, int]:
    """Bytes at the peak by category, without the subject's."""
    totals = dict.fromkeys(Category, 0)
    for item in trace.alive_at(trace.peak_event):
        totals[item.category] += 0 if subject.matches(item) else item.bytes
    return totals


def _move(before: StepTrace, after: StepTrace) -> str:
    old, new = where(before, before.peak_event), where(after, after.peak_event)
    return f"the peak stays {new}" if old == new else f"the peak moves from {_bare(old)} to {_bare(new)}"


def _bare(place: str) -> str:
    """`in the backward of x` as `the backward of x`."""
    return place.removeprefix("in ").removeprefix("at ").replace("before the step begins", "the start of the step")
