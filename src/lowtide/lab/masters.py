"""Plain training with fp32 masters: what updates through Lowtide's own kernels are checked against.

torch's own optimizer steps on fp32 copies of the weights, with their gradients in fp32, and each weight is its master's
rounding afterwards. For weights in fp32 that is the optimizer's own step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.lab.optimizer_recipe import OptimizerRecipe
from lowtide.lab.training import optimizer_over


def optimizer_over_masters(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, for the same loop as a plain one: its step takes the model's gradients, and writes the model's weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in trained]
    optimizer = optimizer_over(recipe, masters)

    def take_gradients(*_: Any) -> None:
        for parameter, master in zip(trained, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            # The loop clears the gradients of the optimizer's own tensors, which these are not.
            parameter.grad = None

    def write_weights(*_: Any) -> None:
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_weights)
    return optimizer
