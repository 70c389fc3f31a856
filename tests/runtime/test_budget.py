"""Budgets: what does not fit is refused with numbers, what fits runs, and one byte less than it took does not."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BudgetError, EmulatedOutOfMemoryError, LowtideError, PlanError
from lowtide.memory.tier import host_capacity_bytes, pinned_capacity_bytes
from lowtide.runtime.session import Session
from lowtide.runtime.updates.worker import HostWorker, Job
from tests.runtime.twins import (
    PLACES,
    SmallNet,
    adamw,
    device_peak,
    make_batch,
    make_net,
    take_step,
    twins,
    usual_peak,
)
from tests.zoo import assert_same_tensors, train, zoo

BLOCK_BYTES = 5120
"""The bytes of one block of the small model, with padding."""
every_place = pytest.mark.parametrize("place", PLACES)
every_schedule = pytest.mark.parametrize("schedule", ["deferred", "in_backward"])


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_plain(model: SmallNet, before: dict[str, torch.Tensor]) -> None:
    """Nothing of a session is left: the values are the same, and the model can be managed."""
    assert_same_tensors(before, model.state_dict())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        take_step(model, optimizer, 0)


def peak(session: Session, tier: str) -> int:
    return next(row.peak_bytes for row in session.stats().tiers if row.tier == tier)


# -- the device --------------------------------------------------------------------------------------------------------


def test_a_device_that_cannot_hold_the_largest_group() -> None:
    model = make_net()
    with pytest.raises(PlanError, match=r"cannot hold the weights.*5.0 KiB of it for 'layers.\d' alone") as caught:
        lowtide.make_plan(model, device_memory=BLOCK_BYTES, prefetch_depth=0)
    assert caught.value.group is not None
    assert caught.value.group.startswith("layers.")
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > BLOCK_BYTES
    with pytest.raises(PlanError, match="window_memory is 5.0 KiB .*, and the streamed weights that") as caught:
        lowtide.make_plan(model, weights={"*": "streamed", "": "streamed"}, window_memory=BLOCK_BYTES)
    assert caught.value.needed_bytes == BLOCK_BYTES + 1024
    assert_plain(model, values(model))


def test_groups_that_are_open_together_and_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that calls another one needs both at once, which no plan could know."""
    with twins("streamed-host", prefetch_depth=0, window_memory=BLOCK_BYTES + 1024) as both:
        both.step(0)
        before = both.snapshot()
        inner, outer = both.model.layers[0], both.model.layers[1]
        with monkeypatch.context() as patch:
            whole = outer.forward
            patch.setattr(outer, "forward", lambda x: whole(inner(x)))
            message = (
                r"group layers.0 needs 5.0 KiB of the device's room.*has 6.0 KiB and 6.0 KiB in use "
                r"\(open groups: layers.1, \(rest\)\); raise window_memory \(of a WarmUp or a StaticPartition device_memory\)"
            )
            with pytest.raises(BudgetError, match=message) as caught:
                both.model(*make_batch(1))
        error = caught.value
        assert (error.needed_bytes, error.free_bytes, error.budget_bytes) == (5120, 0, 6144)
        assert error.owner == "layers.0"
        del caught, error
        gc.collect()
        both.assert_is(before)
        both.step(2)


def test_buffers_that_do_not_fit_leave_a_plain_model() -> None:
    model = make_net()
    model.register_buffer("table", torch.zeros(10_000))
    before = values(model)
    plan = lowtide.make_plan(model, weights="resident", update="device", device_memory="32KiB")
    with pytest.raises(EmulatedOutOfMemoryError, match=r"included asked for 39.1 KiB .* of 32.0 KiB in use"):
        lowtide.manage(model, adamw(model), plan, device="cpu")
    assert_plain(model, before)


def test_a_plan_for_another_model() -> None:
    model = make_net()
    before = values(model)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    with pytest.raises(PlanError, match="the plan does not fit this model"):
        lowtide.manage(model, adamw(model), lowtide.make_plan(other), device="cpu")
    larger = make_net()
    larger.layers[1].inner = nn.Linear(16, 64)
    larger.layers[1].outer = nn.Linear(64, 16)
    with pytest.raises(PlanError, match="'layers.1' was planned with .* and has"):
        lowtide.manage(model, adamw(model), lowtide.make_plan(larger), device="cpu")
    assert_plain(model, before)


# -- the host ----------------------------------------------------------------------------------------------------------


def test_a_host_that_cannot_hold_the_weights() -> None:
    with pytest.raises(PlanError, match="the host budget of 4.0 KiB cannot hold") as caught:
        lowtide.make_plan(make_net(), host_memory="4KiB")
    assert caught.value.needed_bytes == 3 * BLOCK_BYTES + 1024


