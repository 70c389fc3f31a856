"""What is read off the points of a sweep."""

from __future__ import annotations

from lowtide.lab.budget import BudgetPoint, not_monotone, pareto, reversals
from lowtide.units import GiB


def point(budget: float, peak: float, recomputed: float = 0.0) -> BudgetPoint:
    return BudgetPoint(
        budget=budget,
        saved_bytes=0,
        peak_bytes=round(peak * GiB),
        unfused_peak_bytes=0,
        recomputed_flops_share=recomputed,
        seconds=1.0,
    )


def test_a_peak_that_falls_with_the_budget_is_monotone() -> None:
    assert not_monotone([point(0, 1), point(0.5, 2), point(1, 2)]) == []
    assert not_monotone([point(0.5, 2)]) == []
    assert not_monotone([]) == []


def test_each_stretch_of_rises_is_told_once_from_end_to_end() -> None:
    points = [point(0.0, 9), point(0.25, 5), point(0.5, 4), point(0.75, 3), point(0.8, 6), point(1.0, 7)]
    rises = not_monotone(reversed(points))
    assert [(rise.high.budget, rise.low.budget) for rise in rises] == [(0.75, 0.0)]
    assert rises[0].words == "from budget 0.75 down to 0 the peak rises from 3,072.0 to 9,216.0 MiB"


def test_stretches_with_a_fall_between_them_are_two() -> None:
    points = [point(0.0, 5), point(0.2, 4), point(0.4, 6), point(0.6, 5), point(1.0, 8)]
    assert [(rise.high.budget, rise.low.budget) for rise in not_monotone(points)] == [(0.6, 0.4), (0.2, 0.0)]


def test_pareto_keeps_what_nothing_else_beats() -> None:
    points = [point(0, 6, 1.0), point(0.1, 3, 0.9), point(0.5, 4, 0.4), point(0.6, 5, 0.4), point(1, 8, 0.0)]
    assert [kept.budget for kept in pareto(points)] == [0.1, 0.5, 1]


def test_pareto_against_the_definition() -> None:
    points = [point(i / 20, (i * 7) % 5, ((i * 11) % 6) / 6) for i in range(20)]

    figures = [(one.peak_bytes, one.recomputed_flops_share) for one in points]

    def is_beaten(one: tuple[int, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in figures)

    assert {(kept.peak_bytes, kept.recomputed_flops_share) for kept in pareto(points)} == {
        one for one in figures if not is_beaten(one)
    }


def test_a_smaller_budget_with_a_larger_peak_is_found_and_said() -> None:
    found = reversals([point(0.6, 15.0), point(0.05, 13.5), point(0.1, 13.25), point(0.3, 13.0)])
    assert [reversal.point.budget for reversal in found] == [0.05, 0.1]
    assert found[0].words == (
        "Budget 0.05 has a larger peak, 13.500 GiB, than budget 0.3 with 13.000 GiB: 512.0 MiB more (static)."
    )


def test_equal_peaks_are_no_reversal() -> None:
    assert reversals([point(0.1, 5.0), point(0.5, 5.0)]) == ()
