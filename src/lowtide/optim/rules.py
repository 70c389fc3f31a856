"""The rules that kernels run, as plain data with the states that each keeps, and the rule of a torch optimizer: read anew
for each step, so that schedulers are heard.

Note [Adafactor in two vectors]
A tensor with two dimensions or more is a matrix, of rows as long as its last dimension; its second moment is kept as the
sums of its rows and of its columns. Step t takes the gradient g, in fp32 and with its factor, and `s = g * g + eps`:

    beta2 = min(1 - t ** decay_rate, max_beta2)
    row  <- beta2 * row + (1 - beta2) * (sums of s over each row);    col likewise
    d     = g * (row ** -0.5 * col ** -0.5)                            the direction, up to a factor
    size  = sqrt(sum of row)                                           that factor
    step  = lr * size / max(1, size * sqrt(mean of d * d) / clip_threshold)
    weight <- weight * (1 - lr * weight_decay) - step * d

A vector or a number keeps its second moment whole, under `row`: there `d = g / sqrt(row)`, and `size` is 1. Nothing of the
weight's size is made: d is computed twice, from the gradient, and lands in the weight as the rounding says. The vectors
are fp32 whatever the weight is, and whatever format was chosen for moments: they are a thousandth of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.memory.groups import is_dense
from lowtide.optim.optimizers import Adafactor as AdafactorOptimizer
from lowtide.optim.optimizers import Lion as LionOptimizer

ROW = "row"
COLUMN = "col"
STATISTICS = frozenset({ROW, COLUMN})
"""States that are fp32 whatever format was chosen for moments; named as `lowtide.optim.Adafactor` names them."""

WITH_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, LionOptimizer, AdafactorOptimizer)
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels update."""
_LARGEST = float(torch.finfo(torch.float32).max)
"""The largest setting that kernels can take: they compute in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam and AdamW as torch writes them."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = True
    """AdamW: decay multiplies the weight; else it is added to the gradient."""
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """SGD with momentum as torch writes it; the first step takes the gradient itself for the momentum."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled decay. The sign of zero is zero, that of a NaN is NaN."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """`lowtide.optim.Adafactor`; see Note [Adafactor in two vectors]."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-30
    decay_rate: float = -0.8
    max_beta2: float = 0.999
    clip_threshold: float = 1.0

    def beta2(self, step: int) -> float:
        """How much of the second moment stays in this step."""
        return min(1.0 - math.pow(step, self.decay_rate), self.max_beta2)


ElementwiseRule = Adam | Sgd | Lion
Rule = ElementwiseRule | Adafactor
"""What the kernels run."""
STATE_NAMES: dict[type, tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    Sgd: ("momentum_buffer",),
    Lion: ("exp_avg",),
}
"""As torch's optimizers call them; Adam with amsgrad has `max_exp_avg_sq` too, SGD without momentum has none."""
UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
"""States that are never negative: second moments."""


def require_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:
    """The rule of a param group as its settings are now.

    A rate or beta that is a tensor is read: on a GPU that waits for it.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9)
        >>> require_rule(optimizer, optimizer.param_groups[0]).momentum
        0.9

    Raises:
        UnsupportedOptimizerError: The kernels have none; the message says why.
        ConfigError: A setting is no number.
    """
    if (reason := reason_without_rule(optimizer, group)) is not None:
        raise UnsupportedOptimizerError(
            f"there is no kernel for this update: {reason}; leave the precision of updates to the optimizer itself "
            "(precision=None), or choose Adam, AdamW, SGD, lowtide.optim.Lion or lowtide.optim.Adafactor"
        )
    lr, weight_decay = _number(group, "lr"), _number(group, "weight_decay")
    if isinstance(optimizer, AdafactorOptimizer):
        numbers = {key: _number(group, key) for key in ("eps", "decay_rate", "max_beta2", "clip_threshold")}
        return Adafactor(lr=lr, weight_decay=weight_decay, **numbers)
    maximize = bool(group["maximize"])
    if isinstance(optimizer, torch.optim.SGD):
        return Sgd(
            lr=lr,
            momentum=_number(group, "momentum"),
            dampening=_number(group, "dampening"),
            nesterov=bool(group["nesterov"]),
            weight_decay=weight_decay,
            maximize=maximize,
        )
    beta1, beta2 = _betas(group)
    if isinstance(optimizer, LionOptimizer):
        return Lion(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, maximize=maximize)
    return Adam(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        weight_decay=weight_decay,
        is_decoupled=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=maximize,
    )


