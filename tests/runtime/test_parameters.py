"""Parameters of every kind: tied, frozen, unused, used twice, switched on and off, computed, left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lowtide.errors import ModelChangedError
from tests.runtime.side_by_side import (
    WIDTH,
    Block,
    Tower,
    adamw,
    in_all_places,
    in_turn,
    inputs,
    loss_of,
    manage,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


class SharedTower(Tower):
    """One block called three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__([Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.blocks[0](x)
        out: Tensor = self.head(self.norm(x))
        return out


class RepeatedTower(Tower):
    """The same block object at two places among others."""

    def __init__(self) -> None:
        shared = Block()
        super().__init__([shared, Block(), shared])


class TiedTower(Tower):
    """Blocks that share one weight and not the other."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.inner.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]


class FunctionalTower(Tower):
    """The stem's weight is used again outside of the stem's call, as a head tied by hand."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden, self.stem.weight.t())[:, :4] + self.head(self.norm(hidden))


class NeverCalledTower(Tower):
    """A layer, large enough for a group of its own, that is never called: its weight is used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.by_hand = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(self.norm(F.linear(hidden, self.by_hand.weight, self.by_hand.bias)))
        return out


class LowRank(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def low_rank_tower() -> nn.Module:
    tower = Tower()
    tower.requires_grad_(False)
    for block in tower.blocks:
        assert isinstance(block, Block)
        block.inner = LowRank(block.inner)  # type: ignore[assignment]
    return tower


class UnusedTower(Tower):
    """A block and a parameter that no batch ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare_block = Block()
        self.spare = nn.Parameter(torch.ones(3))


class ConditionalTower(Tower):
    """The batch decides which blocks run."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for index, block in enumerate(self.blocks):
            if (x.shape[0] + index) % 3:
                hidden = block(hidden)
        out: Tensor = self.head(self.norm(hidden) if x.shape[0] % 2 else hidden)
        return out


class HalfUsedBlock(Block):
    """Uses one of its layers for some batches only."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            return x + self.outer(torch.tanh(self.inner(x)))
        return x + self.outer.bias


class AttentionBlock(nn.Module):
    """MultiheadAttention, which reads its children's weights instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        normed: Tensor = self.norm(x + out[0])
        return normed


class RecurrentBlock(nn.Module):
    """An LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x[None])
        return x + out[0]


class NormBlock(nn.Module):
    """BatchNorm, whose forward changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.linear(x))
        return out


class Double(nn.Module):
    """A parametrization by hand."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight.tril() if weight.dim() == 2 else 2 * weight


def weight_norm_block() -> nn.Module:
    block = Block()
    parametrizations.weight_norm(block.inner)
    parametrize.register_parametrization(block.outer, "weight", Double())
    return block


def spectral_norm_block() -> nn.Module:
    block = Block()
    parametrizations.spectral_norm(block.inner)
    return block


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one block three times": SharedTower,
    "a block at two places": RepeatedTower,
    "tied": TiedTower,
    "used by hand too": FunctionalTower,
    "used by hand only": NeverCalledTower,
    "low rank": low_rank_tower,
    "unused": UnusedTower,
    "conditional": ConditionalTower,
    "half used": lambda: Tower([HalfUsedBlock() for _ in range(3)]),
    "attention": lambda: Tower([AttentionBlock() for _ in range(2)]),
    "lstm": lambda: Tower([RecurrentBlock() for _ in range(2)]),
    "batch norm": lambda: Tower([NormBlock() for _ in range(3)]),
    "weight norm": lambda: Tower([weight_norm_block() for _ in range(2)]),
    "spectral norm": lambda: Tower([spectral_norm_block() for _ in range(2)]),
}


