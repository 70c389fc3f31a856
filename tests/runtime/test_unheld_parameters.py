"""Trained parameters that the optimizer does not hold, under updates in backward: no memory is kept for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GradientGoneError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups

WIDTH = 32
HELD = 3
"""Layers that the optimizer holds, the last of six."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def sgd(model: nn.Sequential, *, with_bias_of_first: bool = False) -> torch.optim.Optimizer:
    held = [parameter for layer in list(model)[-HELD:] for parameter in layer.parameters()]
    first = model[0]
    assert isinstance(first, nn.Linear)
    return torch.optim.SGD(held + ([first.bias] if with_bias_of_first else []), lr=0.1)


def backward(model: nn.Module, step: int) -> None:
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("with_bias_of_first", [False, True], ids=["apart", "in one chunk with a held one"])
def test_no_staging_is_kept(weights: str, precision: str | None, with_bias_of_first: bool) -> None:
    models = network(), network()
    optimizers = [sgd(model, with_bias_of_first=with_bias_of_first) for model in models]
    for step in range(4):
        backward(models[0], step)
        optimizers[0].step()
        optimizers[0].zero_grad()
    layout = lay_out(find_groups(models[1]), chunk_bytes=1 << 20)
    plan = lowtide.make_plan(layout, weights=weights, update="host", schedule="in_backward", cached_buffers=0)
    with lowtide.manage(models[1], optimizers[1], plan, device="cpu", precision=precision) as session:
        plan_run = session._plan_run
        assert plan_run is not None
        for step in range(4):
            backward(models[1], step)
            session.settle()
            staged = [
                chunk.spec.name
                for group in plan_run._groups.values()
                for chunk in group.stored.chunks
                if chunk.staging is not None
            ]
            assert staged == []
            assert not plan_run._pool._staged
            assert not plan_run._pool._extras
            optimizers[1].step()
            optimizers[1].zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_look_at_what_was_dropped_is_refused_until_the_step() -> None:
    model = network()
    optimizer = sgd(model)
    first = next(model.parameters())
    plan = lowtide.make_plan(model, update="host", schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        backward(model, 0)
        with pytest.raises(
            GradientGoneError, match=r"gradient of 0.bias was dropped in backward: the optimizer does not hold"
        ):
            _ = first.grad
        optimizer.step()
        assert first.grad is None
        backward(model, 1)
        optimizer.zero_grad()
        assert first.grad is None
    backward(model, 2)
    assert first.grad is not None


def test_one_that_is_added_later_is_updated() -> None:
    models = network(), network()
    optimizers = [sgd(model) for model in models]
    plan = lowtide.make_plan(models[1], update="host", schedule="in_backward")
    with lowtide.manage(models[1], optimizers[1], plan, device="cpu"):
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                if step == 2:
                    first = model[0]
                    assert isinstance(first, nn.Linear)
                    first.weight.grad = None
                    optimizer.add_param_group({"params": [first.weight]})
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# Another optimizer holds them


def two(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """One for the last layers, one for the others."""
    others = [parameter for layer in list(model)[:-HELD] for parameter in layer.parameters()]
    return sgd(model), torch.optim.Adam(others, lr=0.01)


def train_both(model: nn.Sequential, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    for step in range(4):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("is_managed_first", [True, False])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_a_second_optimizer_trains_as_plainly_or_is_refused(
    weights: str, update: str, schedule: str, is_managed_first: bool
) -> None:
    models = network(), network()
    (held, others), (managed, unmanaged) = two(models[0]), two(models[1])
    train_both(models[0], (held, others))
    plan = lowtide.make_plan(models[1], weights=weights, update=update, schedule=schedule)
    with lowtide.manage(models[1], managed, plan, device="cpu"):
        in_turn = (managed, unmanaged) if is_managed_first else (unmanaged, managed)
        if schedule == "in_backward" and update == "host":
            what = (
                "this Adam holds 6 parameters .the first is 0.weight. of a managed model"
                if is_managed_first
                else "dropped"
            )
            with pytest.raises(GradientGoneError, match=what):
                train_both(models[1], in_turn)
            return
        train_both(models[1], in_turn)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_second_optimizer_with_gradients_of_its_own_is_no_concern() -> None:
    model = network()
    optimizer, other = two(model)
    with lowtide.manage(
        model, optimizer, lowtide.make_plan(model, update="host", schedule="in_backward"), device="cpu"
    ):
        backward(model, 0)
        optimizer.step()
        for group in other.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        before = model[0].weight.sum().item()  # type: ignore[union-attr, operator]
        other.step()
        assert model[0].weight.sum().item() < before  # type: ignore[union-attr, operator]
        # One that has nothing of the model's steps at any time.
        stranger = nn.Parameter(torch.ones(1))
        torch.optim.SGD([stranger], lr=0.1).step()
    backward(model, 1)
    other.step()
