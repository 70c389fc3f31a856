"""SessionStats in the terminal: rich renderables for the command line to print.

Names come from a model and are wrapped in `Text`, never passed as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lowtide.report.session_facts import ChunkSummary, beside_rows, cache_line, chunk_summaries, per_step, phase_rows
from lowtide.report.terminal_table import titled_table
from lowtide.runtime.session_stats import SessionStats
from lowtide.units import format_bytes, format_seconds

_BAR_WIDTH = 24
_GOOD, _BAD, _QUIET = "green", "bold red", "dim"


def stats_tables(stats: SessionStats, *, num_chunks: int = 16) -> Group:
    """Everything the terminal shows about a session: time, copies, peaks, chunks and the cache.

    Args:
        stats: What `session.stats()` gave.
        num_chunks: Bound on the rows of the table of chunks; chunks with the same lot share a row.
    """
    parts: list[RenderableType] = [
        _headline(stats),
        time_table(stats),
        moved_table(stats),
        tier_table(stats),
        chunk_table(chunk_summaries(stats.chunks), limit=num_chunks),
        Text(cache_line(stats.cache), style=_QUIET),
    ]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def time_table(stats: SessionStats) -> Table:
    """Time of the loop by phase, for a step and as a share; waiting, inside of them, is what the copies cost."""
    table = titled_table("Time of the loop", "phase", ">a step", ">total", ">share", "")
    whole = stats.seconds.total_s
    phases = [(name, name, seconds) for name, seconds in phase_rows(stats.seconds)]
    for name, kind, seconds in [*phases, *beside_rows(stats)]:
        colour = "red" if kind == "waiting" and seconds > 0 else "default"
        share = seconds / whole if whole else 0.0
        bar = Bar(size=1.0, begin=0, end=share, width=_BAR_WIDTH, color=colour)
        each = format_seconds(seconds / stats.num_steps) if stats.num_steps else "–"
        table.add_row(Text(name), each, format_seconds(seconds), f"{share:.1%}", bar)
    return table


def moved_table(stats: SessionStats) -> Table:
    """Bytes copied, by direction and reason."""
    table = titled_table("Copies", "direction", "reason", ">bytes", ">a step", ">copies")
    for row in stats.moved:
        each = per_step(row.num_bytes, stats.num_steps)
        table.add_row(
            Text(row.direction), Text(row.reason.value), format_bytes(row.num_bytes), each, f"{row.num_copies:,}"
        )
    if not stats.moved:
        table.add_row(Text("nothing was copied", style=_QUIET), "", "", "", "")
    return table


def tier_table(stats: SessionStats) -> Table:
    """The peak of each tier against its budget and its prediction."""
    table = titled_table("Peak by tier", "tier", ">peak", ">budget", ">predicted", ">error")
    for row in stats.tiers:
        style = {True: _GOOD, False: _BAD, None: ""}[row.is_within_budget]
        error = "" if row.prediction_error is None else f"{row.prediction_error:+.1%}"
        table.add_row(
            Text(row.tier),
            Text(format_bytes(row.peak_bytes), style=style),
            "–" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            "–" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
            error,
        )
    return table


def chunk_table(rows: Sequence[ChunkSummary], *, limit: int = 16) -> Table:
    """Chunks with the same lot together: where they live, where they are updated, how long they were on the device."""
    table = titled_table("Chunks", "chunks", ">count", ">bytes", "<weights", "<update", ">fetches", ">on the device")
    for row in rows[:limit]:
        table.add_row(
            Text(row.name),
            f"{row.count}",
            format_bytes(row.num_bytes),
            Text(row.weights),
            Text(row.site),
            f"{row.num_fetches:,}",
            row.share_text,
        )
    rest = rows[limit:]
    if rest:
        count, size = sum(row.count for row in rest), sum(row.num_bytes for row in rest)
        table.add_row("others", f"{count}", format_bytes(size), "", "", "", "", style=_QUIET)
    return table


def _headline(stats: SessionStats) -> Text:
    line = Text(f"{stats.num_steps:,} steps, {format_seconds(stats.seconds.total_s)}", style="bold")
    if stats.is_emulated:
        line.append("  emulated device", style="yellow")
    waited = f"  {format_seconds(stats.exposed_copy_s)} of copy time not hidden"
    return line.append(waited, style=_QUIET)
