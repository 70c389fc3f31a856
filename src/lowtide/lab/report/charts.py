"""The charts of a comparison as plain data: memory against speed, memory through one step, and a swept budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lowtide.lab.budget import BudgetPoint, BudgetSweep, reversals
from lowtide.lab.recipe import PublishedFigures
from lowtide.lab.report.comparison import Comparison, published_speed, unit_for
from lowtide.lab.report.rows import Row
from lowtide.lab.report.tables import outcome_words
from lowtide.plain_text import Plain
from lowtide.report.charts import Axis, Mark, Panel, Scatter, StepCurve, axis_over
from lowtide.report.table import ByteUnit, byte_unit
from lowtide.units import GiB


def panel_of(comparison: Comparison) -> Panel:
    """The comparison in a picture."""
    scatter = scatter_of(comparison)
    return Panel(title=comparison.title, scatter=None if scatter is None else scatter[0], steps=step_curves(comparison))


def scatter_of(comparison: Comparison) -> tuple[Scatter, tuple[Row, ...]] | None:
    """Memory upwards, samples/s to the right, and the row of each mark; None where no finished row has both figures.

    Marks of finished rows come first, then those of published figures: one for each recipe, however many rows are of it.
    """
    unit = unit_for(comparison.rows)
    on_front = {id(row) for row in comparison.front}
    drawn = [
        (row, speed.mean)
        for row in comparison.rows
        if row.is_finished and row.peak_bytes is not None and (speed := comparison.speed(row)) is not None
    ]
    if not drawn:
        return None
    marks = [
        Mark(
            name=row.label,
            x=speed,
            y=(row.peak_bytes or 0) / unit.num_bytes,
            kind="on-front" if id(row) in on_front else "ours",
        )
        for row, speed in drawn
    ]
    rows = [row for row, _ in drawn]
    published, undrawn = _published(comparison, unit, rows)
    numbers = {id(row): number for number, row in enumerate(rows)}
    marks += [
        Mark(name=row.label, x=speed, y=memory, kind="published", belongs_to=numbers.get(id(row)))
        for row, speed, memory in published
    ]
    theirs = [row for row, _, _ in published]
    kind = "with compilation" if comparison.is_compiled else "over all steps"
    scatter = Scatter(
        marks=tuple(marks),
        front=_stairs([mark for mark in marks if mark.kind == "on-front"]),
        x=axis_over(mark.x for mark in marks),
        y=axis_over(mark.y for mark in marks),
        x_name=f"samples/s {'after 10 steps of warm-up' if comparison.is_warm else kind}",
        y_name=f"peak, {unit.name}",
        notes=_notes(comparison, rows, theirs, undrawn),
    )
    return scatter, (*rows, *theirs)


def _published(
    comparison: Comparison, unit: ByteUnit, drawn: list[Row]
) -> tuple[list[tuple[Row, float, float]], list[str]]:
    """Row, speed and memory of each; and the rows for which there is no published speed of our kind."""
    by_recipe: dict[tuple[str, PublishedFigures], Row] = {}
    for row in sorted(comparison.rows, key=lambda row: row not in drawn):
        if row.published is not None and row.published.peak_gib is not None:
            by_recipe.setdefault((row.name, row.published), row)
    found, undrawn = [], []
    for (_, published), row in by_recipe.items():
        speed = published_speed(row, is_warm=comparison.is_warm)
        if speed is None:
            undrawn.append(row.label)
        else:
            found.append((row, speed, (published.peak_gib or 0.0) * GiB / unit.num_bytes))
    return found, undrawn


def _stairs(marks: list[Mark]) -> tuple[tuple[float, float], ...]:
    """Between two rows of the front the memory of the next is needed for any speed above that of the first."""
    corners: list[tuple[float, float]] = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        if corners:
            corners.append((corners[-1][0], mark.y))
        corners.append((mark.x, mark.y))
    return tuple(corners)


def _notes(comparison: Comparison, drawn: list[Row], published: list[Row], undrawn: list[str]) -> tuple[str, ...]:
    notes = []
    if published and comparison.is_warm:
        notes.append("The speed of a published mark follows from its time of steps 10 to 100.")
    elif published:
        notes.append("Published speeds are over their whole runs, ours over the few steps that were made.")
    if published:
        sources = dict.fromkeys(row.published.source for row in published if row.published)
        notes.append(f"Published: {'; '.join(sources)}.")
    if undrawn:
        kind = "after warm-up" if comparison.is_warm else "over all steps"
        notes.append(f"No published speed {kind} to draw for {', '.join(undrawn)}.")
    unfinished = [f"{row.label} {outcome_words(row)}" for row in comparison.rows if not row.is_finished]
    if unfinished:
        notes.append(f"Not on the chart, since not every run of theirs finished: {', '.join(unfinished)}.")
    left_out = [row.label for row in comparison.rows if row.is_finished and row not in drawn]
    if left_out:
        notes.append(f"Not on the chart, for want of a peak or a {comparison.speed_name}: {', '.join(left_out)}.")
    return tuple(notes)


def step_curves(comparison: Comparison) -> tuple[StepCurve, ...]:
    """The steps of the rows of which one was watched."""
    unit = unit_for(comparison.rows)
    return tuple(_step_curve(row, unit) for row in comparison.rows if row.timeline)


def _step_curve(row: Row, unit: ByteUnit) -> StepCurve:
    held = [num_bytes for _, num_bytes in row.timeline]
    phase = next(phase for phase, num_bytes in row.timeline if num_bytes == max(held))
    predicted = row.predicted.peak_bytes if row.predicted else None
    told = "" if predicted is None else f", predicted {unit.text(predicted)}"
    return StepCurve(
        name=row.label,
        words=f"{unit.text(max(held))} {unit.name} in {phase}{told}",
        points=tuple(num_bytes / unit.num_bytes for num_bytes in held),
        spans=_spans(row.timeline),
        predicted=None if predicted is None else predicted / unit.num_bytes,
    )


def _spans(timeline: Sequence[tuple[str, int]]) -> tuple[tuple[str, float, float], ...]:
    """Neighbouring points of one phase, with their start and end as shares of the step."""
    whole = len(timeline)
    edges = [index for index in range(whole) if not index or timeline[index][0] != timeline[index - 1][0]]
    return tuple((timeline[start][0], start / whole, end / whole) for start, end in pairwise([*edges, whole]))


def sweep_lines(sweep: BudgetSweep) -> dict[str, Plain]:
    """Peak and saved bytes over the budget, for the page's script; peaks that a larger budget beats are marked."""
    largest = max(max(point.peak_bytes, point.saved_bytes) for point in sweep.points)
    unit = byte_unit(largest)
    beaten = {id(reversal.point) for reversal in reversals(sweep.points)}

    def line(*, is_peak: bool) -> list[Plain]:
        places: list[Plain] = [
            [
                point.budget,
                (point.peak_bytes if is_peak else point.saved_bytes) / unit.num_bytes,
                _point_words(point),
                is_peak and id(point) in beaten,
            ]
            for point in sweep.points
        ]
        return [f"{'peak' if is_peak else 'saved'} static", places]

    return {
        "words": f"{sweep.title}: peak and saved bytes by budget",
        "names": ["activation memory budget", unit.name],
        "x": Axis(0.0, 1.0).plain(),
        "y": Axis(0.0, 1.1 * largest / unit.num_bytes or 1.0).plain(),
        "lines": [line(is_peak=False), line(is_peak=True)],
    }


def _point_words(point: BudgetPoint) -> str:
    unit = byte_unit(point.peak_bytes)
    return (
        f"budget {point.budget:g} ({point.kind}): peak {unit.text(point.peak_bytes)}, saved "
        f"{unit.text(point.saved_bytes)} {unit.name}, {point.recomputed_flops_share:.1%} recomputed"
    )
