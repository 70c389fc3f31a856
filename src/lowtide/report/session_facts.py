"""What a report says about a session, as plain data and sentences, the same in the terminal and on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.runtime.session_stats import CacheRow, ChunkRow, PhaseSeconds, SessionStats
from lowtide.runtime.timeline import Timeline
from lowtide.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """Chunks whose names differ only in numbers and which have the same lot."""

    name: str
    """With `*` for each number that differs; as it is for a single chunk."""
    count: int
    num_bytes: int
    """Of all of them."""
    weights: str
    site: str
    num_fetches: int
    """Of all of them."""
    least_share: float
    most_share: float

    @property
    def share_text(self) -> str:
        """How much of the time they held bytes of the device: `100%`, or `12–17%` where they differ."""
        least, most = f"{self.least_share:.0%}", f"{self.most_share:.0%}"
        return most if least == most else f"{least[:-1]}–{most}"


def chunk_summaries(chunks: Sequence[ChunkRow]) -> list[ChunkSummary]:
    """Chunks together with those of the same lot, in order of first appearance: 24 equal blocks are one line."""
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


def phase_rows(seconds: PhaseSeconds) -> list[tuple[str, float]]:
    """Name and time of each phase, in the order of a step; together they are the whole."""
    return [
        ("forward", seconds.forward_s),
        ("backward", seconds.backward_s),
        ("update", seconds.update_s),
        ("rest", seconds.rest_s),
    ]


class BesideRow(NamedTuple):
    """A time that is no phase."""

    name: str
    kind: str
    """Of span, as the chart colours it."""
    seconds: float


def beside_rows(stats: SessionStats) -> list[BesideRow]:
    """Waiting, which lies inside of the phases, and updates on the host, which run beside them."""
    rows = [BesideRow("waiting, in these", "waiting", stats.exposed_copy_s)]
    if stats.host_update_s:
        rows.append(BesideRow("host updates, beside", "update", stats.host_update_s))
    return rows


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


def _called(group: str) -> str:
    return group or "the rest of the model"


def _common_name(names: list[str]) -> str:
    # Only the numbers that really differ become a star.
    texts = _NUMBER.split(names[0])
    numbers = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    stars = [column[0] if len(set(column)) == 1 else "*" for column in numbers]
    return "".join(text + star for text, star in zip(texts, [*stars, ""], strict=True))
