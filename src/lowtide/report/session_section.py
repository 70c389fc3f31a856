"""The section of the HTML page that shows a session: its figures, its chart and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from lowtide.plain_text import Plain
from lowtide.report import markup
from lowtide.report.gantt import gantt_data
from lowtide.report.markup import Cell, Markup
from lowtide.report.session_facts import beside_rows, cache_line, chunk_summaries, overlap_line, per_step, phase_rows
from lowtide.runtime.session_stats import SessionStats
from lowtide.runtime.timeline import Lane, Timeline
from lowtide.units import format_bytes, format_seconds

_NUM_CHUNKS = 24


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


def section_data(section: SessionSection) -> dict[str, Plain]:
    """What the section's chart is drawn from."""
    return gantt_data(section.timeline, chunks=[chunk.name for chunk in section.stats.chunks])


def section_html(section: SessionSection, index: int) -> str:
    """The section as escaped HTML; the script draws the chart into its figure."""
    stats, timeline = section.stats, section.timeline
    badge = ' <em class="emulated">emulated device</em>' if section.is_emulated else ""
    steps = f"{stats.num_steps:,} {'step' if stats.num_steps == 1 else 'steps'}"
    pieces = [
        f'<section class="trace session" id="trace-{index}" aria-labelledby="name-{index}">',
        f'<header><h2 id="name-{index}">{escape(section.name)}{badge}</h2><p>{steps}</p></header>',
        figures(stats),
    ]
    # An emulated copy runs as late as it may, to show a missing wait: when it began says nothing.
    if not section.is_emulated and (overlap := overlap_line(timeline)):
        pieces.append(f'<p class="where">{escape(overlap)}</p>')
    if timeline.spans or timeline.residency:
        pieces.append(
            f'<figure class="timeline gantt" data-gantt="{index}" aria-label="Chunks on the device and work by lane">'
            "<noscript><p>The chart is drawn by a script; the tables below hold its sums.</p></noscript></figure>"
        )
    pieces.append(f'<div class="pair">{time_table(stats)}{tier_table(stats)}</div>')
    pieces += [moved_table(stats), chunk_table(stats), f'<p class="quiet">{escape(cache_line(stats.cache))}</p>']
    if len(stats.chunks) > 1:
        pieces.append(f"<details><summary>Every chunk</summary>{every_chunk_table(stats)}</details>")
    pieces.append(markup.notes(section.notes))
    return "".join([*pieces, "</section>"])


def figures(stats: SessionStats) -> str:
    """The handful of numbers at the top of the section."""
    total_s, steps = stats.seconds.total_s, max(stats.num_steps, 1)
    share = stats.exposed_copy_s / total_s if total_s else 0.0
    items: list[tuple[str, Cell, Cell]] = [
        ("Time a step", format_seconds(total_s / steps), f"{format_seconds(total_s)} in all"),
        ("Copies not hidden", f"{share:.1%}", f"{format_seconds(stats.exposed_copy_s / steps)} a step of waiting"),
    ]
    for lane, name in ((Lane.TO_DEVICE, "To the device"), (Lane.TO_HOST, "To the host")):
        moved = stats.moved_bytes(lane.value)
        items.append((name, per_step(moved, stats.num_steps), f"a step, {format_bytes(moved)} in all"))
    for tier in stats.tiers[:1]:
        detail: Cell = "no budget was set"
        if tier.budget_bytes is not None:
            word, kind = ("within", "fits") if tier.is_within_budget else ("over", "too-large")
            detail = Markup(f'<b class="{kind}">{word} the budget of {format_bytes(tier.budget_bytes)}</b>')
        items.append((f"{tier.tier.capitalize()} peak", markup.size(tier.peak_bytes), detail))
    return markup.figures(items)


def time_table(stats: SessionStats) -> str:
    """Time of the loop by phase, and below it what lies inside of the phases or runs beside them."""
    whole, steps = stats.seconds.total_s, stats.num_steps
    rows: list[list[Cell]] = []
    phases = [(name, name, seconds) for name, seconds in phase_rows(stats.seconds)]
    for name, kind, seconds in [*phases, *beside_rows(stats)]:
        share = seconds / whole if whole else 0.0
        each = format_seconds(seconds / steps) if steps else "–"
        swatch, bar = Markup(f'<i class="swatch kind-{kind}"></i>{name}'), markup.bar(f"kind-{kind}", share)
        rows.append([swatch, each, format_seconds(seconds), f"{share:.1%}", bar])
    return markup.table("Time of the loop", ["phase", "#a step", "#total", "#share", "%"], rows)


def tier_table(stats: SessionStats) -> str:
    """The peak of each tier against its budget and its prediction."""
    rows: list[list[Cell]] = []
    for tier in stats.tiers:
        peak = markup.size(tier.peak_bytes)
        if tier.is_within_budget is not None:
            peak = Markup(f'<b class="{"fits" if tier.is_within_budget else "too-large"}">{peak.html}</b>')
        error = "" if tier.prediction_error is None else f"{tier.prediction_error:+.1%}"
        rows.append([tier.tier, peak, _size(tier.budget_bytes), _size(tier.predicted_bytes), error])
    return markup.table("Peak by tier", ["tier", "#peak", "#budget", "#predicted", "#error"], rows)


def moved_table(stats: SessionStats) -> str:
    """Bytes copied, by direction and reason."""
    rows: list[list[Cell]] = [
        [
            row.direction,
            Markup(f'<i class="swatch kind-{_slug(row.reason.value)}"></i>{escape(row.reason.value)}'),
            markup.size(row.num_bytes),
            per_step(row.num_bytes, stats.num_steps),
            f"{row.num_copies:,}",
        ]
        for row in stats.moved
    ] or [["nothing was copied", "", "", "", ""]]
    return markup.table("Copies", ["direction", "reason", "#bytes", "#a step", "#copies"], rows, kind="narrow")


def chunk_table(stats: SessionStats) -> str:
    """Chunks with the same lot together."""
    summaries = chunk_summaries(stats.chunks)
    rows: list[list[Cell]] = [
        [
            Markup(f"<code>{escape(row.name)}</code>"),
            f"{row.count:,}",
            markup.size(row.num_bytes),
            row.weights,
            row.site,
            f"{row.num_fetches:,}",
            row.share_text,
        ]
        for row in summaries[:_NUM_CHUNKS]
    ]
    rest = summaries[_NUM_CHUNKS:]
    if rest:
        count, size = sum(row.count for row in rest), sum(row.num_bytes for row in rest)
        rows.append([f"{len(rest):,} other kinds", f"{count:,}", markup.size(size), "", "", "", ""])
    return markup.table("Chunks, those with the same lot together", ["chunks", "#count", *_CHUNK_HEADS], rows)


def every_chunk_table(stats: SessionStats) -> str:
    """Chunks one by one."""
    rows: list[list[Cell]] = [
        [
            Markup(f"<code>{escape(row.name)}</code>"),
            markup.size(row.num_bytes),
            row.weights,
            row.site,
            f"{row.num_fetches:,}",
            f"{row.resident_share:.1%}",
        ]
        for row in stats.chunks
    ]
    return markup.table("Every chunk", ["chunk", *_CHUNK_HEADS], rows)


_CHUNK_HEADS = ("#bytes", "weights", "updated on", "#fetches", "#on the device")


def _size(num_bytes: int | None) -> Cell:
    return "–" if num_bytes is None else markup.size(num_bytes)


def _slug(words: str) -> str:
    return words.replace(" ", "-")
