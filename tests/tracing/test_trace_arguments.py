"""Arguments of `trace` that make no sense: told before anything runs, with what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
import lowtide.activations
from lowtide.errors import ConfigError
from lowtide.tracing.step_trace import Category, StepTrace


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamw"}, r"got 'adamw'; for example optimizer=torch.optim.AdamW"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            r"holds 2 parameters, none of them of this Linear",
        ),
        ({"torch_version": "banana"}, r"must look like 2.11.0, got 'banana'"),
        ({"torch_version": "3.1"}, r"made for torch 2.8 to 2.13"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), **arguments)


def test_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module, got NoneType"):
        lowtide.trace(None, torch.randn(2, 4))  # type: ignore[arg-type]


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match=r"no parameter that requires a gradient"):
        lowtide.trace(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), optimizer=torch.optim.SGD)


def test_a_trace_prints_in_one_line() -> None:
    trace = lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    assert repr(trace).startswith("StepTrace('Linear', predicted for h200, peak 0.0")
    assert "\n" not in repr(trace)
    assert repr(trace.at_peak).startswith("{'weights': ")


def test_what_stands_in_a_models_calls_cannot_be_traced() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    with (
        lowtide.activations.apply(model, "recompute"),
        pytest.raises(ConfigError, match=r"remove\(\) it first, and say settings=StepSettings"),
    ):
        lowtide.trace(model, torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    with (
        lowtide.manage(model, None, lowtide.make_plan(model), device="cpu"),
        pytest.raises(ConfigError, match="under management"),
    ):
        lowtide.trace(model, torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())


def test_the_state_of_an_optimizer_that_has_stepped_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def traced() -> StepTrace:
        return lowtide.trace(
            model, torch.randn(2, 64), loss=lambda model, batch: model(batch).sum(), optimizer=optimizer
        )

    before = traced()
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = traced()
    # The counts of steps, one number for each parameter, are there from the beginning.
    assert after.at_peak[Category.ACTIVATIONS] == before.at_peak[Category.ACTIVATIONS]
    assert 0 <= after.at_peak[Category.OPTIMIZER] - before.at_peak[Category.OPTIMIZER] <= 512 * 4
