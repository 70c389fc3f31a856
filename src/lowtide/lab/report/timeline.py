"""The memory of one step through time as plain data, for the page and for the figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowtide.lab.report.rows import Row

MAX_POINTS = 400
"""Of one curve: more than a small chart has pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """Neighbouring points of one phase."""

    phase: str
    start: float
    """As a share of the step, as the next."""
    end: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTimeline:
    """A row's step: each point is the most that was held since the one before."""

    row: Row
    points: tuple[int, ...]
    """Bytes at even distances."""
    spans: tuple[PhaseSpan, ...]
    peak_index: int
    """Of the largest point."""
    predicted_bytes: int | None
    top_bytes: int
    """The larger of measured and predicted peak, at least 1."""


def timeline_of(row: Row, *, max_points: int = MAX_POINTS) -> RowTimeline | None:
    """The row's step; None where none was watched."""
    if not row.timeline:
        return None
    points = thinned([num_bytes for _, num_bytes in row.timeline], max_points)
    predicted = row.predicted.peak_bytes if row.predicted else None
    return RowTimeline(
        row=row,
        points=points,
        spans=_spans(row.timeline),
        peak_index=points.index(max(points)),
        predicted_bytes=predicted,
        top_bytes=max(*points, predicted or 0, 1),
    )


def thinned(values: Sequence[int], most: int) -> tuple[int, ...]:
    """At most this many values: the largest of each of as many equal parts, so that no peak is lost."""
    if len(values) <= most:
        return tuple(values)
    edges = [index * len(values) // most for index in range(most + 1)]
    return tuple(max(values[start:end]) for start, end in pairwise(edges))


def _spans(timeline: Sequence[tuple[str, int]]) -> tuple[PhaseSpan, ...]:
    spans: list[PhaseSpan] = []
    first, whole = 0, len(timeline)
    for index in range(1, whole + 1):
        if index < whole and timeline[index][0] == timeline[first][0]:
            continue
        held = [num_bytes for _, num_bytes in timeline[first:index]]
        spans.append(PhaseSpan(phase=timeline[first][0], start=first / whole, end=index / whole, peak_bytes=max(held)))
        first = index
    return tuple(spans)
