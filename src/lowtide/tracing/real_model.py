"""A real model made ready to be observed: where it lives, its batch beside it, and settings that can be taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import ConfigError, ObserveError
from lowtide.tracing.activation_setup import activations_applied
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.training_step import choose_implementation, update_in_backward


def device_of(model: nn.Module) -> torch.device:
    """The one device that a model is on.

    Raises:
        ObserveError: It is on several, on the meta device, or on one that cannot be observed.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.device, name)
    kind = type(model).__name__
    if torch.device("meta") in found:
        raise ObserveError(
            f"{found[torch.device('meta')]!r} of {kind} is on the meta device, which has shapes and no memory: there "
            "is nothing to run. Use lowtide.trace to predict the step, or load weights into model.to_empty(device=...)."
        )
    if len(found) > 1:
        places = ", ".join(f"{device} (such as {name!r})" for device, name in found.items())
        raise ObserveError(
            f"{kind} is on {len(found)} devices: {places}. A step is observed on one: move it with model.to(...)."
        )
    device = next(iter(found), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ObserveError(
            f"{kind} is on {device}; only steps on cpu and cuda can be observed. Move it with model.to(...)."
        )
    return device


def move_batch(batch: Any, device: torch.device) -> tuple[Any, set[torch.device]]:
    """The batch with its tensors on the device, and where those that had to move came from."""
    moved: set[torch.device] = set()

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device == device:
                return value
            if value.device.type == "meta":
                raise ObserveError(
                    f"the batch has a tensor of shape {list(value.shape)} on the meta device, which has no values to "
                    "run on. Make the batch on the host or on the model's device."
                )
            moved.add(value.device)
            return value.to(device)
        if isinstance(value, Mapping):
            return {key: move(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(move(item) for item in value)
        return value

    on_device = move(batch)
    return (on_device if moved else batch), moved


def check_precision(model: nn.Module, settings: StepSettings) -> None:
    """An observed model is not converted behind its owner's back.

    Raises:
        ConfigError: The settings ask for a precision that the model does not have.
    """
    if settings.precision is None:
        return
    wanted = getattr(torch, settings.precision)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != wanted:
            raise ConfigError(
                f"precision is {settings.precision}, but {name!r} is {str(parameter.dtype).removeprefix('torch.')}: "
                f"observe runs the model as it is. Convert it first with model.to(torch.{settings.precision}).",
                key="precision",
            )


@contextlib.contextmanager
def applied(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: StepSettings) -> Iterator[None]:
    """Put the settings on a real model and its optimizer; afterwards both are as they came, and no gradient is left."""
    flags = [{key: group.get(key) for key in ("foreach", "fused") if key in group} for group in _groups(optimizer)]
    hooks = [(parameter, set(compat.post_accumulate_hooks(parameter))) for parameter in model.parameters()]
    try:
        if optimizer is not None and settings.implementation is not None:
            choose_implementation(optimizer, settings.implementation)
        if optimizer is not None and settings.update is UpdateSchedule.IN_BACKWARD:
            update_in_backward(optimizer)
        with activations_applied(model, settings):
            yield
    finally:
        for group, old in zip(_groups(optimizer), flags, strict=True):
            group.update(old.items())
        for parameter, known in hooks:
            for number in set(compat.post_accumulate_hooks(parameter)) - known:
                del compat.post_accumulate_hooks(parameter)[number]
        model.zero_grad(set_to_none=True)


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups
