"""The parts of the HTML page that need no script: headline figures, tables and notes, as escaped HTML.

They are complete by themselves, so that a reader without scripts, or with a screen reader, misses no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lowtide.planning.what_if import WhatIfRow
from lowtide.report import markup
from lowtide.report.facts import circumstances, differences, fit_of, saving
from lowtide.report.markup import Cell, Markup
from lowtide.report.palette import STACK_ORDER
from lowtide.report.phase_runs import phase_runs, run_peak
from lowtide.tracing.attention.use import attention_use, fallbacks
from lowtide.tracing.explanation.instant import AliveGroup, group_alive, instant_of, largest_alive
from lowtide.tracing.step_trace import Allocation, StepTrace
from lowtide.units import format_bytes, format_count

_NUM_GROUPS = 24
_NUM_LARGEST = 12
_MAX_RUNS = 40
"""Rows of the timeline's table: phases that alternate many times say nothing more one by one."""


def figures(trace: StepTrace) -> str:
    """The handful of numbers at the top of a section."""
    moment = instant_of(trace, trace.peak_event)
    where = f"The peak is {moment.place}."
    if moment.phase is not None:
        source = f' <span class="quiet">{escape(moment.source)}</span>' if moment.source else ""
        where = f"The peak is in <b>{moment.phase.value}</b>, at <code>{escape(moment.place)}</code>{source}"
    items: list[tuple[str, Cell, Cell]] = [
        ("Peak allocated", markup.size(trace.peak_bytes), f"{trace.peak_bytes:,} bytes"),
        ("Peak reserved", markup.size(trace.peak_reserved_bytes), "what the allocator holds on to"),
    ]
    if trace.target.context_bytes:
        items.append(("Context", markup.size(trace.target.context_bytes), "beside it, outside the allocator"))
    fit = fit_of(trace)
    if fit is not None:
        detail = Markup(f'<b class="{"fits" if fit.fits else "too-large"}">{escape(fit.verdict)}</b>')
        items.append((trace.target.card, markup.size(fit.capacity_bytes), detail))
    return f'{markup.figures(items)}<p class="where">{where}</p>{_attention(trace)}'


def _attention(trace: StepTrace) -> str:
    """The backends that attention ran on, and calls that fell back to math."""
    uses = ", ".join(escape(use.text) for use in attention_use(trace))
    if not uses:
        return ""
    told = "".join(f' <b class="too-large">{escape(note)}.</b>' for note in fallbacks(trace))
    return f'<p class="where">Attention: {uses}.{told}</p>'


def category_table(trace: StepTrace) -> str:
    """Bytes by category at the peak, with bar and share."""
    at_peak, whole = trace.at_peak, max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = [
        [
            Markup(f'<i class="swatch {category.value}"></i>{category.value}'),
            markup.size(at_peak[category]),
            f"{at_peak[category] / whole:.1%}",
            markup.bar(category.value, at_peak[category] / whole),
        ]
        for category in STACK_ORDER
    ]
    rows.append([Markup("<b>sum</b>"), markup.size(sum(at_peak.values())), "", ""])
    return markup.table("At the peak, by category", ["category", "#bytes", "#share", "%"], rows)


def phase_table(trace: StepTrace) -> str:
    """The highest allocated bytes in each phase."""
    whole = max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = []
    for phase, size in trace.phase_peaks().items():
        at_peak = trace.peak_event >= 0 and phase is trace.peak_phase
        name = Markup(f"<b>{phase.value}</b> <em>peak</em>") if at_peak else Markup(phase.value)
        kind = "peak" if at_peak else "plain"
        rows.append([name, markup.size(size), f"{size / whole:.1%}", markup.bar(kind, size / whole)])
    return markup.table("Highest in each phase", ["phase", "#bytes", "#of the peak", "%"], rows)


def comparison_table(predicted: StepTrace, observed: StepTrace) -> str:
    """Predicted against observed."""
    rows: list[list[Cell]] = [
        [
            row.what,
            markup.size(row.predicted_bytes),
            markup.size(row.observed_bytes),
            "" if row.error is None else f"{row.error:+.2%}",
        ]
        for row in differences(predicted, observed)
    ]
    return markup.table("Predicted against observed", ["", "#predicted", "#observed", "#error"], rows, kind="narrow")


def what_if_table(techniques: Sequence[WhatIfRow]) -> str:
    """What each technique would do to the peak, and why."""
    rows: list[list[Cell]] = []
    for row in techniques:
        kind = "saves" if row.saved_bytes > 0 else "costs" if row.saved_bytes < 0 else "quiet"
        saved = saving(row)
        cells = [
            markup.size(row.before_bytes),
            markup.size(row.after_bytes),
            Markup(f'<b class="{kind}">{escape(saved)}</b>'),
        ]
        rows.append([Markup(f"<b>{escape(row.technique)}</b>"), *cells, row.reason])
    return markup.table(
        "What would lower the peak", ["technique", "#before", "#after", "#saves", "because"], rows, kind="reasons"
    )


def alive_table(trace: StepTrace) -> str:
    """All that is alive at the peak, equal tensors of equal layers together."""
    groups = group_alive(trace, trace.peak_event)
    whole = max(trace.peak_bytes, 1)
    rows: list[list[Cell]] = [
        [markup.size(group.bytes), f"{group.bytes / whole:.1%}", f"{group.count:,}", *_tensor(group)]
        for group in groups[:_NUM_GROUPS]
    ]
    rest = groups[_NUM_GROUPS:]
    if rest:
        size, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        rows.append([markup.size(size), f"{size / whole:.1%}", f"{count:,}", "", f"{len(rest)} smaller kinds", "", ""])
    return markup.table(
        "Alive at the peak, equal layers together", ["#bytes", "#share", "#count", *_TENSOR_HEADS], rows, kind="wide"
    )


def largest_table(trace: StepTrace) -> str:
    """The largest single tensors at the peak."""
    rows = [[markup.size(item.bytes), *_tensor(item)] for item in largest_alive(trace, trace.peak_event, _NUM_LARGEST)]
    return markup.table("Largest single tensors at the peak", ["#bytes", *_TENSOR_HEADS], rows, kind="wide")


def timeline_table(trace: StepTrace) -> str:
    """The timeline as a table: each phase's start, summit and end, by category."""
    rows: list[list[Cell]] = []
    for run in phase_runs(trace)[:_MAX_RUNS]:
        for moment, position in (("start", run.first), ("highest", run_peak(trace, run)), ("end", run.last)):
            sizes = [format_bytes(int(trace.stacked[category][position])) for category in STACK_ORDER]
            total = format_bytes(int(trace.curve[position]))
            rows.append([run.phase.value, moment, f"{position:,}", total, *sizes])
    heads = ["phase", "moment", "#event", "#allocated", *(f"#{category.value}" for category in STACK_ORDER)]
    return markup.table("The timeline as a table", heads, rows, kind="wide")


def settings_table(trace: StepTrace) -> str:
    """What the step ran under."""
    pairs: list[tuple[str, object]] = [
        ("model", trace.model),
        ("parameters", f"{format_count(trace.num_parameters)} ({trace.num_parameters:,})"),
        ("origin", trace.origin),
        *circumstances(trace),
        ("ops, events", f"{len(trace.ops):,}, {len(trace.events):,}"),
        *_flat(trace.settings),
    ]
    return markup.table("Settings", ["setting", "value"], [[name, str(value)] for name, value in pairs])


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


def _flat(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
