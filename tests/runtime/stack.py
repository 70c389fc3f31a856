"""A model whose bytes can be counted on the fingers: equal blocks of 16 KiB, and half a KiB around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.planning.plan import Plan, Site, Weights
from lowtide.runtime.statistics.session_stats import TierRow

KB = 1024
WIDTH = 32
BLOCK_BYTES = 16 * KB
REST_BYTES = 512
NUM_BLOCKS = 6
NUM_ROWS = 64


class Block(nn.Module):
    """Two matrices of 8 KiB."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Stack(nn.Module):
    """Blocks, and a scale in the rest group; returns its loss."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.between(index, block(x))
        return (x * self.scale).square().mean()

    def between(self, index: int, x: Tensor) -> Tensor:
        """After each block."""
        del index
        return x


def batch(step: int = 0, num_rows: int = NUM_ROWS) -> Tensor:
    """Another one for each step, the same each time."""
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, *, first: int = 0) -> list[float]:
    """The plain loop; losses."""
    losses = []
    for step in range(first, first + num_steps):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def managed(plan: object, *, num_steps: int = 0, **settings: Any) -> tuple[lowtide.Session, list[float]]:
    """A session on a stack with AdamW, after some steps; the caller closes it."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = lowtide.manage(model, optimizer, plan, **settings)  # type: ignore[arg-type]
    try:
        return session, steps(model, optimizer, num_steps)
    except BaseException:
        session.close()
        raise


def num_resident(plan: Plan) -> int:
    """Groups that stay on the device."""
    return sum(group.weights is Weights.RESIDENT for group in plan.groups)


def num_on_device(plan: Plan) -> int:
    """Chunks that the device updates."""
    return sum(site is Site.DEVICE for group in plan.groups for site in group.sites)


def tier(session: lowtide.Session, name: str) -> TierRow:
    """A row of the statistics."""
    return next(row for row in session.stats().tiers if row.tier == name)
