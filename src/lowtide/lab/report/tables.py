"""The tables of the report, one row a configuration.

A column appears where at least one row has something to say in it, and brings its line of the legend with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lowtide.lab.budget import BudgetSweep, reversals
from lowtide.lab.report.comparison import Beside, BesidePublished, Comparison, beside_published, unit_for
from lowtide.lab.report.rows import Row, Spread, error_line
from lowtide.report.palette import STACK_ORDER
from lowtide.report.table import Bar, ByteUnit, Column, Table, Tone, Value, byte_unit, make_table, words
from lowtide.report.table import number as number_column

_BESIDE = {
    "samples/s": "as published: over all steps, with their compilation and the evaluation; left out where a run has fewer steps "
    "than the published one, or no evaluation",
    "perplexity": "left out where a run has fewer steps than the published one",
}
"""Legends of what stands beside published figures."""


def result_table(comparison: Comparison) -> Table:
    """All results, one row a configuration."""
    rows, unit = comparison.rows, unit_for(comparison.rows)
    columns = [
        _column(
            "outcome",
            rows,
            lambda row: _outcome(row) if any(not each.is_finished for each in rows) else None,
            "how the runs ended, with the error's words",
            is_number=False,
        ),
        _column(
            "runs",
            rows,
            lambda row: (
                Value(str(len(row.seeds)), len(row.seeds)) if any(len(each.seeds) > 1 for each in rows) else None
            ),
            "how many were made, one a seed; speeds and perplexities are means over those that finished",
        ),
        _column(
            f"peak, {unit.name}",
            rows,
            lambda row: _peak(row, unit),
            "most bytes of tensors on the device at any time, the evaluation included; the largest of all seeds"
            + ("; ≥ where a run ended early" if any(row.peak_bytes and not row.is_finished for row in rows) else ""),
        ),
        _column(
            f"training, {unit.name}",
            rows,
            lambda row: unit.value(row.training_peak_bytes) if any(map(_evaluation_is_higher, rows)) else None,
            "the peak without the evaluation, which somewhere is higher than training",
        ),
        _column(
            "reduction",
            rows,
            lambda row: _share(comparison.reduction(row)),
            f"share of the peak of {comparison.control.label if comparison.control else ''} that is saved",
        ),
        _column("at", rows, _phase, "the part of the step, or the evaluation, in which the peak is", is_number=False),
        _column(
            "steps",
            rows,
            lambda row: Value(str(row.steps), row.steps) if row.steps is not None and _steps_differ(rows) else None,
            "that were made, which differ: speeds of few steps are those of their first, and perplexities are of models that "
            "were trained for so many",
        ),
        _column(
            "samples/s",
            rows,
            lambda row: _mean(row.samples_per_s),
            "over all steps"
            + (", compilation included" if comparison.is_compiled else "")
            + ("; over several seeds: mean (least–largest)" if _has_several(row.samples_per_s for row in rows) else ""),
        ),
        _column(
            "warm samples/s", rows, lambda row: _mean(row.warm_samples_per_s), "the same without the first 10 steps"
        ),
        _column(
            "steps 10 to 100, s",
            rows,
            lambda row: None if row.steps_10_to_100_s is None else _seconds(row.steps_10_to_100_s.mean),
            "seconds from the end of step 10 to the end of step 100",
        ),
        _column(
            "perplexity",
            rows,
            lambda row: _perplexity(row.perplexity),
            "exp of the evaluation loss" + _spread_words(row.perplexity for row in rows),
        ),
        _column(
            f"predicted, {unit.name}",
            rows,
            lambda row: None if row.predicted is None else unit.value(row.predicted.peak_bytes),
            "the peak that the trace said before the run",
        ),
        _column(
            "error",
            rows,
            lambda row: _signed(row.prediction_error, digits=2),
            "predicted over measured peak of training, less 1",
        ),
        _column(
            f"reserved, {unit.name}",
            rows,
            lambda row: unit.value(row.reserved_bytes),
            "most that the allocator took from the device",
        ),
        _column(
            f"host, {unit.name}", rows, lambda row: unit.value(row.host_bytes), "largest resident size of the process"
        ),
    ]
    return _table("Results", comparison, rows, _said(columns))


def perplexity_table(comparison: Comparison) -> Table | None:
    """Perplexities by the step that they are of; None where no row has any but the last."""
    rows = tuple(row for row in comparison.rows if row.perplexities)
    if not rows:
        return None

    def column(step: int) -> Column:
        return _column(f"after {step}", rows, lambda row: _perplexity(row.perplexities.get(step)))

    columns = map(column, sorted({step for row in rows for step in row.perplexities}))
    return _table("Perplexity after so many steps", comparison, rows, columns)


def breakdown_table(comparison: Comparison) -> Table | None:
    """The peak of each row by category; None where no row knows it."""
    rows = tuple(row for row in comparison.rows if row.breakdown)
    if not rows:
        return None
    unit = unit_for(comparison.rows)
    columns = [
        _column(f"{category}, {unit.name}", rows, lambda row, category=category: _category(row, category, unit))  # type: ignore[misc]
        for category in categories_of(rows)
    ]
    columns.append(
        _column(
            f"sum, {unit.name}",
            rows,
            lambda row: unit.value(sum(row.breakdown.by_category.values())) if row.breakdown else None,
            "of all categories; less than the peak where another step, or the evaluation, had more",
        )
    )
    columns.append(
        _column(
            "from",
            rows,
            lambda row: (
                Value("trace", "trace") if row.breakdown and row.breakdown.is_predicted else Value("run", "run")
            ),
            "run: one more step was watched; trace: as predicted, because none was",
            is_number=False,
        )
    )
    bars = Column(head="", values=_bars(rows))
    return _table("What the peak is made of", comparison, rows, [bars, *_said(columns)])


def published_table(comparison: Comparison) -> Table | None:
    """Each row beside what was published for it; None where nothing was."""
    beside = {id(row): beside_published(row) for row in comparison.rows}
    rows = tuple(row for row in comparison.rows if beside[id(row)] is not None)
    if not rows:
        return None
    unit = unit_for(rows)
    kinds: tuple[tuple[str, Callable[[BesidePublished], Beside], Callable[[float], Value], int], ...] = (
        (f"peak, {unit.name}", lambda all_: all_.peak_bytes, lambda size: Value(unit.text(size), size), 2),
        ("samples/s", lambda all_: all_.samples_per_s, _speed, 0),
        ("steps 10 to 100, s", lambda all_: all_.steps_10_to_100_s, _seconds, 0),
        ("perplexity", lambda all_: all_.perplexity, lambda value: Value(number(value), value), 1),
    )
    columns: list[Column] = []
    for head, pick, say, digits in kinds:
        pairs = [pick(each) if (each := beside[id(row)]) is not None else None for row in rows]
        if not any(pair and pair.published is not None for pair in pairs):
            continue
        # The first is there even if it is empty: it says what the published figure is of.
        columns.append(
            Column(
                head=head,
                legend=_BESIDE.get(head, ""),
                values=tuple(_said_by(pair.ours if pair else None, say) for pair in pairs),
            )
        )
        theirs = tuple(_said_by(pair.published if pair else None, say) for pair in pairs)
        differences = tuple(_signed(pair.difference if pair else None, digits=digits) for pair in pairs)
        columns += _said([Column(head="published", values=theirs), Column(head="differs", values=differences)])
    return _table("Beside the published figures", comparison, rows, columns)


def phase_table(comparison: Comparison) -> Table | None:
    """The peak of each phase of each row; None where nothing is known."""
    rows = tuple(row for row in comparison.rows if row.by_phase)
    if not rows:
        return None
    unit = unit_for(rows)
    columns = [
        Column(head=f"{phase}, {unit.name}", values=tuple(unit.value(row.by_phase.get(phase)) for row in rows))
        for phase in dict.fromkeys(phase for row in rows for phase in row.by_phase)
    ]
    return _table("Highest in each phase", comparison, rows, columns)


def sweep_table(sweep: BudgetSweep) -> Table:
    """The points of a sweep; a peak that a larger budget beats stands out."""
    unit = byte_unit(max(point.peak_bytes for point in sweep.points))
    beaten = {id(reversal.point) for reversal in reversals(sweep.points)}
    rows = [
        [
            f"{point.budget:g}",
            Value(unit.text(point.peak_bytes), point.peak_bytes, tone=Tone.BAD if id(point) in beaten else Tone.PLAIN),
            unit.value(point.saved_bytes),
            f"{point.recomputed_flops_share:.1%}",
            point.kind,
        ]
        for point in sweep.points
    ]
    heads = ("budget", f"peak, {unit.name}", f"saved, {unit.name}", "recomputed")
    columns = (*map(number_column, heads), words("kind"))
    return make_table(f"Budgets of {sweep.title}", columns, rows, kind="sortable narrow")


def categories_of(rows: Sequence[Row]) -> list[str]:
    """The categories of a trace in the order of its stack, then what else the breakdowns name."""
    known = [category.value for category in STACK_ORDER]
    return list(dict.fromkeys([*known, *(name for row in rows if row.breakdown for name in row.breakdown.by_category)]))


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
    rest = [column for column in table.columns[1:] if column is not outcome]
    return replace(table, columns=(replace(table.columns[0], values=tuple(names)), *rest))


def number(value: float) -> str:
    """A perplexity: one digit after the point from 100 on, two below."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def speed_text(samples_per_s: float) -> str:
    """Four digits, as published tables have them.

    Example:
        >>> speed_text(2.518), speed_text(31.234), speed_text(1250.0)
        ('2.518', '31.23', '1,250.0')
    """
    decimals = 3 if samples_per_s < 10 else 2 if samples_per_s < 100 else 1
    return f"{samples_per_s:,.{decimals}f}"


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


