"""The simulator against closed forms: what bounds a step is known for steps made by hand."""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.hardware import UpdateKind, find_hardware
from lowtide.hardware.rates import HostRates, UpdateRates
from lowtide.planning.lanes import GroupChoice, LaneRates, Placement, update_bytes
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.planning.simulator import Simulator, lane_rates, simulate
from lowtide.planning.step_costs import GroupCosts, StepCosts, Use, UseCost
from lowtide.planning.timeline import Lane
from lowtide.tracing.step_trace import Phase
from tests.planning.plain_simulator import plain_least_s, plainly_simulated

RATES = LaneRates(
    launch_s=0.0,
    window_s=0.0,
    watched_s=0.0,
    finished_s=0.0,
    slowdown_beside_updates=1.0,
    to_device_bytes_per_s=100.0,
    to_host_bytes_per_s=100.0,
    host_update_bytes_per_s=1000.0,
    host_update_beside_copies_bytes_per_s=1000.0,
    device_update_bytes_per_s=1e9,
)
NUM_GROUPS = 6
BYTES = 100


def step(forward_s: float = 10.0, backward_s: float = 20.0, *, num_ops: int = 0, state_bytes: int = 0) -> StepCosts:
    names = [f"g{index}" for index in range(NUM_GROUPS)]

    def use(name: str, phase: Phase, seconds: float) -> Use:
        return Use(window=name, groups=(name,), phase=phase, costs={"keep": UseCost(device_s=seconds, num_ops=num_ops)})

    uses = [use(name, Phase.FORWARD, forward_s) for name in names]
    uses += [use(name, Phase.BACKWARD, backward_s) for name in reversed(names)]
    groups = {
        name: GroupCosts(
            name=name,
            kind=0,
            weight_bytes=BYTES,
            trained_bytes=BYTES,
            state_bytes=state_bytes,
            num_trained=2,
            policies=("keep",),
        )
        for name in names
    }
    return StepCosts(uses=tuple(uses), groups=groups, start_bytes=0)


def place(
    weights: Weights = Weights.STREAMED,
    site: Site = Site.HOST,
    schedule: Schedule = Schedule.IN_BACKWARD,
    *,
    prefetch_depth: int = 1,
    window: int = 2,
    staging: int = NUM_GROUPS,
) -> Placement:
    return Placement(
        groups={f"g{index}": GroupChoice(weights=weights, site=site) for index in range(NUM_GROUPS)},
        schedule=schedule,
        prefetch_depth=prefetch_depth,
        window_bytes=window * BYTES,
        staging_bytes=staging * BYTES,
    )


def test_all_resident_is_the_computation_and_the_updates() -> None:
    costs = step()
    simulated = simulate(costs, place(Weights.RESIDENT, Site.DEVICE), RATES)
    updates_s = NUM_GROUPS * update_bytes(costs.groups["g0"]) / RATES.device_update_bytes_per_s
    assert simulated.step_s == pytest.approx(NUM_GROUPS * 30.0 + updates_s)
    assert simulated.bound_by == "compute"


def test_copies_hide_behind_longer_computation() -> None:
    """A fetch takes 1 s and a group computes for 10 s, so only what no computation precedes is waited for."""
    simulated = simulate(step(), place(), RATES)
    alone = NUM_GROUPS * 30.0
    # Last of a step: the gradient of g0 (1 s), its update (0.3 s), and its fetch (1 s).
    assert simulated.step_s == pytest.approx(alone + 2.3)


def test_without_prefetching_each_fetch_is_waited_for() -> None:
    simulated = simulate(step(), place(prefetch_depth=0, window=1), RATES)
    # Twelve uses; g5 stays between its forward and its backward. The gradient and the update of g0 come besides.
    assert simulated.step_s == pytest.approx(NUM_GROUPS * 30.0 + 11 * 1.0 + 1.3)


