"""The search, with single choices changed, against every placement of small random steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from torch import nn

from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning.lanes import GroupChoice, LaneRates, Placement
from lowtide.planning.placement import window_bytes
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.planning.search import WORTH_IT, Limits, Search
from lowtide.planning.step_costs import GroupCosts, StepCosts, Use, UseCost
from lowtide.tracing.step_trace import Phase

NUM_BLOCKS = 3
WORDS = ("keep", "recompute")
ENDLESS = 1 << 50


def layout_of(chance: random.Random) -> Layout:
    widths = [chance.choice((32, 64, 96)) for _ in range(NUM_BLOCKS)]
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in widths))
    return lay_out(find_groups(blocks))


def step(chance: random.Random, layout: Layout) -> StepCosts:
    forward: list[Use] = []
    backward: list[Use] = []
    groups = {}
    for spec in layout.groups:
        held = chance.randrange(10_000, 100_000)
        small, seconds = chance.randrange(0, held // 2), chance.uniform(0.002, 0.02)
        costs = {
            "keep": UseCost(device_s=seconds, grown_bytes=held, peak_bytes=held),
            "recompute": UseCost(device_s=seconds, grown_bytes=small, peak_bytes=held),
        }
        forward.append(Use(window=spec.name, groups=(spec.name,), phase=Phase.FORWARD, costs=costs))
        costs = {
            "keep": UseCost(device_s=2 * seconds, grown_bytes=-held, peak_bytes=1_000),
            "recompute": UseCost(device_s=3 * seconds, grown_bytes=-small, peak_bytes=held - small + 1_000),
        }
        backward.insert(0, Use(window=spec.name, groups=(spec.name,), phase=Phase.BACKWARD, costs=costs))
        groups[spec.name] = GroupCosts(
            name=spec.name, kind=0, weight_bytes=spec.nbytes, trained_bytes=spec.nbytes, state_bytes=2 * spec.nbytes,
            num_trained=4, policies=WORDS,
        )  # fmt: skip
    return StepCosts(uses=(*forward, *backward), groups=groups, start_bytes=1_000)


def rates(chance: random.Random) -> LaneRates:
    link, update = chance.uniform(1e6, 2e7), chance.uniform(3e6, 5e7)
    return LaneRates(
        launch_s=0.0,
        window_s=0.0,
        watched_s=0.0,
        finished_s=0.0,
        slowdown_beside_updates=1.0,
        to_device_bytes_per_s=link,
        to_host_bytes_per_s=link,
        host_update_bytes_per_s=update,
        host_update_beside_copies_bytes_per_s=0.7 * update,
        device_update_bytes_per_s=1e9,
    )


def every(layout: Layout, search: Search, limits: Limits) -> list[Placement]:
    """All placements that fit, without more window memory than the least."""
    one = [GroupChoice(weights=weights, site=site, policy=word)
           for weights in (Weights.RESIDENT, Weights.STREAMED)
           for site in (Site.DEVICE, Site.HOST)
           for word in WORDS]  # fmt: skip
    names = [group.name for group in layout.groups]
    found = []
    for choices in itertools.product(one, repeat=NUM_BLOCKS):
        groups = dict(zip(names, choices, strict=True))
        streamed = {name for name, choice in groups.items() if choice.weights is Weights.STREAMED}
        for depth in (0, 1, 2):
            placement = Placement(
                groups=groups,
                schedule=limits.schedule,
                prefetch_depth=depth,
                window_bytes=window_bytes(layout, streamed, depth),
                staging_bytes=0,
            )
            placement = search._staged(placement, limits)
            if search.fits(placement, limits):
                found.append(placement)
    return found


def slower_than_the_best(seed: int) -> float:
    """By which share the search's placement is slower than the fastest of all."""
    chance = random.Random(seed)
    layout = layout_of(chance)
    search = Search(step(chance, layout), layout, rates(chance))
    limits = Limits(
        device_bytes=ENDLESS, host_bytes=ENDLESS, pinned_bytes=ENDLESS, schedule=chance.choice(list(Schedule))
    )
    least = search.device_bytes(search.placement(search.smallest(limits), limits))
    limits = replace(limits, device_bytes=int(least * chance.uniform(1.02, 3.0)))
    best = search.improved(search.fastest(limits).best, limits)
    assert best.device_bytes <= limits.device_bytes
    stays_s = (
        sum(group.weight_bytes for group in search.costs.groups.values()) / search.simulator.rates.to_device_bytes_per_s
    )
    bounded = [
        (search.simulator.least_s(each) - stays_s, number, each)
        for number, each in enumerate(every(layout, search, limits))
    ]
    fastest_s = best.step_s
    for bound_s, _, placement in sorted(bounded, key=lambda entry: entry[:2]):
        if bound_s >= fastest_s:
            break
        fastest_s = min(fastest_s, search.simulator.times(placement).step_s)
    return best.step_s / fastest_s - 1


def test_small_steps_are_near_the_best_of_all_placements() -> None:
    slower = [slower_than_the_best(seed) for seed in range(12)]
    assert max(slower) <= 2 * WORTH_IT, slower


@pytest.mark.slow
def test_two_hundred_small_steps_are_near_the_best_of_all_placements() -> None:
    """All but one are within 0.5% of the fastest, which is what a change must gain; that one is 5% slower. The mean is 0.1%."""
    slower = sorted(slower_than_the_best(seed) for seed in range(200))
    assert slower[-2] <= 2 * WORTH_IT
    assert slower[-1] <= 0.06
    assert sum(slower) / len(slower) <= 0.002
