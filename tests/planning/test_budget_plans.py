"""Plans that fill a device: by a fixed share, or after an observed step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.config import from_plain, to_plain
from lowtide.errors import ConfigError, PlanError
from lowtide.memory.chunk import Layout
from lowtide.planning.budget_plans import (
    MonitorMode,
    StaticPartition,
    StepSample,
    WarmUp,
    partition,
    plan_after,
    warm_up_plan,
)
from lowtide.planning.placement import (
    by_first_use,
    check_plan,
    group_sizes,
    largest_window,
    window_bytes,
)
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from tests.memory.small_layouts import group, layout, random_layouts
from tests.planning.chunk_bytes import ChunkBytes, chunk_bytes_on_device

KB = 1024
MODEL = layout(*(group(f"layers.{index}", [KB]) for index in range(8)), group("", [512]))


def resident(plan: Plan) -> list[str]:
    return [spec.name for spec in plan.groups if spec.weights is Weights.RESIDENT]


def by_share(share: float, schedule: Schedule = Schedule.DEFERRED) -> Plan:
    config = StaticPartition(share=share, schedule=schedule)
    return partition(MODEL, 64 * KB, config, state_bytes_per_parameter_byte=2)


def test_turning_the_share_changes_the_bytes() -> None:
    # Windows take 2 KiB, a resident layer 4 KiB with gradient and state, the rest 2 KiB; a share of 64 KiB.
    assert resident(by_share(0.05)) == []
    assert resident(by_share(0.0625)) == [""]
    assert resident(by_share(0.125)) == ["layers.0", ""]
    assert resident(by_share(0.25)) == ["layers.0", "layers.1", "layers.2", ""]
    quarter, half = (
        chunk_bytes_on_device(MODEL, by_share(share), state_bytes_per_parameter_byte=2) for share in (0.25, 0.5)
    )
    assert quarter == ChunkBytes(
        resident_bytes=3 * KB + 512, window_bytes=2 * KB, gradient_bytes=3 * KB + 512, state_bytes=7 * KB
    )
    assert (quarter.total_bytes, half.total_bytes) == (16 * KB, 31 * KB)
    assert len(resident(by_share(1.0))) == 9


def test_gradients_that_do_not_stay_leave_room_for_more() -> None:
    assert len(resident(by_share(0.5, Schedule.IN_BACKWARD))) > len(resident(by_share(0.5)))


def test_resident_groups_are_updated_on_the_device_and_streamed_ones_on_the_host() -> None:
    for spec in by_share(0.25).groups:
        assert set(spec.sites) == {Site.DEVICE if spec.weights is Weights.RESIDENT else Site.HOST}


def test_a_share_that_cannot_hold_the_windows() -> None:
    with pytest.raises(PlanError, match=r"a share of 0.03 of 64.0 KiB is 1.9 KiB, .* need 2.5 KiB .*'layers.0' alone"):
        by_share(0.03)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan")])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ConfigError, match=f"share is {share}; give a share of the device above 0"):
        StaticPartition(share=share)


def test_a_depth_that_is_none() -> None:
    with pytest.raises(ConfigError, match="prefetch_depth is -1"):
        StaticPartition(share=0.5, prefetch_depth=-1)


@given(
    random_layouts(),
    st.integers(0, 100_000),
    st.floats(0.01, 1),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.3, 2.0, 4.0]),
    st.sampled_from(Schedule),
)
def test_never_over_the_share_and_not_a_group_too_few(
    made: Layout, device_bytes: int, share: float, depth: int, state: float, schedule: Schedule
) -> None:
    config = StaticPartition(share=share, prefetch_depth=depth, schedule=schedule)

    def plan_for(room_bytes: int) -> Plan:
        return partition(made, room_bytes, config, state_bytes_per_parameter_byte=state)

    if window_bytes(made, [spec.name for spec in made.groups], depth) > config.chunk_room_bytes(device_bytes):
        with pytest.raises(PlanError, match="the windows of streamed groups need"):
            plan_for(device_bytes)
        return
    plan = plan_for(device_bytes)
    check_plan(plan, made)
    used = chunk_bytes_on_device(made, plan, state_bytes_per_parameter_byte=state).total_bytes
    assert used <= config.chunk_room_bytes(device_bytes)
    order = by_first_use(made)
    chosen = set(resident(plan))
    assert chosen == set(order[: len(chosen)])
    assert chosen <= set(resident(plan_for(2 * device_bytes)))


DEVICE_BYTES = 100 * KB


def sample(used: int, chunk: int = 0, number: int = 0) -> StepSample:
    return StepSample(number=number, group="layers.0", phase="forward", used_bytes=used, chunk_bytes=chunk)


def after(*samples: StepSample, config: WarmUp = WarmUp(), **settings: Any) -> Plan:  # noqa: B008 - frozen
    settings = {"state_bytes_per_parameter_byte": 2.0} | settings
    return plan_after(MODEL, samples, config, DEVICE_BYTES, **settings)


def bytes_of(plan: Plan) -> ChunkBytes:
    return chunk_bytes_on_device(MODEL, plan, state_bytes_per_parameter_byte=2)


def num_resident(plan: Plan) -> int:
    return sum(spec.weights is Weights.RESIDENT for spec in plan.groups)


def num_on_device(plan: Plan) -> int:
    return sum(site is Site.DEVICE for spec in plan.groups for site in spec.sites)


class TestTheObservedStep:
    def test_all_is_streamed_and_the_hosts(self) -> None:
        plan = warm_up_plan(MODEL, WarmUp(), DEVICE_BYTES)
        assert num_resident(plan) == 1, "the rest, which is always open"
        assert num_on_device(plan) == 0
        check_plan(plan, MODEL)

    def test_the_warm_up_share_is_what_chunks_may_use(self) -> None:
        for share in (0.1, 0.3):
            plan = warm_up_plan(MODEL, WarmUp(warm_up_share=share), DEVICE_BYTES)
            assert bytes_of(plan).total_bytes == int(share * int(0.9 * DEVICE_BYTES))

    def test_the_largest_window_always_has_room(self) -> None:
        assert warm_up_plan(MODEL, WarmUp(warm_up_share=0), DEVICE_BYTES).budgets.window_bytes == KB

    def test_budgets_are_shares_of_what_there_is(self) -> None:
        plan = warm_up_plan(MODEL, WarmUp(device_share=0.5, host_share=0.25), DEVICE_BYTES, host_bytes=80 * KB)
        assert (plan.budgets.device_bytes, plan.budgets.host_bytes) == (50 * KB, 20 * KB)

    def test_a_device_that_is_too_small(self) -> None:
        with pytest.raises(
            PlanError, match=r"budget of 1.3 KiB \(0.9 of 1.5 KiB\) cannot hold 1.5 KiB: 1.0 KiB .*'layers.0'"
        ) as caught:
            warm_up_plan(MODEL, WarmUp(), KB + 512)
        assert caught.value.needed_bytes == KB + 512


class TestThePlanAfterwards:
    def test_what_was_seen_stays_free(self) -> None:
        # Room 90 KiB less what was no chunk; the model's weights are 8.5 KiB.
        assert num_resident(after(sample(10 * KB))) == 9
        fuller = after(sample(10 * KB), sample(90 * KB, 6 * KB, number=1), sample(20 * KB, number=2))
        # 6 KiB left: the rest, two layers in windows, three more.
        assert num_resident(fuller) == 4
        assert bytes_of(fuller).total_bytes + 84 * KB <= 90 * KB

    def test_the_device_share(self) -> None:
        assert num_resident(after(sample(84 * KB), config=WarmUp(device_share=1.0))) == 9
        assert num_resident(after(sample(84 * KB), config=WarmUp(device_share=0.9))) == 4

    def test_the_margin_share(self) -> None:
        # Margin: 90 - 60 - 8.5 KiB; a layer's gradient and state are 3 KiB.
        for share, expected in ((0.0, 0), (0.5, 3), (0.8, 5), (1.0, 7)):
            plan = after(sample(60 * KB), config=WarmUp(margin_share=share))
            assert num_on_device(plan) == expected
            assert bytes_of(plan).state_bytes == 2 * KB * expected

    def test_the_host_share(self) -> None:
        for share in (0.5, 0.8):
            plan = after(sample(0), config=WarmUp(host_share=share), host_bytes=1000)
            assert plan.budgets.host_bytes == int(1000 * share)

    def test_the_monitor_mode_decides_what_is_seen(self) -> None:
        # In a module that rises from 20 to 84 KiB and falls again, boundaries see 20 and peaks see 84.
        seen = {MonitorMode.BOUNDARIES: sample(20 * KB), MonitorMode.PEAKS: sample(84 * KB)}
        found = {mode: bytes_of(after(seen[mode], config=WarmUp(monitor=mode))).total_bytes for mode in MonitorMode}
        assert found[MonitorMode.PEAKS] < found[MonitorMode.BOUNDARIES]

    def test_in_backward_more_is_updated_on_the_device(self) -> None:
        deferred, in_backward = (
            num_on_device(after(sample(60 * KB), config=WarmUp(schedule=schedule))) for schedule in Schedule
        )
        assert in_backward > deferred

    def test_prefetch_gives_way_before_the_plan_fails(self) -> None:
        assert after(sample(88 * KB), config=WarmUp(prefetch_depth=3)).prefetch_depth == 0
        assert after(sample(87 * KB), config=WarmUp(prefetch_depth=3)).prefetch_depth == 1
        with pytest.raises(PlanError, match="1.0 KiB of weights .* and 89.0 KiB that were no chunks at the fullest"):
            after(sample(89 * KB))

    def test_without_samples(self) -> None:
        with pytest.raises(PlanError, match="no samples of a warm-up step"):
            after()

    def test_more_chunks_than_use_is_nothing_else(self) -> None:
        assert sample(5, 9).other_bytes == 0


samples = st.builds(
    StepSample,
    number=st.integers(0, 99),
    group=st.just("layers.0"),
    phase=st.sampled_from(["forward", "backward"]),
    used_bytes=st.integers(0, 60_000),
    chunk_bytes=st.integers(0, 20_000),
)
shares = st.floats(0.01, 1)
configs = st.builds(
    WarmUp, warm_up_share=shares, device_share=shares, margin_share=shares, prefetch_depth=st.integers(0, 3)
)


def least_bytes(made: Layout) -> int:
    """What no plan can do without: the groups that are always open, and the largest window."""
    always = {spec.name for spec in made.groups if "" in spec.modules}
    sizes = group_sizes(made)
    return sum(sizes[name] for name in always) + largest_window(made, sizes.keys() - always)[1]


@settings(max_examples=150)
@given(
    random_layouts(),
    st.lists(samples, min_size=1, max_size=5),
    configs,
    st.integers(0, 200_000),
    st.sampled_from([0.0, 0.3, 2.0, 4.0]),
    st.sampled_from(Schedule),
)
def test_never_over_the_quota(
    made: Layout, seen: list[StepSample], config: WarmUp, device_bytes: int, state: float, schedule: Schedule
) -> None:
    config = replace(config, schedule=schedule)
    other = max(moment.other_bytes for moment in seen)
    quota = config.quota_bytes(device_bytes)

    def make() -> Plan:
        return plan_after(made, seen, config, device_bytes, state_bytes_per_parameter_byte=state)

    if least_bytes(made) + other > quota:
        with pytest.raises(PlanError, match="that were no chunks at the fullest point of the step"):
            make()
        return
    plan = make()
    check_plan(plan, made)
    found = chunk_bytes_on_device(made, plan, state_bytes_per_parameter_byte=state)
    assert found.total_bytes + other <= quota
    margin = quota - other - found.resident_bytes - found.window_bytes
    assert found.gradient_bytes + found.state_bytes <= config.margin_share * margin


@given(random_layouts(), configs, st.integers(0, 200_000))
def test_the_observed_step_is_within_the_quota(made: Layout, config: WarmUp, device_bytes: int) -> None:
    if least_bytes(made) > config.quota_bytes(device_bytes):
        with pytest.raises(PlanError, match="cannot hold"):
            warm_up_plan(made, config, device_bytes)
        return
    plan = warm_up_plan(made, config, device_bytes)
    check_plan(plan, made)
    found = chunk_bytes_on_device(made, plan, state_bytes_per_parameter_byte=2)
    assert found.total_bytes <= config.quota_bytes(device_bytes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warm_up_share": -0.1}, "warm_up_share is -0.1; give a share from 0 to 1"),
        ({"device_share": 0.0}, "device_share is 0.0; give a share above 0 to 1"),
        ({"host_share": 1.5}, "host_share is 1.5"),
        ({"margin_share": float("nan")}, "margin_share is nan"),
        ({"prefetch_depth": -1}, "prefetch_depth is -1"),
        ({"cached_buffers": -1}, "cached_buffers is -1"),
        ({"defragment_every": -1}, "defragment_every is -1"),
        ({"device_memory": "much"}, "much"),
        ({"host_memory": "much"}, "much"),
    ],
)
def test_shares_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WarmUp(**settings)


def test_the_config_is_plain_data() -> None:
    config = replace(WarmUp(), monitor=MonitorMode.BOUNDARIES)
    assert from_plain(WarmUp, to_plain(config)) == config