def test_a_step_bound_by_copies_takes_their_time() -> None:
    simulated = simulate(step(0.01, 0.01), place(), RATES)
    assert simulated.bound_by == str(Lane.TO_DEVICE)
    fetched_s = (2 * NUM_GROUPS - 2) * 1.0  # the two in the window at the turn stay
    assert fetched_s <= simulated.step_s <= fetched_s + 3.0


def test_a_step_bound_by_the_host_takes_its_updates() -> None:
    costs = step(0.1, 0.1, state_bytes=50 * BYTES)
    simulated = simulate(costs, place(Weights.RESIDENT), RATES)
    busy_s = NUM_GROUPS * update_bytes(costs.groups["g0"]) / RATES.host_update_bytes_per_s
    assert simulated.bound_by == str(Lane.HOST_UPDATE)
    assert busy_s <= simulated.step_s <= busy_s * 1.25


def test_a_group_that_is_called_twice_sends_its_activations_once() -> None:
    costs = step()
    sent = {name: replace(group, stashed_bytes={"keep": 600}) for name, group in costs.groups.items()}
    placement = place(Weights.RESIDENT, Site.DEVICE)
    for times in (1, 2):
        repeated = replace(costs, uses=costs.uses * times, groups=sent)
        found = simulate(repeated, placement, RATES)
        assert found.busy_s[Lane.TO_HOST] == pytest.approx(NUM_GROUPS * 600 / RATES.to_host_bytes_per_s)
        assert found.busy_s[Lane.TO_DEVICE] == pytest.approx(NUM_GROUPS * 600 / RATES.to_device_bytes_per_s)


def test_copies_slow_the_host_down() -> None:
    costs = step(0.1, 0.1, state_bytes=50 * BYTES)
    slower = replace(RATES, host_update_beside_copies_bytes_per_s=500.0)
    assert simulate(costs, place(), slower).step_s > simulate(costs, place(), RATES).step_s * 1.05


def test_a_full_staging_holds_the_backward_up() -> None:
    costs = step(1.0, 1.0, state_bytes=50 * BYTES)
    roomy, tight = (simulate(costs, place(Weights.RESIDENT, staging=room), RATES).step_s for room in (NUM_GROUPS, 1))
    assert tight >= roomy


def test_launches_bound_a_step_of_small_operators() -> None:
    costs = step(1e-6, 1e-6, num_ops=100)
    simulated = simulate(costs, place(Weights.RESIDENT, Site.DEVICE), replace(RATES, launch_s=1e-3))
    assert simulated.step_s == pytest.approx(2 * NUM_GROUPS * 0.1, rel=1e-3)
    assert simulated.bound_by == "launches"


def test_watched_operators_take_the_host_longer() -> None:
    costs = step(1e-6, 1e-6, num_ops=100)
    watched = replace(
        costs,
        uses=tuple(replace(use, costs={"keep": replace(use.costs["keep"], num_watched_ops=10)}) for use in costs.uses),
    )
    rates = replace(RATES, launch_s=1e-3, watched_s=5e-3)
    simulated = simulate(watched, place(Weights.RESIDENT, Site.DEVICE), rates)
    assert simulated.step_s == pytest.approx(2 * NUM_GROUPS * (0.1 + 10 * 5e-3), rel=1e-3)


@pytest.mark.parametrize("site", list(Site)[:2], ids=str)
def test_each_finished_gradient_takes_the_host_a_moment(site: Site) -> None:
    costs = step(1e-6, 1e-6, num_ops=100)
    quick = {"to_host_bytes_per_s": 1e9, "to_device_bytes_per_s": 1e9, "host_update_bytes_per_s": 1e9}
    rates = replace(RATES, launch_s=1e-3, finished_s=2e-3, host_update_beside_copies_bytes_per_s=1e9, **quick)
    with_moments, without = (
        simulate(costs, place(Weights.RESIDENT, site), each).step_s for each in (rates, replace(rates, finished_s=0.0))
    )
    assert with_moments - without == pytest.approx(NUM_GROUPS * 2 * 2e-3, rel=1e-2)


