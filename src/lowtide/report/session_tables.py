"""What a report says about a session, as tables and sentences, the same in the terminal and on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.planning.timeline import Timeline
from lowtide.report.table import Table, Tone, Value, bar, make_table, number, size, words
from lowtide.runtime.statistics.session_stats import CacheRow, ChunkRow, SessionStats
from lowtide.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """Chunks whose names differ only in numbers and which are treated alike."""

    name: str
    """Their name, with `*` for each number that differs."""
    count: int
    num_bytes: int
    """The sum over all of them, as the number of fetches is."""
    weights: str
    site: str
    num_fetches: int
    least_share: float
    most_share: float

    @property
    def share_text(self) -> str:
        """How much of the time they held bytes of the device: `100%`, or `12–17%` where they differ."""
        least, most = f"{self.least_share:.0%}", f"{self.most_share:.0%}"
        return most if least == most else f"{least[:-1]}–{most}"


def chunk_summaries(chunks: Sequence[ChunkRow]) -> list[ChunkSummary]:
    """Chunks together with those treated alike, in order of first appearance: 24 equal blocks are one line."""
    alike: dict[tuple[str, str, str], list[ChunkRow]] = {}
    for chunk in chunks:
        alike.setdefault((_NUMBER.sub("*", chunk.name), chunk.weights, chunk.site), []).append(chunk)
    return [
        ChunkSummary(
            name=_common_name([chunk.name for chunk in rows]),
            count=len(rows),
            num_bytes=sum(chunk.num_bytes for chunk in rows),
            weights=rows[0].weights,
            site=rows[0].site,
            num_fetches=sum(chunk.num_fetches for chunk in rows),
            least_share=min(chunk.resident_share for chunk in rows),
            most_share=max(chunk.resident_share for chunk in rows),
        )
        for rows in alike.values()
    ]


def per_step(num_bytes: int, num_steps: int) -> str:
    """Bytes of one step on average; a dash before the first."""
    return format_bytes(num_bytes / num_steps) if num_steps else "–"


def cache_line(cache: CacheRow) -> str:
    """What the cache of released buffers did, in a sentence."""
    if cache.hit_rate is None:
        return "The buffer cache was not asked for anything."
    requests = cache.hits + cache.misses
    return (
        f"The buffer cache served {cache.hits:,} of {requests:,} requests ({cache.hit_rate:.0%}) "
        f"and holds {format_bytes(cache.held_bytes)}."
    )


def overlap_line(timeline: Timeline) -> str:
    """Whether copies ran ahead of their use, in a sentence; "" where no group was fetched."""
    overlaps = timeline.overlaps()
    if not overlaps:
        return ""
    late = [overlap for overlap in overlaps if overlap.lead_s <= 0]
    if not late:
        least = min(overlaps, key=lambda overlap: overlap.lead_s)
        return (
            f"All {len(overlaps):,} fetches began before the computation ahead of them had ended, "
            f"{format_seconds(least.lead_s)} before it at the least ({_called(least.next_group)})."
        )
    first = late[0]
    behind = f"{format_seconds(-first.lead_s)} after" if first.lead_s else "when"
    return (
        f"{len(late):,} of {len(overlaps):,} fetches were late: that of {_called(first.next_group)} began only "
        f"{behind} {_called(first.group)} had ended. "
        "A larger prefetch depth or a larger window starts copies earlier."
    )


_NUM_CHUNKS = 24


def time_table(stats: SessionStats) -> Table:
    """Time of the loop by phase, and below it waiting, which lies inside of the phases, and host updates at the same time."""
    seconds, whole, steps = stats.seconds, stats.seconds.total_s, stats.num_steps
    times = [
        ("forward", "kind-forward", seconds.forward_s),
        ("backward", "kind-backward", seconds.backward_s),
        ("update", "kind-update", seconds.update_s),
        ("rest", "kind-rest", seconds.rest_s),
        ("waiting, in these", "kind-waiting", stats.exposed_copy_s),
    ]
    if stats.host_update_s:
        times.append(("host updates, beside", "kind-update", stats.host_update_s))
    return make_table(
        "Time of the loop",
        [(name, kind, time_s, time_s / whole if whole else 0.0) for name, kind, time_s in times],
        words("phase", lambda row: Value(row[0], swatch=row[1]), wraps=True),
        number("a step", lambda row: format_seconds(row[2] / steps) if steps else "–"),
        number("total", lambda row: format_seconds(row[2])),
        number("share", lambda row: f"{row[3]:.1%}"),
        number("", lambda row: bar(row[1], row[3])),
    )


def moved_table(stats: SessionStats) -> Table:
    """Bytes copied, by direction and reason."""
    table = make_table(
        "Copies",
        stats.moved,
        words("direction", lambda row: row.direction, wraps=True),
        words("reason", lambda row: Value(row.reason.value, swatch=f"kind-{row.reason.value.replace(' ', '-')}")),
        number("bytes", lambda row: size(row.num_bytes)),
        number("a step", lambda row: per_step(row.num_bytes, stats.num_steps)),
        number("copies", lambda row: f"{row.num_copies:,}"),
        kind="narrow",
    )
    return table if stats.moved else table.with_row(Value("nothing was copied", tone=Tone.QUIET), "", "", "", "")


def tier_table(stats: SessionStats) -> Table:
    """The peak of each tier against its budget and its prediction."""
    tones = {True: Tone.GOOD, False: Tone.BAD, None: Tone.PLAIN}
    return make_table(
        "Peak by tier",
        stats.tiers,
        words("tier", lambda tier: tier.tier, wraps=True),
        number("peak", lambda tier: size(tier.peak_bytes, tones[tier.is_within_budget])),
        number("budget", lambda tier: size(tier.budget_bytes)),
        number("predicted", lambda tier: size(tier.predicted_bytes)),
        number("error", lambda tier: "" if tier.prediction_error is None else f"{tier.prediction_error:+.1%}"),
    )


def chunk_table(stats: SessionStats, *, limit: int = _NUM_CHUNKS) -> Table:
    """Chunks treated alike together: where they live, where they are updated, how long they were on the device."""
    summaries = chunk_summaries(stats.chunks)
    table = make_table(
        "Chunks, those treated alike together",
        summaries[:limit],
        words("chunks", lambda row: Value(row.name, is_code=True), wraps=True),
        number("count", lambda row: f"{row.count:,}"),
        number("bytes", lambda row: size(row.num_bytes)),
        words("weights", lambda row: row.weights),
        words("updated on", lambda row: row.site),
        number("fetches", lambda row: f"{row.num_fetches:,}"),
        number("on the device", lambda row: row.share_text),
    )
    if others := summaries[limit:]:
        count, num_bytes = sum(row.count for row in others), sum(row.num_bytes for row in others)
        return table.with_row(Value("others", tone=Tone.QUIET), f"{count:,}", size(num_bytes), "", "", "", "")
    return table


def every_chunk_table(stats: SessionStats) -> Table:
    """A row for each chunk, none of them put together."""
    return make_table(
        "Every chunk",
        stats.chunks,
        words("chunk", lambda row: Value(row.name, is_code=True)),
        number("bytes", lambda row: size(row.num_bytes)),
        words("weights", lambda row: row.weights),
        words("updated on", lambda row: row.site),
        number("fetches", lambda row: f"{row.num_fetches:,}"),
        number("on the device", lambda row: f"{row.resident_share:.1%}"),
    )


def _called(group: str) -> str:
    return group or "the rest of the model"


def _common_name(names: list[str]) -> str:
    # Only the numbers that really differ become a star.
    texts = _NUMBER.split(names[0])
    numbers = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    stars = [column[0] if len(set(column)) == 1 else "*" for column in numbers]
    return "".join(text + star for text, star in zip(texts, [*stars, ""], strict=True))
