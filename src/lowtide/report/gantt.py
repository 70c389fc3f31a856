"""The data of a session's chart: chunk residency and lanes on one time axis, as columns for the page's script.

Names repeat thousands of times, so each is stored once and spans hold indices. Times are microseconds from the first
instant shown, to a tenth: an hour of steps still fits a double, and touching spans still touch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypeAlias

from lowtide.plain_text import Plain
from lowtide.planning.timeline import Lane, LaneSpan, ResidencySpan, Timeline

MAX_SPANS = 20_000
"""How many spans a page holds, about 700 kB; whole steps are left out from the front until the rest fits."""

WAITING = "waiting"
"""The kind of a compute span in which the device stood still."""

_REST = "(rest of the model)"
Numbers: TypeAlias = defaultdict[str, int]
"""Texts in order of first sight, each with its number."""


def gantt_data(timeline: Timeline, *, chunks: Sequence[str] = (), max_spans: int = MAX_SPANS) -> dict[str, Plain]:
    """What the script draws: the last steps of a timeline, as many as fit, and at least one.

    Args:
        timeline: What the session recorded.
        chunks: The order of the rows; chunks that are not named follow in the order of their first appearance.
        max_spans: Bound on the spans of both kinds, unless the last step alone has more.
    """
    shown = recent(timeline, max_spans)
    names: Numbers = defaultdict(count().__next__)
    start_s, end_s = shown.start_s, shown.end_s
    return {
        "isEmulated": shown.is_emulated,
        "numSteps": len(timeline.steps),
        "end": _microseconds(end_s - start_s),
        "steps": [[step, _microseconds(begin_s - start_s)] for step, begin_s in shown.step_starts()],
        "residency": _residency(shown.residency, chunks, start_s, names),
        "lanes": [_lane(lane, shown.spans, start_s, names) for lane in Lane],
        "curve": [[_microseconds(time_s - start_s), held_bytes] for time_s, held_bytes in shown.device_chunk_bytes()],
        "names": list(names),
    }


def recent(timeline: Timeline, max_spans: int) -> Timeline:
    """The longest run of last steps with at most `max_spans` spans; the last step where it alone has more."""

    def num_spans(num_steps: int) -> int:
        part = timeline.last_steps(num_steps)
        return len(part.spans) + len(part.residency)

    fitting = bisect_right(range(1, len(timeline.steps) + 1), max_spans, key=num_spans)
    return timeline.last_steps(max(fitting, 1))


def kind_of(span: LaneSpan) -> str:
    """What a span is coloured by: the reason of a copy, the phase of a computation, or `waiting`."""
    if span.waits_for is not None:
        return WAITING
    return span.reason.value if span.reason is not None else span.phase


def _residency(
    spans: Sequence[ResidencySpan], order: Sequence[str], start_s: float, names: Numbers
) -> dict[str, Plain]:
    spans = sorted(spans, key=lambda span: span.start_s)
    first = {span.chunk: span for span in reversed(spans)}
    known = {chunk: place for place, chunk in enumerate(order)}
    appearance = {span.chunk: place for place, span in reversed(list(enumerate(spans)))}
    rows = sorted(first, key=lambda chunk: (known.get(chunk, len(known)), appearance[chunk]))
    # Chunks of one group stand together, where its first chunk stands.
    places: dict[str, int] = {}
    for chunk in rows:
        places.setdefault(first[chunk].group, len(places))
    rows.sort(key=lambda chunk: places[first[chunk].group])
    row_of = {chunk: row for row, chunk in enumerate(rows)}
    return {
        "chunk": [names[chunk or _REST] for chunk in rows],
        "group": [names[first[chunk].group or _REST] for chunk in rows],
        "row": [row_of[span.chunk] for span in spans],
        "kind": [names[span.state] for span in spans],
        "bytes": [span.num_bytes for span in spans],
        **_times(spans, start_s),
    }


def _lane(lane: Lane, spans: Iterable[LaneSpan], start_s: float, names: Numbers) -> dict[str, Plain]:
    mine = sorted((span for span in spans if span.lane is lane), key=lambda span: span.start_s)
    return {
        "lane": lane.value,
        # The name of a wait is the group it waits for; its kind says that it is one.
        "name": [names[(span.name if span.waits_for is None else span.waits_for) or _REST] for span in mine],
        "kind": [names[kind_of(span)] for span in mine],
        "phase": [names[span.phase] for span in mine],
        "step": [span.step for span in mine],
        "bytes": [span.num_bytes for span in mine],
        **_times(mine, start_s),
    }


def _times(spans: Sequence[LaneSpan] | Sequence[ResidencySpan], start_s: float) -> dict[str, Plain]:
    return {
        "from": [_microseconds(span.start_s - start_s) for span in spans],
        "to": [_microseconds(span.end_s - start_s) for span in spans],
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
