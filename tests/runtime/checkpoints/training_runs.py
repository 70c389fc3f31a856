"""Training runs that are broken off after a checkpoint, and the undisturbed ones that they must equal to the bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim import LossScaler
from lowtide.optim.optimizers import Adafactor
from lowtide.optim.update_types import PRECISIONS
from lowtide.runtime.checkpoints.loading import LoadedCheckpoint

WIDTH = 24
STREAMED_HOST: dict[str, Any] = {"weights": "streamed", "update": "host"}
SPREAD: dict[str, Any] = {"weights": {"*": "streamed", "blocks.1": "resident"}, "update": 0.5}
RESIDENT: dict[str, Any] = {"weights": "resident", "update": "device"}


class Block(nn.Module):
    """Has dropout, and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.up(x)))
        return x + self.down(hidden) + 0.01 * self.mean.to(x.dtype)  # type: ignore[no-any-return]  # a module's call


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if self.training and torch.is_grad_enabled():
                # Once for each step, and not again where the block is recomputed.
                with torch.no_grad():
                    block.mean.lerp_(x.detach().float().mean((0, 1)).to(block.mean.dtype), 0.1)  # type: ignore[union-attr]
        return self.head(x).float()  # type: ignore[no-any-return]  # a module's call


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().to(dtype)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run is trained."""

    precision: str | None = None
    moments: str = "fp32"
    optimizer: str = "adamw"
    place: dict[str, Any] = field(default_factory=lambda: SPREAD)
    schedule: str = "deferred"
    activations: str | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    has_scheduler: bool = True
    chunk_bytes: int | None = None
    device: str = "cpu"
    seed: int = 7

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision is None else PRECISIONS[self.precision].dtype

    def __str__(self) -> str:
        named = [self.optimizer, str(self.precision), self.moments, self.schedule, self.activations or "keep"]
        return "-".join(named).replace(" ", "_")


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    if kind == "adafactor":
        return Adafactor(model.parameters(), lr=1e-2)
    if kind == "torch adafactor":
        # torch asks each group for a key that this class does not give it, where there is a CUDA device.
        return torch.optim.Adafactor([{"params": list(model.parameters()), "capturable": False}], lr=1e-2)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    if kind == "amsgrad":
        return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    assert kind == "adamw"
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


class Training:
    """One process's objects, fresh from their factories."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = make_net(run.dtype)
        self.optimizer = make_optimizer(run.optimizer, self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.02, total_steps=40, cycle_momentum=False
        )
        self.scaler = LossScaler() if run.precision == "fp16 exact" else None
        self.generator = torch.Generator().manual_seed(3)
        layout = lay_out(find_groups(self.model), chunk_bytes=run.chunk_bytes)
        plan = lowtide.make_plan(layout, schedule=run.schedule, activations=run.activations, **run.place)
        settings: dict[str, Any] = {"device": run.device, "max_grad_norm": run.max_grad_norm}
        if run.precision is not None:
            settings |= {"precision": run.precision, "moments": run.moments, "seed": run.seed}
        self.session = lowtide.manage(self.model, self.optimizer, plan, **settings)

    @property
    def state(self) -> dict[str, Any]:
        """What belongs to the run beside model and optimizer."""
        found: dict[str, Any] = {"data": self.generator}
        if self.run.has_scheduler:
            found["scheduler"] = self.scheduler
        if self.scaler is not None:
            found["scaler"] = self.scaler
        return found

    def step(self) -> float:
        total = 0.0
        for _ in range(self.run.accumulate):
            ids = torch.randint(20, (2, 6), generator=self.generator).to(self.run.device)
            logits = self.model(ids)
            # Loops draw numbers of their own, too.
            noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) * noise
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += float(loss.detach())
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.run.has_scheduler:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def values(self) -> dict[str, Tensor]:
        """Copies of all that the model keeps."""
        self.session.settle()
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def load(self, folder: Path) -> LoadedCheckpoint:
        return lowtide.load(folder, self.session, state=self.state)


@contextlib.contextmanager
def training(run: Run) -> Iterator[Training]:
    made = Training(run)
    try:
        yield made
    finally:
        made.session.close()


def draw_from(seed: int) -> None:
    """Set all generators that nobody names."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def assert_resumes(run: Run, other: Run, folder: Path, *, num_before: int = 3, num_after: int = 3) -> None:
    """A run that is saved and goes on, and one with fresh objects from the checkpoint, are the same to the bit."""
    draw_from(11)
    with training(run) as whole:
        whole.steps(num_before)
        whole.session.save(folder, state={**whole.state, "epoch": (1, 2)})
        losses = whole.steps(num_after)
        values = whole.values()
    draw_from(99)
    with training(other) as resumed:
        # Neither what was trained before nor where its generators are must matter.
        resumed.steps(1)
        loaded = resumed.load(folder)
        assert loaded.step == resumed.session.num_steps == num_before
        assert loaded.is_exact
        assert loaded.state == {"epoch": (1, 2)}
        assert resumed.steps(num_after) == losses
        assert_same(resumed.values(), values)
        assert resumed.session.num_steps == num_before + num_after


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
