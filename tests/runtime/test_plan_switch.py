"""A session that goes on under another plan trains as plain torch does; where it cannot, the model is plain."""

from __future__ import annotations

import signal

import pytest
import torch

import lowtide
from lowtide.errors import PlanError
from lowtide.runtime.emulation.device import living_trackers
from lowtide.runtime.hand_over import HandOver
from lowtide.runtime.plan_run import BROKEN_OFF, PlanRun, switch_plan
from lowtide.runtime.warm_up import WarmUpPlans
from tests.runtime.twins import PLACES, Twins, flat_state, make_net, take_step
from tests.zoo import assert_same_tensors


def switch(both: Twins, place: str) -> None:
    assert both.session._open().is_quiet()
    both.session._switch(lowtide.make_plan(make_net(), **PLACES[place]))


@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", PLACES)
def test_training_goes_on(before: str, after: str) -> None:
    # Resident weights stay in full, whichever of the two plans has them.
    both = Twins(before, device_memory=1 << 20)
    both.step(0)
    num_steps = both.session.stats().num_steps
    switch(both, after)
    both.step(1)
    both.step(2)
    both.assert_same()
    assert both.session.stats().num_steps == num_steps + 2
    both.session.close()


class TestWhereTheSuccessorIsRefused:
    """Something breaks off before, while or after the plan run of before was taken apart."""

    @pytest.fixture(
        params=[
            "runtime.plan_run.PlanRun",
            "runtime.host_memory.HostPool.close",
            "runtime.emulation.memory.TrackedMemory.start",
        ]
    )
    def both(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Twins:
        both = Twins("mixed")
        both.step(0)

        def refuse(*_: object, **__: object) -> PlanRun:
            context.undo()  # once
            raise RuntimeError("no")

        with monkeypatch.context() as context:
            context.setattr(f"lowtide.{request.param}", refuse)
            with pytest.raises(RuntimeError, match="no") as caught:
                switch(both, "resident-device")
        assert caught.value.__notes__ == [BROKEN_OFF]
        return both

    def test_the_session_is_closed(self, both: Twins) -> None:
        assert not both.session.is_open
        assert not living_trackers()

    def test_model_and_optimizer_train_on_as_plain_ones(self, both: Twins) -> None:
        assert "step" not in vars(both.optimizer)
        for seed in (1, 2):
            losses = [take_step(model, optimizer, seed) for model, optimizer in both.pairs]
            assert torch.equal(*losses)
        assert_same_tensors(both.plain.state_dict(), both.model.state_dict())
        assert_same_tensors(flat_state(both.plain_optimizer), flat_state(both.optimizer))


def test_a_plan_for_another_model_leaves_the_machinery_as_it_is() -> None:
    both = Twins("mixed")
    both.step(0)
    other = lowtide.make_plan(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    with pytest.raises(PlanError, match="does not fit this model"):
        switch_plan(both.session._open(), other)
    both.step(1)
    both.assert_same()
    both.session.close()


def test_a_plan_for_another_model_leaves_the_session_as_it_is() -> None:
    both = Twins("mixed")
    both.step(0)
    before = both.session.plan
    with pytest.raises(PlanError, match="does not fit this model"):
        both.session._switch(lowtide.make_plan(torch.nn.Sequential(torch.nn.Linear(3, 3))))
    assert both.session.is_open
    assert both.session.plan == before
    both.step(1)
    both.assert_same()
    both.session.close()
    assert all(type(parameter) is torch.nn.Parameter for parameter in both.model.parameters())


def test_a_warm_up_whose_plan_is_refused_goes_on_observing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises at each call, until a plan fits; the model is managed all along."""
    other = lowtide.make_plan(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    model, plain = make_net(), make_net()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    right, is_wrong = WarmUpPlans.after, True
    monkeypatch.setattr(WarmUpPlans, "after", lambda plans, samples: other if is_wrong else right(plans, samples))
    session = lowtide.manage(model, optimizers[0], lowtide.WarmUp(device_memory="64MiB"), device="cpu")
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        take_step(each, optimizer, 0)
    for _ in range(2):
        with pytest.raises(PlanError, match="does not fit this model"):
            take_step(model, optimizers[0], 1)
        assert session.is_open
        assert session.is_warming_up
    is_wrong = False
    for seed in (1, 2):
        losses = [take_step(each, optimizer, seed) for each, optimizer in zip((model, plain), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert not session.is_warming_up
    session.close()
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_an_interrupt_in_a_warm_ups_change_of_plan_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = make_net(), make_net()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    session = lowtide.manage(model, optimizers[0], lowtide.WarmUp(device_memory="64MiB"), device="cpu")
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            take_step(each, optimizer, 0)
        hand_over = PlanRun.hand_over

        def interrupted(plan_run: PlanRun) -> HandOver:
            signal.raise_signal(signal.SIGINT)
            return hand_over(plan_run)

        monkeypatch.setattr(PlanRun, "hand_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take_step(model, optimizers[0], 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert session.is_open
        assert not session.is_warming_up
        for seed in (1, 2):
            losses = [take_step(each, step, seed) for each, step in zip((model, plain), optimizers, strict=True)]
            assert torch.equal(*losses)
    finally:
        signal.signal(signal.SIGINT, outside)
    session.close()
    assert_same_tensors(plain.state_dict(), model.state_dict())
