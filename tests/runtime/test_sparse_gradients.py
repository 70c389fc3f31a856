"""Sparse gradients: trained with where the optimizer itself can, refused by name before anything is updated elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import ConfigError, SessionError, StepLostError

ROWS, WIDTH = 20, 8


class Table(nn.Module):
    """Looks rows up in a plain parameter, which only the call knows to be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.rows, sparse=True)


def network(table: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("update", ["host", "device", "paged"])
def test_a_table_is_refused_with_a_precision(update: str, schedule: str) -> None:
    model = network(nn.Embedding(ROWS, WIDTH, sparse=True))
    before = values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, update=update, schedule=schedule)
    with pytest.raises(
        ConfigError,
        match="gradient of 0.weight will be sparse, and precision='fp32' needs dense ones; make .* sparse=False",
    ):
        lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_table_is_refused_with_a_norm() -> None:
    model = network(nn.Embedding(ROWS, WIDTH, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="0.weight will be sparse, and max_grad_norm=1.0 needs dense"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", max_grad_norm=1.0)


def test_a_table_that_the_optimizer_does_not_hold_is_not() -> None:
    model = network(nn.Embedding(ROWS, WIDTH, sparse=True))
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32"):
        model(torch.arange(4)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("update", ["host", "device", "paged"])
def test_deferred_nothing_is_updated(update: str, weights: str) -> None:
    model = network(Table())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights=weights, update=update)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        before = values(model)
        with pytest.raises(
            SessionError, match=r"the gradient of 0.rows is sparse_coo, of shape \(20, 8\).* sparse=False"
        ):
            step(model, optimizer)
        assert all(map(torch.equal, before, model.parameters()))
        if update == "host":
            with pytest.raises(StepLostError, match="as before the step"):
                optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters()))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("update", ["host", "device", "paged"])
def test_in_backward_the_message_is_the_same(update: str, weights: str) -> None:
    model = network(Table())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights=weights, update=update, schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        rows = values(model)[0]
        with pytest.raises(SessionError, match=r"0.rows is sparse_coo, of shape \(20, 8\).* sparse=False"):
            model(torch.arange(4)).square().sum().backward()
        with pytest.raises(StepLostError, match="updated 2 of 3 groups"):
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(rows, next(model.parameters()))


def test_without_a_precision_the_optimizers_own_step_takes_them() -> None:
    models = network(nn.Embedding(ROWS, WIDTH, sparse=True)), network(nn.Embedding(ROWS, WIDTH, sparse=True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with lowtide.manage(models[1], optimizers[1], lowtide.make_plan(models[1]), device="cpu"):
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(2):
                model(torch.arange(4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
