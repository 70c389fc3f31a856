"""What a report says about a trace, as plain data: where the peak is, whether it fits, how a prediction compares."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.what_if import WhatIfRow
from lowtide.tracing.explanation.compare import Difference, compare
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the step needs of the card against what the card has."""

    needed_bytes: int
    """Peak of reserved memory and the context beside it."""
    least_bytes: int
    """The same with allocated memory: what remains when the allocator gives cached blocks back, as it does on a full card."""
    capacity_bytes: int
    is_context_known: bool

    @property
    def fits(self) -> bool:
        """Whether all of it goes onto the card."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def fits_tightly(self) -> bool:
        """Whether it goes onto the card only if cached blocks are given back, which costs time and may fail for fragmentation."""
        return not self.fits and self.least_bytes <= self.capacity_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left; negative when it does not fit."""
        return self.capacity_bytes - (self.least_bytes if self.fits_tightly else self.needed_bytes)

    @property
    def verdict(self) -> str:
        """In words, with the amount."""
        if self.fits:
            words = f"fits, {format_bytes(self.spare_bytes)} to spare"
        elif self.fits_tightly:
            words = f"fits only if cached blocks are given back, {format_bytes(self.spare_bytes)} to spare then"
        else:
            words = f"does not fit, {format_bytes(self.least_bytes - self.capacity_bytes)} too much"
        return words if self.is_context_known else f"{words} (CUDA context not known, not counted)"


def fit_of(trace: StepTrace) -> Fit | None:
    """How the step fits its card; None when the card's memory is not known."""
    if trace.target.capacity_bytes <= 0:
        return None
    context = trace.target.context_bytes
    return Fit(
        needed_bytes=trace.peak_reserved_bytes + context,
        least_bytes=trace.peak_bytes + context,
        capacity_bytes=trace.target.capacity_bytes,
        is_context_known=context > 0,
    )


def circumstances(trace: StepTrace) -> list[tuple[str, str]]:
    """What was traced, for what and with what, as pairs; of a trace that an older version saved, what it has."""
    about, card = trace.about, trace.target.card
    autocast = trace.settings.get("autocast")
    weights = " under autocast to ".join(str(word) for word in (about.get("dtype"), autocast) if word)
    memory = f", {format_bytes(trace.target.capacity_bytes)}" if trace.target.capacity_bytes else ""
    pairs = [
        ("batch", about.get("batch", "")),
        ("optimizer", about.get("optimizer", "")),
        ("weights", weights),
        ("hardware", f"{card}{memory}"),
        ("versions", _versions(trace)),
    ]
    return [(name, words) for name, words in pairs if words]


def _versions(trace: StepTrace) -> str:
    about, torch_version = trace.about, trace.target.torch_version
    traced_with = about.get("torch", torch_version)
    words = [f"torch {torch_version}"]
    if traced_with.partition("+")[0] != torch_version:
        words[0] += f" (traced with {traced_with})"
    commit, _, changes = about.get("commit", "").partition("+")
    named = {"lowtide": about.get("lowtide"), "Python": about.get("python"), "commit": commit[:12]}
    words += [f"{name} {value}" for name, value in named.items() if value]
    return ", ".join(words) + (f" with {changes}" if changes else "")


def differences(predicted: StepTrace, observed: StepTrace) -> list[Difference]:
    """Peaks, then the peak of each phase, then each category at the peak of its own trace."""
    return list(compare(predicted, observed).differences)


NOTHING_SHARE = 0.001
"""Of the peak: a difference below this is rounding of blocks, not a saving."""


def saving(row: WhatIfRow) -> str:
    """A saving in words: `3.6 GiB`, `nothing`, or `costs 1.2 GiB` when the peak rises."""
    if abs(row.saved_bytes) < NOTHING_SHARE * row.before_bytes:
        return "nothing"
    if row.saved_bytes < 0:
        return f"costs {format_bytes(-row.saved_bytes)}"
    return format_bytes(row.saved_bytes) if row.saved_bytes else "nothing"
