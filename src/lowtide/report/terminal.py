"""Traces and sessions in the terminal: rich renderables for the command line to print.

Every name from a model is wrapped in `Text`, never passed as markup: `layers[0]` is a module path here, not a style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from lowtide.planning.what_if import WhatIfRow
from lowtide.report import session_tables, trace_tables
from lowtide.report.palette import PEAK_COLOUR
from lowtide.report.plan_tables import LANE_NAMES
from lowtide.report.session_tables import cache_line
from lowtide.report.table import STYLES, Tone
from lowtide.report.trace_tables import ASSUMED_CONTEXT, circumstances, fit_of
from lowtide.runtime.statistics.session_stats import SessionStats
from lowtide.tracing.attention.use import attention_use, fallbacks, is_on_attention
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import Category, StepTrace, step_time
from lowtide.units import format_bytes, format_count, format_seconds

_GOOD, _BAD, _QUIET = STYLES[Tone.GOOD], STYLES[Tone.BAD], STYLES[Tone.QUIET]


def trace_report(
    trace: StepTrace, *, observed: StepTrace | None = None, num_largest: int = 10, num_groups: int = 10
) -> Group:
    """Everything the terminal shows about a trace, from the headline down to the notes."""
    parts: list[RenderableType] = [headline(trace)]
    if observed is not None:
        parts.append(trace_tables.comparison_table(trace, observed))
    parts += [
        trace_tables.category_table(trace),
        trace_tables.phase_table(trace),
        *([trace_tables.alive_table(trace, limit=num_groups)] if num_groups else []),
        *([trace_tables.largest_table(trace, limit=num_largest)] if num_largest else []),
    ]
    others = [note for note in trace.notes if not is_on_attention(note)]
    if others:
        parts.append(notes(others))
    return _spaced(parts)


def session_report(stats: SessionStats, *, num_chunks: int = 16) -> Group:
    """Everything the terminal shows about a session: time, copies, peaks, chunks and the cache.

    Args:
        stats: What `session.stats()` gave.
        num_chunks: Bound on the rows of the table of chunks; chunks that are treated alike share a row.
    """
    line = Text(f"{stats.num_steps:,} steps, {format_seconds(stats.seconds.total_s)}", style="bold")
    if stats.is_emulated:
        line.append("  emulated device", style="yellow")
    line.append(f"  {format_seconds(stats.exposed_copy_s)} of copy time not hidden", style=_QUIET)
    parts: list[RenderableType] = [
        line,
        session_tables.time_table(stats),
        session_tables.moved_table(stats),
        session_tables.tier_table(stats),
        session_tables.chunk_table(stats, limit=num_chunks),
        Text(cache_line(stats.cache), style=_QUIET),
    ]
    return _spaced(parts)


def what_if_report(rows: Sequence[WhatIfRow]) -> Group:
    """What each technique would do to the peak, and below it why: reasons are sentences and want the whole width."""
    techniques: dict[str, list[str]] = {}
    for row in rows:
        techniques.setdefault(row.reason, []).append(row.technique)
    reasons = (Text.assemble((", ".join(names), "bold"), f": {reason}") for reason, names in techniques.items())
    return Group(trace_tables.what_if_table(rows), "", *reasons)


def _weight_types(trace: StepTrace) -> str:
    """What the weights are stored in, the most bytes first: two runs that differ in nothing else differ twofold."""
    held: Counter[str] = Counter()
    for item in trace.allocations:
        if item.category is Category.WEIGHTS and item.dtype:
            held[item.dtype] += item.bytes
    return f" in {' and '.join(name for name, _ in held.most_common())}" if held else ""


def headline(trace: StepTrace) -> Panel:
    """The peak, whether it fits, and the instant it happens at."""
    facts = RichTable.grid(padding=(0, 2))
    facts.add_column(style=_QUIET, no_wrap=True)
    facts.add_column(overflow="fold")
    peak = Text(format_bytes(trace.peak_bytes), style=f"bold {PEAK_COLOUR}")
    facts.add_row("peak allocated", peak + Text(f"  {trace.peak_bytes:,} bytes", style=_QUIET))
    facts.add_row("peak reserved", format_bytes(trace.peak_reserved_bytes))
    if trace.target.context_bytes:
        context = Text(format_bytes(trace.target.context_bytes))
        if trace.target.is_context_assumed:
            context.append(f"  {ASSUMED_CONTEXT}", style=_QUIET)
        facts.add_row("context beside it", context)
    hardware, fit = Text(f"{trace.target.card}, memory not known"), fit_of(trace)
    if fit is not None:
        hardware = Text(f"{trace.target.card}, {format_bytes(fit.capacity_bytes)}: ")
        hardware.append(fit.verdict, style=_GOOD if fit.fits else _BAD)
    facts.add_row("hardware", hardware)
    if trace.host_bytes is not None:
        locked = f"  {format_bytes(trace.pinned_bytes or 0)} of it locked"
        facts.add_row("host", Text(format_bytes(trace.host_bytes)) + Text(locked, style=_QUIET))
    if (time := step_time(trace)) is not None:
        duration = Text(f"about {format_seconds(time.step_s)}")
        bound = LANE_NAMES.get(time.bound_by, time.bound_by)
        duration.append(f"  bound by {bound}, by the vendor's rates", style=_QUIET)
        facts.add_row("time of the step", duration)
    instant = instant_of(trace, trace.peak_event)
    facts.add_row("the peak is in", Text(instant.phase.value if instant.phase else instant.place, style="bold"))
    if instant.phase is not None:
        facts.add_row("at", Text(instant.place))
        if instant.source:
            facts.add_row("line", Text(instant.source))
    uses = attention_use(trace)
    for use in uses:
        facts.add_row("attention" if use is uses[0] else "", Text(use.text))
    for note in fallbacks(trace):
        facts.add_row("", Text(note, style=_BAD))
    for name, words in circumstances(trace):
        if name != "hardware":  # it has a line of its own above
            facts.add_row(name, Text(words))
    size = f"{format_count(trace.num_parameters)} parameters{_weight_types(trace)}"
    title = Text.assemble((trace.model, "bold"), f"  {size}, {trace.origin}")
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def notes(lines: Sequence[str]) -> Panel:
    """What the reader must know about how the trace was made."""
    text = Text("\n").join(Text(f"• {line}") for line in lines)
    return Panel(text, title="Notes", title_align="left", expand=False, border_style=_QUIET)


def _spaced(parts: Sequence[RenderableType]) -> Group:
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))
