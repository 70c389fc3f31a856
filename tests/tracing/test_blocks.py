"""Recomputing the repeated blocks changes neither values nor gradients."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lowtide.tracing.blocks import caching_configs, recompute_blocks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(width, width), 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + self.layer(x).tanh() * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def test_recomputing_runs_each_block_twice_and_changes_no_gradient() -> None:
    plain, model = Stack(), None
    model = copy.deepcopy(plain)
    assert recompute_blocks(model) == 3
    x = torch.randn(5, 4)
    for network in (plain, model):
        network(x).square().sum().backward()
    assert [block.calls for block in plain.layers] == [1, 1, 1]
    assert [block.calls for block in model.layers] == [2, 2, 2]
    for (name, expected), (_, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name


def test_without_gradients_nothing_is_recomputed() -> None:
    model = Stack()
    recompute_blocks(model)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert [block.calls for block in model.layers] == [1, 1, 1]


def test_recomputation_turns_the_key_value_cache_off() -> None:
    model = nn.Sequential(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    assert caching_configs(model) == [model.config]
    recompute_blocks(model)
    assert model.config.use_cache is False  # type: ignore[union-attr]
    assert caching_configs(model) == []
