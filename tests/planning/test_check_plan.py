"""Plans that do not fit are refused, with what differs or what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import PlanError
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.placement import check_plan
from lowtide.planning.plan import Budgets
from tests.memory.small_layouts import group, layout

KB = 1024
MODEL = layout(
    group("embedding", [4 * KB]),
    group("layers.0", [2 * KB, KB]),
    group("layers.1", [2 * KB, KB]),
    group("", [512]),
    chunk_bytes=2 * KB,
)
PLAN = make_plan(MODEL, prefetch_depth=0)


def test_a_plan_for_this_model() -> None:
    check_plan(PLAN, MODEL)


def test_a_changed_parameter() -> None:
    frozen = layout(*MODEL.groups[:-1], group("", [512], frozen=(0,)), chunk_bytes=2 * KB)
    with pytest.raises(PlanError, match=f"fingerprint is {MODEL.fingerprint}, this model's is {frozen.fingerprint}"):
        check_plan(PLAN, frozen)


def test_missing_and_unknown_groups() -> None:
    other = layout(*MODEL.groups[:-1], group("head", [512]), group("norm", [5]), chunk_bytes=2 * KB)
    with pytest.raises(
        PlanError,
        match="the groups 'head', 'norm' of the model are not in the plan; the group '' of the plan is not in",
    ):
        check_plan(PLAN, other)


def test_other_sizes() -> None:
    wider = layout(*MODEL.groups[:-1], group("", [1024]), chunk_bytes=2 * KB)
    with pytest.raises(PlanError, match=r"'' was planned with 512 B of weights \(512 bytes\) and has 1.0 KiB \(1,024"):
        check_plan(PLAN, wider)


def test_other_chunks() -> None:
    with pytest.raises(
        PlanError, match=r"'layers.0' has 1 chunks of at most 8.0 KiB, and update sites for 2 of 2.0 KiB;"
    ) as caught:
        check_plan(PLAN, layout(*MODEL.groups, chunk_bytes=8 * KB))
    assert "lay the model out with the plan's chunk size of 2048 bytes" in str(caught.value)


def test_a_group_planned_twice() -> None:
    with pytest.raises(PlanError, match="'embedding' is planned 2 times"):
        check_plan(replace(PLAN, groups=(PLAN.groups[0], *PLAN.groups)), MODEL)


def test_many_differences_are_cut_short() -> None:
    many = layout(*(group(f"layers.{index}", [KB + index]) for index in range(9)))
    wider = layout(*(group(f"layers.{index}", [2 * KB]) for index in range(9)))
    with pytest.raises(PlanError, match="'layers.4' was planned .*; and 4 more. Make the plan again"):
        check_plan(make_plan(many), wider)


class TestBudgets:
    def test_the_device_holds_exactly_what_it_must(self) -> None:
        enough = replace(PLAN, budgets=Budgets(device_bytes=4 * KB + 512))
        check_plan(enough, MODEL)
        with pytest.raises(PlanError) as caught:
            check_plan(replace(PLAN, budgets=Budgets(device_bytes=4 * KB + 511)), MODEL)
        assert (caught.value.needed_bytes, caught.value.group) == (4 * KB + 512, "embedding")
        assert str(caught.value) == (
            "the device budget of 4.5 KiB cannot hold the weights: 512 B are resident, and the windows of streamed "
            "groups need 4.0 KiB (4.0 KiB of it for 'embedding' alone), 4,608 bytes together; raise the device budget "
            "to more than 4.5 KiB, or stream more groups, or tile the layers of that module (lowtide.activations.tile)"
        )

    def test_prefetch_takes_its_part(self) -> None:
        with pytest.raises(PlanError, match="need 7.0 KiB .*lower prefetch_depth from 1"):
            make_plan(MODEL, prefetch_depth=1, device_memory=7 * KB)
        make_plan(MODEL, prefetch_depth=1, device_memory=7 * KB + 512)
        make_plan(MODEL, prefetch_depth=1, device_memory=5 * KB, window_memory=4 * KB)

    def test_resident_weights_count(self) -> None:
        with pytest.raises(PlanError, match="10.5 KiB are resident, and the windows .* need 0 B"):
            make_plan(MODEL, weights="resident", device_memory=10 * KB)

    def test_windows_smaller_than_the_largest_group(self) -> None:
        with pytest.raises(
            PlanError, match=r"window_memory is 3.0 KiB .*'embedding' needs at once are 4.0 KiB \(4,096"
        ):
            make_plan(MODEL, window_memory=3 * KB)

    def test_windows_smaller_than_the_two_groups_of_a_segment(self) -> None:
        in_twos = {"layers.*": "recompute/2"}
        with pytest.raises(
            PlanError, match="'layers.1' needs at once are 6.0 KiB .*, or recompute in segments of 1, or tile"
        ):
            make_plan(MODEL, activations=in_twos, window_memory=5 * KB)
        make_plan(MODEL, activations={"layers.*": "recompute/1"}, window_memory=5 * KB)
        make_plan(MODEL, activations=in_twos, window_memory=6 * KB)
        with pytest.raises(PlanError, match="need 6.0 KiB .*, or recompute in segments of 1, or tile"):
            make_plan(MODEL, activations=in_twos, prefetch_depth=0, device_memory=6 * KB)

    def test_the_host(self) -> None:
        with pytest.raises(PlanError, match=r"host budget of 9.0 KiB cannot hold the 10.0 KiB \(10,240 bytes\)"):
            make_plan(MODEL, host_memory=9 * KB)

    def test_state_that_visits_counts_where_the_optimizer_is_known(self) -> None:
        # In backward a group's state at once, 5 bytes beside each of the 4 KiB, and that of a resident chunk beside it.
        visitors = 5 * (4 * KB + 512)
        plan = make_plan(MODEL, update="paged", schedule="in_backward", prefetch_depth=0)
        enough = 4 * KB + 512 + visitors
        for size in (enough, enough - 1):
            budgeted = replace(plan, budgets=Budgets(device_bytes=size))
            check_plan(budgeted, MODEL)
            if size == enough:
                check_plan(budgeted, MODEL, state_bytes_per_parameter_byte=5)
                continue
            with pytest.raises(
                PlanError,
                match=rf"state that visits the device \('paged'\) takes 22.5 KiB \({visitors:,} bytes\), {enough:,} bytes "
                "together; .* or update on the host, or tile",
            ) as caught:
                check_plan(budgeted, MODEL, state_bytes_per_parameter_byte=5)
            assert caught.value.needed_bytes == enough
