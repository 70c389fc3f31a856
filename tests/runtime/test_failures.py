"""What goes wrong in a step: each a clear error, weights and optimizer in the stated condition, and training goes on."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import (
    EmulatedOutOfMemoryError,
    NonFiniteLossError,
    SecondBackwardError,
    SessionError,
    StaleBackwardError,
    StepLostError,
)
from lowtide.runtime.parameters import gradients
from tests.runtime.twins import (
    PLACES,
    STREAMED,
    SmallNet,
    TrippedError,
    Twins,
    device_peak,
    make_batch,
    off_the_books,
    twins,
)
from tests.zoo import assert_same_tensors

SCHEDULES = ("deferred", "in_backward")
AWAY = tuple(place for place in PLACES if place != "resident-device")
"""Places with something that Lowtide has to do in a deferred step."""

every_place = pytest.mark.parametrize("place", PLACES)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def backward(model: SmallNet, seed: int, size: int = 4) -> None:
    model(*make_batch(seed, size)).backward()


# -- old weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", STREAMED)
@every_schedule
def test_a_backward_through_updated_weights(place: str, schedule: str) -> None:
    with twins(place, schedule) as both:
        both.step(0)
        stale = both.model(*make_batch(1))
        both.step(2)
        before = both.snapshot()
        with pytest.raises(StaleBackwardError, match=r"group .* as they were 1 update\(s\) ago.*Nothing was updated"):
            stale.backward()
        both.assert_is(before)
        with pytest.raises(StepLostError, match="weights and optimizer are as before the step"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.assert_is(before)
        both.step(3)


@every_place
def test_a_second_backward_where_the_first_has_updated(place: str) -> None:
    with twins(place, "in_backward") as both:
        both.step(0)
        both.each(lambda model, _: backward(model, 1))
        with pytest.raises(SecondBackwardError, match="a second backward reached group .* before step"):
            backward(both.model, 2)
        with off_the_books():
            both.plain_optimizer.step()
            both.plain_optimizer.zero_grad()
        both.assert_same()
        with pytest.raises(StepLostError, match="5 of 5 groups"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.step(3)


@pytest.mark.parametrize("place", STREAMED)
@every_schedule
def test_a_graph_that_outlives_the_session(place: str, schedule: str) -> None:
    with twins(place, schedule) as both:
        both.step(0)
        loss = both.model(*make_batch(1))
    with pytest.raises(SessionError, match="closed since"):
        loss.backward()
    assert_same_tensors(both.plain.state_dict(), both.model.state_dict())
    # Plain now, with what the backward left before it was refused.
    both.optimizer.zero_grad()
    both.each(lambda model, _: backward(model, 2))
    for plain, managed in zip(both.plain.parameters(), both.model.parameters(), strict=True):
        assert plain.grad is not None
        assert managed.grad is not None
        assert torch.equal(plain.grad, managed.grad)


# -- exceptions of the user's ------------------------------------------------------------------------------------------


@every_place
@every_schedule
def test_an_exception_in_forward(place: str, schedule: str) -> None:
    error = KeyboardInterrupt() if place in ("resident-host", "streamed-host") else TrippedError("tripped")
    with twins(place, schedule) as both:
        both.step(0)
        before = both.snapshot()
        both.trip("forward", error=error)
        with pytest.raises(type(error)):
            both.model(*make_batch(1))
        both.mend()
        both.assert_is(before)
        both.step(2)
        both.step(3)


@every_place
def test_an_exception_in_forward_between_two_backwards(place: str) -> None:
    """The gradient that is there already is kept, as in plain torch."""
    with twins(place) as both:
        both.each(lambda model, _: backward(model, 0))
        both.trip("forward")

        def fail(model: SmallNet, _: object) -> None:
            with pytest.raises(TrippedError):
                model(*make_batch(1))

        both.each(fail)
        both.mend()
        both.step(2)


@pytest.mark.parametrize("place", AWAY)
def test_an_exception_in_a_deferred_backward(place: str) -> None:
    with twins(place) as both:
        both.step(0)
        before = both.snapshot()
        both.trip("backward")
        with pytest.raises(TrippedError):
            backward(both.model, 1)
        with pytest.raises(StepLostError, match="gradients are incomplete; weights and optimizer are as before"):
            both.optimizer.step()
        with pytest.raises(StepLostError):
            both.optimizer.step()
        both.assert_is(before)
        both.mend()
        both.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in both.model.parameters())
        both.step(2)
        both.step(3)


@every_place
@pytest.mark.parametrize("layer", [0, 2])
def test_an_exception_in_a_backward_that_updates(place: str, layer: int) -> None:
    """Groups behind the one that failed have moved, the others have not; the error names them."""
    with twins(place, "in_backward") as both:
        both.step(0)
        before, state_before = both.snapshot()
        both.trip("backward", layer)
        with pytest.raises(TrippedError):
            backward(both.model, 1)
        with pytest.raises(StepLostError, match="Load a checkpoint, or call zero_grad") as caught:
            both.optimizer.step()
        both.mend()
        both.optimizer.zero_grad()
        moved = [f"layers.{index}" for index in range(layer + 1, 3)]
        # The head is in the rest of the model, and the first to have its gradient.
        named = ", ".join(sorted(["(rest of the model)", *moved]))
        assert f"{len(moved) + 1} of 5 groups ({named})" in str(caught.value)

        def take_the_same(model: SmallNet, optimizer: torch.optim.Optimizer) -> None:
            backward(model, 1)
            for name, parameter in model.named_parameters():
                if not name.startswith(("head", *moved)):
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()

        with off_the_books():
            take_the_same(both.plain, both.plain_optimizer)
        both.assert_same()
        now, state_now = both.snapshot()
        changed = {name for name in now if not torch.equal(now[name], before[name])}
        assert changed == {name for name in now if name.startswith(("head", *moved))}
        assert {name for name in state_now if not torch.equal(state_now[name], state_before[name])}
        both.step(2)


@pytest.mark.parametrize("place", AWAY)
def test_a_lost_step_is_lost_also_after_another_forward(place: str) -> None:
    with twins(place) as both:
        both.trip("backward")
        with pytest.raises(TrippedError):
            backward(both.model, 0)
        both.mend()
        backward(both.model, 1)
        with pytest.raises(StepLostError):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.step(2)


# -- losses ------------------------------------------------------------------------------------------------------------


def bad_batch(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, classes = make_batch(1)
    x[0, 0] = value
    return x, classes


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize(("where", "value"), [("in the model", math.nan), ("outside", math.inf)])
def test_a_loss_that_is_not_finite_deferred(place: str, where: str, value: float) -> None:
    with twins(place) as both:
        both.step(0)
        before = both.snapshot()
        bad_loss(both.model, where, value).backward()
        with pytest.raises(NonFiniteLossError, match="nothing was updated, weights and optimizer are as before"):
            both.optimizer.step()
        both.assert_is(before)
        both.optimizer.zero_grad()
        both.step(2)


@every_place
@pytest.mark.parametrize("where", ["in the model", "outside"])
def test_a_loss_that_is_not_finite_in_backward(place: str, where: str) -> None:
    with twins(place, "in_backward") as both:
        both.step(0)
        before = both.snapshot()
        loss = bad_loss(both.model, where, math.nan)
        with pytest.raises(NonFiniteLossError, match="nothing was updated"):
            loss.backward()
        del loss
        both.assert_is(before)
        with pytest.raises(StepLostError, match="weights and optimizer are as before the step"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.assert_is(before)
        both.step(2)


@pytest.mark.parametrize("place", STREAMED)
def test_a_step_that_the_user_skips_for_its_loss_does_not_haunt_the_next(place: str) -> None:
    with twins(place) as both:
        bad_loss(both.model, "in the model", math.nan).backward()
        both.optimizer.zero_grad()
        both.step(1)


@pytest.mark.parametrize("place", STREAMED)
def test_one_bad_loss_of_several_accumulated_ones(place: str) -> None:
    with twins(place) as both:
        before = both.snapshot()
        bad_loss(both.model, "in the model", math.nan).backward()
        backward(both.model, 1)
        with pytest.raises(NonFiniteLossError):
            both.optimizer.step()
        both.assert_is(before)
        both.optimizer.zero_grad()
        both.step(2)


def bad_loss(model: SmallNet, where: str, value: float) -> torch.Tensor:
    x, classes = bad_batch(value)
    if where == "in the model":
        loss: torch.Tensor = model(x, classes)
        return loss
    return F.cross_entropy(model(x), classes)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_place
@every_schedule
def test_out_of_memory_in_forward(place: str, schedule: str) -> None:
    with twins(place, schedule) as both:
        both.step(0)
        before = both.snapshot()
        with pytest.raises(EmulatedOutOfMemoryError, match=f"of {both.budget_bytes / 1024:.1f} KiB in use") as caught:
            both.model(*make_batch(1, 500))
        assert caught.value.budget_bytes == both.budget_bytes
        assert caught.value.needed_bytes > caught.value.free_bytes
        del caught
        gc.collect()
        both.assert_is(before)
        both.step(2)
        both.step(3, size=2)


class Inflate(torch.autograd.Function):
    """Nothing in forward, and more than there is in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_bytes: int) -> torch.Tensor:
        ctx.num_bytes = num_bytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + torch.zeros(ctx.num_bytes // 4).sum(), None


@pytest.mark.slow
@pytest.mark.parametrize("place", AWAY)
def test_out_of_memory_in_a_deferred_backward(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(place) as both:
        both.step(0)
        before = both.snapshot()
        block = both.model.layers[1]
        with monkeypatch.context() as patch:
            whole = block.forward
            patch.setattr(block, "forward", lambda x: Inflate.apply(whole(x), both.budget_bytes))
            loss = both.model(*make_batch(1, 8))
            with pytest.raises(EmulatedOutOfMemoryError, match="aten.zeros asked for"):
                loss.backward()
            del loss
        gc.collect()
        with pytest.raises(StepLostError, match="weights and optimizer are as before"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        both.assert_is(before)
        assert device_peak(both.session) <= both.budget_bytes
        both.step(2, size=2)
        both.step(3)


@pytest.mark.slow
@every_place
def test_out_of_memory_in_a_backward_that_updates(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(place, "in_backward") as both:
        both.step(0)
        block = both.model.layers[1]
        with monkeypatch.context() as patch:
            whole = block.forward
            patch.setattr(block, "forward", lambda x: Inflate.apply(whole(x), both.budget_bytes))
            loss = both.model(*make_batch(1))
            with pytest.raises(EmulatedOutOfMemoryError):
                loss.backward()
            del loss
        gc.collect()
        with pytest.raises(StepLostError, match=r"2 of 5 groups \(\(rest of the model\), layers.2\)"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        before = both.snapshot()
        for name in before[0]:
            has_moved = name.startswith(("head", "layers.2"))
            assert torch.equal(before[0][name], both.plain.state_dict()[name]) is not has_moved
        both.follow()
        both.step(2, size=2)


def step_and_forward(both: Twins) -> None:
    backward(both.model, 1)
    both.optimizer.step()
    both.model(*make_batch(2))


# -- the host's worker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["resident-host", "streamed-host"])
@every_schedule
def test_an_error_in_the_hosts_worker(place: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the next call, and `close` gives the model back all the same."""
    both = Twins(place, schedule)
    both.step(0)
    before, _ = both.snapshot()

    def broken(optimizer: object, closure: object = None) -> None:
        raise ValueError("the rule is broken")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", broken)
        # In backward it may come sooner, where memory for the next gradient waits for the failed update.
        with pytest.raises(ValueError, match="the rule is broken"):
            step_and_forward(both)
        # In backward, updates that had all failed when the first was told are told with it, and nothing is left for `close`.
        told_again = contextlib.suppress(ValueError) if schedule == "in_backward" else None
        with told_again or pytest.raises(ValueError, match="the rule is broken"):
            both.session.close()
    # The broken rule has changed nothing.
    assert not both.session.is_open
    assert_same_tensors(before, both.model.state_dict())
    assert all(type(parameter) is nn.Parameter for parameter in both.model.parameters())
    both.optimizer.zero_grad()
    backward(both.model, 3)
    assert all(type(parameter.grad) is torch.Tensor for parameter in both.model.parameters())
    both.optimizer.step()
    both.session.close()


def test_staging_comes_back_from_additions_behind_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    session = lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=1.0)
    plan_run = session._open()
    whole, failures, gate = gradients.norm_of, [ValueError("no norm")], threading.Event()

    def norm_of(gradient: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "lowtide host worker" and failures:
            raise failures.pop()
        return whole(gradient)

    monkeypatch.setattr(gradients, "norm_of", norm_of)
    model(torch.ones(2, 4)).sum().backward()
    # Until it is opened nothing has failed: the second addition is given after one that will.
    plan_run._worker.submit(lambda: (gate.wait(timeout=30), None)[1])
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    gate.set()
    with pytest.raises(ValueError, match="no norm"):
        session.close()
    assert plan_run._pool.staging.counts.lent_bytes == 0
