"""The same small model twice, plain and managed: what is done to one is done to the other, and they must stay the same.

The model can be told to fail in the middle of its forward or backward, and to wait for a batch that is not finite.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.runtime.emulation.device import EmulatedDevice, Mark, set_mark
from lowtide.runtime.session import Session
from tests.zoo import assert_same_tensors

PLACES: dict[str, dict[str, Any]] = {
    "resident-device": {"weights": "resident", "update": "device"},
    "resident-host": {"weights": "resident", "update": "host"},
    "streamed-device": {"weights": {"*": "streamed", "": "streamed"}, "update": "device"},
    "streamed-host": {"weights": {"*": "streamed", "": "streamed"}, "update": "host"},
    "mixed": {"weights": {"*": "streamed", "layers.1": "resident"}, "update": {"*": "host", "layers.2": "device"}},
}
STREAMED = ("streamed-device", "streamed-host", "mixed")
WIDTH = 16


class TrippedError(Exception):
    """What the model raises when it was told to."""


class Block(nn.Module):
    """A residual layer that fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.trip: str | None = None
        """`forward` or `backward`: raise there, in the middle of the block."""
        self.error: BaseException = TrippedError("tripped")

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        if self.trip == "forward":
            raise self.error
        if self.trip == "backward" and hidden.requires_grad:
            hidden.register_hook(self._fail)
        out: Tensor = x + self.outer(hidden)
        return out

    def _fail(self, gradient: Tensor) -> None:
        raise self.error


class SmallNet(nn.Module):
    """Stem, three equal blocks and a head; gives its loss where it is given the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits if classes is None else F.cross_entropy(logits, classes)


def make_net() -> SmallNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return SmallNet()


def make_batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def device_peak(session: Session) -> int:
    return next(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "device")


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, size: int = 4) -> Tensor:
    """One unchanged step; returns the loss."""
    loss: Tensor = model(*make_batch(seed, size))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@functools.cache
def usual_peak(place: str, schedule: str) -> int:
    """What a few steps of training take of the device."""
    model = make_net()
    optimizer = adamw(model)
    plan = lowtide.make_plan(model, schedule=schedule, **PLACES[place])
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        for seed in range(3):
            take_step(model, optimizer, seed)
        return device_peak(session)


class Twins:
    """A plain and a managed model with their optimizers; the managed one inside the memory that a usual run takes."""

    def __init__(self, place: str = "streamed-host", schedule: str = "deferred", **plan: Any) -> None:
        self.plain, self.model = make_net(), make_net()
        self.plain_optimizer, self.optimizer = adamw(self.plain), adamw(self.model)
        for parameter in self.plain.parameters():
            set_mark(parameter.untyped_storage(), Mark.HOST)
        # A traceback, or a graph that is kept, holds a few activations longer than a step that goes well.
        self.budget_bytes = plan.pop("device_memory", usual_peak(place, schedule) + 8192)
        plan = {"schedule": schedule, "device_memory": self.budget_bytes, **PLACES[place], **plan}
        self.session = lowtide.manage(self.model, self.optimizer, lowtide.make_plan(self.model, **plan), device="cpu")

    @property
    def pairs(self) -> tuple[tuple[SmallNet, torch.optim.Optimizer], ...]:
        return (self.plain, self.plain_optimizer), (self.model, self.optimizer)

    def step(self, seed: int, size: int = 4) -> None:
        """The same step on both; the losses are the same bits."""
        with off_the_books():
            plain = take_step(self.plain, self.plain_optimizer, seed, size)
        managed = take_step(self.model, self.optimizer, seed, size)
        assert torch.equal(plain, managed), f"step {seed}: {plain.item()!r} against {managed.item()!r}"

    def each(self, action: Callable[[SmallNet, torch.optim.Optimizer], None]) -> None:
        """The same on both."""
        with off_the_books():
            action(self.plain, self.plain_optimizer)
        action(self.model, self.optimizer)

    def trip(self, place: str, layer: int = 1, error: BaseException | None = None) -> None:
        """Let both fail in this layer from now on."""
        for model, _ in self.pairs:
            block = model.layers[layer]
            assert isinstance(block, Block)
            block.trip, block.error = place, error or TrippedError("tripped")

    def mend(self) -> None:
        for model, _ in self.pairs:
            for block in model.layers:
                assert isinstance(block, Block)
                # A new error too: the one that was raised holds its traceback, and that the graph.
                block.trip, block.error = None, TrippedError("tripped")

    def assert_same(self) -> None:
        """Weights and optimizer state have the same bits, and the managed one kept to its budget."""
        assert device_peak(self.session) <= self.budget_bytes
        with off_the_books():
            assert_same_tensors(self.plain.state_dict(), self.model.state_dict())
            assert_same_tensors(flat_state(self.plain_optimizer), flat_state(self.optimizer))

    def follow(self) -> None:
        """The plain one takes over what the managed one has."""
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for value in flat_state(self.plain_optimizer).values():
            set_mark(value.untyped_storage(), Mark.HOST)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the managed weights and optimizer state."""
        with off_the_books():
            weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            return weights, {name: value.clone() for name, value in flat_state(self.optimizer).items()}

    def assert_is(self, snapshot: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        """The managed model and optimizer are as they were."""
        with off_the_books():
            for before, now in zip(snapshot, self.snapshot(), strict=True):
                assert_same_tensors(before, now)


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    # Sorted: entries stand in the order in which they were made, which a step by chunks changes.
    return {
        f"{index}.{key}": value
        for index, entry in sorted(optimizer.state_dict()["state"].items())
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


@contextmanager
def twins(place: str = "streamed-host", schedule: str = "deferred", **plan: Any) -> Iterator[Twins]:
    """Twins that are still the same at the end, before and after `close`."""
    both = Twins(place, schedule, **plan)
    try:
        yield both
        both.assert_same()
    finally:
        both.session.close()
    assert_same_tensors(both.plain.state_dict(), both.model.state_dict())
    assert_same_tensors(flat_state(both.plain_optimizer), flat_state(both.optimizer))


def off_the_books() -> AbstractContextManager[None]:
    """The plain model runs beside the emulated device, not on it."""
    return EmulatedDevice.of_this_thread().on_host()
