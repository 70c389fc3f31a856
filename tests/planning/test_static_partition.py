"""Static partition: the share is used, never exceeded, and turning it changes the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError, PlanError
from lowtide.memory.layout_types import Layout
from lowtide.planning.check_plan import check_plan
from lowtide.planning.placement import ChunkBytes, by_first_use, chunk_bytes_on_device
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.planning.static_partition import StaticPartition, partition
from lowtide.planning.window_need import window_bytes
from tests.memory.small_layouts import group, layout, random_layouts

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
