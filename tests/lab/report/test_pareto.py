from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.report.pareto import pareto_front

# Few values, so that ties in one and in both are common.
POINTS = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=12)


def is_beaten(point: tuple[float, float], by: tuple[float, float]) -> bool:
    return by[0] <= point[0] and by[1] >= point[1] and by != point


@given(POINTS)
def test_brute_force_agrees(points: list[tuple[float, float]]) -> None:
    expected = {index for index, point in enumerate(points) if not any(is_beaten(point, other) for other in points)}
    front = pareto_front(points)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [points[index][0] for index in front] == sorted(points[index][0] for index in front)


def test_by_hand() -> None:
    # Memory, speed: the second has less memory than the first and is slower; the third is beaten by both.
    assert pareto_front([(21.0, 5.6), (0.56, 5.0), (22.0, 4.0), (21.0, 5.5)]) == (1, 0)
    assert pareto_front([]) == ()
    assert pareto_front([(1.0, 1.0), (1.0, 1.0)]) == (0, 1)
