"""The parts of the HTML page that need no script: headline figures, tables and notes, as escaped HTML.

They are complete by themselves, so that a reader without scripts, or with a screen reader, misses no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lowtide.planning.what_if_row import WhatIfRow
from lowtide.report.facts import differences, fit_of, saving
from lowtide.report.palette import STACK_ORDER
from lowtide.report.phase_runs import phase_runs, run_peak
from lowtide.tracing.alive import AliveGroup, group_alive, largest_alive
from lowtide.tracing.instant import instant_of
from lowtide.tracing.step_trace import Allocation, StepTrace
from lowtide.units import format_bytes, format_count

_NUM_GROUPS = 24
_NUM_LARGEST = 12
_MAX_RUNS = 40
"""Rows of the timeline's table: phases that alternate many times say nothing more one by one."""


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe as it is; plain strings are escaped wherever they are placed."""

    html: str


Cell = str | Markup


def figures(trace: StepTrace) -> str:
    """The handful of numbers at the top of a section."""
    moment = instant_of(trace, trace.peak_event)
    where = f"The peak is {moment.place}."
    if moment.phase is not None:
        source = f' <span class="quiet">{escape(moment.source)}</span>' if moment.source else ""
        where = f"The peak is in <b>{moment.phase.value}</b>, at <code>{escape(moment.place)}</code>{source}"
    items: list[tuple[str, Cell, Cell]] = [
        ("Peak allocated", _bytes(trace.peak_bytes), f"{trace.peak_bytes:,} bytes"),
        ("Peak reserved", _bytes(trace.peak_reserved_bytes), "what the allocator holds on to"),
    ]
    if trace.target.context_bytes:
        items.append(("Context", _bytes(trace.target.context_bytes), "beside it, outside the allocator"))
    fit = fit_of(trace)
    if fit is not None:
        detail = Markup(f'<b class="{"fits" if fit.fits else "too-large"}">{escape(fit.verdict)}</b>')
        items.append((trace.target.card, _bytes(fit.capacity_bytes), detail))
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{_text(value)}<small>{_text(detail)}</small></dd></div>"
        for name, value, detail in items
    )
    return f'<dl class="figures">{cards}</dl><p class="where">{where}</p>'


def category_table(trace: StepTrace) -> str:
    """Bytes by category at the peak, with bar and share."""
    at_peak, whole = trace.at_peak, max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = [
        [
            Markup(f'<i class="swatch {category.value}"></i>{category.value}'),
            _bytes(at_peak[category]),
            f"{at_peak[category] / whole:.1%}",
            _bar(category.value, at_peak[category] / whole),
        ]
        for category in STACK_ORDER
    ]
    rows.append([Markup("<b>sum</b>"), _bytes(sum(at_peak.values())), "", ""])
    return _table("At the peak, by category", ["category", "#bytes", "#share", "%"], rows)


def phase_table(trace: StepTrace) -> str:
    """The highest allocated bytes in each phase."""
    whole = max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = []
    for phase, size in trace.phase_peaks().items():
        at_peak = trace.peak_event >= 0 and phase is trace.peak_phase
        name = Markup(f"<b>{phase.value}</b> <em>peak</em>") if at_peak else Markup(phase.value)
        kind = "peak" if at_peak else "plain"
        rows.append([name, _bytes(size), f"{size / whole:.1%}", _bar(kind, size / whole)])
    return _table("Highest in each phase", ["phase", "#bytes", "#of the peak", "%"], rows)


def comparison_table(predicted: StepTrace, observed: StepTrace) -> str:
    """Predicted against observed."""
    rows: list[list[Cell]] = [
        [
            row.what,
            _bytes(row.predicted_bytes),
            _bytes(row.observed_bytes),
            "" if row.error is None else f"{row.error:+.2%}",
        ]
        for row in differences(predicted, observed)
    ]
    return _table("Predicted against observed", ["", "#predicted", "#observed", "#error"], rows, kind="narrow")


def what_if_table(techniques: Sequence[WhatIfRow]) -> str:
    """What each technique would do to the peak, and why."""
    rows: list[list[Cell]] = []
    for row in techniques:
        kind = "saves" if row.saved_bytes > 0 else "costs" if row.saved_bytes < 0 else "quiet"
        saved = saving(row)
        cells = [_bytes(row.before_bytes), _bytes(row.after_bytes), Markup(f'<b class="{kind}">{escape(saved)}</b>')]
        rows.append([Markup(f"<b>{escape(row.technique)}</b>"), *cells, row.reason])
    return _table(
        "What would lower the peak", ["technique", "#before", "#after", "#saves", "because"], rows, kind="reasons"
    )


def alive_table(trace: StepTrace) -> str:
    """All that is alive at the peak, equal tensors of equal layers together."""
    groups = group_alive(trace, trace.peak_event)
    whole = max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = [
        [_bytes(group.bytes), f"{group.bytes / whole:.1%}", f"{group.count:,}", *_tensor(group)]
        for group in groups[:_NUM_GROUPS]
    ]
    rest = groups[_NUM_GROUPS:]
    if rest:
        size, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        rows.append([_bytes(size), f"{size / whole:.1%}", f"{count:,}", "", f"{len(rest)} smaller kinds", "", ""])
    return _table(
        "Alive at the peak, equal layers together", ["#bytes", "#share", "#count", *_TENSOR_HEADS], rows, kind="wide"
    )


def largest_table(trace: StepTrace) -> str:
    """The largest single tensors at the peak."""
    rows = [[_bytes(item.bytes), *_tensor(item)] for item in largest_alive(trace, trace.peak_event, _NUM_LARGEST)]
    return _table("Largest single tensors at the peak", ["#bytes", *_TENSOR_HEADS], rows, kind="wide")


def timeline_table(trace: StepTrace) -> str:
    """The timeline as a table: each phase's start, summit and end, by category."""
    rows: list[list[Cell]] = []
    for run in phase_runs(trace)[:_MAX_RUNS]:
        for moment, position in (("start", run.first), ("highest", run_peak(trace, run)), ("end", run.last)):
            sizes = [format_bytes(int(trace.stacked[category][position])) for category in STACK_ORDER]
            total = format_bytes(int(trace.curve[position]))
            rows.append([run.phase.value, moment, f"{position:,}", total, *sizes])
    heads = ["phase", "moment", "#event", "#allocated", *(f"#{category.value}" for category in STACK_ORDER)]
    return _table("The timeline as a table", heads, rows, kind="wide")


