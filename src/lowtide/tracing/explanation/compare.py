"""Comparison of two traces: how far a prediction is from what was observed, by phase, by category and by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lowtide.tracing.explanation.instant import Instant, decisive_event, instant_of
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import format_bytes, format_count

_Name = TypeVar("_Name", bound=str)

NUM_MODULES = 10
"""Rows by module; the rest is too small to act on."""
_IGNORED_SETTINGS = frozenset({"precision"})
"""A prediction converts the model, an observation finds it converted: the same step under two settings."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity, predicted and observed."""

    what: str
    predicted_bytes: int
    observed_bytes: int

    @property
    def bytes(self) -> int:
        """Predicted less observed."""
        return self.predicted_bytes - self.observed_bytes

    @property
    def error(self) -> float | None:
        """Relative to the observation; None when nothing was observed."""
        return None if self.observed_bytes == 0 else self.bytes / self.observed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prediction against an observation. Categories and modules are those alive at the peak of each."""

    model: str
    peak: Difference
    reserved: Difference
    by_phase: tuple[Difference, ...]
    """The highest allocated bytes in each phase that either has."""
    by_category: tuple[Difference, ...]
    """Each category that either has; their differences sum to that of the peak."""
    by_module: tuple[Difference, ...]
    """The largest differences by the first two levels of the module path, largest first; equal ones are left out."""
    predicted_place: Instant
    """When the last sizeable tensor up to the peak was allocated; its phase is that of the peak."""
    observed_place: Instant
    cautions: tuple[str, ...]
    """Why the two may not be of the same step: other settings, another device, another model."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The rows of a table: the peaks, each phase, each category."""
        phases = [replace(row, what=f"highest in {row.what}") for row in self.by_phase]
        categories = [replace(row, what=f"{row.what} at the peak") for row in self.by_category]
        return (self.peak, self.reserved, *phases, *categories)

    def summary(self) -> list[str]:
        """The comparison in lines of text, the most important first."""
        lines = [f"{self.model}, predicted against observed", *(_line(row) for row in self.differences)]
        if self.predicted_place.phase is self.observed_place.phase:
            lines.append(f"both peak in the {self.observed_place.phase or 'state before the step'}")
        else:
            lines.append("the peaks are in different phases")
        lines += [f"predicted peak: {self.predicted_place}", f"observed peak: {self.observed_place}"]
        for row in self.by_module:
            sign = "+" if row.bytes > 0 else ""
            lines.append(f"{row.what or '(outside the model)'}: {sign}{format_bytes(row.bytes)} at the peak")
        return [*lines, *(f"caution: {caution}" for caution in self.cautions)]


def compare_traces(predicted: StepTrace, observed: StepTrace) -> Comparison:
    """How far the first trace is from the second: a prediction and an observation of one step, or any two."""
    both = predicted, observed
    phases = [trace.phase_peaks() for trace in both]
    at_peak = [trace.at_peak for trace in both]
    modules = [_bytes_by_module(trace) for trace in both]
    by_module = _paired(sorted(modules[0].keys() | modules[1].keys()), *modules)
    return Comparison(
        model=observed.model,
        peak=Difference("peak allocated", predicted.peak_bytes, observed.peak_bytes),
        reserved=Difference("peak reserved", predicted.peak_reserved_bytes, observed.peak_reserved_bytes),
        by_phase=_paired([phase for phase in Phase if phase in phases[0] or phase in phases[1]], *phases),
        by_category=_paired([kind for kind in Category if at_peak[0][kind] or at_peak[1][kind]], *at_peak),
        by_module=tuple(sorted((row for row in by_module if row.bytes), key=lambda row: -abs(row.bytes))[:NUM_MODULES]),
        predicted_place=_peak_place(predicted),
        observed_place=_peak_place(observed),
        cautions=tuple(_cautions(predicted, observed)),
    )


def _paired(
    names: Iterable[_Name], predicted: Mapping[_Name, int], observed: Mapping[_Name, int]
) -> tuple[Difference, ...]:
    return tuple(Difference(str(name), predicted.get(name, 0), observed.get(name, 0)) for name in names)


def _bytes_by_module(trace: StepTrace) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for allocation in trace.alive_at(trace.peak_event):
        sizes[".".join(allocation.module.split(".")[:2])] += allocation.bytes
    return sizes


def _peak_place(trace: StepTrace) -> Instant:
    return replace(instant_of(trace, decisive_event(trace)), phase=trace.peak_phase if trace.peak_event >= 0 else None)


def _cautions(predicted: StepTrace, observed: StepTrace) -> Iterable[str]:
    if predicted.num_parameters != observed.num_parameters:
        counts = [format_count(trace.num_parameters) for trace in (predicted, observed)]
        yield f"the models differ: {counts[0]} parameters were predicted, {counts[1]} observed"
    if predicted.target.card != observed.target.card:
        yield f"the prediction is for {predicted.target.card}, the observation is from {observed.target.card}"
    if predicted.target.torch_version != observed.target.torch_version:
        versions = predicted.target.torch_version, observed.target.torch_version
        yield f"the prediction is for torch {versions[0]}, the observation is from torch {versions[1]}"
    for key in sorted((predicted.settings.keys() & observed.settings.keys()) - _IGNORED_SETTINGS):
        if predicted.settings[key] != observed.settings[key]:
            yield f"{key} was {predicted.settings[key]} in the prediction, {observed.settings[key]} in the observation"


def _line(row: Difference) -> str:
    pair = f"{format_bytes(row.predicted_bytes)} against {format_bytes(row.observed_bytes)}"
    return f"{row.what}: {pair} ({'none observed' if row.error is None else f'{row.error:+.2%}'})"