def _table(caption: str, comparison: Comparison, rows: Sequence[Row], columns: Iterable[Column]) -> Table:
    """The names of the configurations, those on the front marked, before the columns."""
    on_front = {id(row) for row in comparison.front}
    names = tuple(
        Value(row.label, row.label, tone=Tone.STRONG, badge="front")
        if id(row) in on_front
        else Value(row.label, row.label)
        for row in rows
    )
    name = Column(head="configuration", is_number=False, wraps=True, values=names)
    return Table(caption=caption, columns=(name, *columns), kind="sortable")


def _bars(rows: Sequence[Row]) -> tuple[Bar, ...]:
    """What each peak is made of, as bars of one scale."""
    sizes = [row.breakdown.by_category if row.breakdown else {} for row in rows]
    largest = max(max(sum(each.values()) for each in sizes), 1)
    return tuple(
        Bar(tuple((category_kind(name), each.get(name, 0) / largest) for name in categories_of(rows))) for each in sizes
    )


def _column(
    head: str, rows: Sequence[Row], value: Callable[[Row], Value | None], legend: str = "", *, is_number: bool = True
) -> Column:
    return Column(head=head, legend=legend, is_number=is_number, values=tuple(map(value, rows)))


def _said(columns: Iterable[Column]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(value is not None for value in column.values))


