"""The search against brute force on a small step, and what must hold for every budget."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.activations.policy import policy_of
from lowtide.errors import PlanError
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning.improve import Arrangement
from lowtide.planning.lanes import LaneRates
from lowtide.planning.placement import assemble
from lowtide.planning.plan import Budgets, Schedule, Site
from lowtide.planning.search import LADDERS, WORTH_IT, Limits, Search, Shape
from lowtide.planning.step_costs import POLICIES, PRICED, GroupCosts, StepCosts, Use, UseCost
from lowtide.tracing.step_trace import Phase

NUM_BLOCKS = 5
RATES = LaneRates(
    launch_s=0.0,
    window_s=0.0,
    watched_s=0.0,
    finished_s=0.0,
    slowdown_beside_updates=1.0,
    to_device_bytes_per_s=4e6,
    to_host_bytes_per_s=4e6,
    host_update_bytes_per_s=6e6,
    host_update_beside_copies_bytes_per_s=4e6,
    device_update_bytes_per_s=1e9,
)
ENDLESS = 1 << 50


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def layout() -> Layout:
    return lay_out(find_groups(Stack()))


@pytest.fixture(scope="module")
def costs(layout: Layout) -> StepCosts:
    held = dict(zip(PRICED, (60_000, 30_000, 8_000, 0, 2_000), strict=True))
    again_s = dict(zip(PRICED, (0.0, 0.002, 0.006, 0.007, 0.001), strict=True))
    names = [group.name for group in layout.groups]
    forward = [
        Use(
            window=name,
            groups=(name,),
            phase=Phase.FORWARD,
            costs={word: UseCost(device_s=0.01, grown_bytes=held[word], peak_bytes=held[word]) for word in PRICED},
        )
        for name in names
    ]
    backward = [
        Use(
            window=name,
            groups=(name,),
            phase=Phase.BACKWARD,
            costs={
                word: UseCost(device_s=0.02 + again_s[word], grown_bytes=-held[word], peak_bytes=60_000 - held[word])
                for word in PRICED
            },
        )
        for name in reversed(names)
    ]
    groups = {
        group.name: GroupCosts(
            name=group.name,
            kind=0,
            weight_bytes=group.nbytes,
            trained_bytes=group.nbytes,
            state_bytes=2 * group.nbytes,
            num_trained=2,
            policies=POLICIES,
            stashed_bytes={"offload": 8_000, "offload/all": 52_000},
        )
        for group in layout.groups
    }
    return StepCosts(uses=(*forward, *backward), groups=groups, start_bytes=1_000)


def limits(device_bytes: int, schedule: Schedule = Schedule.IN_BACKWARD, **others: int) -> Limits:
    sizes = {"host_bytes": ENDLESS, "pinned_bytes": ENDLESS} | others
    return Limits(device_bytes=device_bytes, schedule=schedule, **sizes)


def floor(search: Search) -> int:
    return search.device_bytes(search.placement(search.smallest(limits(ENDLESS)), limits(ENDLESS)))


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("share", [1.05, 1.3, 1.7, 2.5, 4.0])
def test_within_the_best_of_all_shapes(layout: Layout, costs: StepCosts, schedule: Schedule, share: float) -> None:
    search = Search(costs, layout, RATES)
    allowed = limits(int(floor(search) * share), schedule)
    counts = range(search.num_groups + 1)
    every = [
        Shape(num_resident=resident, num_device=device, small=small, fast=fast, num_fast=num_fast, prefetch_depth=depth)
        for resident, device, (small, fast), num_fast, depth in itertools.product(
            counts, counts, LADDERS, counts, (0, 1)
        )
    ]
    fitting = [shape for shape in every if search.fits(search.placement(shape, allowed), allowed)]
    best_s = min(search.evaluate(shape, allowed).step_s for shape in fitting)
    found = search.fastest(allowed)
    assert found.best.device_bytes <= allowed.device_bytes
    assert found.best.step_s <= best_s * 1.02 + 1e-12


def test_more_memory_is_never_slower(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    least = floor(search)
    times = [search.fastest(limits(int(least * share))).best.step_s for share in (1.01, 1.2, 1.5, 2, 3, 4, 6, 10)]
    assert all(later <= earlier * (1 + WORTH_IT) for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0]


def test_a_mixed_placement_beats_every_uniform_one(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    found = search.fastest(limits(int(floor(search) * 1.7)))
    assert found.uniform
    assert found.best.step_s < found.uniform[0].step_s


def test_with_all_the_memory_nothing_is_computed_twice(layout: Layout, costs: StepCosts) -> None:
    best = Search(costs, layout, RATES).fastest(limits(ENDLESS)).best
    assert {choice.policy for choice in best.placement.groups.values()} == {"keep"}


def test_what_does_not_fit_the_device_says_the_least(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    with pytest.raises(
        PlanError, match="no plan fits .* of device memory: .* takes about .*; give at least that"
    ) as caught:
        search.fastest(limits(floor(search) // 2))
    assert caught.value.needed_bytes == floor(search)


def test_what_does_not_fit_the_host_says_so(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    with pytest.raises(PlanError, match="no plan fits .* of host memory"):
        search.fastest(limits(int(floor(search) * 1.01), host_bytes=1_000))


def test_a_correction_counts_against_the_budget(layout: Layout, costs: StepCosts) -> None:
    plain = Search(costs, layout, RATES)
    corrected = Search(costs, layout, RATES, correction_bytes=12_345)
    shape = Shape(num_resident=2, num_device=1, small="recompute", fast="keep", num_fast=2)
    bytes_of = [search.device_bytes(search.placement(shape, limits(ENDLESS))) for search in (plain, corrected)]
    assert bytes_of[1] - bytes_of[0] == 12_345


def test_only_allowed_policies_are_used(layout: Layout, costs: StepCosts) -> None:
    search = Search(costs, layout, RATES)
    allowed = Limits(device_bytes=ENDLESS, host_bytes=ENDLESS, pinned_bytes=ENDLESS, policies=("recompute",))
    assert {choice.policy for choice in search.fastest(allowed).best.placement.groups.values()} == {"recompute"}


@pytest.mark.parametrize("share", [1.05, 1.7, 4.0])
def test_a_plan_made_of_a_placement_takes_its_time(layout: Layout, costs: StepCosts, share: float) -> None:
    search = Search(costs, layout, RATES)
    allowed = limits(int(floor(search) * share))
    best = search.fastest(allowed).best
    choices = best.placement.groups
    plan = assemble(
        layout,
        weights={name: choice.weights for name, choice in choices.items()},
        sites={chunk.name: choices[chunk.group].site for chunk in layout.chunks},
        schedule=allowed.schedule,
        prefetch_depth=best.shape.prefetch_depth,
        activations={name: policy_of(choice.policy) for name, choice in choices.items()},
        budgets=Budgets(),
    )
    assert search.simulate(plan, allowed).step_s == best.step_s


@pytest.mark.parametrize("share", [1.01, 1.2, 1.6])
@pytest.mark.parametrize("host_bytes", [ENDLESS, 160_000])
def test_near_the_best_of_all_policies_block_by_block(
    layout: Layout, costs: StepCosts, share: float, host_bytes: int
) -> None:
    """Segments and what waits on the host among them; without host memory for activations segments are what is left."""
    search = Search(costs, layout, RATES)
    least = min(
        search.device_bytes(search.placement(shape, limits(ENDLESS)))
        for shape in (everywhere("recompute/4"), everywhere("offload"))
    )
    allowed = limits(int(least * share) + 100_000, host_bytes=host_bytes, pinned_bytes=host_bytes)
    fixed = search.placement(everywhere("keep"), allowed)
    every = [
        search._placed(
            Arrangement(
                tuple(replace(choice, policy=word) for choice, word in zip(fixed.groups.values(), words, strict=True)),
                0,
            ),
            allowed,
        )
        for words in itertools.product(
            ("keep", "offload/all", "recompute", "recompute/2", "offload"), repeat=NUM_BLOCKS
        )
    ]
    fitting = [placement for placement in every if search.fits(placement, allowed)]
    best_s = min(search.simulator.times(placement).step_s for placement in fitting)
    found = search.improved(search.fastest(allowed).best, allowed)
    assert search.fits(found.placement, allowed)
    assert found.step_s <= best_s * (1 + 4 * WORTH_IT)


def everywhere(word: str) -> Shape:
    """All resident, updated on the device."""
    return Shape(num_resident=NUM_BLOCKS, num_device=NUM_BLOCKS, small=word, fast=word, num_fast=0)


@pytest.mark.parametrize("share", [1.05, 1.3, 1.7])
@pytest.mark.parametrize("places", list(itertools.product((Site.DEVICE, Site.HOST), repeat=2)))
def test_sites_that_are_given_are_kept(
    layout: Layout, costs: StepCosts, share: float, places: tuple[Site, Site]
) -> None:
    """The first blocks and the last one are updated where it is said; all the rest is tried by brute force."""
    names = [group.name for group in layout.groups]
    given = {name: places[name == names[-1]] for name in names}
    search = Search(costs, layout, RATES)
    everywhere = replace(limits(ENDLESS), sites=given)
    least = search.device_bytes(search.placement(search.smallest(everywhere), everywhere))
    within = replace(everywhere, device_bytes=int(least * share))
    start = search.fastest(within).best
    for found in (start, search.improved(start, within)):
        assert {name: choice.site for name, choice in found.placement.groups.items()} == given
    shapes = [
        Shape(num_resident=resident, num_device=0, small=small, fast=fast, num_fast=num_fast, prefetch_depth=depth)
        for resident, num_fast in itertools.product(range(NUM_BLOCKS + 1), repeat=2)
        for small, fast in LADDERS
        for depth in (0, 1)
    ]
    fitting = [shape for shape in shapes if search.fits(search.placement(shape, within), within)]
    best_s = min(search.evaluate(shape, within).step_s for shape in fitting)
    assert search.improved(start, within).step_s <= best_s * 1.02 + 1e-12
