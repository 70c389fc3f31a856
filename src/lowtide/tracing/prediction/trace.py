"""trace_step: the memory of a training step, before it runs and without the device it is for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import ConfigError, TooLargeError
from lowtide.hardware import Hardware, find_hardware, known_hardware
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.prediction.job import Contents, Job, pack
from lowtide.tracing.prediction.sandbox import shared_sandbox
from lowtide.tracing.settings import StepContext, StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, OptimizerFactory
from lowtide.units import format_bytes


def trace_step(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    hardware: str | Hardware = "h200",
    torch_version: str | None = None,
    allocator: AllocatorSettings | None = None,
    if_full: AllocatorSettings | None = None,
    name: str | None = None,
    context: StepContext | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> StepTrace:
    """Predict one step. `lowtide.trace` says what the arguments are.

    `context` is what the step runs inside of, where something else than torch holds its weights, and `if_full` the settings
    of a second replay, where the allocator's limit does not hold the step.
    """
    _check_arguments(model, optimizer)
    settings = settings or StepSettings()
    if autocast is not None:
        settings = replace(settings, autocast=str(autocast))
    target = find_hardware(hardware) if isinstance(hardware, str) else hardware
    job = Job(
        name=name or type(model).__name__,
        payload=pack(Contents(model, batch, optimizer, loss, context), batch),
        settings=settings,
        hardware=target,
        torch_version=_checked_version(torch_version or torch.__version__),
        allocator=allocator or AllocatorSettings(),
        if_full=if_full,
    )
    result = shared_sandbox().run(job, on_progress)
    _check_size(result)
    for note in result.notes:
        if note.startswith("autocast="):
            warnings.warn(note, stacklevel=2)
    return result


def _check_arguments(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}", key="model")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        gradient_bytes = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        raise ConfigError(
            f"the model is wrapped in DistributedDataParallel, which cannot leave its process group; trace model.module, and "
            f"add the wrapper's buckets: {format_bytes(gradient_bytes)}, a second copy of the gradients, unless it "
            "was made with gradient_as_bucket_view=True",
            key="model",
        )
    _refuse_changed_calls(model)
    if optimizer is None:
        return
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch optimizer, its class or a function from parameters to one, got {optimizer!r}; "
            "for example optimizer=torch.optim.AdamW",
            key="optimizer",
        )
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient, so nothing to train", key="model"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held & trainable:
            raise ConfigError(
                f"the {type(optimizer).__name__} holds {len(held)} parameters, none of them of this "
                f"{type(model).__name__}; build it from this model's parameters",
                key="optimizer",
            )


def _refuse_changed_calls(model: nn.Module) -> None:
    """What stands in a module's calls does not travel with it: the figure would be that of the plain model."""
    for path, module in model.named_modules():
        owner = getattr(compat.call_of(module), "__self__", None)
        home = type(owner).__module__
        if home.startswith("lowtide.runtime."):
            raise ConfigError(
                "the model is under management, and a session's placement cannot be traced; trace it before you manage it, or "
                "after session.close()",
                key="model",
            )
        if home.startswith("lowtide.activations."):
            raise ConfigError(
                f"{path or 'the model'!r} has a {type(owner).__name__} in its calls, which a trace would leave out; remove() it "
                "first, and say settings=StepSettings(activations=...) for a policy",
                key="model",
            )


def _checked_version(version: str) -> str:
    plain = version.split("+")[0]
    parts = plain.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise ConfigError(f"torch_version must look like 2.11.0, got {version!r}", key="torch_version")
    if not (2, 8) <= (int(parts[0]), int(parts[1])) <= (2, 13):
        raise ConfigError(
            f"the rules for torch {plain} are not known; predictions are made for torch 2.8 to 2.13",
            key="torch_version",
        )
    return plain


def _check_size(result: StepTrace) -> None:
    """A step may need several devices or the host; a single tensor larger than any device cannot run anywhere."""
    largest_known = max(known_hardware(), key=lambda known: known.memory_bytes)
    largest = max(result.allocations, key=lambda allocation: allocation.bytes, default=None)
    if largest is not None and largest.bytes > largest_known.memory_bytes:
        raise TooLargeError(
            f"{largest.op} in {largest.module!r} needs one tensor of {format_bytes(largest.bytes)} ({list(largest.shape)} "
            f"{largest.dtype}); the largest device known, {largest_known.name}, has {format_bytes(largest_known.memory_bytes)}. "
            "Use a smaller batch or a shorter sequence.",
            module=largest.module,
            op=largest.op,
            needed_bytes=largest.bytes,
        )
