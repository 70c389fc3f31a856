"""What a report says about a trace, as plain data: where the peak is, whether it fits, how a prediction compares."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.what_if_row import WhatIfRow
from lowtide.tracing.compare import Difference, compare
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the step needs of the card against what the card has."""

    needed_bytes: int
    """Peak of reserved memory and the context beside it."""
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether all of it goes onto the card."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left; negative when it does not fit."""
        return self.capacity_bytes - self.needed_bytes


def fit_of(trace: StepTrace) -> Fit | None:
    """How the step fits its card; None when the card's memory is not known."""
    if trace.target.capacity_bytes <= 0:
        return None
    needed = trace.peak_reserved_bytes + trace.target.context_bytes
    return Fit(needed_bytes=needed, capacity_bytes=trace.target.capacity_bytes)


def differences(predicted: StepTrace, observed: StepTrace) -> list[Difference]:
    """Peaks, then the peak of each phase, then each category at the peak of its own trace."""
    return list(compare(predicted, observed).differences)


def saving(row: WhatIfRow) -> str:
    """A saving in words: `3.6 GiB`, `nothing`, or `costs 1.2 GiB` when the peak rises."""
    if row.saved_bytes < 0:
        return f"costs {format_bytes(-row.saved_bytes)}"
    return format_bytes(row.saved_bytes) if row.saved_bytes else "nothing"
