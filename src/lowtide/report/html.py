"""One self-contained HTML page for traces and sessions: no network, no library, works offline and on a phone.

Its sections come from here, the frame that they are put in from `page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lowtide.errors import ConfigError
from lowtide.planning.budget_curve import BudgetPoint
from lowtide.planning.comparison import compare
from lowtide.planning.simulator import SimulatedStep
from lowtide.planning.timeline import Lane, Timeline
from lowtide.planning.what_if import WhatIfRow
from lowtide.report import page, plan_tables, session_tables, trace_tables
from lowtide.report.charts import curve_data, gantt_data
from lowtide.report.page import fill_page, read_asset
from lowtide.report.session_tables import cache_line, overlap_line, per_step
from lowtide.report.table import Table, Tone, Value, size, to_html
from lowtide.report.timeline import timeline_data
from lowtide.report.trace_tables import ASSUMED_CONTEXT, circumstances, fit_of
from lowtide.runtime.plan_problem import PlannedStep
from lowtide.runtime.statistics.session_stats import SessionStats
from lowtide.tracing.attention.use import attention_use, fallbacks
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import format_bytes, format_count, format_seconds

_TRACE_SCRIPTS = ("timeline.js", "timeline_input.js")
_GANTT_SCRIPTS = ("gantt.js", "gantt_rows.js", "gantt_input.js")
_CURVE_SCRIPTS = ("charts.js", "curve.js")
_BEGINNING = (
    "The step begins with its first computation. What lies before it are updates and copies that its forward waits for, and "
    "that run beside the end of the step before."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One step on the page."""

    trace: StepTrace
    """Drawn as the stack."""
    observed: StepTrace | None = None
    """A second trace of the same step, drawn as a line over it."""
    explanation: str = ""
    """Plain text; blank lines separate paragraphs."""
    what_if: tuple[WhatIfRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSection:
    """One session on the page."""

    stats: SessionStats
    timeline: Timeline
    """All steps or the last ones; an empty one leaves the chart out."""
    name: str = "Session"
    notes: tuple[str, ...] = ()

    @property
    def is_emulated(self) -> bool:
        """Whether the device was a tier of host memory, so that times say nothing about a GPU."""
        return self.stats.is_emulated or self.timeline.is_emulated


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """A plan on the page, and the memory of its step."""

    found: PlannedStep
    name: str = "Plan"
    points: tuple[BudgetPoint, ...] = ()
    """`found.by_budget()`; without it there is no curve."""
    code: str = ""
    """What does this in a script."""
    tables: tuple[Table, ...] = ()
    """What else there is to say."""

    @property
    def trace(self) -> StepTrace:
        """The memory of its step."""
        return self.found.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSection:
    """A simulated step beside the steps that a session recorded."""

    simulated: SimulatedStep
    observed: Timeline
    name: str = "Simulated against observed"

    @property
    def is_emulated(self) -> bool:
        """Whether the device was a tier of host memory."""
        return self.observed.is_emulated


AnySection = Section | SessionSection | PlanSection | ComparisonSection


def render_page(sections: Sequence[AnySection], *, title: str) -> str:
    """The page for steps, plans and sessions, in the order given, as text to be written to a `.html` file.

    Raises:
        ConfigError: There is no section to show.
    """
    if not sections:
        raise ConfigError("a report needs at least one trace, got none; pass what lowtide.trace or observe returned")
    charts = _Charts()
    body = "".join(_section(section, f"trace-{index}", charts) for index, section in enumerate(sections))
    # A page carries only the scripts that it uses: the base set is most of a small report.
    scripts = (
        "units.js",
        *(_TRACE_SCRIPTS * ("timeline" in charts.kinds)),
        *(_GANTT_SCRIPTS * ("gantt" in charts.kinds)),
        *(_CURVE_SCRIPTS * ("curve" in charts.kinds)),
        "page.js",
    )
    styles = [f"{kind}.css" for kind in ("gantt", "curve") if kind in charts.kinds]
    has_lanes = any(not isinstance(section, Section) for section in sections)
    return fill_page(
        title=title,
        contents=_contents(sections),
        body=body,
        styles=map(read_asset, dict.fromkeys(["gantt.css"] * has_lanes + styles)),
        data=charts.data,
        scripts=map(read_asset, scripts),
    )


class _Charts:
    """Gathers the data of the charts, in the order in which they stand on the page."""

    def __init__(self) -> None:
        self.data: list[object] = []
        self.kinds: set[str] = set()

    def figure(self, kind: str, data: object, label: str, *, classes: str = "timeline") -> str:
        """The place of a chart that the page's script draws."""
        self.kinds.add(kind)
        self.data.append(data)
        return (
            f'<figure class="{classes}" data-{kind}="{len(self.data) - 1}" aria-label="{escape(label)}">'
            "<noscript><p>The chart is drawn by a script; the tables below hold its numbers.</p></noscript></figure>"
        )


def _section(section: AnySection, key: str, charts: _Charts) -> str:
    match section:
        case Section():
            return _trace_section(section, key, charts)
        case SessionSection():
            return _session_section(section, key, charts)
        case PlanSection():
            return _plan_section(section, key, charts)
        case ComparisonSection():
            return _comparison_section(section, key, charts)


def render_session_page(stats: SessionStats, timeline: Timeline, *, title: str, notes: Sequence[str] = ()) -> str:
    """The page as text to be written to a `.html` file.

    To show a session beside the traces of its step, give `render_page` a `SessionSection` among its sections.

    Args:
        stats: What `session.stats()` gave.
        timeline: What the session recorded, of all its steps or of the last ones.
        title: Heading of the page and of the browser's tab.
        notes: What the reader must know, a sentence each.
    """
    return render_page([SessionSection(stats=stats, timeline=timeline, notes=tuple(notes))], title=title)


def _trace_section(section: Section, key: str, charts: _Charts) -> str:
    trace, observed = section.trace, section.observed
    facts = dict(circumstances(trace))
    size = f"{format_count(trace.num_parameters)} parameters"
    pieces = [
        _trace_figures(trace),
        charts.figure("timeline", timeline_data(trace, observed=observed), "Memory over the step, by category"),
    ]
    if section.explanation:
        pieces.append(f'<div class="prose"><h3>Why the peak is there</h3>{page.prose(section.explanation)}</div>')
    if section.what_if:
        pieces.append(to_html(trace_tables.what_if_table(section.what_if)))
    by_category, by_phase = to_html(trace_tables.category_table(trace)), to_html(trace_tables.phase_table(trace))
    pieces.append(f'<div class="pair">{by_category}{by_phase}</div>')
    if observed is not None:
        pieces.append(to_html(trace_tables.comparison_table(trace, observed)))
    pieces += [
        to_html(trace_tables.alive_table(trace)),
        to_html(trace_tables.largest_table(trace)),
        page.folded("The timeline as a table", to_html(trace_tables.timeline_table(trace))),
        page.folded("Settings", to_html(trace_tables.settings_table(trace))),
        page.notes((*trace.notes, *(observed.notes if observed else ()))),
    ]
    lines = [
        " · ".join([size, *(facts[name] for name in ("weights", "batch", "optimizer") if name in facts)]),
        " · ".join([trace.origin, facts["hardware"], facts["versions"]]),
    ]
    return page.section("trace", key, trace.model, pieces, lines=lines)


def _contents(sections: Sequence[AnySection]) -> str:
    if len(sections) == 1:
        return ""
    names = (
        (section.trace.model, section.trace.origin)
        if isinstance(section, Section)
        else (section.name, "session" if isinstance(section, SessionSection) else "")
        for section in sections
    )
    return page.contents((f"trace-{index}", name, kind) for index, (name, kind) in enumerate(names))


def _trace_figures(trace: StepTrace) -> str:
    """The handful of numbers at the top of a section."""
    instant = instant_of(trace, trace.peak_event)
    where = f"The peak is {instant.place}."
    if instant.phase is not None:
        source = f' <span class="quiet">{escape(instant.source)}</span>' if instant.source else ""
        where = f"The peak is in <b>{instant.phase.value}</b>, at <code>{escape(instant.place)}</code>{source}"
    items: list[tuple[str, Value, Value]] = [
        ("Peak allocated", size(trace.peak_bytes), Value(f"{trace.peak_bytes:,} bytes")),
        ("Peak reserved", size(trace.peak_reserved_bytes), Value("what the allocator holds on to")),
    ]
    if trace.host_bytes is not None:
        items.append(("Host", size(trace.host_bytes), Value(f"{format_bytes(trace.pinned_bytes or 0)} of it locked")))
    if trace.simulated_s is not None:
        items.append(("Time a step", Value(format_seconds(trace.simulated_s["step"])), Value("simulated")))
    if trace.target.context_bytes:
        detail = ASSUMED_CONTEXT if trace.target.is_context_assumed else "beside it, outside the allocator"
        items.append(("Context", size(trace.target.context_bytes), Value(detail)))
    fit = fit_of(trace)
    if fit is not None:
        verdict = Value(fit.verdict, tone=Tone.GOOD if fit.fits else Tone.BAD)
        items.append((trace.target.card, size(fit.capacity_bytes), verdict))
    return f'{page.figures(items)}<p class="where">{where}</p>{_attention(trace)}'


def _attention(trace: StepTrace) -> str:
    """The backends that attention ran on, and calls that fell back to math."""
    uses = ", ".join(escape(use.text) for use in attention_use(trace))
    if not uses:
        return ""
    told = "".join(f' <b class="bad">{escape(note)}.</b>' for note in fallbacks(trace))
    return f'<p class="where">Attention: {uses}.{told}</p>'


def _session_section(section: SessionSection, key: str, charts: _Charts) -> str:
    stats, timeline = section.stats, section.timeline
    pieces = [_session_figures(stats)]
    # An emulated copy runs as late as it may, to show a missing wait: when it began says nothing.
    if not section.is_emulated and (overlap := overlap_line(timeline)):
        pieces.append(f'<p class="where">{escape(overlap)}</p>')
    if timeline.spans or timeline.residency:
        data = gantt_data(timeline, chunks=[chunk.name for chunk in stats.chunks])
        pieces.append(_lanes(charts, data, "Chunks on the device and work by lane"))
    times, tiers = to_html(session_tables.time_table(stats)), to_html(session_tables.tier_table(stats))
    pieces.append(f'<div class="pair">{times}{tiers}</div>')
    pieces += [to_html(session_tables.moved_table(stats)), to_html(session_tables.chunk_table(stats))]
    pieces.append(f'<p class="quiet">{escape(cache_line(stats.cache))}</p>')
    if len(stats.chunks) > 1:
        pieces.append(page.folded("Every chunk", to_html(session_tables.every_chunk_table(stats))))
    pieces.append(page.notes(section.notes))
    steps = f"{stats.num_steps:,} {'step' if stats.num_steps == 1 else 'steps'}"
    return page.section("trace session", key, section.name, pieces, lines=[steps], is_emulated=section.is_emulated)


def _lanes(charts: _Charts, data: object, label: str) -> str:
    return charts.figure("gantt", data, label, classes="timeline gantt")


def _plan_section(section: PlanSection, key: str, charts: _Charts) -> str:
    found = section.found
    trace, simulated = found.trace, found.simulated
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.words)
    pieces = [
        _plan_figures(found),
        f'<div class="prose"><h3>The plan</h3><ul>{said}</ul></div>',
        f'<pre class="code"><code>{escape(section.code)}</code></pre>' if section.code else "",
        to_html(plan_tables.placement_table(found)),
        "<h3>The simulated step</h3>",
        _lanes(charts, gantt_data(simulated.timeline), "The simulated step by lane"),
        f'<p class="hint">{_BEGINNING}</p>',
        to_html(plan_tables.lane_table(simulated)),
    ]
    if section.points:
        data = curve_data(section.points, chosen_bytes=trace.peak_reserved_bytes, tokens=found.num_tokens)
        pieces += [
            "<h3>Memory against speed</h3>",
            charts.figure("curve", data, "Time of a step against device memory", classes="timeline curve"),
            page.folded("The curve as a table", to_html(plan_tables.budget_table(section.points, found.num_tokens))),
        ]
    pieces += [to_html(table) for table in section.tables]
    pieces.append(page.notes(["Times are simulated by the hardware\u2019s rates, peaks by a replay of the allocator."]))
    about = f"{trace.model}, {format_count(trace.num_parameters)} parameters"
    line = " · ".join(
        [about, *(value for name, value in circumstances(trace) if name in ("batch", "optimizer", "hardware"))]
    )
    memory = _trace_section(Section(trace=trace), f"{key}-memory", charts)
    return page.section("trace session", key, section.name, pieces, lines=[line]) + memory


