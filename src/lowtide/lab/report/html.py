"""The report as one self-contained HTML page: no network, no library, works offline and on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowtide.lab.record import RunRecord
from lowtide.lab.report import html_parts as parts
from lowtide.lab.report.byte_unit import unit_for
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.fastest import fastest_words
from lowtide.lab.report.provenance import provenance, remarks
from lowtide.lab.report.scatter import Scatter, scatter_of
from lowtide.lab.report.scatter_svg import scatter_svg
from lowtide.lab.report.sweep import Sweep
from lowtide.lab.report.tables import moments_table, published_table, result_table
from lowtide.lab.report.timeline import timeline_of
from lowtide.lab.report.timeline_svg import timeline_grid
from lowtide.plain_text import Plain
from lowtide.report import markup
from lowtide.report.page import fill_page, read_part
from lowtide.units import format_count

_PACKAGE = "lowtide.lab.report"


def render_html(
    comparisons: Sequence[Comparison],
    records: Sequence[RunRecord],
    *,
    title: str,
    skipped: Sequence[str] = (),
    sweeps: Sequence[Sweep] = (),
    num_older: int = 0,
) -> str:
    """The page as text to be written to a `.html` file."""
    scatters = [scatter_of(comparison) for comparison in comparisons]
    body = [
        _comparison(comparison, scatter, index)
        for index, (comparison, scatter) in enumerate(zip(comparisons, scatters, strict=True))
    ]
    if sweeps:
        body.append(parts.sweep_section(sweeps))
    body.append(_origin(records, skipped, num_older))
    return fill_page(
        title=title,
        contents=_contents(comparisons, has_sweeps=bool(sweeps)),
        body="".join(body),
        styles=[read_part("lab.css", _PACKAGE)],
        data=[
            [] if scatter is None else _details(comparison, scatter)
            for comparison, scatter in zip(comparisons, scatters, strict=True)
        ],
        scripts=[read_part("lab.js", _PACKAGE)],
    )


def _comparison(comparison: Comparison, scatter: Scatter | None, index: int) -> str:
    rows = comparison.rows
    badge = ' <em class="emulated">emulated device</em>' if comparison.is_emulated else ""
    sizes = dict.fromkeys(format_count(row.parameters) for row in rows if row.parameters is not None)
    meta = " · ".join(
        [
            *(f"{size} parameters" for size in sizes),
            f"{len(rows)} {'configuration' if len(rows) == 1 else 'configurations'}",
        ]
    )
    pieces = [
        f'<section class="trace lab" id="lab-{index}" aria-labelledby="name-{index}">',
        f'<header><h2 id="name-{index}">{escape(comparison.title)}{badge}</h2><p>{escape(meta)}</p></header>',
        parts.headline(comparison),
    ]
    if scatter is None:
        pieces.append("<p>No finished row has both a peak and a speed, so that there is no chart of them.</p>")
    else:
        pieces.append(_scatter_figure(scatter, index))
    pieces.append(parts.table_html(result_table(comparison), comparison))
    pieces += [
        f'<p class="hint">{escape(words)}</p>'
        for words in (fastest_words(comparison), comparison.control_words)
        if words
    ]
    if (published := published_table(comparison)) is not None:
        pieces.append(parts.table_html(published, comparison))
        sources = dict.fromkeys(row.published.source for row in published.rows if row.published)
        pieces.append(f'<p class="hint">Published: {escape("; ".join(sources))}.</p>')
    if (moments := moments_table(comparison)) is not None:
        pieces.append(parts.table_html(moments, comparison))
    pieces += [parts.breakdown(comparison), _timelines(comparison, index), parts.phase_table(comparison)]
    pieces += [parts.unfinished(comparison), markup.notes(remarks(comparison))]
    return "".join([*pieces, "</section>"])


def _scatter_figure(scatter: Scatter, index: int) -> str:
    keys = ["<li><i class='key on-front'></i>on the front: no other is as small and as fast</li>"]
    if any(not mark.is_on_front for mark in scatter.marks):
        keys.append("<li><i class='key ours'></i>another is as small and as fast</li>")
    if scatter.published:
        keys.append("<li><i class='key published'></i>published</li>")
    notes = "".join(f'<p class="hint">{escape(note)}</p>' for note in scatter.notes)
    return (
        f'<figure class="scatter" data-scatter="{index}" aria-label="Memory against speed"><h3>Memory against speed</h3>'
        f'<ul class="legend">{"".join(keys)}</ul><div class="chart">{scatter_svg(scatter)}'
        f'<div class="readout" hidden></div></div><p class="hint">Low and far right is good.</p>{notes}</figure>'
    )


def _details(comparison: Comparison, scatter: Scatter) -> list[Plain]:
    """What the readout says of each mark, in the order of their numbers."""
    table = result_table(comparison)
    said: dict[int, list[Plain]] = {}
    for index, row in enumerate(table.rows):
        said[id(row)] = [
            [column.head, value.text]
            for column in table.columns
            if column.head != "outcome" and (value := column.values[index]) is not None
        ]
    ours: list[Plain] = [[mark.row.label, said[id(mark.row)]] for mark in scatter.marks]
    theirs: list[Plain] = [
        [f"{mark.row.label}, published", parts.published_facts(mark, scatter)] for mark in scatter.published
    ]
    return [*ours, *theirs]


def _timelines(comparison: Comparison, index: int) -> str:
    timelines = [timeline for row in comparison.rows if (timeline := timeline_of(row)) is not None]
    if not timelines:
        return ""
    unit = unit_for(comparison.rows)
    predicted = ""
    if any(timeline.predicted_bytes is not None for timeline in timelines):
        predicted = '<li><i class="key predicted"></i>predicted peak</li>'
    return (
        f'<div class="timelines"><h3>Memory through one step, {unit.name}</h3><div class="tools">'
        f'<ul class="legend"><li><i class="key held"></i>held on the device</li>{predicted}</ul>'
        f'<label><input type="checkbox" class="same" id="same-{index}"> the same scale for all</label></div>'
        f"{timeline_grid(timelines, unit)}</div>"
    )


def _origin(records: Sequence[RunRecord], skipped: Sequence[str], num_older: int) -> str:
    pairs: list[list[markup.Cell]] = [[name, value] for name, value in provenance(records, num_older)]
    pieces = ['<section class="trace lab" id="origin" aria-labelledby="name-origin">']
    pieces.append('<header><h2 id="name-origin">Where the figures come from</h2></header>')
    pieces.append(markup.table("Made with", ["what", "value"], pairs, kind="narrow origin"))
    if skipped:
        items = "".join(f"<li>{escape(line)}</li>" for line in skipped)
        pieces.append(f'<aside class="notes skipped"><h3>Skipped files</h3><ul>{items}</ul></aside>')
    return "".join([*pieces, "</section>"])


def _contents(comparisons: Sequence[Comparison], *, has_sweeps: bool) -> str:
    links = [(f"lab-{index}", comparison.title) for index, comparison in enumerate(comparisons)]
    links += [("budget-sweep", "Memory budget sweep")] if has_sweeps else []
    links.append(("origin", "Where the figures come from"))
    items = "".join(f'<li><a href="#{target}">{escape(name)}</a></li>' for target, name in links)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'
