"""Models for the check over ranks, some of which do otherwise on rank 1 than in one process."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

Made = tuple[nn.Module, dict[str, torch.Tensor]]


class Net(nn.Module):
    """What a transformer lacks: running statistics, and dropout."""

    def __init__(self, on_rank_1: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)
        self.on_rank_1 = on_rank_1

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> SimpleNamespace:
        if dist.is_initialized() and dist.get_rank() == 1:
            match self.on_rank_1:
                case "raises":
                    raise ValueError("on purpose")
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "computes something else":
                    x = 1.01 * x
        hidden = self.dropout(self.norm(self.first(x * scale))).relu()
        return SimpleNamespace(loss=(self.last(hidden) - x.sum(1, keepdim=True)).square().mean())


def make(on_rank_1: str) -> Made:
    # `scale` is a row that all samples have, which is not divided.
    return Net(on_rank_1), {"x": torch.rand(8, 8), "scale": torch.rand(1, 8)}


def right() -> Made:
    return make("is right")


def wrong() -> Made:
    return make("computes something else")


def raising() -> Made:
    return make("raises")


def killed() -> Made:
    return make("is killed")


def sparse() -> Made:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8, sparse=True)
            self.last = nn.Linear(8, 1)

        def forward(self, ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.last(self.table(ids)).square().mean())

    return Sparse(), {"ids": torch.ones(4, 2, dtype=torch.long)}
