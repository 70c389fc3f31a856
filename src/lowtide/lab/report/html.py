"""The report as one self-contained HTML page: no network, no library, works offline and on a phone.

The page's script draws the charts; the tables hold all numbers without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from operator import itemgetter

from lowtide.lab.budget import BudgetSweep, reversals
from lowtide.lab.report import charts, tables
from lowtide.lab.report.comparison import (
    Comparison,
    LabReport,
    fastest_words,
    provenance,
    remarks,
    speed_text,
    unit_for,
)
from lowtide.lab.report.rows import Row, alike_endings
from lowtide.lab.report.tables import outcome_words, perplexity_text
from lowtide.plain_text import Plain
from lowtide.report import page
from lowtide.report.charts import Mark, Scatter
from lowtide.report.page import fill_page, read_asset
from lowtide.report.table import Tone, Value, make_table, to_html, words
from lowtide.units import format_count

_PACKAGE = "lowtide.lab.report"
_BUDGET_WORDS = (
    "torch.compile keeps this share of what it would save for the backward, and recomputes the rest. A smaller budget should "
    "never have a larger peak."
)
_NO_SCRIPT = "<noscript><p>The chart is drawn by a script; the tables below hold its numbers.</p></noscript>"


def render_html(report: LabReport) -> str:
    """The page as text to be written to a `.html` file."""
    links = [(f"lab-{index}", comparison.title, "") for index, comparison in enumerate(report.comparisons)]
    body = [_comparison(comparison, index) for index, comparison in enumerate(report.comparisons)]
    if report.sweeps:
        links.append(("budget-sweep", "Memory budget sweep", ""))
        sweeps = "".join(_sweep(sweep, index) for index, sweep in enumerate(report.sweeps))
        body.append(page.section("trace lab", *links[-1][:2], [f'<p class="where">{_BUDGET_WORDS}</p>', sweeps]))
    links.append(("origin", "Where the figures come from", ""))
    body.append(page.section("trace lab", *links[-1][:2], _origin(report)))
    return fill_page(
        title=report.title,
        contents=page.contents(links),
        body="".join(body),
        styles=[read_asset("lab.css", _PACKAGE)],
        data={
            "comparisons": [_chart_data(comparison) for comparison in report.comparisons],
            "sweeps": [charts.sweep_lines(sweep) for sweep in report.sweeps],
        },
        scripts=[read_asset("units.js"), read_asset("charts.js"), read_asset("lab.js", _PACKAGE)],
    )


def _comparison(comparison: Comparison, index: int) -> str:
    rows = comparison.rows
    sizes = dict.fromkeys(format_count(row.parameters) for row in rows if row.parameters is not None)
    configurations = f"{len(rows)} {'configuration' if len(rows) == 1 else 'configurations'}"
    published, perplexities = tables.published_table(comparison), tables.perplexity_table(comparison)
    phases = tables.phase_table(comparison)
    pieces = [
        _headline(comparison),
        _scatter_figure(comparison, index),
        to_html(tables.outcomes_below(tables.result_table(comparison))),
        _hints(fastest_words(comparison), comparison.control_words),
        "" if published is None else to_html(published),
        _hints(comparison.sources),
        "" if perplexities is None else to_html(perplexities),
        _breakdown(comparison),
        _steps(comparison, index),
        "" if phases is None else page.folded(phases.caption, to_html(phases)),
        _unfinished(rows),
        page.notes(remarks(comparison)),
    ]
    lines = [" · ".join([*(f"{size} parameters" for size in sizes), configurations])]
    return page.section(
        "trace lab", f"lab-{index}", comparison.title, pieces, lines=lines, is_emulated=comparison.is_emulated
    )


def _hints(*sentences: str) -> str:
    return "".join(f'<p class="hint">{escape(sentence)}</p>' for sentence in sentences if sentence)


def _headline(comparison: Comparison) -> str:
    """The handful of numbers at the top of a comparison."""
    unit, finished = unit_for(comparison.rows), [row for row in comparison.rows if row.is_finished]
    items: list[tuple[str, Value, Value]] = []
    peaks = [(row.peak_bytes, row) for row in finished if row.peak_bytes is not None]
    if peaks:
        peak, row = min(peaks, key=lambda pair: pair[0])
        saved = comparison.reduction(row)
        against = f", {saved:.1%} less than {comparison.control.label}" if saved and comparison.control else ""
        items.append(("Smallest peak", Value(f"{unit.text(peak)} {unit.name}"), Value(f"{row.label}{against}")))
    speeds = [(speed.mean, row) for row in finished if (speed := comparison.speed(row)) is not None]
    if speeds:
        fastest, row = max(speeds, key=lambda pair: pair[0])
        timed = f", of {len(speeds)} with a {comparison.speed_name}" if comparison.speedless else ""
        items.append(("Fastest", Value(f"{speed_text(fastest)} samples/s"), Value(f"{row.label}{timed}")))
    errors = [(abs(row.prediction_error), row) for row in finished if row.prediction_error is not None]
    if errors:
        error, row = max(errors, key=lambda pair: pair[0])
        of_all = Value(f"{row.label}, of {len(errors)} predicted")
        items.append(("Largest error of a prediction", Value(f"{error:.2%}"), of_all))
    detail = Value("every one of them")
    if unfinished := [row for row in comparison.rows if not row.is_finished]:
        detail = Value(", ".join(f"{row.label} {outcome_words(row)}" for row in unfinished), tone=Tone.BAD)
    items.append(("Finished", Value(f"{len(finished)} of {len(comparison.rows)}"), detail))
    return page.figures(items)


def _scatter_figure(comparison: Comparison, index: int) -> str:
    found = charts.scatter_of(comparison)
    if found is None:
        return "<p>No finished row has both a peak and a speed, so that there is no chart of them.</p>"
    scatter, _ = found
    kinds = {mark.kind for mark in scatter.marks}
    keys = ["<li><i class='key on-front'></i>on the front: no other is as small and as fast</li>"]
    if "ours" in kinds:
        keys.append("<li><i class='key ours'></i>another is as small and as fast</li>")
    if "published" in kinds:
        keys.append("<li><i class='key published'></i>published</li>")
    return (
        f'<figure class="scatter" data-scatter="{index}" aria-label="Memory against speed"><h3>Memory against speed</h3>'
        f'<ul class="legend">{"".join(keys)}</ul><div class="chart">{_NO_SCRIPT}'
        f'<div class="readout" hidden></div></div>{_hints("Low and far right is good.", *scatter.notes)}</figure>'
    )


def _chart_data(comparison: Comparison) -> dict[str, Plain]:
    found = charts.scatter_of(comparison)
    steps: list[Plain] = [curve.plain() for curve in charts.step_curves(comparison)]
    if found is None:
        return {"scatter": None, "details": [], "steps": steps}
    return {"scatter": found[0].plain(), "details": _details(comparison, *found), "steps": steps}


def _details(comparison: Comparison, scatter: Scatter, rows: Sequence[Row]) -> list[Plain]:
    """What the readout says of each mark, in the order of their numbers."""
    table = tables.outcomes_below(tables.result_table(comparison))
    heads = [column.head for column in table.columns[1:]]
    said: dict[int, list[Plain]] = {
        id(row): [[head, cell.text] for head, cell in zip(heads, cells[1:], strict=True) if isinstance(cell, Value)]
        for row, cells in zip(comparison.rows, table.rows, strict=True)
    }
    return [
        [f"{mark.name}, published", _published_facts(mark, row, scatter)]
        if mark.kind == "published"
        else [mark.name, said[id(row)]]
        for mark, row in zip(scatter.marks, rows, strict=True)
    ]


def _published_facts(mark: Mark, row: Row, scatter: Scatter) -> list[Plain]:
    published = row.published
    assert published is not None, "only rows with published figures have such a mark"
    figures: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        (scatter.y_name, mark.y, "{:,.3f}".format),
        ("samples/s", published.samples_per_s, speed_text),
        ("steps 10 to 100, s", published.steps_10_to_100_s, "{:,.1f}".format),
        ("perplexity", published.perplexity, perplexity_text),
    )
    return [[name, text(figure)] for name, figure, text in figures if figure is not None]


def _breakdown(comparison: Comparison) -> str:
    """What each peak is made of, as bars of one scale and as numbers; "" where nothing is known."""
    table = tables.breakdown_table(comparison)
    if table is None:
        return ""
    shown = tables.categories_of(comparison.rows)
    keys = "".join(f'<li><i class="swatch {tables.category_kind(name)}"></i>{escape(name)}</li>' for name in shown)
    drawn = to_html(replace(table, kind=f"{table.kind} breakdown"))
    return f'<h3>{escape(table.caption)}</h3><ul class="legend">{keys}</ul>{drawn}'


def _steps(comparison: Comparison, index: int) -> str:
    curves = charts.step_curves(comparison)
    if not curves:
        return ""
    predicted = ""
    if any(curve.predicted is not None for curve in curves):
        predicted = '<li><i class="key predicted"></i>predicted peak</li>'
    figures = "".join(
        f'<figure class="multiple"><figcaption><b>{escape(curve.name)}</b> '
        f'<span class="quiet">{escape(curve.words)}</span></figcaption></figure>'
        for curve in curves
    )
    return (
        f'<div class="timelines" data-steps="{index}"><h3>Memory through one step, {unit_for(comparison.rows).name}</h3>'
        f'<div class="tools"><ul class="legend"><li><i class="key held"></i>held on the device</li>{predicted}</ul>'
        f'<label><input type="checkbox" class="same" id="same-{index}"> the same scale for all</label></div>'
        f'<div class="multiples">{figures}</div></div>'
    )


def _unfinished(rows: Sequence[Row]) -> str:
    """Runs that did not come to their end, with all that they said; "" where every one did."""
    items = "".join(
        f"<li><b>{escape(row.label)}</b>, {seeds}: {escape(ending.outcome)}"
        + (f"<pre>{escape(ending.message.strip())}</pre>" if ending.message.strip() else "")
        + "</li>"
        for row in rows
        for seeds, ending in alike_endings(row)
    )
    return f'<aside class="notes unfinished"><h3>Runs that did not finish</h3><ul>{items}</ul></aside>' if items else ""


def _sweep(sweep: BudgetSweep, index: int) -> str:
    beaten = "".join(f"<li>{escape(reversal.words)}</li>" for reversal in reversals(sweep.points))
    verdict = (
        f'<div class="reversals"><p><b class="bad">Not monotone.</b></p><ul>{beaten}</ul></div>'
        if beaten
        else '<p class="reversals"><b class="good">Monotone:</b> no smaller budget has a larger peak.</p>'
    )
    legend = "".join(f'<li><i class="key {what}"></i>{what}</li>' for what in ("peak", "saved"))
    legend += '<li><i class="key static"></i>read off the graphs</li>'
    if beaten:
        legend += '<li><i class="key reversal"></i>beaten by a larger budget</li>'
    return (
        f'<figure class="sweep" data-sweep="{index}" aria-label="{escape(sweep.title)}"><h3>{escape(sweep.title)}</h3>'
        f'<ul class="legend">{legend}</ul><div class="chart">{_NO_SCRIPT}</div></figure>'
        f"{verdict}{to_html(tables.sweep_table(sweep))}"
    )


def _origin(report: LabReport) -> list[str]:
    columns = (words("what", itemgetter(0)), words("value", itemgetter(1)))
    made_with = make_table("Made with", provenance(report), *columns, kind="narrow origin")
    return [to_html(made_with), page.notes(report.skipped, title="Skipped files", kind="notes skipped")]
