"""Charts as plain data: what the page's script and the figures draw alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.plain_text import Plain
from lowtide.planning.budget_curve import BudgetPoint
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
