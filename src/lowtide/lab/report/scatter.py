"""The chart of memory against speed as plain data, for the page and for the figure."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.lab.recipe import PublishedFigures
from lowtide.lab.report.axis import Axis, axis_over
from lowtide.lab.report.byte_unit import ByteUnit, unit_for
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.published import published_speed
from lowtide.lab.report.rows import Row
from lowtide.lab.report.tables import outcome_words
from lowtide.units import GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One place on the chart."""

    row: Row
    samples_per_s: float
    memory: float
    """In the chart's unit."""
    is_on_front: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Memory upwards, samples/s to the right: what is low and far right is good."""

    marks: tuple[Mark, ...]
    """Of finished rows with both figures."""
    published: tuple[Mark, ...]
    """Where somebody else had the same recipes: one for each, however many rows are of it."""
    front: tuple[tuple[float, float], ...]
    """Corners of the line below which nobody is, as (samples/s, memory)."""
    speed: Axis
    memory: Axis
    unit: ByteUnit
    speed_words: str
    notes: tuple[str, ...]
    """What is not drawn, and why."""


def scatter_of(comparison: Comparison) -> Scatter | None:
    """The chart; None where no finished row has both memory and speed."""
    unit = unit_for(comparison.rows)
    marks = [
        Mark(
            row=row,
            samples_per_s=speed.mean,
            memory=row.peak_bytes / unit.num_bytes,
            is_on_front=row in comparison.front,
        )
        for row in comparison.rows
        if row.is_finished and row.peak_bytes is not None and (speed := comparison.speed(row)) is not None
    ]
    published, undrawn = _published(comparison, unit, [mark.row for mark in marks])
    if not marks:
        return None
    return Scatter(
        marks=tuple(marks),
        published=tuple(published),
        front=_stairs([mark for row in comparison.front for mark in marks if mark.row is row]),
        speed=axis_over(mark.samples_per_s for mark in (*marks, *published)),
        memory=axis_over(mark.memory for mark in (*marks, *published)),
        unit=unit,
        speed_words=_speed_words(comparison),
        notes=_notes(comparison, marks, published, undrawn),
    )


def _published(comparison: Comparison, unit: ByteUnit, drawn: list[Row]) -> tuple[list[Mark], list[str]]:
    """Their marks, beside ours where there is one; and the rows for which they have no speed of our kind."""
    by_recipe: dict[tuple[str, PublishedFigures], Row] = {}
    for row in sorted(comparison.rows, key=lambda row: row not in drawn):
        if row.published is not None and row.published.peak_gib is not None:
            by_recipe.setdefault((row.name, row.published), row)
    marks, undrawn = [], []
    for (_, published), row in by_recipe.items():
        speed = published_speed(row, is_warm=comparison.is_warm)
        if speed is None:
            undrawn.append(row.label)
        else:
            memory = (published.peak_gib or 0.0) * GiB / unit.num_bytes
            marks.append(Mark(row=row, samples_per_s=speed, memory=memory))
    return marks, undrawn


def _speed_words(comparison: Comparison) -> str:
    if comparison.is_warm:
        return "samples/s after 10 steps of warm-up"
    return "samples/s with compilation" if comparison.is_compiled else "samples/s over all steps"


def _stairs(marks: list[Mark]) -> tuple[tuple[float, float], ...]:
    """Between two rows of the front the memory of the next is needed for any speed above that of the first."""
    corners: list[tuple[float, float]] = []
    for mark in sorted(marks, key=lambda mark: mark.samples_per_s):
        if corners:
            corners.append((corners[-1][0], mark.memory))
        corners.append((mark.samples_per_s, mark.memory))
    return tuple(corners)


def _notes(comparison: Comparison, marks: list[Mark], published: list[Mark], undrawn: list[str]) -> tuple[str, ...]:
    notes = []
    if published and comparison.is_warm:
        notes.append("The speed of a published mark follows from its time of steps 10 to 100.")
    elif published:
        notes.append("Published speeds are over their whole runs, ours over the few steps that were made.")
    if published:
        sources = dict.fromkeys(mark.row.published.source for mark in published if mark.row.published)
        notes.append(f"Published: {'; '.join(sources)}.")
    if undrawn:
        kind = "after warm-up" if comparison.is_warm else "over all steps"
        notes.append(f"No published speed {kind} to draw for {', '.join(undrawn)}.")
    drawn = [mark.row for mark in marks]
    unfinished = [f"{row.label} {outcome_words(row)}" for row in comparison.rows if not row.is_finished]
    if unfinished:
        notes.append(f"Not on the chart, since not every run of theirs finished: {', '.join(unfinished)}.")
    left_out = [row.label for row in comparison.rows if row.is_finished and row not in drawn]
    if left_out:
        notes.append(f"Not on the chart, for want of a peak or a {comparison.speed_name}: {', '.join(left_out)}.")
    return tuple(notes)