def as_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose tensors of one element were read, so that nobody else waits for them."""
    return {key: _read(value) for key, value in settings.items()}


def reason_without_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot take a param group, as the rest of a sentence; None where they can."""
    name = type(optimizer).__name__
    if type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon):
        return f"torch.optim.{name} looks at whole matrices"
    # A subclass may do anything in its step.
    if type(optimizer) not in WITH_KERNEL:
        known = ", ".join(sorted(kind.__name__ for kind in WITH_KERNEL))
        return f"{name} is none of the rules there are kernels for ({known})"
    for option, why in (
        ("capturable", "keeps its count of steps on the device, for CUDA graphs"),
        ("differentiable", "is recorded by autograd"),
    ):
        if group.get(option):
            return f"{name} with {option}=True {why}"
    for parameter in group["params"]:
        if parameter.dtype not in WEIGHT_TYPES:
            return (
                f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; kernels are for fp32, bf16, fp16"
            )
        if parameter.numel() and not is_dense(tuple(parameter.shape), parameter.stride()):
            return (
                f"a parameter of shape {tuple(parameter.shape)} and stride {parameter.stride()} has elements that overlap or "
                "have gaps between them; kernels are for dense ones, such as its .contiguous()"
            )
    return None


def _read(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_read, value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas of a param group are {betas!r}; set two numbers before the next step", key="betas")
    beta1, beta2 = (_as_number("betas", value) for value in betas)
    # With 1 a moment would never move, and its correction divides by zero: in the middle of a step.
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ConfigError(
            f"betas of a param group are {(beta1, beta2)}; set two numbers from 0 to below 1 before the next step",
            key="betas",
        )
    return beta1, beta2


def _number(group: Mapping[str, Any], key: str) -> float:
    return _as_number(key, group.get(key))


def _as_number(key: str, value: object) -> float:
    value = _read(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ConfigError(
            f"{key} of a param group is {shown}; set a finite number before the next step, at most fp32's {_LARGEST:.2g} (a "
            "scheduler or a loaded state may have put this there)",
            key=key,
        )
    return float(value)


def state_names(rule: ElementwiseRule) -> tuple[str, ...]:
    """The states that a rule keeps for each element."""
    if isinstance(rule, Sgd) and not rule.momentum:
        return ()
    more = ("max_exp_avg_sq",) if isinstance(rule, Adam) and rule.amsgrad else ()
    return STATE_NAMES[type(rule)] + more


def form_of(rule: ElementwiseRule) -> tuple[object, ...]:
    """Equal for rules between which numbers alone differ: they keep the same states, and one kernel is for all of them.

    Example:
        >>> form_of(Sgd(lr=0.1)) == form_of(Sgd(lr=0.2)), form_of(Sgd(lr=0.1)) == form_of(Sgd(lr=0.1, momentum=0.9))
        (True, False)
    """
    option = rule.is_decoupled if isinstance(rule, Adam) else isinstance(rule, Sgd) and rule.nesterov
    return type(rule), state_names(rule), option


def names_of_states(rule: Rule, shape: Sequence[int]) -> tuple[str, ...]:
    """The states that a rule keeps for a parameter of this shape."""
    return tuple(statistic_sizes(shape)) if isinstance(rule, Adafactor) else state_names(rule)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of two dimensions or more, as `lowtide.optim.Adafactor` sees it.

    Example:
        >>> matrix_shape((4, 3, 2, 5))
        (24, 5)
    """
    return math.prod(shape[:-1]), shape[-1]


def statistic_sizes(shape: Sequence[int]) -> dict[str, int]:
    """The states of a parameter of this shape, and how many numbers each has.

    Example:
        >>> statistic_sizes((2048, 5400)), statistic_sizes((7,)), statistic_sizes(())
        ({'row': 2048, 'col': 5400}, {'row': 7}, {'row': 1})
    """
    if len(shape) < 2:
        return {ROW: math.prod(shape)}
    rows, columns = matrix_shape(shape)
    return {ROW: rows, COLUMN: columns}
