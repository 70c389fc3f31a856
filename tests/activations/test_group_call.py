"""A second run has the inputs and the buffers of the first."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.activations import Policy, apply
from tests.activations.measured import assert_equal
from tests.activations.test_policies_identity import POLICIES

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Answer:
    value: Tensor
    label: str


class Nested(nn.Module):
    """Takes and gives everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)

    def forward(
        self, x: Tensor, rest: dict[str, Any], *masks: Tensor | None, pair: Pair, scale: float = 1.0, notes: list[Any]
    ) -> tuple[Tensor, dict[str, Any], Answer, None]:
        hidden = self.drop(self.norm(self.layer(x * pair.left + pair.right)) * scale)
        for mask in masks:
            hidden = hidden if mask is None else hidden.masked_fill(mask, 0.5)
        for entry in rest["list"]:
            hidden = hidden + entry
        notes.append(hidden.abs().mean())
        return hidden, {"list": [hidden.tanh()], "name": rest["name"]}, Answer(hidden.exp(), "a"), None


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nested() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rest: dict[str, Any] = {"list": [torch.ones(8)], "name": "n"}
        notes: list[Tensor] = []
        total = torch.zeros(())
        pair = Pair(torch.tensor(1.5), torch.arange(8.0))
        for block in self.blocks:
            x, rest, answer, nothing = block(x, rest, x > 1, None, pair=pair, scale=0.5, notes=notes)
            assert nothing is None
            assert answer.label == "a"
            total = total + answer.value.mean()
        assert len(notes) == 4, "the caller's own list is filled, once for each call"
        return total + x.square().mean() + torch.stack(notes).sum()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nested_inputs_and_outputs(policy: Policy) -> None:
    def step() -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        model, x = Network(), torch.randn(16, 8, requires_grad=True)
        with apply(model, chosen, poison=True):
            loss = model(x)
            loss.backward()
        assert x.grad is not None
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [loss.detach(), x.grad, *found], dict(model.named_buffers()), torch.rand(3)

    chosen: Policy = POLICIES["keep"]
    expected, expected_buffers, expected_random = step()
    chosen = policy
    found, buffers, drawn = step()
    assert_equal(expected, found)
    # Statistics move once, and the generator is where it would be.
    assert_equal(list(expected_buffers.values()), list(buffers.values()))
    assert torch.equal(expected_random, drawn)


class Counting(nn.Module):
    """Buffers that are written to, replaced, and left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        for name in ("written", "replaced", "fixed"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        return x + self.norm(self.layer(x)).relu() * (1 + self.fixed)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_buffer_moves_once(policy: Policy) -> None:
    def steps(chosen: Policy) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(Counting() for _ in range(4))))
        with apply(model, chosen):
            for is_training in (True, False, True):
                model.train(is_training)
                model(torch.randn(16, 8)).square().mean().backward()
        return model, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, expected = steps(POLICIES["keep"])
    model, found = steps(policy)
    assert_equal(expected, found)
    for (name, one), (_, other) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_without_gradients_calls_go_straight_through(policy: Policy) -> None:
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(16, 8)
    with torch.no_grad():
        expected = model(x)
    frozen = Network().eval().requires_grad_(False)
    with apply(model, policy) as applied, apply(frozen, policy) as of_frozen:
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert not frozen(x).requires_grad
        for stats in (applied.stats(), of_frozen.stats()):
            assert (stats.num_recomputed, stats.num_offloaded) == (0, 0)


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
