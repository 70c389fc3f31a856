"""Lion: a torch optimizer that keeps one state and moves every weight by the same amount, up or down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.errors import ConfigError
from lowtide.optim.reference import sign


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2), with decoupled decay.

    One state of the parameter's own dtype: half of Adam's. Rates are usually 3 to 10 times smaller than Adam's, and
    decays as much larger. In plain torch, parameter by parameter; a managed model updates it with Lowtide's kernels.

    Args:
        params: Parameters or groups.
        lr: How far each weight moves in a step; a number or a tensor of one element.
        betas: Of the momentum in the step taken, and in the one that is kept.
        weight_decay: Decoupled, scaled by `lr`.
        maximize: Go up instead of down.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> (weight**2).sum().backward()
        >>> Lion([weight], lr=0.25).step()
        >>> weight.tolist()
        [0.75, -0.75]
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ConfigError(f"lr is {float(lr)}; give a number of 0 or more", key="lr")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas are {betas}; give two numbers from 0 to below 1", key="betas")
        if not weight_decay >= 0.0:
            raise ConfigError(f"weight_decay is {weight_decay}; give a number of 0 or more", key="weight_decay")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's own do
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient: Tensor = parameter.grad  # type: ignore[assignment]  # the caller has checked
        if gradient.is_sparse:
            raise ConfigError("Lion has no rule for sparse gradients; make the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"] != 0:
            parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(sign(state["exp_avg"].lerp(gradient, 1 - beta1)), alpha=-lr)
        state["exp_avg"].lerp_(gradient, 1 - beta2)
