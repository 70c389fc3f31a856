"""Arguments of `manage` that cannot be meant."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, SessionError
from lowtide.planning.plan import Schedule


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_the_optimizer_of_a_copy_is_refused() -> None:
    model = small()
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(SessionError, match="holds none of the model's 4 trained parameters; its 4 belong to something"):
        lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu")
    assert type(model[0].weight) is nn.Parameter


def test_an_optimizer_over_a_part_of_the_model_is_fine() -> None:
    model = small()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model), device="cpu"):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(before, model[0].weight)


def test_what_is_no_plan_is_refused() -> None:
    model = small()
    with pytest.raises(SessionError, match=r"the plan is a str; give one from lowtide.make_plan\(model, ...\)"):
        lowtide.manage(model, None, "streamed", device="cpu")  # type: ignore[arg-type]  # what the test is about


@pytest.mark.parametrize(
    "make", [lambda word: lowtide.WarmUp(schedule=word), lambda word: lowtide.StaticPartition(share=0.5, schedule=word)]
)
def test_schedules_by_name(make: object) -> None:
    assert make("in_backward").schedule is Schedule.IN_BACKWARD  # type: ignore[operator]  # either of the two
    with pytest.raises(ConfigError, match="schedule is 'inbak'; give 'deferred' or 'in_backward'"):
        make("inbak")  # type: ignore[operator]  # either of the two
