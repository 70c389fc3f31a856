"""A recipe as torch objects, and the plain PyTorch loop over them.

The loop knows nothing of plans: the plain and the managed run of a check go through it unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ConfigError, TraceError
from lowtide.lab.materialise import first_model
from lowtide.lab.optimizer_recipe import OPTIMIZERS, Constant, LinearWarmup, OptimizerRecipe, RiseFromZero
from lowtide.lab.recipe import Recipe
from lowtide.models import ModelSource

Batch = dict[str, Tensor]


def make_model(recipe: Recipe, source: ModelSource) -> nn.Module:
    """The model on the host, in training mode, with the first weights that the recipe's seed gives."""
    torch.manual_seed(recipe.seed)
    return first_model(source, recipe.torch_dtype)


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters that are trained."""
    return optimizer_over(recipe, [parameter for parameter in model.parameters() if parameter.requires_grad])


def optimizer_over(recipe: OptimizerRecipe, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer over some parameters."""
    trained = list(parameters)
    settings: dict[str, Any] = dict(recipe.settings)
    if not recipe.decay_matrices_only:
        return OPTIMIZERS[recipe.name](trained, **settings)
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    # torch refuses a param group without parameters.
    groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
    groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    return OPTIMIZERS[recipe.name](groups, **settings)


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule of the learning rate; None where it stays as it is."""
    match recipe.scheduler:
        case Constant():
            return None
        case RiseFromZero(rise_steps=rise_steps):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / rise_steps))
        case LinearWarmup(warmup_steps=warmup_steps):
            return torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: linear_warmup(step, warmup_steps=warmup_steps, steps=recipe.steps)
            )


def linear_warmup(step: int, *, warmup_steps: int, steps: int) -> float:
    """The part of the full learning rate that the step numbered from 0 has; never 0 within the run.

    Example:
        >>> [linear_warmup(step, warmup_steps=2, steps=4) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # A schedule is asked once more after the last step, where a rise over the whole run leaves nothing to divide by.
    return max(0, steps - step) / max(1, steps - warmup_steps)


def make_batches(recipe: Recipe, source: ModelSource) -> Callable[[int], Batch]:
    """Numbered batches on the host, floating point inputs in the model's type.

    Batch `n` is the model's one batch, turned `n` places along the last dimension of each tensor: valid for any model,
    and different, so that an accumulated gradient is a sum of different ones.

    Raises:
        ConfigError: The recipe's batch does not fit the model.
    """
    try:
        made = source.make_batch(recipe.batch or source.default_batch)
    except TraceError as error:
        # It was written for tracing, where a batch that does not fit is an error of the run; here the recipe is wrong.
        raise ConfigError(f"'batch': {error}", key="batch") from error
    first = {key: value.to(recipe.torch_dtype) if value.is_floating_point() else value for key, value in made.items()}

    def batch(number: int) -> Batch:
        return {key: value.roll(number, dims=-1) if value.dim() else value for key, value in first.items()}

    return batch


def train(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Batch],
    *,
    device: torch.device,
    on_step: Callable[[int, float], None],
) -> tuple[float, ...]:
    """The loss of each update: the mean over its backward calls, as exact floats of what the model computed.

    Args:
        recipe: Says how many steps, and of what.
        model: Trained in place.
        optimizer: Over its parameters.
        batch: By number, on the host.
        device: Where batches go.
        on_step: Called with each update's number, from 0, and its loss.
    """
    scheduler = make_scheduler(recipe, optimizer)
    torch.manual_seed(recipe.seed)
    losses = []
    for step in range(recipe.steps):
        parts = []
        for part in range(recipe.accumulation):
            inputs = {key: value.to(device) for key, value in batch(step * recipe.accumulation + part).items()}
            loss = model(**inputs).loss
            (loss / recipe.accumulation).backward()
            parts.append(loss.detach().double().item())
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(math.fsum(parts) / len(parts))
        on_step(step, losses[-1])
    return tuple(losses)
