"""Modules that write to their arguments and return them: their groups are there in the backward all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from tests.runtime.twins import PLACES

WIDTH = 16


class Block(nn.Module):
    """Gives back the tensor that it was given, with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.linear(x.clone())
        return x.mul_(2).add_(change)


class Stack(nn.Module):
    """A stack of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("place", [place for place in PLACES if place != "mixed"])
@pytest.mark.parametrize("schedule", ["in_backward", "deferred"])
def test_same_bits_as_plain_torch(place: str, schedule: str) -> None:
    outcomes = []
    for is_managed in (False, True):
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = lowtide.make_plan(model, schedule=schedule, **PLACES[place])
        session = lowtide.manage(model, optimizer, plan, device="cpu") if is_managed else None
        for _ in range(3):
            loss = model(torch.randn(4, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        outcomes.append([loss.detach(), *(value.clone() for value in model.state_dict().values())])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
