"""The budget curve against all shapes of a small step, and its ends against the replay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lowtide.memory.chunk import Layout
from lowtide.planning.budget_curve import BudgetPoint, CurveSource, budget_curve, worthwhile
from lowtide.planning.search import LADDERS, WORTH_IT, Candidate, Limits, Search, Shape
from lowtide.planning.step_costs import StepCosts
from tests.planning.test_search import ENDLESS, RATES, costs, floor, layout, limits

__all__ = ["costs", "layout"]  # fixtures
GAP_BYTES = 20_000
"""What this allocator holds beyond tensors."""


class Source:
    """A source whose replays say what a step really takes, and count."""

    def __init__(self, costs: StepCosts, layout: Layout, device_bytes: int | None, host_bytes: int = ENDLESS) -> None:
        self.search = Search(costs, layout, RATES)
        self.num_replays = 0
        within = limits(device_bytes or ENDLESS, host_bytes=host_bytes)
        smallest = self.search.evaluate(self.search.smallest(within), within)
        self.source = CurveSource(
            search=self.search,
            gaps=0.05,
            limits=within,
            best=smallest,
            best_bytes=self.reserved(smallest),
            device_bytes=device_bytes,
            replay=self.replay,  # type: ignore[arg-type]  # the part of a trace that is read
        )

    def reserved(self, candidate: Candidate) -> int:
        return self.search.device_bytes(candidate.placement) + GAP_BYTES

    def replay(self, candidate: Candidate, within: Limits) -> SimpleNamespace:
        self.num_replays += 1
        host_bytes, pinned_bytes = self.search.host_bytes(candidate.placement)
        return SimpleNamespace(
            peak_reserved_bytes=self.reserved(candidate), host_bytes=host_bytes, pinned_bytes=pinned_bytes
        )


def test_no_point_is_far_from_the_fastest_of_all_shapes(layout: Layout, costs: StepCosts) -> None:
    made = Source(costs, layout, None)
    points = budget_curve(made.source)
    counts = range(made.search.num_groups + 1)
    every = [
        Shape(num_resident=resident, num_device=device, small=small, fast=fast, num_fast=num_fast, prefetch_depth=depth)
        for resident, device, (small, fast), num_fast, depth in itertools.product(
            counts, counts, LADDERS, counts, (0, 1)
        )
    ]
    simulated = [made.search.evaluate(shape, made.source.limits) for shape in every]
    assert made.num_replays == 2
    assert len(points) > 4
    for point in points:
        fitting = [each.step_s for each in simulated if made.reserved(each) <= point.budget_bytes]
        assert min(fitting) <= point.step_s <= min(fitting) * 1.05
    # Estimated or replayed, a budget is what the allocator takes.
    assert all(point.budget_bytes == made.reserved(point.candidate) for point in points)
    assert points[0].is_replayed
    assert points[0].budget_bytes == pytest.approx(floor(made.search) + GAP_BYTES, rel=0.08)
    assert points[-1].step_s <= min(each.step_s for each in simulated) * (1 + 2 * WORTH_IT)
    assert all(later.step_s < earlier.step_s for earlier, later in itertools.pairwise(points))


def test_no_point_is_beyond_the_device(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    device_bytes = int(1.5 * floor(search))
    points = budget_curve(Source(costs, layout, device_bytes).source)
    assert max(point.budget_bytes for point in points) <= device_bytes
    assert len(points) > 1


def test_a_short_host_keeps_more_on_the_device(layout: Layout, costs: StepCosts) -> None:
    endless = Source(costs, layout, None)
    streamed = endless.search.placement(endless.search.smallest(endless.source.limits), endless.source.limits)
    host_bytes = endless.search.host_bytes(streamed)[0] // 2
    short = Source(costs, layout, None, host_bytes=host_bytes)
    best = short.search.fastest(short.source.limits).best
    points = budget_curve(replace(short.source, best=best, best_bytes=short.reserved(best)))
    assert points[0].budget_bytes > budget_curve(endless.source)[0].budget_bytes
    assert len(points) > 1
    assert all(short.search.host_bytes(point.candidate.placement)[0] <= host_bytes for point in points)


def test_what_gains_nothing_is_left_out(layout: Layout, costs: StepCosts) -> None:
    one = Source(costs, layout, None).source.best
    later = [BudgetPoint(budget_bytes=size, candidate=one, is_replayed=False) for size in (3, 1, 2)]
    assert [point.budget_bytes for point in worthwhile(later)] == [1]


def test_of_two_at_nearly_one_budget_the_faster_stands_unless_the_other_was_replayed(
    layout: Layout, costs: StepCosts
) -> None:
    made = Source(costs, layout, None)
    slow, fast = made.source.best, made.search.fastest(made.source.limits).best
    for is_replayed, expected in ((False, [1005]), (True, [1000, 1005])):
        first = BudgetPoint(budget_bytes=1000, candidate=slow, is_replayed=is_replayed)
        second = BudgetPoint(budget_bytes=1005, candidate=fast, is_replayed=False)
        assert [point.budget_bytes for point in worthwhile([second, first])] == expected
