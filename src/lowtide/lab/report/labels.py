"""Names beside the marks of a chart, so that none lies on another or on a mark.

Each name is tried around its mark, near first, and takes the cheapest free place; where it ends up far away, a thin line
leads back. Marks with many neighbours choose first: the others have room left anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
Line = tuple[Point, Point]

_ROOM_ACROSS, _ROOM_DOWN = 0.6, 0.05
"""Kept free around each name, in its heights: two in a line must not read as one."""
_NUM_DIRECTIONS = 16
_DIRECTIONS = tuple(
    (math.cos(2 * math.pi * turn / _NUM_DIRECTIONS), math.sin(2 * math.pi * turn / _NUM_DIRECTIONS))
    for turn in range(_NUM_DIRECTIONS)
)
_BLOCKED = 1e6
"""For each unit of area that would lie on something else, so that only what is free everywhere is cheap."""
_CROSSED = 40.0
"""For each line that would run through a name or a mark, in units of distance."""
_MISTAKEN = 15.0
"""For each mark that a name would be nearer to than to its own."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, with y growing downwards."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, point: Point, radius: float) -> Box:
        """A square with a point in its middle."""
        return cls(point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius)

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return width * height if width > 0 and height > 0 else 0.0

    @property
    def roomy(self) -> Box:
        """With the room that other names leave."""
        height = self.bottom - self.top
        across, down = _ROOM_ACROSS * height, _ROOM_DOWN * height
        return Box(self.left - across, self.top - down, self.right + across, self.bottom + down)

    def nearest(self, point: Point) -> Point:
        """The place in it that is nearest to a point."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)

    @property
    def area(self) -> float:
        """Of the rectangle."""
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Label:
    """Where a name stands."""

    box: Box
    leader: Line | None
    """A line from the mark to the name; None where it stands close."""


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


def place_labels(
    anchors: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    *,
    bounds: Box,
    radius: float = 5.0,
    obstacles: Sequence[Box] = (),
    lines: Sequence[Line] = (),
) -> tuple[Label, ...]:
    """Places for all names, in the order given.

    Args:
        anchors: Centres of the marks that are named.
        sizes: Width and height of each name.
        bounds: Where names may stand.
        radius: Of the marks, which names keep off.
        obstacles: What else names keep off, such as marks without one.
        lines: Of the chart: names stand on them only where there is no other room nearby.
    """
    marks = [Box.around(anchor, radius) for anchor in anchors]
    placed: dict[int, Label] = {}
    for index in sorted(range(len(anchors)), key=lambda index: (-_neighbours(index, anchors, sizes), index)):
        others = [mark for other, mark in enumerate(marks) if other != index]
        taken = list(placed.values())
        scene = _Scene(
            bounds=bounds,
            blocked=[*marks, *obstacles, *(label.box.roomy for label in taken)],
            lines=[*lines, *(label.leader for label in taken if label.leader is not None)],
            uncrossed=[*others, *obstacles, *(label.box for label in taken)],
            others=[anchor for other, anchor in enumerate(anchors) if other != index],
        )
        placed[index] = _cheapest(_candidates(anchors[index], sizes[index], bounds, radius), anchors[index], scene)
    return tuple(placed[index] for index in range(len(anchors)))


def _neighbours(index: int, anchors: Sequence[Point], sizes: Sequence[tuple[float, float]]) -> int:
    (x, y), (width, height) = anchors[index], sizes[index]
    return sum(abs(other_x - x) < width and abs(other_y - y) < 3 * height for other_x, other_y in anchors) - 1


def _cheapest(candidates: Iterator[Label], anchor: Point, scene: _Scene) -> Label:
    best = next(candidates)
    least = _cost(best, anchor, scene)
    for candidate in candidates:
        # Whatever else it costs, a name costs its distance: most need no further look.
        if math.dist(candidate.box.nearest(anchor), anchor) >= least:
            continue
        if (cost := _cost(candidate, anchor, scene)) < least:
            least, best = cost, candidate
    return best


def _candidates(anchor: Point, size: tuple[float, float], bounds: Box, radius: float) -> Iterator[Label]:
    (x, y), (width, height) = anchor, size
    farthest = max(bounds.right - bounds.left, bounds.bottom - bounds.top)
    distance = near = radius + 3.0
    while distance <= farthest:
        for across, down in _DIRECTIONS:
            centre_x, centre_y = x + across * (distance + width / 2), y + down * (distance + height / 2)
            box = Box(centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2)
            end = box.nearest(anchor)
            is_far = math.dist(end, anchor) > 1.8 * near
            yield Label(box, (anchor, end) if is_far else None)
        distance += max(0.5 * height, 0.15 * distance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What a name has to mind."""

    bounds: Box
    blocked: Sequence[Box]
    """It must not lie on these."""
    lines: Sequence[Line]
    """It should not lie on these."""
    uncrossed: Sequence[Box]
    """Its own line should not run through these."""
    others: Sequence[Point]
    """It should not seem to belong to these."""


def _cost(candidate: Label, anchor: Point, scene: _Scene) -> float:
    box = candidate.box
    covered = sum(box.overlap(other) for other in scene.blocked) + box.area - box.overlap(scene.bounds)
    distance = cost = math.dist(box.nearest(anchor), anchor)
    cost += _MISTAKEN * sum(math.dist(box.nearest(other), other) < distance for other in scene.others)
    # Right and left of a mark a name reads as belonging to it; above and below it is the next best.
    is_beside = box.top < anchor[1] < box.bottom
    cost += 0.0 if is_beside and box.left > anchor[0] else 1.0 if is_beside else 3.0
    crossings = sum(_crosses(line, box) for line in scene.lines)
    crossings += sum(_crosses(candidate.leader, other) for other in scene.uncrossed)
    return cost + _CROSSED * crossings + (_BLOCKED * covered if covered > 1e-6 else 0.0)


def _crosses(line: Line | None, box: Box) -> bool:
    """Whether a line and a box meet, by what each side of the box leaves of it (Liang and Barsky)."""
    if line is None:
        return False
    (x, y), (end_x, end_y) = line
    first, last = 0.0, 1.0
    for start, length, low, high in ((x, end_x - x, box.left, box.right), (y, end_y - y, box.top, box.bottom)):
        if length == 0:
            if not low < start < high:
                return False
            continue
        enters, leaves = sorted(((low - start) / length, (high - start) / length))
        first, last = max(first, enters), min(last, leaves)
    return first < last