def settings_table(trace: StepTrace) -> str:
    """What the step ran under."""
    pairs: list[tuple[str, object]] = [
        ("model", trace.model),
        ("parameters", f"{format_count(trace.num_parameters)} ({trace.num_parameters:,})"),
        ("origin", trace.origin),
        ("card", trace.target.card),
        ("torch", trace.target.torch_version),
        ("ops, events", f"{len(trace.ops):,}, {len(trace.events):,}"),
        *_flat(trace.settings),
    ]
    return _table("Settings", ["setting", "value"], [[name, str(value)] for name, value in pairs])


def notes(lines: Sequence[str]) -> str:
    """What the reader must know about how the trace was made."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="notes"><h3>Notes</h3><ul>{items}</ul></aside>' if lines else ""


def prose(text: str) -> str:
    """Plain text as paragraphs; blank lines separate them."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)


_TENSOR_HEADS = ("category", "tensor", "made by", "line")


def _tensor(item: AliveGroup | Allocation) -> list[Cell]:
    category = item.category.value
    module = escape(item.module or "(outside the model)")
    return [
        Markup(f'<i class="swatch {category}"></i>{category}'),
        Markup(f"<code>{escape(str(list(item.shape)))}</code> {escape(item.dtype)}"),
        Markup(f"<code>{module}</code> <code class=quiet>{escape(item.op)}</code>"),
        Markup(f"<code class=quiet>{escape(item.source)}</code>"),
    ]


def _table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[Cell]], *, kind: str = "") -> str:
    # In a head, "#" marks a column of numbers and "%" one of bars, which screen readers skip: the share says it
    # already.
    heads = list(heads)
    classes = [{"#": "number", "%": "bars"}.get(head[:1], "") for head in heads]
    hidden = ' aria-hidden="true"'
    top = "".join(
        f'<th scope="col" class="{name}"{hidden if name == "bars" else ""}>{escape(head.lstrip("#%"))}</th>'
        for head, name in zip(heads, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{name}"{hidden if name == "bars" else ""}>{_text(cell)}</td>'
            for cell, name in zip(row, classes, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    # The wrapper scrolls sideways on a phone; it takes the focus so that the keyboard can scroll it too.
    return (
        f'<div class="table {kind}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _text(cell: Cell) -> str:
    return cell.html if isinstance(cell, Markup) else escape(cell)


def _bytes(size: int) -> Markup:
    return Markup(f'<span title="{size:,} bytes" data-bytes="{size}">{format_bytes(size)}</span>')


def _bar(kind: str, share: float) -> Markup:
    return Markup(f'<i class="bar {kind}" style="width:{share:.2%}"></i>' if share else "")


def _flat(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
