"""From a torch optimizer to the rule that the kernels run: read anew for each step, so that schedulers are heard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.memory.groups import is_dense
from lowtide.optim.optimizers import Adafactor as AdafactorOptimizer
from lowtide.optim.optimizers import Lion as LionOptimizer
from lowtide.optim.update_types import Adafactor, Adam, Lion, Rule, Sgd

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, LionOptimizer)
MATRIX = (torch.optim.Adafactor, torch.optim.Muon, AdafactorOptimizer)
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels update."""
_LARGEST = float(torch.finfo(torch.float32).max)
"""The largest setting that kernels can take: they compute in fp32."""


def has_matrix_rule(optimizer: Optimizer) -> bool:
    """Whether it updates a parameter as a whole, and each by itself: Adafactor and Muon.

    There is a kernel for `lowtide.optim.Adafactor`; torch's two stay with their own code.
    """
    return type(optimizer) in MATRIX


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule | None:
    """The rule of a param group as its settings are now; None where the kernels have none, see `reason_without_rule`.

    A rate or beta that is a tensor is read: on a GPU that waits for it.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9)
        >>> rule_of(optimizer, optimizer.param_groups[0]).momentum
        0.9

    Raises:
        ConfigError: A setting is no number.
    """
    if reason_without_rule(optimizer, group) is not None:
        return None
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


def require_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:
    """`rule_of`, where there must be one.

    Raises:
        UnsupportedOptimizerError: There is none; the message says why.
        ConfigError: A setting is no number.
    """
    rule = rule_of(optimizer, group)
    if rule is None:
        raise UnsupportedOptimizerError(
            f"there is no kernel for this update: {reason_without_rule(optimizer, group)}; leave the precision of updates "
            "to the optimizer itself (precision=None), or choose Adam, AdamW, SGD, lowtide.optim.Lion or "
            "lowtide.optim.Adafactor"
        )
    return rule


def as_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose tensors of one element were read, so that nobody else waits for them."""
    return {key: _read(value) for key, value in settings.items()}


def reason_without_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot take a param group, as the rest of a sentence; None where they can."""
    name = type(optimizer).__name__
    # A subclass may do anything in its step.
    with_kernel = (*ELEMENTWISE, AdafactorOptimizer)
    if has_matrix_rule(optimizer) and type(optimizer) not in with_kernel:
        return f"torch.optim.{name} looks at whole matrices"
    if type(optimizer) not in with_kernel:
        known = ", ".join(sorted(kind.__name__ for kind in with_kernel))
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