def _plan_figures(found: PlannedStep) -> str:
    trace, budgets = found.trace, found.plan.budgets
    speed = "" if found.tokens_per_s is None else f"{format_count(round(found.tokens_per_s))} tokens/s"
    items: list[tuple[str, Value, Value]] = [
        ("Time a step", Value(format_seconds(found.step_s)), Value(speed)),
        (
            "Bound by",
            Value(plan_tables.bound_words(found.simulated)),
            Value(f"{found.num_tried:,} plans were simulated"),
        ),
        (
            "Device peak",
            size(trace.peak_reserved_bytes),
            Value(f"reserved, of a budget of {format_bytes(budgets.device_bytes or 0)}"),
        ),
        (
            "Host",
            size(trace.host_bytes),
            Value(f"{format_bytes(trace.pinned_bytes or 0)} of it locked, of {format_bytes(budgets.host_bytes or 0)}"),
        ),
    ]
    return page.figures(items)


def _comparison_section(section: ComparisonSection, key: str, charts: _Charts) -> str:
    simulated, observed = section.simulated, section.observed
    pieces = [
        to_html(plan_tables.comparison_table(compare(simulated, observed))),
        "<h3>Simulated</h3>",
        _lanes(charts, gantt_data(simulated.timeline), "The simulated step by lane"),
        "<h3>Observed</h3>",
        _lanes(charts, gantt_data(observed), "The observed steps: chunks on the device and work by lane"),
    ]
    return page.section("trace session", key, section.name, pieces, is_emulated=section.is_emulated)


