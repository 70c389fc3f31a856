"""Running a few real steps, for the tests of every model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def train_losses(
    model: nn.Module, batch: Mapping[str, Tensor], *, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """The loss before each of `steps` updates on one batch, by AdamW unless another optimizer is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every parameter after one backward, by name."""
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
