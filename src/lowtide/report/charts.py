"""Charts as plain data: what the page's script and the figures draw alike.

A session's chart has columns, chunk residency and lanes on one time axis. Names repeat thousands of times, so each is stored
once and spans hold indices. Times are microseconds from the first instant shown, to a tenth: an hour of steps still fits a
double, and touching spans still touch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias

from lowtide.plain_text import Plain
from lowtide.planning.budget_curve import BudgetPoint
from lowtide.planning.timeline import Lane, LaneSpan, ResidencySpan, Timeline, lanes_that_work
from lowtide.report.plan_tables import milliseconds
from lowtide.units import GiB, format_bytes, format_count

LOG_RATIO = 8.0
"""Values that are this far apart leave no room for the small ones on a linear axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    is_log: bool = False

    def plain(self) -> list[Plain]:
        """The data for the page's script."""
        return [self.low, self.high, self.is_log]


def axis_over(values: Iterable[float]) -> Axis:
    """An axis with some room around all values: logarithmic where they are far apart, otherwise linear from 0."""
    known = list(values)
    least, largest = min(known), max(known)
    if least > 0 and largest / least > LOG_RATIO:
        return Axis(least / 1.35, largest * 1.35, is_log=True)
    return Axis(min(0.0, least), largest * 1.12 if largest > 0 else 1.0)


def cut_name(name: str, limit: int = 40) -> str:
    """A name that fits a chart: long ones lose their middle, because names of one kind differ at the ends.

    Example:
        >>> cut_name("fused_memory_budget_05", limit=15)
        'fused_m…dget_05'
    """
    if len(name) <= limit:
        return name
    head = limit // 2
    return f"{name[:head]}…{name[len(name) - (limit - head - 1) :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One place of a scatter chart."""

    name: str
    x: float
    y: float
    kind: Literal["on-front", "ours", "published"]
    belongs_to: int | None = None
    """The number of the mark that it stands beside, whose name serves both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Named marks over two axes: what is low and far right is good."""

    marks: tuple[Mark, ...]
    front: tuple[tuple[float, float], ...]
    """Corners of the line below which nothing is."""
    x: Axis
    y: Axis
    x_name: str
    y_name: str
    notes: tuple[str, ...]
    """What is not drawn, and why."""

    def plain(self) -> dict[str, Plain]:
        """The data for the page's script."""
        return {
            "x": self.x.plain(),
            "y": self.y.plain(),
            "names": [self.x_name, self.y_name],
            "front": [list(corner) for corner in self.front],
            "marks": [[cut_name(mark.name), mark.x, mark.y, mark.kind, mark.belongs_to] for mark in self.marks],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """The memory of one step: each point is the most that was held since the one before."""

    name: str
    words: str
    """The peak, its phase and its prediction."""
    points: tuple[float, ...]
    """The values at even distances, in the chart's unit."""
    spans: tuple[tuple[str, float, float], ...]
    """Phase, start and end, as shares of the step."""
    predicted: float | None

    @property
    def peak(self) -> int:
        """The index of the largest point."""
        return self.points.index(max(self.points))

    @property
    def top(self) -> float:
        """The larger of measured and predicted peak."""
        return max(*self.points, self.predicted or 0.0) or 1.0

    def plain(self) -> dict[str, Plain]:
        """The data for the page's script."""
        return {
            "points": [round(point, 4) for point in self.points],
            "spans": [list(span) for span in self.spans],
            "predicted": self.predicted,
            "peak": self.peak,
            "top": self.top,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One comparison in a picture."""

    title: str
    scatter: Scatter | None
    steps: tuple[StepCurve, ...]


def curve_data(points: Sequence[BudgetPoint], *, chosen_bytes: int, tokens: int = 0) -> dict[str, Plain]:
    """Time a step over device memory, for the page's script; the place of the plan itself is marked."""

    def said(point: BudgetPoint) -> str:
        speed = f", {format_count(round(tokens / point.step_s))} tokens/s" if tokens else ""
        how = "replayed" if point.is_replayed else "estimated"
        groups = f"{point.num_resident} groups resident, {point.num_updated_there} updated on the device"
        time = f"{format_bytes(point.budget_bytes)} ({how}): {milliseconds(point.step_s)}{speed}"
        return f"{time}; {groups}, activations: {point.activations}"

    return {
        "x": axis_over(point.budget_bytes / GiB for point in points).plain(),
        "y": axis_over(point.step_s for point in points).plain(),
        "names": ["device memory, GiB", "seconds a step"],
        "points": [
            [point.budget_bytes / GiB, point.step_s, said(point), point.is_replayed, point.budget_bytes == chosen_bytes]
            for point in points
        ],
    }


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
        "lanes": [_lane(lane, shown.spans, start_s, names) for lane in lanes_that_work(timeline.lanes)],
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
