"""Optimizers: hooks around their steps, copies over other tensors, and what a GradScaler leaves on them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that users registered before and after this optimizer's step, and every optimizer's, in torch's order."""
    from torch.optim import optimizer as module

    before = [*module._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()]
    return before, after


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> bool:
    """Take the step of the optimizer's class by itself: the wrapper around it would call hooks. True: it was taken."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *arguments)
    return True


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that `step` was called: they warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it on the fly


def copy_scheduler_mark(source: object, target: object) -> None:
    """Where a scheduler has put its wrapper around one `step`, let it find its mark on the one in its place."""
    if hasattr(source, "_wrapped_by_lr_sched"):
        target._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers set it on the fly


SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
"""What a GradScaler puts on a fused optimizer for the time of its `step`: the kernels unscale, or skip the update."""


UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler runs on the gradients of each device, with its flag and its scale there."""


def scaler_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of what a GradScaler has put on the optimizer: it takes them away when `step` returns."""
    found = {name: vars(optimizer)[name] for name in SCALER_ATTRIBUTES if name in vars(optimizer)}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


OPTIMIZER_BOOKKEEPING = frozenset({
    *SCALER_ATTRIBUTES, "__getstate__", "_need_device_dtype_check_for_fused", "_opt_called",
    "_optimizer_load_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks",
    "_warned_capturable_if_run_uncaptured", "param_groups", "state", "step", "zero_grad",
})  # fmt: skip
"""Attributes of an optimizer that are torch's own, or a session's: all others say something about its rule."""


def shallow_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters and state, without the user's hooks."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    for name in SCALER_ATTRIBUTES:
        shadow.__dict__.pop(name, None)
    complete_optimizer(shadow, groups, state)
    return shadow


def complete_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Give an object of an optimizer's class what its `step` needs beside the class's own attributes; no hooks."""
    optimizer.param_groups, optimizer.state = groups, state
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