def test_updates_beside_launches_make_them_take_longer() -> None:
    """The worker is busy nearly all the time, so that all launches take twice as long."""
    costs = step(1e-6, 1e-6, num_ops=100, state_bytes=50 * BYTES)
    alone = replace(RATES, launch_s=0.1)
    beside = replace(alone, slowdown_beside_updates=2.0)
    quick = replace(beside, host_update_bytes_per_s=1e9, host_update_beside_copies_bytes_per_s=1e9)
    placement = place(Weights.RESIDENT)
    busy_s = simulate(costs, placement, alone).busy_s[Lane.HOST_UPDATE]
    slower_s = simulate(costs, placement, beside).step_s - simulate(costs, placement, alone).step_s
    assert slower_s == pytest.approx(busy_s / 2, rel=0.1)  # while it works, half as much is launched
    assert simulate(costs, placement, quick).step_s == pytest.approx(2 * NUM_GROUPS * 10.0, rel=0.05)


def test_clipping_makes_updates_wait_for_the_last_gradient() -> None:
    costs = step(state_bytes=50 * BYTES)
    deferred = place(Weights.RESIDENT, schedule=Schedule.DEFERRED)
    clipped = simulate(costs, replace(deferred, is_clipped=True), RATES)
    assert clipped.step_s > simulate(costs, place(Weights.RESIDENT), RATES).step_s


def test_unknown_rates_are_those_of_the_stand_in() -> None:
    assert lane_rates(find_hardware("24GiB"), UpdateKind.EXACT) == lane_rates(
        find_hardware("rtx-4090"), UpdateKind.EXACT
    )


def test_each_kind_of_update_has_a_rate_of_its_own() -> None:
    rates = [lane_rates(find_hardware("h200"), kind).host_update_bytes_per_s for kind in UpdateKind]
    host = find_hardware("h200").host.updates
    assert rates == [host.exact, host.fp32, host.eight_bit, host.torch_fused, host.torch]


def test_lanes_are_as_fast_as_they_were_measured() -> None:
    """Every number of the lanes, each another one, comes from the calibration."""
    card = find_hardware("rtx-4090")
    assert card.rates is not None
    updates = [
        UpdateRates(exact=base, fp32=1.0, eight_bit=1.0, torch_fused=1.0, torch=1.0) for base in (8.0, 9.0, 10.0)
    ]
    host = HostRates(
        launch_s=1.0, window_s=2.0, watched_s=3.0, finished_s=4.0, slowdown_beside_updates=5.0, updates=updates[0],
        updates_beside_copies=updates[1],
    )  # fmt: skip
    device = replace(card.rates, to_device_bytes_per_s=6.0, to_host_bytes_per_s=7.0, updates=updates[2])
    found = lane_rates(replace(card, host=host, measured=device), UpdateKind.EXACT)
    assert astuple(found) == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)


@given(
    forward_s=st.floats(0.001, 20),
    backward_s=st.floats(0.001, 20),
    state_bytes=st.integers(0, 60 * BYTES),
    weights=st.sampled_from([Weights.RESIDENT, Weights.STREAMED]),
    site=st.sampled_from([Site.HOST, Site.DEVICE]),
    schedule=st.sampled_from(list(Schedule)),
    window=st.integers(1, NUM_GROUPS),
    staging=st.integers(1, NUM_GROUPS),
    depth=st.integers(0, 2),
)
def test_no_step_is_faster_than_its_lanes(
    forward_s: float,
    backward_s: float,
    state_bytes: int,
    weights: Weights,
    site: Site,
    schedule: Schedule,
    window: int,
    staging: int,
    depth: int,
) -> None:
    costs = step(forward_s, backward_s, state_bytes=state_bytes)
    placement = place(weights, site, schedule, prefetch_depth=depth, window=window, staging=staging)
    simulated = simulate(costs, placement, RATES)
    # What stays in the window is not fetched again, so at most the window's bytes are missing in the bound.
    stays_s = min(window, NUM_GROUPS) * BYTES / RATES.to_device_bytes_per_s
    assert simulated.step_s >= Simulator(costs, RATES).least_s(placement) - stays_s - 1e-9
    for lane in Lane:
        spans = sorted(
            (span for span in simulated.timeline.spans if span.lane is lane),
            key=lambda span: (span.start_s, span.end_s),
        )
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(spans))


