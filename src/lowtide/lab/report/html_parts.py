"""The parts of the report's page that need no script: headline figures, tables, bars and sweeps, as escaped HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowtide.lab.report.byte_unit import byte_unit, unit_for
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.rows import Row, alike_endings
from lowtide.lab.report.scatter import Mark, Scatter
from lowtide.lab.report.sweep import Sweep
from lowtide.lab.report.sweep_svg import sweep_svg
from lowtide.lab.report.tables import (
    Column,
    Table,
    Value,
    breakdown_table,
    number,
    outcome_words,
    shortened,
    speed_text,
)
from lowtide.plain_text import Plain
from lowtide.report import markup
from lowtide.report.markup import Cell, Markup
from lowtide.report.palette import STACK_ORDER

_CATEGORIES = frozenset(category.value for category in STACK_ORDER)


def headline(comparison: Comparison) -> str:
    """The handful of numbers at the top of a comparison."""
    unit, finished = unit_for(comparison.rows), [row for row in comparison.rows if row.is_finished]
    items: list[tuple[str, Cell, Cell]] = []
    peaks = [(row.peak_bytes, row) for row in finished if row.peak_bytes is not None]
    if peaks:
        peak, row = min(peaks, key=lambda pair: pair[0])
        saved = comparison.reduction(row)
        against = f", {saved:.1%} less than {comparison.control.label}" if saved and comparison.control else ""
        items.append(("Smallest peak", f"{unit.text(peak)} {unit.name}", f"{row.label}{against}"))
    speeds = [(speed.mean, row) for row in finished if (speed := comparison.speed(row)) is not None]
    if speeds:
        fastest, row = max(speeds, key=lambda pair: pair[0])
        timed = f", of {len(speeds)} with a {comparison.speed_name}" if comparison.speedless else ""
        items.append(("Fastest", f"{speed_text(fastest)} samples/s", f"{row.label}{timed}"))
    errors = [(abs(row.prediction_error), row) for row in finished if row.prediction_error is not None]
    if errors:
        error, row = max(errors, key=lambda pair: pair[0])
        items.append(("Largest error of a prediction", f"{error:.2%}", f"{row.label}, of {len(errors)} predicted"))
    unfinished = [row for row in comparison.rows if not row.is_finished]
    detail: Cell = "every one of them"
    if unfinished:
        words = ", ".join(f"{row.label} {outcome_words(row)}" for row in unfinished)
        detail = Markup(f'<b class="too-large">{escape(words)}</b>')
    items.append(("Finished", f"{len(finished)} of {len(comparison.rows)}", detail))
    return markup.figures(items)


def table_html(table: Table, comparison: Comparison) -> str:
    """A table that the script makes sortable, and its legend. Outcomes stand below the names, where they have room."""
    outcome = next((column for column in table.columns if column.head == "outcome"), None)
    columns = [column for column in table.columns if column is not outcome]
    rows: list[list[Cell]] = [
        [
            _name(row, comparison, outcome.values[index] if outcome else None),
            *(_cell(column.values[index]) for column in columns),
        ]
        for index, row in enumerate(table.rows)
    ]
    return markup.table(table.caption, ["configuration", *map(_head, columns)], rows, kind="sortable") + _legend(
        columns
    )


def breakdown(comparison: Comparison) -> str:
    """What each peak is made of, as bars of one scale and as numbers; "" where nothing is known."""
    table = breakdown_table(comparison)
    if table is None:
        return ""
    largest = max(_breakdown_bytes(row) for row in table.rows)
    rows: list[list[Cell]] = [
        [_name(row, comparison), _stack(row, largest), *(_cell(column.values[index]) for column in table.columns)]
        for index, row in enumerate(table.rows)
    ]
    shown = [category for category in _ordered(table.rows) if any(_category_bytes(row, category) for row in table.rows)]
    keys = "".join(f'<li><i class="swatch {_class(name)}"></i>{escape(name)}</li>' for name in shown)
    heads = ["configuration", "%", *map(_head, table.columns)]
    return (
        f'<h3>{escape(table.caption)}</h3><ul class="legend">{keys}</ul>'
        + markup.table(table.caption, heads, rows, kind="sortable breakdown")
        + _legend(table.columns)
    )


def phase_table(comparison: Comparison) -> str:
    """The peak of each phase of each row; "" where nothing is known."""
    rows = [row for row in comparison.rows if row.by_phase]
    if not rows:
        return ""
    unit = unit_for(rows)
    phases = list(dict.fromkeys(phase for row in rows for phase in row.by_phase))
    columns = [
        Column(
            head=f"{phase}, {unit.name}",
            values=tuple(_size(row.by_phase.get(phase), unit.text(row.by_phase.get(phase, 0))) for row in rows),
        )
        for phase in phases
    ]
    table = Table(caption="Highest in each phase", rows=tuple(rows), columns=tuple(columns))
    return f"<details><summary>Highest in each phase</summary>{table_html(table, comparison)}</details>"


def unfinished(comparison: Comparison) -> str:
    """Runs that did not come to their end, with all that they said; "" where every one did."""
    items = "".join(
        f"<li><b>{escape(row.label)}</b>, {seeds}: {escape(ending.outcome)}"
        + (f"<pre>{escape(ending.message.strip())}</pre>" if ending.message.strip() else "")
        + "</li>"
        for row in comparison.rows
        for seeds, ending in alike_endings(row)
    )
    return f'<aside class="notes unfinished"><h3>Runs that did not finish</h3><ul>{items}</ul></aside>' if items else ""


def sweep_section(sweeps: Sequence[Sweep]) -> str:
    """All sweeps, each with its curve, its table and where it is not monotone."""
    pieces = ['<section class="trace lab" id="budget-sweep" aria-labelledby="name-sweep">']
    pieces.append('<header><h2 id="name-sweep">Memory budget sweep</h2></header>')
    pieces.append(
        '<p class="where">torch.compile keeps this share of what it would save for the backward, and recomputes the rest. '
        "A smaller budget should never have a larger peak.</p>"
    )
    return "".join([*pieces, *map(_sweep, sweeps), "</section>"])


def published_facts(mark: Mark, scatter: Scatter) -> list[Plain]:
    """What the readout says of a published mark."""
    published = mark.row.published
    assert published is not None, "only rows with published figures have such a mark"
    facts: list[Plain] = [[f"peak, {scatter.unit.name}", f"{mark.memory:,.{scatter.unit.decimals}f}"]]
    if published.samples_per_s is not None:
        facts.append(["samples/s", speed_text(published.samples_per_s)])
    if published.steps_10_to_100_s is not None:
        facts.append(["steps 10 to 100, s", f"{published.steps_10_to_100_s:,.1f}"])
    if published.perplexity is not None:
        facts.append(["perplexity", number(published.perplexity)])
    return facts


def _sweep(sweep: Sweep) -> str:
    unit = byte_unit(max(point.peak_bytes for point in sweep.points))
    reversed_points = {id(reversal.point) for reversal in sweep.reversals}
    rows: list[list[Cell]] = []
    for point in sweep.points:
        peak = unit.text(point.peak_bytes)
        marked = Markup(f'<b class="costs">{peak} <span title="a larger budget has a smaller peak">▲</span></b>')
        rows.append(
            [
                f"{point.budget:g}",
                marked if id(point) in reversed_points else peak,
                unit.text(point.saved_bytes),
                f"{point.recomputed_flops_share:.1%}",
                point.kind,
            ]
        )
    heads = ["#budget", f"#peak, {unit.name}", f"#saved, {unit.name}", "#recomputed", "kind"]
    words = "".join(f"<li>{escape(reversal.words)}</li>" for reversal in sweep.reversals)
    verdict = (
        f'<div class="reversals"><p><b class="costs">Not monotone.</b></p><ul>{words}</ul></div>'
        if words
        else '<p class="reversals"><b class="fits">Monotone:</b> no smaller budget has a larger peak.</p>'
    )
    legend = "".join(f'<li><i class="key {what}"></i>{what}</li>' for what in ("peak", "saved"))
    legend += "".join(f'<li><i class="key {kind}"></i>{_KINDS[kind]}</li>' for kind in sweep.curves)
    if words:
        legend += '<li><i class="key reversal"></i>beaten by a larger budget</li>'
    return (
        f'<figure class="sweep" aria-label="{escape(sweep.title)}"><h3>{escape(sweep.title)}</h3>'
        f'<ul class="legend">{legend}</ul><div class="chart">{sweep_svg(sweep)}</div></figure>'
        f"{verdict}{markup.table(f'Budgets of {sweep.title}', heads, rows, kind='sortable narrow')}"
    )


_KINDS = {"static": "read off the graphs", "real": "measured in a run"}


def _name(row: Row, comparison: Comparison, outcome: Value | None = None) -> Markup:
    badge = ' <em class="on-front">front</em>' if row in comparison.front else ""
    ending = ""
    if outcome is not None and not row.is_finished:
        reason = f": {escape(shortened(outcome.detail, 70))}" if outcome.detail else ""
        ending = f'<small><b class="too-large">{escape(outcome.text)}</b>{reason}</small>'
    # Long names may break after an underscore, which no browser does by itself.
    words = escape(row.label).replace("_", "_<wbr>")
    return Markup(f'<span data-value="{escape(row.label)}">{words}</span>{badge}{ending}')


def _head(column: Column) -> str:
    return f"#{column.head}" if column.is_number else column.head


def _cell(value: Value | None) -> Cell:
    if value is None:
        return Markup('<span class="quiet">–</span>')
    detail = f"<small>{escape(value.detail)}</small>" if value.detail else ""
    return Markup(f'<span data-value="{escape(str(value.order))}">{escape(value.text)}</span>{detail}')


def _size(num_bytes: int | None, words: str) -> Value | None:
    return None if num_bytes is None else Value(words, num_bytes)


def _legend(columns: Sequence[Column]) -> str:
    lines = "".join(
        f"<dt>{escape(column.head)}</dt><dd>{escape(column.legend)}</dd>" for column in columns if column.legend
    )
    return (
        f'<details class="columns"><summary>What the columns mean</summary><dl>{lines}</dl></details>' if lines else ""
    )


def _stack(row: Row, largest_bytes: int) -> Markup:
    bars = "".join(
        f'<i class="bar {_class(category)}" style="width:{size / largest_bytes:.2%}"></i>'
        for category in _ordered([row])
        if (size := _category_bytes(row, category))
    )
    return Markup(f'<span class="stack">{bars}</span>')


def _ordered(rows: Sequence[Row]) -> list[str]:
    others = [name for row in rows if row.breakdown for name in row.breakdown.by_category if name not in _CATEGORIES]
    return list(dict.fromkeys([*(category.value for category in STACK_ORDER), *others]))


def _category_bytes(row: Row, category: str) -> int:
    return row.breakdown.by_category.get(category, 0) if row.breakdown else 0


def _breakdown_bytes(row: Row) -> int:
    return max(sum(row.breakdown.by_category.values()), 1) if row.breakdown else 1


def _class(category: str) -> str:
    """Of the style sheet: a word that is no category must not become one."""
    return category if category in _CATEGORIES else "plain"
