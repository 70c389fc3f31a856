"""What the trace says of a recipe before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.hardware import find_hardware, parse_cublas_workspace_config
from lowtide.lab.check import plan_of
from lowtide.lab.footprint import KernelFootprint
from lowtide.lab.inputs import check_inputs
from lowtide.lab.plan_recipe import PlanRecipe
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import PredictedFigures
from lowtide.lab.training import Batch, optimizer_over
from lowtide.memory.layout import lay_out
from lowtide.memory.named_groups import find_named_groups
from lowtide.models import resolve_model
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.planning.window_need import window_bytes_needed
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.tracing.trace import trace
from lowtide.units import MiB


class UnpredictedError(LowtideError):
    """The trace does not know this kind of run; the message says what it lacks."""


def predict(
    recipe: Recipe, model: nn.Module, batch: Batch, *, hardware: str, say: Callable[[str], None]
) -> PredictedFigures:
    """The peak of a step of the recipe on a card.

    Args:
        recipe: What is run.
        model: On the host or on meta, without policies, compilation or a session.
        batch: One of the run's.
        hardware: The card.
        say: Is told what is being done.

    Raises:
        UnpredictedError: The recipe compiles, or keeps a part of its optimizer state away from the device.
    """
    _refuse_unknown(recipe)
    card = find_hardware(hardware)
    if recipe.cublas_workspace is not None:
        card = replace(card, configured_workspace_bytes=parse_cublas_workspace_config(recipe.cublas_workspace))
    words = recipe.plan or PlanRecipe(weights=Weights.RESIDENT, update=Site.DEVICE)
    assert isinstance(words.activations, str | None)
    result = trace(
        model,
        batch,
        optimizer=_optimizer(recipe),
        settings=StepSettings(
            update=UpdateSchedule.IN_BACKWARD if words.schedule is Schedule.IN_BACKWARD else UpdateSchedule.DEFERRED,
            activations=words.activations,
            accumulate=recipe.accumulation,
            max_grad_norm=recipe.max_grad_norm,
        ),
        hardware=card,
        on_progress=say,
    )
    if recipe.plan is None:
        return PredictedFigures(
            peak_bytes=result.peak_bytes,
            peak_phase=str(result.peak_phase),
            at_peak={str(category): num_bytes for category, num_bytes in result.at_peak.items()},
            reserved_bytes=result.peak_reserved_bytes,
        )
    return _with_chunks(result, weight_bytes(plan_of(recipe.plan, model), model))


def predict_recipe(recipe: Recipe, *, hardware: str, say: Callable[[str], None]) -> PredictedFigures:
    """The same without a run: from the recipe alone, on a batch of the shape that all of its batches have.

    Raises:
        UnpredictedError: As for `predict`.
        ConfigError: The recipe does not fit its model.
    """
    _refuse_unknown(recipe)  # before the model is built
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = check_inputs(recipe, source)
    return predict(recipe, source.build(recipe.torch_dtype), batch, hardware=hardware, say=say)


def weight_bytes(plan: Plan, model: nn.Module) -> int:
    """Device bytes that a session holds for weights: resident chunks, and the window of streamed ones."""
    layout = lay_out(find_named_groups(model, [group.name for group in plan.groups]), chunk_bytes=plan.chunk_bytes)
    placed = {group.name: group.weights for group in plan.groups}
    resident = sum(_block_bytes(chunk.nbytes) for chunk in layout.chunks if placed[chunk.group] is Weights.RESIDENT)
    streamed = [chunk.nbytes for chunk in layout.chunks if placed[chunk.group] is Weights.STREAMED]
    if not streamed:
        return resident
    window = plan.budgets.window_bytes
    window = min(sum(streamed), window_bytes_needed(layout, plan) if window is None else window)
    # Which chunks are in the window at the peak is not known: their blocks are as much larger as all are in the mean.
    return resident + round(window * sum(map(_block_bytes, streamed)) / sum(streamed))


def _block_bytes(num_bytes: int) -> int:
    """What the allocator takes for a buffer of its own: from 10 MiB on a segment of whole 2 MiB, split if worth it."""
    block, segment = -(-num_bytes // 512) * 512, -(-num_bytes // (2 * MiB)) * 2 * MiB
    return segment if block >= 10 * MiB and segment - block <= MiB else block


def _with_chunks(result: StepTrace, weights: int) -> PredictedFigures:
    """The peak of everything but weights, and beside it those that the session holds throughout."""
    changes = np.zeros(len(result.events) + 1, dtype=np.int64)
    for allocation in result.allocations:
        if allocation.category is Category.WEIGHTS:
            continue
        changes[0 if allocation.born is None else allocation.born + 1] += allocation.bytes
        if allocation.died is not None:
            changes[allocation.died + 1] -= allocation.bytes
    curve = np.cumsum(changes)
    event = int(curve.argmax()) - 1
    by_category: dict[str, int] = {str(Category.WEIGHTS): weights}
    for allocation in result.alive_at(event):
        if allocation.category is not Category.WEIGHTS:
            key = str(allocation.category)
            by_category[key] = by_category.get(key, 0) + allocation.bytes
    phase = result.events[event].phase if event >= 0 else Phase.FORWARD
    return PredictedFigures(peak_bytes=int(curve.max()) + weights, peak_phase=str(phase), at_peak=by_category)


def _refuse_unknown(recipe: Recipe) -> None:
    if recipe.compile is not None:
        raise UnpredictedError("compiled code is not predicted")
    if recipe.plan is None:
        return
    if recipe.plan.update is not Site.DEVICE:
        raise UnpredictedError("only runs with all updates on the device are predicted")
    if isinstance(recipe.plan.weights, dict) and Weights.HOST in recipe.plan.weights.values():
        raise UnpredictedError("embeddings on the host are not predicted")
    if isinstance(recipe.plan.activations, dict):
        raise UnpredictedError("activation policies by group are not predicted")


def _optimizer(recipe: Recipe) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = partial(optimizer_over, recipe.optimizer)
    if recipe.precision is None:
        return make
    return partial(KernelFootprint, make=make, precision=recipe.precision, moments=recipe.moments)
