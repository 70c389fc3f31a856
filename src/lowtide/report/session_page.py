"""One self-contained HTML page for a session: chunk residency, lanes and statistics."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.report.html import render_page
from lowtide.report.session_section import SessionSection
from lowtide.runtime.session_stats import SessionStats
from lowtide.runtime.timeline import Timeline


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