def varied(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Batches of several sizes, so that what depends on them changes, with an evaluation in between."""
    seen = []
    for seed, size in enumerate((4, 5, 3, 7, 4, 6)):
        loss = loss_of(model, seed, size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
        if seed == 2:
            model.eval()
            with torch.no_grad():
                seen.append(model(inputs(50)))
            model.train()
    return seen


def adamw_of_trained(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


@in_turn
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_use(name: str, place: str, schedule: str) -> None:
    side_by_side(varied, place, schedule=schedule, build=MODELS[name], make_optimizer=adamw_of_trained)


@in_all_places
@pytest.mark.parametrize("name", ["one block three times", "tied", "used by hand too", "conditional"])
def test_every_kind_of_use_with_accumulation_and_clipping(name: str, place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for step in range(3):
            for part in range(3):
                (loss_of(model, 10 * step + part, 3 + part) / 3).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place, build=MODELS[name])


def test_frozen_parameters_have_no_gradients_and_cost_their_own_bytes() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(LowRank(nn.Linear(128, 128, bias=False)) for _ in range(4)))

    def host_bytes(model: nn.Module) -> int:
        optimizer = adamw_of_trained(model)
        with manage(model, optimizer, "streamed-host") as session:
            model(torch.ones(2, 128)).sum().backward()
            optimizer.step()
            assert all((parameter.grad is None) != parameter.requires_grad for parameter in model.parameters())
            return next(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "host")

    weights = sum(parameter.nbytes for parameter in build().parameters())
    assert host_bytes(build()) < 1.25 * weights
    assert host_bytes(build().requires_grad_(True)) > 2 * weights


@in_all_places
@with_both_schedules
def test_parameters_switched_off_and_on_between_steps(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        assert isinstance(model, Tower)
        seen = []
        for turn in range(4):
            for frozen in (model.blocks[1], model.blocks[2].inner, model.norm):
                assert isinstance(frozen, nn.Module)
                frozen.requires_grad_(turn % 2 == 0)
            seen += steps(model, optimizer, range(2 * turn, 2 * turn + 2))
            assert all(parameter.grad is None for parameter in model.parameters())
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_a_parameter_that_was_frozen_at_the_start_cannot_be_trained_later(place: str) -> None:
    """The plan has no room for its gradient and its state; after `close` it can be managed again."""
    model = seeded(Tower)
    assert isinstance(model, Tower)
    model.blocks[0].requires_grad_(False)
    optimizer = adamw(model)
    session = manage(model, optimizer, place)
    steps(model, optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ModelChangedError, match="blocks.0.inner.weight of group blocks.0 was frozen"):
        steps(model, optimizer)
    session.close()
    assert_same_tensors(before, model.state_dict())
    with manage(model, optimizer, place):
        steps(model, optimizer)


class Marked(torch.Tensor):
    """A subclass of a library that Lowtide knows nothing of."""


def with_a_subclass() -> nn.Module:
    tower = Tower()
    data = tower.blocks[0].inner.weight.detach().as_subclass(Marked)  # type: ignore[union-attr]
    tower.blocks[0].inner.weight = nn.Parameter(data)  # type: ignore[union-attr]
    return tower


@in_all_places
@with_both_schedules
def test_parameters_of_a_subclass_are_left_alone_and_trained(place: str, schedule: str) -> None:
    side_by_side(
        lambda model, optimizer: [loss.as_subclass(Tensor) for loss in steps(model, optimizer)],
        place,
        schedule=schedule,
        build=with_a_subclass,
    )
    model = seeded(with_a_subclass)
    weight: Any = model.blocks[0].inner.weight  # type: ignore[index, union-attr]
    with manage(model, adamw(model), place):
        assert model.blocks[0].inner.weight is weight  # type: ignore[index, union-attr]
        assert isinstance(weight, Marked)


@in_all_places
def test_a_quantised_layer_is_left_alone(place: str) -> None:
    class Quantised(nn.Module):
        """An integer weight with its scale as buffers, and a bias that is trained."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.tensor(0.01))
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(x, self.weight * self.scale, self.bias)

    side_by_side(steps, place, build=lambda: Tower([Quantised() for _ in range(2)]), make_optimizer=adamw_of_trained)


@in_all_places
@with_both_schedules
def test_a_loss_that_reads_the_weights(place: str, schedule: str) -> None:
    """A penalty over all parameters outside of any module's call."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for seed in range(3):
            penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
            loss = loss_of(model, seed) + 1e-3 * penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    side_by_side(loop, place, schedule=schedule)
