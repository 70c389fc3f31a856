"""The tables of the report, one row a configuration.

A column appears where at least one row has something to say in it, and brings its line of the legend with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lowtide.lab.budget import BudgetSweep, reversals
from lowtide.lab.report.comparison import Comparison, pairs_with_published, speed_text, unit_for
from lowtide.lab.report.rows import Row, Spread, error_line
from lowtide.report.palette import STACK_ORDER
from lowtide.report.table import Bar, ByteUnit, Fill, Table, Tone, Value, byte_unit, make_table, number, words

_PUBLISHED_LEGENDS = {
    "samples/s": "as published: over all steps, with their compilation and the evaluation; left out where a run has fewer steps "
    "than the published one, or no evaluation",
    "perplexity": "left out where a run has fewer steps than the published one",
}
"""Legends of our figures in the table of published ones."""


def result_table(comparison: Comparison) -> Table:
    """All results, one row a configuration."""
    rows, unit = comparison.rows, unit_for(comparison.rows)
    has_unfinished, has_seeds = any(not row.is_finished for row in rows), any(len(row.seeds) > 1 for row in rows)
    # An evaluation that needs more than training does is worth a column.
    has_evaluations = any((row.peak_bytes or 0) > (row.training_peak_bytes or row.peak_bytes or 0) for row in rows)
    steps_differ = len({row.steps for row in rows if row.steps is not None}) > 1
    control = comparison.control.label if comparison.control else ""
    early = "; ≥ where a run ended early" if any(row.peak_bytes and not row.is_finished for row in rows) else ""
    speeds = "over all steps" + (", compilation included" if comparison.is_compiled else "")
    if _has_several(row.samples_per_s for row in rows):
        speeds += "; over several seeds: mean (least–largest)"
    perplexities = "exp of the evaluation loss"
    if _has_several(row.perplexity for row in rows):
        perplexities += "; over several seeds: mean ± standard deviation (least–largest)"
    table = make_table(
        "Results",
        rows,
        _names(comparison),
        words(
            "outcome",
            lambda row: _outcome(row) if has_unfinished else None,
            "how the runs ended, with the error's words",
        ),
        number(
            "runs",
            lambda row: Value(str(len(row.seeds)), len(row.seeds)) if has_seeds else None,
            "how many were made, one a seed; speeds and perplexities are means over those that finished",
        ),
        number(
            f"peak, {unit.name}",
            lambda row: _peak(row, unit),
            f"most bytes of tensors on the device at any time, the evaluation included; the largest of all seeds{early}",
        ),
        number(
            f"training, {unit.name}",
            lambda row: unit.value(row.training_peak_bytes) if has_evaluations else None,
            "the peak without the evaluation, which somewhere is higher than training",
        ),
        number(
            "reduction", lambda row: _share(comparison.reduction(row)), f"share of the peak of {control} that is saved"
        ),
        words(
            "at",
            lambda row: None if row.peak_phase is None else Value(row.peak_phase, row.peak_phase),
            "the part of the step, or the evaluation, in which the peak is",
        ),
        number(
            "steps",
            lambda row: Value(str(row.steps), row.steps) if row.steps is not None and steps_differ else None,
            "that were made, which differ: speeds of few steps are those of their first, and perplexities are of models that "
            "were trained for so many",
        ),
        number("samples/s", lambda row: _mean(row.samples_per_s), speeds),
        number("warm samples/s", lambda row: _mean(row.warm_samples_per_s), "the same without the first 10 steps"),
        number(
            "steps 10 to 100, s",
            lambda row: None if row.steps_10_to_100_s is None else _seconds(row.steps_10_to_100_s.mean),
            "seconds from the end of step 10 to the end of step 100",
        ),
        number("perplexity", lambda row: _perplexity(row.perplexity), perplexities),
        number(
            f"predicted, {unit.name}",
            lambda row: None if row.predicted is None else unit.value(row.predicted.peak_bytes),
            "the peak that the trace said before the run",
        ),
        number(
            "error",
            lambda row: _signed(row.prediction_error, digits=2),
            "predicted over measured peak of training, less 1",
        ),
        number(
            f"reserved, {unit.name}",
            lambda row: unit.value(row.reserved_bytes),
            "most that the allocator took from the device",
        ),
        number(f"host, {unit.name}", lambda row: unit.value(row.host_bytes), "largest resident size of the process"),
        kind="sortable",
    )
    said = [column for column in table.columns if any(value is not None for value in column.values)]
    return replace(table, columns=tuple(said))


def perplexity_table(comparison: Comparison) -> Table | None:
    """Perplexities by the step that they are of; None where no row has any but the last."""
    rows = [row for row in comparison.rows if row.perplexities]

    def column(step: int) -> Fill[Row]:
        return number(f"after {step}", lambda row: _perplexity(row.perplexities.get(step)))

    columns = map(column, sorted({step for row in rows for step in row.perplexities}))
    return _table("Perplexity after so many steps", comparison, rows, *columns)


def breakdown_table(comparison: Comparison) -> Table | None:
    """The peak of each row by category; None where no row knows it."""
    rows, unit = [row for row in comparison.rows if row.by_category], unit_for(comparison.rows)
    largest = max((sum(row.by_category.values()) for row in rows), default=1) or 1
    names = categories_of(rows)

    def column(name: str) -> Fill[Row]:
        return number(f"{name}, {unit.name}", lambda row: unit.value(row.by_category.get(name) or None))

    return _table(
        "What the peak is made of",
        comparison,
        rows,
        # Bars of one scale.
        number(
            "", lambda row: Bar(tuple((category_kind(name), row.by_category.get(name, 0) / largest) for name in names))
        ),
        *map(column, names),
        number(
            f"sum, {unit.name}",
            lambda row: unit.value(sum(row.by_category.values())),
            "of all categories; less than the peak where another step, or the evaluation, had more",
        ),
        words(
            "from",
            lambda row: Value(source := "trace" if row.is_breakdown_predicted else "run", source),
            "run: one more step was watched; trace: as predicted, because none was",
        ),
    )


def published_table(comparison: Comparison) -> Table | None:
    """Each row with what was published for it; None where nothing was."""
    rows = [row for row in comparison.rows if row.published]
    unit, published = unit_for(rows), {id(row): pairs_with_published(row) for row in rows}
    kinds: dict[str, tuple[Callable[[float], Value], int]] = {
        "peak": (lambda size: Value(unit.text(size), size), 2),
        "samples/s": (lambda speed: Value(speed_text(speed), speed), 0),
        "steps 10 to 100, s": (_seconds, 0),
        "perplexity": (lambda value: Value(perplexity_text(value), value), 1),
    }

    def columns(name: str) -> Iterator[Fill[Row]]:
        say, digits = kinds[name]
        pairs = [each[name] for each in published.values()]
        if all(pair.published is None for pair in pairs):
            return
        # The first is there even if it is empty: it says what the published figure is of.
        head = f"peak, {unit.name}" if name == "peak" else name
        yield number(head, lambda row: _said(published[id(row)][name].ours, say), _PUBLISHED_LEGENDS.get(name, ""))
        yield number("published", lambda row: _said(published[id(row)][name].published, say))
        if any(pair.difference is not None for pair in pairs):
            yield number("differs", lambda row: _signed(published[id(row)][name].difference, digits=digits))

    return _table("Beside the published figures", comparison, rows, *(fill for name in kinds for fill in columns(name)))


def phase_table(comparison: Comparison) -> Table | None:
    """The peak of each phase of each row; None where nothing is known."""
    rows = [row for row in comparison.rows if row.by_phase]
    unit = unit_for(rows)

    def column(phase: str) -> Fill[Row]:
        return number(f"{phase}, {unit.name}", lambda row: unit.value(row.by_phase.get(phase)))

    phases = dict.fromkeys(phase for row in rows for phase in row.by_phase)
    return _table("Highest in each phase", comparison, rows, *map(column, phases))


def sweep_table(sweep: BudgetSweep) -> Table:
    """The points of a sweep; a peak that a larger budget beats stands out."""
    unit = byte_unit(max(point.peak_bytes for point in sweep.points))
    tones = {id(reversal.point): Tone.BAD for reversal in reversals(sweep.points)}
    return make_table(
        f"Budgets of {sweep.title}",
        sweep.points,
        number("budget", lambda point: f"{point.budget:g}"),
        number(
            f"peak, {unit.name}",
            lambda point: Value(unit.text(point.peak_bytes), point.peak_bytes, tone=tones.get(id(point), Tone.PLAIN)),
        ),
        number(
            f"unfused, {unit.name}",
            lambda point: unit.value(point.unfused_peak_bytes),
            "the peak if every result were written",
        ),
        number(f"saved, {unit.name}", lambda point: unit.value(point.saved_bytes)),
        number("recomputed", lambda point: f"{point.recomputed_flops_share:.1%}"),
        number("seconds", lambda point: f"{point.seconds:.1f}", "how long the point took to find"),
        words("kind", lambda point: point.kind, is_for_page=True),
        kind="sortable narrow",
    )


def categories_of(rows: Sequence[Row]) -> list[str]:
    """The categories of the breakdowns: those of a trace in the order of its stack, then what else there is."""
    known = (*(category.value for category in STACK_ORDER), *(name for row in rows for name in row.by_category))
    return [name for name in dict.fromkeys(known) if any(row.by_category.get(name) for row in rows)]


def category_kind(category: str) -> str:
    """The class of the page's style sheet: a word that is no category must not become one."""
    return category if category in {known.value for known in STACK_ORDER} else "plain"


