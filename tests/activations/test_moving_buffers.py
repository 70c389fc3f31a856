"""Statistics of norms move once for each forward, whatever the first forward was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.activations import Policy, apply
from tests.activations.test_policies_identity import POLICIES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.fails = nn.BatchNorm1d(4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.fails:
            raise ValueError("broken off")
        return x + self.layer(y).relu()


def of_zeros(model: nn.Module) -> None:
    """The mean of zeros is what a new module has: it does not seem to move."""
    model(torch.zeros(8, 4))


def broken_off(model: nn.Module) -> None:
    model[0].fails = True  # type: ignore[index]
    with pytest.raises(ValueError, match="broken off"):
        model(torch.ones(8, 4))
    model[0].fails = False  # type: ignore[index]


def without_momentum(model: nn.Module) -> None:
    for block in model.children():
        block.norm.momentum = 0.0  # type: ignore[union-attr]
    model(torch.ones(8, 4)).sum().backward()


@pytest.mark.parametrize("first", [of_zeros, broken_off, without_momentum])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_statistics_move_once(policy: Policy, first: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(3)))
    model = copy.deepcopy(plain)
    with apply(model, policy):
        for network in (plain, model):
            torch.manual_seed(1)
            first(network)
            for block in network.children():
                block.norm.momentum = 0.1  # type: ignore[union-attr]
            for _ in range(3):
                network(torch.randn(8, 4) + 3).square().sum().backward()
    for (name, one), (_, other) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(one, other), name


class OwnStatistics(Block):
    """Under names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.batch_norm(x, self.level, self.spread, training=True))


def test_a_run_that_broke_off_settles_nothing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(OwnStatistics() for _ in range(2)))
    model = copy.deepcopy(plain)
    with apply(model, "recompute"):
        for network in (plain, model):
            torch.manual_seed(1)
            network[0].fails = True
            with pytest.raises(ValueError, match="broken off"):
                # The mean of zeros is what the buffer has.
                network(torch.zeros(8, 4))
            network[0].fails = False
            for _ in range(2):
                network(torch.randn(8, 4) + 3).square().sum().backward()
    for (name, one), (_, other) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(one, other), name
