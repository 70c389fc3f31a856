"""One self-contained HTML page for traces and sessions: no network, no library, works offline and on a phone.

Its sections come from here, the sheet that they are put on from `page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lowtide.errors import ConfigError
from lowtide.planning.what_if import WhatIfRow
from lowtide.report import markup
from lowtide.report import page_parts as parts
from lowtide.report.facts import circumstances
from lowtide.report.page import fill_page, read_part
from lowtide.report.sampling import MAX_POINTS
from lowtide.report.session_section import SessionSection, section_data, section_html
from lowtide.report.timeline_data import timeline_data
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import format_count

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


def render_html(
    traces: Sequence[StepTrace],
    *,
    title: str,
    explanation: str = "",
    what_if: Sequence[WhatIfRow] = (),
    max_points: int = MAX_POINTS,
) -> str:
    """The page for some traces, as text to be written to a `.html` file.

    An observed trace that follows a predicted one of the same model is laid over it; every other trace gets a section
    of its own. The explanation and the what-if table belong to the first section; use `render_page` to give each its
    own.

    Args:
        traces: In the order of the page.
        title: Heading of the page and of the browser's tab.
        explanation: Plain text; blank lines separate paragraphs.
        what_if: Techniques tried, in the order of the table.
        max_points: Bound on the points of each curve; the peaks are among them.

    Raises:
        ConfigError: There is no trace to show.
    """
    sections = _paired(traces)
    if sections:
        first = sections[0]
        sections[0] = Section(
            trace=first.trace, observed=first.observed, explanation=explanation, what_if=tuple(what_if)
        )
    return render_page(sections, title=title, max_points=max_points)


def render_page(sections: Sequence[Section | SessionSection], *, title: str, max_points: int = MAX_POINTS) -> str:
    """The page for sections put together by hand: steps and sessions, in the order given.

    Raises:
        ConfigError: There is no section to show.
    """
    if not sections:
        raise ConfigError("a report needs at least one trace, got none; pass what lowtide.trace or observe returned")
    data = [
        section_data(section)
        if isinstance(section, SessionSection)
        else timeline_data(section.trace, observed=section.observed, max_points=max_points)
        for section in sections
    ]
    body = "".join(
        section_html(section, index) if isinstance(section, SessionSection) else _section(section, index)
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


def _paired(traces: Sequence[StepTrace]) -> list[Section]:
    sections: list[Section] = []
    for trace in traces:
        last = sections[-1] if sections else None
        if (
            last is not None
            and last.observed is None
            and (last.trace.origin, trace.origin) == ("predicted", "observed")
            and last.trace.model == trace.model
        ):
            sections[-1] = Section(trace=last.trace, observed=trace)
        else:
            sections.append(Section(trace=trace))
    return sections


def _section(section: Section, index: int) -> str:
    trace, observed = section.trace, section.observed
    facts = dict(circumstances(trace))
    size = f"{format_count(trace.num_parameters)} parameters"
    meta = " · ".join([size, *(facts[name] for name in ("weights", "batch", "optimizer") if name in facts)])
    made = " · ".join([trace.origin, facts["hardware"], facts["versions"]])
    pieces = [
        f'<section class="trace" id="trace-{index}" aria-labelledby="name-{index}">',
        f'<header><h2 id="name-{index}">{escape(trace.model)}</h2><p>{escape(meta)}</p><p>{escape(made)}</p></header>',
        parts.figures(trace),
        f'<figure class="timeline" data-timeline="{index}" aria-label="Memory over the step, by category">',
        "<noscript><p>The timeline is drawn by a script; the tables below hold its numbers.</p></noscript></figure>",
    ]
    if section.explanation:
        pieces.append(f'<div class="prose"><h3>Why the peak is there</h3>{parts.prose(section.explanation)}</div>')
    if section.what_if:
        pieces.append(parts.what_if_table(section.what_if))
    pieces.append(f'<div class="pair">{parts.category_table(trace)}{parts.phase_table(trace)}</div>')
    if observed is not None:
        pieces.append(parts.comparison_table(trace, observed))
    pieces += [parts.alive_table(trace), parts.largest_table(trace)]
    pieces.append(f"<details><summary>The timeline as a table</summary>{parts.timeline_table(trace)}</details>")
    pieces.append(f"<details><summary>Settings</summary>{parts.settings_table(trace)}</details>")
    pieces.append(markup.notes((*trace.notes, *(observed.notes if observed else ()))))
    return "".join([*pieces, "</section>"])


def _contents(sections: Sequence[Section | SessionSection]) -> str:
    if len(sections) == 1:
        return ""
    names = (
        (section.name, "session")
        if isinstance(section, SessionSection)
        else (section.trace.model, section.trace.origin)
        for section in sections
    )
    links = "".join(
        f'<li><a href="#trace-{index}">{escape(name)}</a> {escape(kind)}</li>'
        for index, (name, kind) in enumerate(names)
    )
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
