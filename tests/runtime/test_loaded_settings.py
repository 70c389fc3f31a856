"""Settings come with a loaded state, as torch loads them: they say what the state must hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.zoo import bf16_safe

WIDTH = 16
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        # Smaller with each step, so that amsgrad's maximum is not the present second moment.
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)) / (step + 1)
        model(rows.to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def manage(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, update: str) -> lowtide.Session:
    plan = lowtide.make_plan(model, update=update)
    return lowtide.manage(model, optimizer, plan, device="cpu", precision=precision)


CHANGES: dict[str, tuple[Make, Make]] = {
    "amsgrad comes with it": (
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
    ),
    "amsgrad goes with it": (
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    ),
    "momentum comes with it": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "momentum goes with it": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
}


@pytest.mark.parametrize("update", ["host", "device", "paged"])
@pytest.mark.parametrize("precision", ["fp32", "bf16 exact"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_made_with_other_options_goes_on_with_the_saved_ones(
    change: str, precision: str, update: str
) -> None:
    make_saved, make_other = CHANGES[change]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    whole = network(dtype)
    optimizer = make_saved(whole.parameters())
    with manage(whole, optimizer, precision, update):
        train(whole, optimizer, range(4))
        saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
        train(whole, optimizer, range(4, 8))
    resumed = network(dtype)
    resumed.load_state_dict(saved[0])
    optimizer = make_other(resumed.parameters())
    with manage(resumed, optimizer, precision, update):
        optimizer.load_state_dict(saved[1])
        assert optimizer.state_dict()["state"][0].keys() == saved[1]["state"][0].keys()
        train(resumed, optimizer, range(4, 8))
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
