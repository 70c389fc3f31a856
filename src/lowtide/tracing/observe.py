"""`lowtide.observe`: the memory of a training step, from running it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.tracing.attention_watch import attention_watch
from lowtide.tracing.observe_cuda import observe_on_cuda
from lowtide.tracing.observe_host import observe_on_host
from lowtide.tracing.predict import OptimizerFactory
from lowtide.tracing.real_model import applied, check_precision, device_of, move_batch
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, TrainingStep, autocast_note


def observe(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    steps: int = 3,
    name: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> StepTrace:
    """Run a training step for real and record what it allocates, when, and for which module.

    **The model is trained**: its weights, its buffers and the optimizer's state change by `steps` steps on this batch,
    and gradients that existed before are used up. Observe a copy, or before training begins. Hooks, checkpointing and
    flags that the settings ask for are taken off again, and gradients are cleared.

    On a CUDA card the record is the allocator's own: its peaks are `torch.cuda.max_memory_allocated()` and
    `max_memory_reserved()` of that step. On the host it counts the bytes of the tensors, which is not what a card
    would use.

    Args:
        model: On one device, in the precision and the mode (`train()`) it is trained in.
        batch: A mapping, for which `model(**batch).loss` is the loss; anything else together with `loss`. Moved to the
            model's device where it is elsewhere.
        optimizer: The optimizer, or a function from parameters to one; None runs forward and backward alone.
        loss: `lambda model, batch: ...`, where the batch alone does not say.
        autocast: `bfloat16` or `float16`, as text or as torch's own, if forward and loss run under `torch.autocast`.
        settings: Everything else about the step. `precision` must be the one the model has.
        steps: How many to run; the last one is recorded. The first is never like the others: it makes the optimizer's
            state and, on CUDA, the workspaces.
        name: Shown in reports; the model's class by default.
        on_progress: Is told what is being done.

    Raises:
        ObserveError: The model is on the meta device or on several, or memory ran out.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(100, 10), torch.ones(5, 100)
        >>> result = observe(model, batch, loss=lambda model, x: model(x).sum(), optimizer=torch.optim.AdamW)
        >>> result.origin, result.at_peak["weights"]  # 1010 parameters of 4 bytes
        ('observed', 4040)
    """
    settings = settings or StepSettings()
    if autocast is not None:
        settings = replace(settings, autocast=str(autocast))
    if steps < 2:
        raise ConfigError(f"steps must be at least 2, one to warm up and one to record, got {steps}", key="steps")
    check_precision(model, settings)
    device = device_of(model)
    batch, moved = move_batch(batch, device)
    notes = [f"the batch was moved from {', '.join(sorted(map(str, moved)))} to {device}"] if moved else []
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    watch = attention_watch(model, device)
    step = TrainingStep(model, batch, optimizer, loss, settings, around_first=watch)
    if (idle := autocast_note(step, has_cast=True)) is not None:
        notes.append(idle)
        warnings.warn(idle, stacklevel=2)
    run = observe_on_host if device.type == "cpu" else observe_on_cuda
    with applied(model, optimizer, settings):
        trace = run(
            step,
            name=name or type(model).__name__,
            steps=steps,
            notes=notes,
            on_progress=on_progress or (lambda _: None),
        )
    return trace if watch is None else watch.explained(trace)
