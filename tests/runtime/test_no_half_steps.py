"""What the kernels refuse in one param group or one parameter, they refuse before any other was updated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, UnsupportedOptimizerError
from tests.zoo import bf16_safe

WIDTH = 16
PLACES = [
    (weights, update, schedule)
    for weights in ("streamed", "resident")
    for update in ("host", "device", "paged")
    for schedule in ("deferred", "in_backward")
]
everywhere = pytest.mark.parametrize(
    ("weights", "update", "schedule"), PLACES, ids=[" ".join(place) for place in PLACES]
)
Group = dict[str, Any]


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(torch.bfloat16)


def loss_of(model: nn.Module) -> torch.Tensor:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    return model(rows).float().square().mean()  # type: ignore[no-any-return]  # a module's call has no type


def manage(model: nn.Module, optimizer: torch.optim.Optimizer, *place: str) -> lowtide.Session:
    weights, update, schedule = place
    plan = lowtide.make_plan(model, weights=weights, update=update, schedule=schedule)
    return lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 exact")


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, session: lowtide.Session) -> dict[str, torch.Tensor]:
    session.settle()
    states = optimizer.state_dict()["state"]
    found = {f"{key} {name}": value for key, entries in states.items() for name, value in entries.items()}
    return copy.deepcopy(found | dict(model.state_dict()))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


SPOIL: dict[str, tuple[Callable[[Group], Any], str]] = {
    "a rate beyond fp32": (lambda group: group.update(lr=1e39), r"lr of a param group is 1e\+39"),
    "a beta of 1": (lambda group: group.update(betas=(1.0, 0.999)), r"betas of a param group are \(1.0, 0.999\)"),
    "no betas": (lambda group: group.update(betas=None), "betas of a param group are None"),
    "no eps": (lambda group: group.pop("eps"), "eps of a param group is None"),
}


@everywhere
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", SPOIL)
def test_a_setting_of_one_group(name: str, which: int, weights: str, update: str, schedule: str) -> None:
    spoil, message = SPOIL[name]
    model = network()
    groups = [{"params": list(layers.parameters())} for layers in (model[:2], model[2:])]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with manage(model, optimizer, weights, update, schedule) as session:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer, session)
        good = dict(optimizer.param_groups[which])
        spoil(optimizer.param_groups[which])
        with pytest.raises(ConfigError, match=message):
            step_and_settle(model, optimizer, session)
        optimizer.param_groups[which].update(good)
        assert_same(before, everything(model, optimizer, session))
        optimizer.zero_grad()
        step_and_settle(model, optimizer, session)
        assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_setting_that_adds_state_to_what_visits(which: int, schedule: str) -> None:
    model = network()
    groups = [{"params": list(layers.parameters())} for layers in (model[:2], model[2:])]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with manage(model, optimizer, "streamed", "paged", schedule) as session:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer, session)
        optimizer.param_groups[which]["amsgrad"] = True
        with pytest.raises(ConfigError, match="a setting that adds state .*max_exp_avg_sq.* Nothing was updated"):
            step_and_settle(model, optimizer, session)
        optimizer.param_groups[which]["amsgrad"] = False
        assert_same(before, everything(model, optimizer, session))
        optimizer.zero_grad()
        step_and_settle(model, optimizer, session)


@everywhere
def test_a_parameter_that_is_added_and_has_no_kernel(weights: str, update: str, schedule: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with manage(model, optimizer, weights, update, schedule) as session:
        before = everything(model, optimizer, session)
        for added, message in (
            (nn.Parameter(torch.ones(5, dtype=torch.float64)), r"\(5,\) is torch.float64"),
            (nn.Parameter(torch.ones(5, dtype=torch.float16)), "a exact update is for bf16 weights"),
            (nn.Parameter(torch.ones(6, 8)[:, ::2]), "have gaps between them"),
        ):
            optimizer.add_param_group({"params": [added]})
            with pytest.raises((ConfigError, UnsupportedOptimizerError), match=message):
                step_and_settle(model, optimizer, session, added)
            optimizer.param_groups.pop()
            assert_same(before, everything(model, optimizer, session))
            assert torch.equal(added, torch.ones_like(added))
            optimizer.zero_grad()
        step_and_settle(model, optimizer, session)


def test_a_parameter_with_gaps_is_refused_with_a_precision() -> None:
    """Its elements are not side by side in memory, and others would have been updated in their place."""

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.sliced = nn.Parameter(torch.ones(6, 8)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.sliced.sum()  # type: ignore[no-any-return]  # a module's call has no type

    model = Gaps()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedOptimizerError, match=r"shape \(6, 4\) and stride \(8, 2\)"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32")
    assert type(model.linear.weight) is nn.Parameter
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
    assert (model.sliced != 1).all()


def step_and_settle(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: lowtide.Session,
    added: torch.Tensor | None = None,
) -> None:
    loss = loss_of(model)
    (loss if added is None else loss + added.float().square().sum()).backward()
    optimizer.step()
    session.settle()
