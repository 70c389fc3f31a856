"""The Pareto front: what is not beaten in both memory and speed."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Indices of the points of which no other has less of the first and more of the second, by rising first value.

    A point is beaten by another that is no worse in either and better in one; equal points are on the front together.

    Args:
        points: Memory, where less is better, and speed, where more is.

    Example:
        >>> pareto_front([(8.0, 2.0), (4.0, 1.0), (9.0, 1.5)])
        (1, 0)
    """
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        # In this order nothing that comes later beats what is kept, so that the last one kept is the fastest so far.
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return tuple(front)
