"""A forward that writes to its own weights, or gives them away."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import SessionError

PLACES = [("streamed", "host"), ("streamed", "device"), ("resident", "host"), ("resident", "device")]


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.05, 0.05)
        return torch.relu(self.inner(x))


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(40, 16))
        self.copies = False

    def forward(self, length: int) -> torch.Tensor:
        return self.values[:length].clone() if self.copies else self.values[:length]


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = Prompt()
        self.blocks = nn.ModuleList([Clamped(), Clamped()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.prompt(len(x))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(place: tuple[str, str] | None, schedule: str = "deferred") -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Clamped(), Clamped(), Clamped())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = None
    if place is not None:
        plan = lowtide.make_plan(model, weights=place[0], update=place[1], schedule=schedule)
        session = lowtide.manage(model, optimizer, plan, device="cpu")
    losses = []
    for step in range(4):
        loss = model(torch.full((3, 16), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        model(torch.ones(3, 16))
    weight = model[1].inner.weight.detach().clone()
    if session is not None:
        session.close()
    return losses, weight


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_a_forward_writes_is_kept(place: tuple[str, str], schedule: str) -> None:
    losses, weight = train(None)
    managed_losses, managed_weight = train(place, schedule)
    assert losses == managed_losses
    assert torch.equal(weight, managed_weight)
    assert weight.abs().max() <= 0.05 + 1e-6


def test_weights_that_leave_a_window_are_refused() -> None:
    model = Prompted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights={"*": "streamed", "prompt": "streamed"})
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        with pytest.raises(SessionError, match=r"Prompt at prompt returns its own weights .* group prompt is streamed"):
            model(torch.ones(8, 16))
        model.prompt.copies = True
        model(torch.ones(8, 16)).backward()
        optimizer.step()
