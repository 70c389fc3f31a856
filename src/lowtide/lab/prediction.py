"""What the trace says of a recipe before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from lowtide.errors import LowtideError
from lowtide.hardware import Hardware, find_hardware, parse_cublas_workspace_config
from lowtide.lab.inputs import check_inputs
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import PlanRecipe, plan_of
from lowtide.lab.record import PredictedFigures
from lowtide.lab.training import Batch, optimizer_over
from lowtide.models import resolve_model
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Site
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace

AFTER_A_STEP = "a warm-up's plan is made from the first step of the run, and is not known before"


class UnpredictedError(LowtideError):
    """The trace does not know this kind of run; the message says what it lacks."""


def predict(
    recipe: Recipe, model: nn.Module, batch: Batch, *, hardware: str, say: Callable[[str], None]
) -> PredictedFigures:
    """The peak of a step of the recipe on some hardware.

    Args:
        recipe: What is run.
        model: On the host or on meta, without policies, compilation or a session.
        batch: One of the run's.
        hardware: The name of the hardware.
        say: Is told what is being done.

    Raises:
        UnpredictedError: The recipe compiles, its optimizer state visits the device, or its plan is made from a step of the run.
    """
    _refuse_unknown(recipe)
    target = find_hardware(hardware)
    if recipe.cublas_workspace is not None:
        target = replace(target, configured_workspace_bytes=parse_cublas_workspace_config(recipe.cublas_workspace))
    result = trace_recipe(recipe, model, batch, hardware=target, say=say)
    return PredictedFigures(
        peak_bytes=result.peak_bytes,
        peak_phase=str(result.peak_phase),
        at_peak={str(category): num_bytes for category, num_bytes in result.at_peak.items()},
        reserved_bytes=result.peak_reserved_bytes,
    )


def trace_recipe(
    recipe: Recipe, model: nn.Module, batch: Batch, *, hardware: Hardware, say: Callable[[str], None]
) -> StepTrace:
    """The traced step: plain where there is no plan, else with a session around it."""
    settings = StepSettings(accumulate=recipe.accumulation, max_grad_norm=recipe.max_grad_norm)
    return trace(
        model,
        batch,
        optimizer=partial(optimizer_over, recipe.optimizer),
        settings=settings,
        plan=plan_of(recipe.plan, model) if isinstance(recipe.plan, PlanRecipe) else recipe.plan,
        precision=None if recipe.plan is None else recipe.precision,
        moments=recipe.moments,
        hardware=hardware,
        on_progress=say,
    )


def predict_recipe(recipe: Recipe, *, hardware: str, say: Callable[[str], None]) -> PredictedFigures:
    """The peak of a recipe without a run, on a batch of the shape that all of its batches have.

    Raises:
        UnpredictedError: As for `predict`.
        ConfigError: The recipe does not fit its model.
    """
    _refuse_unknown(recipe)  # before the model is built
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = check_inputs(recipe, source)
    return predict(recipe, source.build(recipe.torch_dtype), batch, hardware=hardware, say=say)


def _refuse_unknown(recipe: Recipe) -> None:
    if recipe.compile is not None:
        raise UnpredictedError("compiled code is not predicted")
    if recipe.plan is None:
        return
    if isinstance(recipe.plan, WarmUp):
        raise UnpredictedError(AFTER_A_STEP)
    if isinstance(recipe.plan, StaticPartition):
        return
    sites = recipe.plan.update.values() if isinstance(recipe.plan.update, dict) else [recipe.plan.update]
    if Site.PAGED in sites:
        raise UnpredictedError("optimizer state that visits the device is not predicted")
