"""Gradients between backward and step: clipped, edited, replaced, held, hooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import GradientGoneError
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    assert_same_values,
    in_all_places,
    loss_of,
    manage,
    seeded,
    side_by_side,
    steps,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def edited(model: nn.Module, optimizer: Optimizer, edit: Any, num_steps: int = 3) -> list[Tensor]:
    """The loop with an edit of the gradients before each step; the losses."""
    losses = []
    for seed in range(num_steps):
        loss = loss_of(model, seed)
        loss.backward()
        edit(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@in_all_places
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_torch_clips_by_norm(place: str, norm_type: float) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        norms: list[Tensor] = []
        losses = edited(
            model,
            optimizer,
            lambda model: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type)),
        )
        assert all(norm > 0.2 for norm in norms), "nothing was clipped"
        return [*norms, *losses]

    side_by_side(loop, place)


@in_all_places
def test_torch_clips_by_value(place: str) -> None:
    side_by_side(
        lambda model, optimizer: edited(
            model, optimizer, lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        ),
        place,
    )


@in_all_places
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [0.2, 1e6])
def test_max_grad_norm_is_the_norm_of_norms_in_parameter_order(
    place: str, dtype: torch.dtype, max_grad_norm: float
) -> None:
    def batch(model: nn.Module, seed: int) -> Tensor:
        return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)).float().square().mean()

    def reversed_groups(model: nn.Module) -> Optimizer:
        # Not the model's order: the norm must be that of the optimizer's groups.
        first, *others = model.parameters()
        return torch.optim.AdamW([{"params": others[::-1]}, {"params": [first], "lr": 1e-3}], lr=1e-2)

    plain = seeded(Tower).to(dtype)
    plain_optimizer = reversed_groups(plain)
    norms = []
    for seed in range(6):
        (batch(plain, seed) / 2).backward()
        if seed % 2:
            gradients = [parameter.grad for parameter in parameters_of(plain_optimizer) if parameter.grad is not None]
            each = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
            norm = torch.linalg.vector_norm(torch.stack(each))
            factor = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(dtype))
            norms.append(norm)
            plain_optimizer.step()
            plain_optimizer.zero_grad()

    managed = seeded(Tower).to(dtype)
    optimizer = reversed_groups(managed)
    found = []
    with manage(managed, optimizer, place, max_grad_norm=max_grad_norm) as session:
        assert session.last_grad_norm is None
        for seed in range(6):
            (batch(managed, seed) / 2).backward()
            if seed % 2:
                optimizer.step()
                assert session.last_grad_norm is not None
                found.append(session.last_grad_norm)
                optimizer.zero_grad()
    assert_same_values(norms, found)
    assert_same_tensors(plain.state_dict(), managed.state_dict())


@in_all_places
def test_gradients_edited_in_place(place: str) -> None:
    def edit(model: nn.Module) -> None:
        for index, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(1 + index)
            parameter.grad.data.add_(1e-3)
            parameter.grad[..., 0] = 0.0

    side_by_side(lambda model, optimizer: edited(model, optimizer, edit), place)


@in_all_places
def test_gradients_replaced(place: str) -> None:
    def edit(model: nn.Module) -> None:
        for index, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            if index % 3 == 0:
                parameter.grad = torch.full_like(parameter, 0.1)
            elif index % 3 == 1:
                parameter.grad = parameter.grad / 2
            else:
                parameter.grad = None

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = edited(model, optimizer, edit)
        # And set without any backward at all.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    side_by_side(loop, place)


@in_all_places
def test_a_replaced_gradient_is_what_the_next_backward_adds_to(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        def edit(model: nn.Module) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            loss_of(model, 77).backward()

        return edited(model, optimizer, edit)

    side_by_side(loop, place)


@in_all_places
def test_gradients_read_between_backward_and_step(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        read: list[Tensor] = []

        def look(model: nn.Module) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.shape == parameter.shape
                read.extend([parameter.grad.clone(), parameter.grad.abs().max(), torch.stack([parameter.grad])])
                read.append(torch.tensor(parameter.grad.tolist()))

        return [*edited(model, optimizer, look), *read]

    side_by_side(loop, place)


@in_all_places
@pytest.mark.parametrize("alias", ["itself", "detach", "view", "data"])
def test_a_held_gradient_keeps_its_value(place: str, alias: str) -> None:
    def held(gradient: Tensor) -> Tensor:
        return {
            "itself": lambda: gradient,
            "detach": gradient.detach,
            "view": lambda: gradient.flatten(),
            "data": lambda: gradient.data,
        }[alias]()

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        kept: list[Tensor] = []

        def hold(model: nn.Module) -> None:
            kept.extend(held(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)

        edited(model, optimizer, hold)
        return kept

    side_by_side(loop, place)


@in_all_places
def test_a_held_gradient_outlives_the_session(place: str) -> None:
    model = seeded(Tower)
    session = manage(model, adamw(model), place)
    loss_of(model, 0).backward()
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    values = [gradient.clone() for gradient in held]
    session.close()
    assert_same_values(values, held)
    assert_same_values(values, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])


@in_all_places
def test_accumulating_into_a_held_gradient_changes_it_as_ever(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        loss_of(model, 0).backward()
        held = [parameter.grad for parameter in model.parameters()]
        loss_of(model, 1).backward()
        assert all(gradient is parameter.grad for gradient, parameter in zip(held, model.parameters(), strict=True))
        return [gradient for gradient in held if gradient is not None]

    side_by_side(loop, place)


@in_all_places
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_hooks_of_the_user_on_parameters(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []

        def before(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        for parameter in model.parameters():
            parameter.register_hook(before)
        losses = steps(model, optimizer)
        assert len(seen) == 3 * len(list(model.parameters()))
        return [*losses, *seen]

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_hooks_of_the_user_after_accumulation(place: str, when: str, accumulation: int) -> None:
    """They find the whole gradient, may change it, and change what the step sees."""

    def run(model: nn.Module, optimizer: Optimizer, register: Any) -> list[Tensor]:
        seen: list[Tensor] = []

        def after(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad.mul_(0.5)

        register(lambda: [parameter.register_post_accumulate_grad_hook(after) for parameter in model.parameters()])
        for step in range(3):
            for part in range(accumulation):
                loss_of(model, 10 * step + part).backward()
            seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plain, managed = seeded(Tower), seeded(Tower)
    expected = run(plain, adamw(plain), lambda add: add())
    optimizer = adamw(managed)
    sessions = []

    def start(add: Any) -> None:
        if when == "before":
            add()
        sessions.append(manage(managed, optimizer, place))
        if when == "after":
            add()

    found = run(managed, optimizer, start)
    sessions[0].close()
    assert_same_values(expected, found)
    assert_same_tensors(plain.state_dict(), managed.state_dict())


@in_all_places
def test_looking_at_a_gradient_that_backward_used_up_raises(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, "in_backward"):
        loss_of(model, 0).backward()
        parameter = next(model.parameters())
        with pytest.raises(GradientGoneError, match="group stem were used up in backward"):
            _ = parameter.grad
        with pytest.raises(GradientGoneError):
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(GradientGoneError):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert parameter.grad is None
