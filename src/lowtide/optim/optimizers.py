"""Optimizers of Lowtide's own, in plain torch: Lion and Adafactor. A managed model updates both with Lowtide's kernels.

Adafactor is the one with which the "Peak Memory" experiment trained Deep One: almost no state, and temporaries instead. It goes
over the parameters one by one, out of place, and the experiment's published peaks contain that: a matrix in fp32 costs
three temporaries of its own size; a matrix in bf16 costs five fp32 copies (gradient, update, weight, scaled update,
difference), ten times its own gradient.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.errors import ConfigError


class _OneByOne(Optimizer):
    """Goes over the parameters one by one."""

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
                    self._update(parameter, parameter.grad, group)
        return loss

    @abc.abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Take one step of one parameter."""


class Lion(_OneByOne):
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2), with decoupled decay.

    One state of the parameter's own dtype: half of Adam's. Rates are usually 3 to 10 times smaller than Adam's, and
    decays as much larger. In plain torch, parameter by parameter; a managed model updates it with Lowtide's kernels.

    Args:
        params: Parameters or groups.
        lr: How far each weight moves in a step; a number or a tensor of one element.
        betas: Decays of the momentum in the step taken, and in the one that is kept.
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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
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


class Adafactor(_OneByOne):
    """Adafactor (Shazeer and Stern 2018) without momentum and without relative steps, in eager ops.

    The second moment of a matrix is kept as its row and column sums, that of a vector whole, in the parameter's own
    dtype. So the state of 1.6 B parameters is 5.4 MiB. `torch.optim.Adafactor` differs: its
    steps are relative to the size of the weights, and at most `1 / sqrt(t)`. A model that is managed with a `precision`
    has no such temporaries: see Note [Adafactor in two vectors] in `update_types`.

    Args:
        params: Parameters or groups.
        lr: Step size, taken as it is.
        weight_decay: Decoupled, scaled by `lr`.
        eps: Added to the squared gradient.
        decay_rate: The second moment's decay at step t is `1 - t ** decay_rate`...
        max_beta2: ...but at most this.
        clip_threshold: Root mean square that the update is scaled down to.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 2e-4,
        *,
        weight_decay: float = 0.01,
        eps: float = 1e-30,
        decay_rate: float = -0.8,
        max_beta2: float = 0.999,
        clip_threshold: float = 1.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not float(value) >= 0.0:
                raise ConfigError(f"{name} is {float(value)}; give a number of 0 or more", key=name)
        if not decay_rate <= 0.0:
            raise ConfigError(f"decay_rate is {decay_rate}; give a number of 0 or less", key="decay_rate")
        if not 0.0 <= max_beta2 < 1.0:
            raise ConfigError(f"max_beta2 is {max_beta2}; give a number from 0 to below 1", key="max_beta2")
        if not clip_threshold > 0.0:
            raise ConfigError(f"clip_threshold is {clip_threshold}; give a number above 0", key="clip_threshold")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
            "decay_rate": decay_rate,
            "max_beta2": max_beta2,
            "clip_threshold": clip_threshold,
        }
        super().__init__(params, defaults)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not parameter.numel():
            return  # it has no rows whose sums could be kept
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter))
        state["step"] += 1
        lr = group["lr"]
        parameter.mul_(1.0 - lr * group["weight_decay"])

        gradient = gradient.float()
        beta2 = min(1.0 - state["step"] ** group["decay_rate"], group["max_beta2"])
        update = _normalised(gradient, state, beta2, group["eps"])
        root_mean_square = update.square().mean().sqrt()
        update /= (root_mean_square / group["clip_threshold"]).clamp_(min=1.0)

        if parameter.dtype == update.dtype:
            parameter.add_(update, alpha=-lr)
        else:
            # `gradient` and `update` are still alive, so these three make the five fp32 copies of the published bf16
            # peaks.
            parameter.copy_(parameter.float() - lr * update)


def _initial_state(parameter: Tensor) -> dict[str, object]:
    # The count is a plain int, not torch's usual tensor: reading it back would need a value that a prediction does not
    # have.
    if parameter.dim() < 2:
        return {"step": 0, "row": torch.zeros_like(parameter)}
    rows = parameter.reshape(-1, parameter.shape[-1])
    return {"step": 0, "row": torch.zeros_like(rows[:, 0]), "col": torch.zeros_like(rows[0])}


def _normalised(gradient: Tensor, state: dict[str, Any], beta2: float, eps: float) -> Tensor:
    """The fp32 gradient divided by the root of its second moment, after moving that moment in `state`."""
    matrix = gradient.reshape(-1, gradient.shape[-1]) if "col" in state else gradient
    squares = matrix.square() + eps
    if "col" not in state:
        return matrix / _moved(state["row"], squares, beta2).sqrt()
    row = _moved(state["row"], squares.sum(dim=-1), beta2)
    col = _moved(state["col"], squares.sum(dim=-2), beta2)
    # Sums, not means: the outer product of the row and column sums over their common total is the same either way.
    scaled = matrix * torch.outer((row / row.sum()).rsqrt(), col.rsqrt())
    return scaled.view_as(gradient)


def _moved(stored: Tensor, target: Tensor, beta2: float) -> Tensor:
    """The stored average moved towards `target`, in fp32; the state keeps it in its own dtype."""
    average = stored.float()
    average.lerp_(target, 1.0 - beta2)
    if average.dtype != stored.dtype:
        stored.copy_(average)
    return average


def sign(values: Tensor) -> Tensor:
    """-1, 0 or 1, and NaN for a NaN, for which torch says 0: a broken gradient would go unnoticed."""
    return torch.where(values.isnan(), values, values.sign())
