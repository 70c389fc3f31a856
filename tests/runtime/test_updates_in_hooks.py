"""Hooks of the user's on gradients that write to the weights: updates of one's own in the backward, or something small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.runtime.side_by_side import (
    Block,
    Tower,
    assert_same_values,
    in_all_places,
    loss_of,
    plan_for,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


def past_autograd(model: nn.Module) -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def without_gradients(model: nn.Module) -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def optimizer_each(model: nn.Module) -> None:
    """As in torch's tutorial on optimizers in the backward."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def before_accumulation(model: nn.Module) -> None:
    def update(gradient: Tensor, parameter: nn.Parameter) -> None:
        parameter.data.add_(gradient, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_hook(partial(update, parameter=parameter))


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "data": past_autograd,
    "no_grad": without_gradients,
    "optimizers": optimizer_each,
    "before": before_accumulation,
}


class Shared(Tower):
    """A block that is called twice."""

    def __init__(self) -> None:
        block = Block()
        super().__init__([block, Block(), block])


def losses(model: nn.Module) -> list[Tensor]:
    found = []
    for seed in range(4):
        loss = loss_of(model, seed)
        loss.backward()
        found.append(loss.detach())
        model.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, 10 + seed))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "words",
    [
        {"weights": "streamed"},
        {"weights": {"*": "streamed", "": "streamed"}, "activations": "recompute", "schedule": "in_backward"},
        {"weights": {"*": "streamed", "blocks.1": "resident"}, "prefetch_depth": 2},
    ],
    ids=["streamed", "recomputed", "mixed"],
)
def test_updates_in_hooks_without_an_optimizer(way: str, when: str, words: dict[str, Any]) -> None:
    build = Tower if when == "after" else Shared
    if build is Shared:
        words = {name: word for name, word in words.items() if name != "activations"}
    plain, model = seeded(build), seeded(build)
    WAYS[way](plain)
    expected = losses(plain)
    if when == "before":
        WAYS[way](model)
    with lowtide.manage(model, None, lowtide.make_plan(model, **words), device="cpu"):
        if when == "after":
            WAYS[way](model)
        assert_same_values(expected, losses(model))
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_a_group_closes_before_the_next_one_opens() -> None:
    """It waits for its hooks and no longer: the device holds no more than without hooks."""
    peaks = []
    for way in (lambda model: None, past_autograd):
        model = seeded(Tower)
        way(model)
        with lowtide.manage(model, None, lowtide.make_plan(model, weights="streamed"), device="cpu") as session:
            for seed in range(3):
                loss_of(model, seed).backward()
                model.zero_grad()
            peaks.append(max(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "device"))
    assert peaks[1] <= peaks[0]


def test_a_hook_that_raises_leaves_the_weights_as_they_are_on_the_host() -> None:
    model = seeded(Tower)
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _: 1 / 0) for parameter in model.blocks[1].parameters()
    ]
    with lowtide.manage(model, None, lowtide.make_plan(model, weights="streamed"), device="cpu"):
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 0).backward()
        for handle in handles:
            handle.remove()
        past_autograd(model)
        model.zero_grad()
        found = losses(model)
    plain = seeded(Tower)
    past_autograd(plain)
    assert_same_values(losses(plain), found)


@in_all_places
@with_both_schedules
def test_hooks_that_write_beside_an_optimizer(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        def decay(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.mul_(0.9)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(decay)
        return steps(model, optimizer)

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_parameters_that_hooks_update_and_not_the_optimizer(place: str) -> None:
    def run(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        past_autograd(model.get_submodule("blocks.0"))
        past_autograd(model.get_submodule("stem"))
        return steps(model, optimizer)

    def head_only(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([*model.get_submodule("blocks.2").parameters()], lr=1e-2)

    plain, model = seeded(Tower), seeded(Tower)
    expected = run(plain, head_only(plain))
    optimizer = head_only(model)
    with lowtide.manage(model, optimizer, plan_for(model, place), device="cpu"):
        assert_same_values(expected, run(model, optimizer))
    for part in ("blocks.0", "blocks.2", "stem"):
        assert_same_tensors(plain.get_submodule(part).state_dict(), model.get_submodule(part).state_dict())