def random_step(chance: random.Random) -> StepCosts:
    """Uses of one group, of several, and of none, as the loss is; some groups are used by two windows, or not trained."""
    names = ["", *(f"g{index}" for index in range(chance.randrange(1, 9)))]
    windows = [(name,) for name in names if name] + [
        tuple(chance.sample(names, chance.randrange(min(3, len(names))))) for _ in range(chance.randrange(3))
    ]

    def use(number: int, groups: tuple[str, ...], phase: Phase) -> Use:
        costs = {
            word: UseCost(
                device_s=chance.choice((0.0, chance.uniform(0.001, 2.0))),
                num_ops=chance.randrange(100),
                num_watched_ops=chance.randrange(10),
            )
            for word in ("keep", "offload")
        }
        return Use(window=groups[0] if groups else f"w{number}", groups=groups, phase=phase, costs=costs)

    forward = [use(number, groups, Phase.FORWARD) for number, groups in enumerate(windows)]
    backward = [use(number, groups, Phase.BACKWARD) for number, groups in enumerate(reversed(windows))]
    groups = {
        name: GroupCosts(
            name=name,
            kind=0,
            weight_bytes=chance.randrange(1, 3 * BYTES),
            trained_bytes=chance.choice((0, chance.randrange(1, 3 * BYTES))),
            state_bytes=chance.randrange(6 * BYTES),
            num_trained=chance.randrange(4),
            policies=("keep", "offload"),
            stashed_bytes={"offload": chance.randrange(BYTES)},
        )
        for name in names
    }
    return StepCosts(uses=(*forward, *backward), groups=groups, start_bytes=0)


def random_placement(chance: random.Random, costs: StepCosts) -> Placement:
    largest = max(group.weight_bytes for group in costs.groups.values())
    return Placement(
        groups={
            name: GroupChoice(
                weights=chance.choice((Weights.RESIDENT, Weights.STREAMED)),
                site=chance.choice((Site.HOST, Site.DEVICE)),
                policy=chance.choice(group.policies),
            )
            for name, group in costs.groups.items()
        },
        schedule=chance.choice(list(Schedule)),
        prefetch_depth=chance.randrange(4),
        window_bytes=int(largest * chance.uniform(0.5, 4)),
        staging_bytes=int(largest * chance.uniform(0.5, 4)),
        is_clipped=chance.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_same_to_the_bit_as_told_plainly(seed: int) -> None:
    chance = random.Random(seed)
    costs = random_step(chance)
    rates = LaneRates(
        launch_s=chance.choice((0.0, 1e-4, 1e-2)),
        window_s=1e-3,
        watched_s=1e-3,
        finished_s=2e-3,
        slowdown_beside_updates=chance.uniform(1.0, 2.0),
        to_device_bytes_per_s=chance.uniform(50, 500),
        to_host_bytes_per_s=chance.uniform(50, 500),
        host_update_bytes_per_s=chance.uniform(200, 5000),
        host_update_beside_copies_bytes_per_s=chance.uniform(100, 200),
        device_update_bytes_per_s=1e6,
    )
    simulator = Simulator(costs, rates)
    for _ in range(20):
        placement = random_placement(chance, costs)
        plain = plainly_simulated(costs, placement, rates)
        assert simulator.step(placement) == plain
        assert simulator.times(placement) == plain.times
        assert simulator.least_s(placement) == plain_least_s(costs, placement, rates)
