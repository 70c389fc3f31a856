"""What a session refuses, with the model and the optimizer as they were, and what it must not refuse."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import (
    GradientGoneError,
    HigherOrderError,
    ModelChangedError,
    SessionError,
    StepLostError,
    UnsupportedOptimizerError,
)
from tests.runtime.twins import PLACES, STREAMED, SmallNet, Twins, adamw, make_batch, make_net, off_the_books, twins
from tests.zoo import assert_same_tensors

Change = Callable[[SmallNet], object]
every_place = pytest.mark.parametrize("place", PLACES)


# -- a model that was changed ------------------------------------------------------------------------------------------


def replace_parameter(model: SmallNet) -> None:
    model.layers[1].inner.weight = nn.Parameter(torch.zeros(32, 16))


def swap_module(model: SmallNet) -> None:
    model.layers[1].inner = nn.Linear(16, 32)


def add_module(model: SmallNet) -> None:
    model.extra = nn.Linear(2, 3)


def remove_module(model: SmallNet) -> None:
    model.layers[1].inner.bias = None


CHANGES: dict[str, tuple[Change, str]] = {
    "parameter": (replace_parameter, r"not those that were managed: 1 replaced \(layers.1.inner.weight\)"),
    "module": (swap_module, r"2 replaced \(layers.1.inner.weight, layers.1.inner.bias\)"),
    "added": (add_module, r"2 added \(extra.weight, extra.bias\)"),
    "removed": (remove_module, r"1 removed \(layers.1.inner.bias\)"),
    "half": (lambda model: model.half(), r"became torch.float16 \(.*\) after the model was managed as torch.float32"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["streamed-device", "streamed-host"])
def test_a_changed_model_is_refused(place: str, change: str) -> None:
    both = Twins(place)
    with contextlib.closing(both.session):
        both.step(0)
        before = both.snapshot()[0]
        action, message = CHANGES[change]
        with off_the_books():
            action(both.model)
        for _ in range(2):
            with pytest.raises(ModelChangedError, match=message) as caught:
                both.model(*make_batch(1))
            assert "session.close()" in str(caught.value)
            assert "Nothing was updated" in str(caught.value)
    after = both.model.state_dict()
    for name in before:
        if name in after and not name.startswith("layers.1.inner"):
            assert torch.equal(after[name], before[name].to(after[name].dtype)), name


def test_other_data_of_the_same_form_is_taken_over() -> None:
    for place in PLACES:
        with twins(place) as both:
            both.step(0)

            def change(model: SmallNet, _: object) -> None:
                model.layers[1].inner.weight.data = torch.full((32, 16), 0.25)
                model.float()

            both.each(change)
            both.step(1)
            both.step(2)


@every_place
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_freezing_and_thawing_what_is_trained_works(place: str, schedule: str) -> None:
    with twins(place, schedule) as both:
        both.step(0)
        both.each(lambda model, _: model.layers[1].requires_grad_(False))
        both.step(1)
        both.each(lambda model, _: model.layers[1].requires_grad_(True))
        both.step(2)


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_to_train_what_was_frozen_is_refused(schedule: str) -> None:
    model = make_net()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, schedule=schedule)
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        model(*make_batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.layers[1].requires_grad_(True)
        with pytest.raises(ModelChangedError, match="layers.1.inner.weight of group layers.1 was frozen"):
            model(*make_batch(1))
        assert_same_tensors(before, model.state_dict())
        model.layers[1].requires_grad_(False)
        model(*make_batch(1)).backward()


def test_a_model_is_managed_once() -> None:
    with twins() as both:
        plan = both.session.plan
        with pytest.raises(SessionError, match="under management already"):
            lowtide.manage(both.model, both.optimizer, plan, device="cpu")
        both.step(0)


def test_a_closed_session_says_so() -> None:
    both = Twins()
    both.session.close()
    both.session.close()
    with pytest.raises(SessionError, match="this session is closed"):
        both.session.stats()


# -- gradients that are gone -------------------------------------------------------------------------------------------


def read(model: SmallNet) -> None:
    _ = model.layers[1].inner.weight.grad


def write(model: SmallNet) -> None:
    model.layers[1].inner.weight.grad = torch.zeros(32, 16)


def clip(model: SmallNet) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def unscale(model: SmallNet) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


TOUCHES: dict[str, Change] = {"read": read, "set": write, "clip": clip, "unscale": unscale}


@every_place
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_gradient_that_was_used_up_is_not_touched(place: str, touch: str) -> None:
    with twins(place, "in_backward") as both:
        both.step(0)
        both.each(lambda model, _: model(*make_batch(1)).backward())
        with pytest.raises(GradientGoneError, match=r"group .* were used up in backward.*Use the schedule 'deferred'"):
            TOUCHES[touch](both.model)
        both.each(lambda _, optimizer: optimizer.step())
        both.each(lambda _, optimizer: optimizer.zero_grad())
        assert all(parameter.grad is None for parameter in both.model.parameters())
        both.step(2)


@every_place
def test_a_step_may_be_given_up_where_backward_has_updated(place: str) -> None:
    """The weights have moved, as the plain ones have after `step`; `zero_grad` starts afresh."""
    with twins(place, "in_backward") as both:
        both.each(lambda model, _: model(*make_batch(1)).backward())
        with off_the_books():
            both.plain_optimizer.step()
        both.each(lambda _, optimizer: optimizer.zero_grad())
        both.step(2)


# -- gradients of gradients --------------------------------------------------------------------------------------------


def penalty(model: SmallNet, seed: int) -> torch.Tensor:
    """A loss that has the gradient at the input in it."""
    x, classes = make_batch(seed)
    x.requires_grad_(True)
    loss = model(x, classes)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    total: torch.Tensor = loss + gradient.square().sum()
    return total


@pytest.mark.parametrize("place", STREAMED)
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_gradients_of_gradients_through_streamed_groups_are_refused(place: str, schedule: str) -> None:
    with twins(place, schedule) as both:
        both.step(0)
        before = both.snapshot()
        with pytest.raises(HigherOrderError, match="gradients of gradients through .* make its group resident"):
            penalty(both.model, 1)
        both.assert_is(before)
        with pytest.raises(StepLostError, match="weights and optimizer are as before"):
            both.optimizer.step()
        both.optimizer.zero_grad()
        loss = both.model(*make_batch(1))
        with pytest.raises(HigherOrderError):
            loss.backward(create_graph=True)
        del loss
        both.optimizer.zero_grad()
        both.assert_is(before)
        both.step(2)


@pytest.mark.parametrize("place", ["resident-device", "resident-host"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_gradients_of_gradients_through_resident_groups_work(place: str, schedule: str) -> None:
    with twins(place, schedule, device_memory=1 << 20) as both:
        for seed in range(3):
            both.each(lambda model, _, seed=seed: penalty(model, seed).backward())
            both.each(lambda _, optimizer: optimizer.step())
            both.each(lambda _, optimizer: optimizer.zero_grad())


@pytest.mark.parametrize("place", ["resident-device", "resident-host"])
def test_gradients_that_are_used_up_cannot_be_gone_through_again(place: str) -> None:
    with twins(place, "in_backward") as both:
        both.step(0)
        before = both.snapshot()
        loss = both.model(*make_batch(1))
        with pytest.raises(HigherOrderError, match="'in_backward' uses up those of group"):
            loss.backward(create_graph=True)
        del loss
        both.optimizer.zero_grad()
        gc.collect()  # a gradient with a graph and its parameter hold each other
        both.assert_is(before)
        both.step(2)


@every_place
def test_gradients_at_the_input_work(place: str) -> None:
    with twins(place, "deferred", device_memory=1 << 20) as both:
        found: list[torch.Tensor] = []

        def ask(model: SmallNet, _: object) -> None:
            x, classes = make_batch(3)
            x.requires_grad_(True)
            loss = model(x, classes)
            found.extend(torch.autograd.grad(loss, x, retain_graph=True))
            loss.backward()

        both.each(ask)
        assert torch.equal(found[0], found[1])
        both.each(lambda _, optimizer: optimizer.step())
        both.each(lambda _, optimizer: optimizer.zero_grad())
        both.step(1)


# -- optimizers that cannot be run chunk by chunk ----------------------------------------------------------------------


class CountingSGD(torch.optim.SGD):
    """Counts its updates in its param group, which every chunk would do for itself."""

    def step(self, closure: object = None) -> None:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + len(group["params"])
        super().step()


class CrossSGD(torch.optim.SGD):
    """Wants more than one parameter."""

    def step(self, closure: object = None) -> None:
        first, second = self.param_groups[0]["params"][:2]
        del first, second
        super().step()


@pytest.mark.parametrize("place", ["resident-host", "streamed-device", "streamed-host", "mixed"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS takes its step over all parameters at once"),
        (lambda model: CountingSGD(model.parameters(), lr=0.1), "CountingSGD changes k of its param group 0"),
        (lambda model: CrossSGD(model.parameters(), lr=0.1), "CrossSGD could not take a step on one parameter alone"),
    ],
    ids=["LBFGS", "counter", "across"],
)
def test_an_optimizer_that_looks_across_parameters_is_refused(
    place: str, make: Callable[[nn.Module], torch.optim.Optimizer], message: str
) -> None:
    model = make_net()
    plan = lowtide.make_plan(model, **PLACES[place])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(UnsupportedOptimizerError, match=message):
        lowtide.manage(model, make(model), plan, device="cpu")
    # A plain model all the same, with its values, and free to be managed.
    assert_same_tensors(before, model.state_dict())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not set(places.values()) & {0}
    model(*make_batch(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        model(*make_batch(0)).backward()
        optimizer.step()
