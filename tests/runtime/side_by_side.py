"""Run the same loop on a plain model and on a managed one; whatever it returns and leaves behind must be the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from tests.zoo import assert_same_tensors

WIDTH = 16
PLACES: dict[str, dict[str, Any]] = {
    "streamed-host": {"weights": "streamed", "update": "host"},
    "streamed-device": {"weights": "streamed", "update": "device"},
    "resident-host": {"weights": "resident", "update": "host"},
    "mixed": {"weights": {"*": "streamed", "blocks.1": "resident"}, "update": 0.5, "prefetch_depth": 2},
}
in_all_places = pytest.mark.parametrize("place", PLACES)
in_turn = pytest.mark.parametrize(
    ("place", "schedule"),
    [
        ("streamed-host", "deferred"),
        ("streamed-device", "in_backward"),
        ("resident-host", "deferred"),
        ("mixed", "in_backward"),
    ],
)
"""Each place and each schedule, not each with each: for tests of many models or many ways."""
with_both_schedules = pytest.mark.parametrize("schedule", ["deferred", "in_backward"])

Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Loop = Callable[[nn.Module, torch.optim.Optimizer], Sequence[Tensor | float]]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


class Tower(nn.Module):
    """Stem, blocks, a norm in the rest group, and a head."""

    def __init__(self, blocks: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def seeded(build: Build) -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build()


def inputs(seed: int, size: int = 4) -> Tensor:
    """A batch for the tower."""
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int, size: int = 4) -> Tensor:
    """The loss of a batch, far enough from 0 for gradients of many sizes."""
    target = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed + 1000))
    return F.mse_loss(model(inputs(seed, size)), 3 * target)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Sequence[int] = range(3)) -> list[Tensor]:
    """The plain loop."""
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plan_for(model: nn.Module, place: str, schedule: str = "deferred") -> lowtide.Plan:
    """The plan of a place, for a model that may lack the groups that it names."""
    words = dict(PLACES[place])
    if isinstance(words["weights"], dict):
        names = {group.name for group in lowtide.make_plan(model).groups}
        words["weights"] = {name: word for name, word in words["weights"].items() if name == "*" or name in names}
    return lowtide.make_plan(model, schedule=schedule, **words)


def manage(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, place: str, schedule: str = "deferred", **options: Any
) -> lowtide.Session:
    """The model on an emulated device."""
    return lowtide.manage(model, optimizer, plan_for(model, place, schedule), device="cpu", **options)


def side_by_side(
    loop: Loop,
    place: str,
    *,
    schedule: str = "deferred",
    build: Build = Tower,
    make_optimizer: MakeOptimizer = adamw,
    **options: Any,
) -> None:
    """Run the loop on both; compare what it returns, the weights, the buffers and the optimizer's state."""
    plain = seeded(build)
    plain_optimizer = make_optimizer(plain)
    torch.manual_seed(0)
    expected = loop(plain, plain_optimizer)
    managed = seeded(build)
    managed_optimizer = make_optimizer(managed)
    with manage(managed, managed_optimizer, place, schedule, **options):
        torch.manual_seed(0)
        found = loop(managed, managed_optimizer)
        assert_same_values(expected, found)
        assert_same_state(plain_optimizer, managed_optimizer)
    assert_same_tensors(plain.state_dict(), managed.state_dict())
    assert_same_state(plain_optimizer, managed_optimizer)


def assert_same_values(expected: Sequence[Tensor | float], found: Sequence[Tensor | float]) -> None:
    """Fail on the first that differs in any bit."""
    assert len(expected) == len(found), f"{len(expected)} values against {len(found)}"
    assert expected, "nothing to compare"
    assert_same_tensors(_named(expected), _named(found))


def assert_same_state(plain: torch.optim.Optimizer, managed: torch.optim.Optimizer) -> None:
    """Fail unless both state dictionaries have the same entries, bits and settings."""
    one, other = plain.state_dict(), managed.state_dict()
    assert set(one["state"]) == set(other["state"])
    for index, entries in one["state"].items():
        assert_same_tensors(_named(entries), _named(other["state"][index]))
    assert one["param_groups"] == other["param_groups"]


def _named(values: Any) -> dict[str, Tensor]:
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {str(key): torch.as_tensor(value) for key, value in pairs if value is not None}