@pytest.mark.parametrize("tier", ["host", "pinned"])
def test_a_host_that_cannot_hold_what_comes_beside_the_weights(tier: str) -> None:
    model = make_net()
    before = values(model)
    plan = lowtide.make_plan(model, **{f"{tier}_memory": "20KiB"})
    with pytest.raises(BudgetError, match="gradients") as caught:
        lowtide.manage(model, adamw(model), plan, device="cpu")
    assert caught.value.tier == tier
    assert caught.value.budget_bytes == 20 * 1024
    assert caught.value.needed_bytes > caught.value.free_bytes
    assert_plain(model, before)


@pytest.mark.parametrize(
    ("budgets", "capacity", "limit"),
    [
        ({"host_memory": 1 << 50}, host_capacity_bytes(), "what there is"),
        ({"host_memory": 1 << 50, "pinned_memory": 1 << 49}, host_capacity_bytes(), "what there is"),
        ({"pinned_memory": pinned_capacity_bytes() + 1}, pinned_capacity_bytes(), "what can be pinned"),
    ],
    ids=["host", "both", "pinned"],
)
def test_a_host_budget_beyond_what_there_is(budgets: dict[str, int], capacity: int, limit: str) -> None:
    model = make_net()
    before = values(model)
    plan = lowtide.make_plan(model, **budgets)
    with pytest.raises(BudgetError, match=f"is beyond {limit}") as caught:
        lowtide.manage(model, adamw(model), plan, device="cpu")
    assert caught.value.budget_bytes == capacity
    assert caught.value.needed_bytes > capacity
    assert_plain(model, before)


@every_schedule
def test_the_host_that_a_plan_needs_is_enough(schedule: str) -> None:
    model = make_net()
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, schedule=schedule), device="cpu") as session:
        take_step(model, optimizer, 0)
        needed = peak(session, "host")
    plan = lowtide.make_plan(model, schedule=schedule, host_memory=needed)
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        take_step(model, optimizer, 1)
        assert peak(session, "host") <= needed
    plan = lowtide.make_plan(model, schedule=schedule, host_memory=needed - 1)
    with pytest.raises(BudgetError):
        lowtide.manage(model, optimizer, plan, device="cpu")


# -- exactly -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompt_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host updates are over when they are given: how many gradients wait for one is no longer a matter of luck."""
    whole = HostWorker.submit

    def submit(worker: HostWorker, work: Any, **options: Any) -> Job:
        job = whole(worker, work, **options)
        job.wait()
        return job

    monkeypatch.setattr(HostWorker, "submit", submit)


def run(place: str, schedule: str, budget_bytes: int | None, num_steps: int = 3) -> tuple[dict[str, torch.Tensor], int]:
    model = make_net()
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, schedule=schedule, device_memory=budget_bytes, **PLACES[place])
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        for seed in range(num_steps):
            take_step(model, optimizer, seed)
        found = device_peak(session)
    return values(model), found


@pytest.mark.slow
@every_place
@every_schedule
@pytest.mark.usefixtures("prompt_worker")
def test_what_a_run_took_is_enough_and_a_byte_less_is_not(place: str, schedule: str) -> None:
    free, needed = run(place, schedule, None)
    tight, found = run(place, schedule, needed)
    assert found == needed
    assert_same_tensors(free, tight)
    with pytest.raises(LowtideError, match="budget|out of memory"):
        run(place, schedule, needed - 1)
    gc.collect()


@every_schedule
def test_streaming_takes_less_than_staying(schedule: str) -> None:
    total = sum(parameter.nbytes for parameter in make_net().parameters())
    assert usual_peak("resident-device", schedule) > 3 * total
    assert usual_peak("streamed-host", schedule) < 2 * total


@every_schedule
def test_a_gpt_in_less_than_it_would_take(schedule: str) -> None:
    runs: list[tuple[nn.Module, list[float]]] = []
    peaks: list[int] = []
    for plan in ({"weights": "resident", "update": "device"}, {"device_memory": "600KiB"}):
        model = zoo("gpt").build(False, torch.float32)
        optimizer = adamw(model)
        made = lowtide.make_plan(model, schedule=schedule, **plan)
        with lowtide.manage(model, optimizer, made, device="cpu") as session:
            runs.append((model, train(model, optimizer, zoo("gpt").batches(3))))
            peaks.append(device_peak(session))
    assert peaks[1] <= 600 * 1024 < 0.7 * peaks[0]
    assert runs[0][1] == runs[1][1]
    assert_same_tensors(runs[0][0].state_dict(), runs[1][0].state_dict())