def _said_by(value: float | None, say: Callable[[float], Value]) -> Value | None:
    return None if value is None else say(value)


def _outcome(row: Row) -> Value:
    reason = next((ending.message for ending in row.unfinished if ending.message), "")
    words = outcome_words(row)
    return Value(words, words, shortened(error_line(reason)))


def _peak(row: Row, unit: ByteUnit) -> Value | None:
    if row.peak_bytes is None:
        return None
    return Value(f"{'' if row.is_finished else '≥ '}{unit.text(row.peak_bytes)}", row.peak_bytes)


def _evaluation_is_higher(row: Row) -> bool:
    return bool(row.peak_bytes and row.training_peak_bytes and row.peak_bytes > row.training_peak_bytes)


def _steps_differ(rows: Sequence[Row]) -> bool:
    return len({row.steps for row in rows if row.steps is not None}) > 1


def _phase(row: Row) -> Value | None:
    return None if row.peak_phase is None else Value(row.peak_phase, row.peak_phase)


def _category(row: Row, category: str, unit: ByteUnit) -> Value | None:
    size = row.breakdown.by_category.get(category, 0) if row.breakdown else 0
    return Value(unit.text(size), size) if size else None


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


def _speed(samples_per_s: float) -> Value:
    return Value(speed_text(samples_per_s), samples_per_s)


def _seconds(seconds: float) -> Value:
    return Value(f"{seconds:,.1f}", seconds)


def _perplexity(spread: Spread | None) -> Value | None:
    if spread is None:
        return None
    if spread.deviation is None:
        return Value(number(spread.mean), spread.mean)
    deviation = f"{spread.deviation:.1f}" if spread.mean >= 100 else f"{spread.deviation:.2f}"
    extremes = f"{number(spread.least)}–{number(spread.largest)}"
    return Value(f"{number(spread.mean)} ± {deviation}", spread.mean, extremes)


def _spread_words(spreads: Iterable[Spread | None]) -> str:
    return "; over several seeds: mean ± standard deviation (least–largest)" if _has_several(spreads) else ""


def _has_several(spreads: Iterable[Spread | None]) -> bool:
    return any(spread and spread.count > 1 for spread in spreads)
