"""One self-contained HTML page for traces and sessions: no network, no library, works offline and on a phone.

Its sections come from here, the frame that they are put in from `page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lowtide.errors import ConfigError
from lowtide.planning.timeline import Lane, Timeline
from lowtide.planning.what_if import WhatIfRow
from lowtide.report import page, session_tables, trace_tables
from lowtide.report.gantt import gantt_data
from lowtide.report.page import fill_page, read_part
from lowtide.report.session_tables import cache_line, overlap_line, per_step
from lowtide.report.table import Tone, Value, size, to_html
from lowtide.report.timeline import timeline_data
from lowtide.report.trace_tables import ASSUMED_CONTEXT, circumstances, fit_of
from lowtide.runtime.statistics.session_stats import SessionStats
from lowtide.tracing.attention.use import attention_use, fallbacks
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import format_bytes, format_count, format_seconds

_TRACE_SCRIPTS = ("timeline.js", "timeline_input.js")
_SESSION_SCRIPTS = ("gantt.js", "gantt_rows.js", "gantt_input.js")


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


def render_page(sections: Sequence[Section | SessionSection], *, title: str) -> str:
    """The page for steps and sessions, in the order given, as text to be written to a `.html` file.

    Raises:
        ConfigError: There is no section to show.
    """
    if not sections:
        raise ConfigError("a report needs at least one trace, got none; pass what lowtide.trace or observe returned")
    data = [
        gantt_data(section.timeline, chunks=[chunk.name for chunk in section.stats.chunks])
        if isinstance(section, SessionSection)
        else timeline_data(section.trace, observed=section.observed)
        for section in sections
    ]
    body = "".join(
        _session_section(section, index) if isinstance(section, SessionSection) else _trace_section(section, index)
        for index, section in enumerate(sections)
    )
    has_sessions = any(isinstance(section, SessionSection) for section in sections)
    has_traces = any(isinstance(section, Section) for section in sections)
    # A page carries only the scripts that it uses: the base set is most of a small report.
    scripts = ("units.js", *(_TRACE_SCRIPTS * has_traces), *(_SESSION_SCRIPTS * has_sessions), "page.js")
    return fill_page(
        title=title,
        contents=_contents(sections),
        body=body,
        styles=[read_part("gantt.css")] if has_sessions else [],
        data=data,
        scripts=map(read_part, scripts),
    )


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


def _trace_section(section: Section, index: int) -> str:
    trace, observed = section.trace, section.observed
    facts = dict(circumstances(trace))
    size = f"{format_count(trace.num_parameters)} parameters"
    pieces = [
        _trace_figures(trace),
        f'<figure class="timeline" data-timeline="{index}" aria-label="Memory over the step, by category">',
        "<noscript><p>The timeline is drawn by a script; the tables below hold its numbers.</p></noscript></figure>",
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
    return page.section("trace", f"trace-{index}", trace.model, pieces, lines=lines)


def _contents(sections: Sequence[Section | SessionSection]) -> str:
    if len(sections) == 1:
        return ""
    names = (
        (section.name, "session")
        if isinstance(section, SessionSection)
        else (section.trace.model, section.trace.origin)
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


def _session_section(section: SessionSection, index: int) -> str:
    stats, timeline = section.stats, section.timeline
    pieces = [_session_figures(stats)]
    # An emulated copy runs as late as it may, to show a missing wait: when it began says nothing.
    if not section.is_emulated and (overlap := overlap_line(timeline)):
        pieces.append(f'<p class="where">{escape(overlap)}</p>')
    if timeline.spans or timeline.residency:
        pieces.append(
            f'<figure class="timeline gantt" data-gantt="{index}" aria-label="Chunks on the device and work by lane">'
            "<noscript><p>The chart is drawn by a script; the tables below hold its sums.</p></noscript></figure>"
        )
    times, tiers = to_html(session_tables.time_table(stats)), to_html(session_tables.tier_table(stats))
    pieces.append(f'<div class="pair">{times}{tiers}</div>')
    pieces += [to_html(session_tables.moved_table(stats)), to_html(session_tables.chunk_table(stats))]
    pieces.append(f'<p class="quiet">{escape(cache_line(stats.cache))}</p>')
    if len(stats.chunks) > 1:
        pieces.append(page.folded("Every chunk", to_html(session_tables.every_chunk_table(stats))))
    pieces.append(page.notes(section.notes))
    steps = f"{stats.num_steps:,} {'step' if stats.num_steps == 1 else 'steps'}"
    return page.section(
        "trace session", f"trace-{index}", section.name, pieces, lines=[steps], is_emulated=section.is_emulated
    )


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
