"""Sparse gradients: where dense ones are needed, they are refused with the parameter's name before anything is updated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lowtide.errors import ConfigError, SessionError
from lowtide.memory.unmanaged import SPARSE_GRADIENT, unmanaged_parameters


def refuse_sparse_gradient(gradient: torch.Tensor, name: str) -> None:
    """Refuse a gradient that is not dense.

    Raises:
        SessionError: It is not.
    """
    if gradient.layout is not torch.strided:
        layout = str(gradient.layout).removeprefix("torch.")
        raise SessionError(
            f"the gradient of {name} is {layout}, of shape {tuple(gradient.shape)}; gradients that go to the host, or that "
            "Lowtide's own kernels update with (precision=), are dense. Look the rows up with sparse=False, or leave "
            "precision out and make the group resident and updated on the device"
        )


def refuse_sparse_tables(model: nn.Module, optimizer: torch.optim.Optimizer, asked: Iterable[str]) -> None:
    """Refuse embeddings that will have sparse gradients, before anything runs.

    Args:
        model: With them, or not.
        optimizer: Those that it does not hold do not matter.
        asked: The settings that need dense gradients, as the user wrote them.

    Raises:
        ConfigError: There is one. The message names the parameter.
    """
    settings = list(asked)
    if not settings:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    for name, reason in unmanaged_parameters(model):
        if reason == SPARSE_GRADIENT and id(named[name]) in held and named[name].requires_grad:
            raise ConfigError(
                f"the gradient of {name} will be sparse, and {settings[0]} needs dense ones; make the embedding with "
                f"sparse=False, or leave {settings[0].partition('=')[0]} out",
                key=settings[0].partition("=")[0],
            )
