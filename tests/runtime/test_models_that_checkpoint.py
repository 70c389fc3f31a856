"""Models that checkpoint themselves, or carry hooks of the user's: they keep working, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lowtide.errors import SecondBackwardError
from tests.runtime.side_by_side import (
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
    with_both_schedules,
)
from tests.zoo import zoo

Optimizer = torch.optim.Optimizer


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, *, use_reentrant: bool) -> Tensor:
    """The function in a checkpoint, as models do it: not where there will be no backward."""
    if not torch.is_grad_enabled() and use_reentrant:
        return function(x)
    out: Tensor = checkpoint(function, x, use_reentrant=use_reentrant)
    return out


class CheckpointedTower(Tower):
    """Each block recomputed by itself."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = recomputed(block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(self.norm(x))
        return out


class ReentrantTower(CheckpointedTower):
    """By a backward inside the backward."""

    use_reentrant = True


class SegmentedTower(Tower):
    """Several blocks, the norm of the rest group and the head recomputed together."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = recomputed(lambda x: self.blocks[1](self.blocks[0](x)), self.stem(x), use_reentrant=self.use_reentrant)
        return recomputed(lambda x: self.head(self.norm(self.blocks[2](x))), x, use_reentrant=self.use_reentrant)


class ReentrantSegmentedTower(SegmentedTower):
    """By a backward inside the backward."""

    use_reentrant = True


class WholeTower(Tower):
    """All but the stem recomputed at once."""

    def forward(self, x: Tensor) -> Tensor:
        def rest(x: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)))
            return out

        out: Tensor = checkpoint(rest, self.stem(x), use_reentrant=False)
        return out


class InnerCheckpoint(Block):
    """A block that recomputes a part of itself."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = recomputed(lambda x: self.dropout(torch.tanh(self.inner(x))), x, use_reentrant=self.use_reentrant)
        out: Tensor = x + self.outer(inner)
        return out


class ReentrantInnerCheckpoint(InnerCheckpoint):
    """By a backward inside the backward."""

    use_reentrant = True


class ManyCallsTower(Tower):
    """One block, recomputed at each of its calls."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = recomputed(self.blocks[0], x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(self.norm(x))
        return out


class ReentrantManyCallsTower(ManyCallsTower):
    """By a backward inside the backward: three of them reach the block, one after the other."""

    use_reentrant = True


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": CheckpointedTower,
    "blocks-reentrant": ReentrantTower,
    "segments": SegmentedTower,
    "segments-reentrant": ReentrantSegmentedTower,
    "nested": WholeTower,
    "inner": lambda: Tower([InnerCheckpoint() for _ in range(3)]),
    "inner-reentrant": lambda: Tower([ReentrantInnerCheckpoint() for _ in range(3)]),
    "many calls": ManyCallsTower,
}


def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Steps with an evaluation in between, which checkpoints nothing."""
    seen = []
    for seed in range(4):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
        with torch.no_grad():
            seen.append(model(inputs(seed + 10)))
    return seen


# A reentrant checkpoint says nothing about the gradient of its input: the stem's output has one.
@in_turn
@pytest.mark.parametrize("name", MODELS)
def test_models_that_checkpoint_themselves(name: str, place: str, schedule: str) -> None:
    side_by_side(trained, place, schedule=schedule, build=MODELS[name])


@in_all_places
def test_a_block_that_several_inner_backwards_reach(place: str) -> None:
    """Each brings a gradient of its own: they add up where gradients wait for the step, and are refused elsewhere."""
    side_by_side(trained, place, build=ReentrantManyCallsTower)
    model = seeded(ReentrantManyCallsTower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, "in_backward"):
        with pytest.raises(SecondBackwardError, match="second backward reached group blocks.0 .*'deferred'"):
            loss_of(model, 0).backward()
        with pytest.warns(RuntimeWarning, match="raised after it had updated . of . groups"):
            optimizer.zero_grad()


@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_checkpoint_themselves_with_accumulation(name: str, place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen = []
        for step in range(2):
            for part in range(2):
                (loss_of(model, 10 * step + part, 3 + part) / 2).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place, build=MODELS[name])


@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@with_both_schedules
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_transformers_own_checkpointing(name: str, place: str, schedule: str, use_reentrant: bool) -> None:
    model = zoo(name)

    def build() -> nn.Module:
        network: Any = model.build(True, torch.float32)
        network.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        network.enable_input_require_grads()
        return network  # type: ignore[no-any-return]

    def loop(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in model.batches(3):
            loss = model.loss(network, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    side_by_side(loop, place, schedule=schedule, build=build)


# Hooks on modules


@in_turn
@pytest.mark.parametrize("when", ["before", "during"])
def test_hooks_on_modules(place: str, schedule: str, when: str) -> None:
    """Forward and backward hooks fire in plain torch's order, see its values, and may change them."""
    events: list[tuple[str, Tensor]] = []

    def hook_all(model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _, args, name=name: events.append((f"pre {name}", args[0])))
            module.register_full_backward_pre_hook(
                lambda _, grads, name=name: events.append((f"backward pre {name}", grads[0]))
            )
            module.register_full_backward_hook(
                lambda _, before, after, name=name: events.append((f"backward {name}", after[0]))
            )
        model.get_submodule("blocks.1").register_forward_hook(lambda module, args, out: out * 1.5)
        model.get_submodule("blocks.0").register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))

    def build() -> nn.Module:
        events.clear()
        tower = Tower()
        if when == "before":
            hook_all(tower)
        return tower

    names: list[list[str]] = []

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        if when == "during":
            hook_all(model)
        losses = []
        for seed in range(3):
            # With a gradient: without one torch warns that a hook has no gradient of an input to see.
            loss = model(inputs(seed).requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        names.append([name for name, _ in events])
        return losses + [value.detach().clone() for _, value in events]

    side_by_side(loop, place, schedule=schedule, build=build)
    assert names[0] == names[1]
    assert len(names[0]) == 3 * 3 * 13, "three hooks on each module, three steps"