def outcomes_below(table: Table) -> Table:
    """The table with its outcomes below the names, where they have room: a page has no other for them."""
    outcome = next((column for column in table.columns if column.head == "outcome"), None)
    if outcome is None:
        return table
    names = [
        replace(name, tone=Tone.BAD, detail=f"{end.text}: {shortened(end.detail, 70)}" if end.detail else end.text)
        if isinstance(name, Value) and isinstance(end, Value) and end.text != "finished"
        else name
        for name, end in zip(table.columns[0].values, outcome.values, strict=True)
    ]
    others = [column for column in table.columns[1:] if column is not outcome]
    return replace(table, columns=(replace(table.columns[0], values=tuple(names)), *others))


def perplexity_text(value: float) -> str:
    """One digit after the point from 100 on, two below."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def outcome_words(row: Row) -> str:
    """How the runs of a row ended, in a few words."""
    if row.is_finished:
        return "finished"
    words = ", ".join(dict.fromkeys(str(ending.outcome) for ending in row.unfinished))
    finished = len(row.seeds) - len(row.unfinished)
    return f"{words} ({finished} of {len(row.seeds)} finished)" if finished else words


def shortened(message: str, limit: int = 120) -> str:
    """The first words of an error on one line: the whole of it stands below the table."""
    line = " ".join(message.split())
    return line if len(line) <= limit else f"{line[: limit - 2].rsplit(' ', 1)[0]} …"


def _table(caption: str, comparison: Comparison, rows: Sequence[Row], *columns: Fill[Row]) -> Table | None:
    return make_table(caption, rows, _names(comparison), *columns, kind="sortable") if rows else None


def _names(comparison: Comparison) -> Fill[Row]:
    """The names of the configurations, those on the front marked."""
    on_front = {id(row): Value(row.label, row.label, tone=Tone.STRONG, badge="front") for row in comparison.front}
    return words("configuration", lambda row: on_front.get(id(row)) or Value(row.label, row.label), wraps=True)


def _said(figure: float | None, say: Callable[[float], Value]) -> Value | None:
    return None if figure is None else say(figure)


def _outcome(row: Row) -> Value:
    reason = next((ending.message for ending in row.unfinished if ending.message), "")
    words = outcome_words(row)
    return Value(words, words, shortened(error_line(reason)))


def _peak(row: Row, unit: ByteUnit) -> Value | None:
    if row.peak_bytes is None:
        return None
    return Value(f"{'' if row.is_finished else '≥ '}{unit.text(row.peak_bytes)}", row.peak_bytes)


def _share(share: float | None) -> Value | None:
    # Rounded first, so that a trifle below nothing is not written as -0.0%.
    return None if share is None else Value(f"{round(share, 3) + 0.0:.1%}", share)


def _signed(share: float | None, digits: int = 1) -> Value | None:
    return None if share is None else Value(f"{round(share, digits + 2) + 0.0:+.{digits}%}", share)


def _mean(spread: Spread | None) -> Value | None:
    if spread is None:
        return None
    extremes = f"{speed_text(spread.least)}–{speed_text(spread.largest)}" if spread.count > 1 else ""
    return Value(speed_text(spread.mean), spread.mean, extremes)


def _seconds(seconds: float) -> Value:
    return Value(f"{seconds:,.1f}", seconds)


def _perplexity(spread: Spread | None) -> Value | None:
    if spread is None:
        return None
    if spread.deviation is None:
        return Value(perplexity_text(spread.mean), spread.mean)
    deviation = f"{spread.deviation:.1f}" if spread.mean >= 100 else f"{spread.deviation:.2f}"
    extremes = f"{perplexity_text(spread.least)}–{perplexity_text(spread.largest)}"
    return Value(f"{perplexity_text(spread.mean)} ± {deviation}", spread.mean, extremes)


def _has_several(spreads: Iterable[Spread | None]) -> bool:
    return any(spread and spread.count > 1 for spread in spreads)