def _session_figures(stats: SessionStats) -> str:
    """The handful of numbers at the top of the section."""
    total_s, steps = stats.seconds.total_s, max(stats.num_steps, 1)
    share = stats.exposed_copy_s / total_s if total_s else 0.0
    items: list[tuple[str, Value, Value]] = [
        ("Time a step", Value(format_seconds(total_s / steps)), Value(f"{format_seconds(total_s)} in all")),
        (
            "Copies not hidden",
            Value(f"{share:.1%}"),
            Value(f"{format_seconds(stats.exposed_copy_s / steps)} a step of waiting"),
        ),
    ]
    for lane, name in ((Lane.TO_DEVICE, "To the device"), (Lane.TO_HOST, "To the host")):
        moved = stats.moved_bytes(lane.value)
        each = Value(per_step(moved, stats.num_steps))
        items.append((name, each, Value(f"a step, {format_bytes(moved)} in all")))
    for tier in stats.tiers[:1]:
        detail = Value("no budget was set")
        if tier.budget_bytes is not None:
            word, tone = ("within", Tone.GOOD) if tier.is_within_budget else ("over", Tone.BAD)
            detail = Value(f"{word} the budget of {format_bytes(tier.budget_bytes)}", tone=tone)
        items.append((f"{tier.tier.capitalize()} peak", size(tier.peak_bytes), detail))
    return page.figures(items)
