"""What the trace says of a recipe before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.hardware import Hardware, find_hardware, parse_cublas_workspace_config
from lowtide.lab.footprint.session import MakeOptimizer, SessionFootprint
from lowtide.lab.inputs import check_inputs
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import PlanRecipe, plan_of
from lowtide.lab.record import PredictedFigures
from lowtide.lab.training import Batch, optimizer_over
from lowtide.memory.groups import find_groups, find_named_groups
from lowtide.memory.layout import lay_out
from lowtide.models import resolve_model
from lowtide.optim.update_types import Numerics, numerics_of
from lowtide.planning.budget_plans import StaticPartition, WarmUp, partition
from lowtide.planning.plan import Plan, Site
from lowtide.runtime.updates.host_need import state_bytes_per_parameter_byte
from lowtide.tracing.allocator import AllocatorFullError, AllocatorSettings
from lowtide.tracing.prediction.trace import trace
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import parse_bytes

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
    make: MakeOptimizer = partial(optimizer_over, recipe.optimizer)
    settings = StepSettings(accumulate=recipe.accumulation, max_grad_norm=recipe.max_grad_norm)
    if recipe.plan is None:
        return trace(model, batch, optimizer=make, settings=settings, hardware=hardware, on_progress=say)
    numerics = None if recipe.precision is None else numerics_of(recipe.precision, recipe.moments)[1]
    plan = _plan_on(hardware, recipe, model, numerics)
    session = SessionFootprint(
        plan,
        lay_out(find_named_groups(model, [group.name for group in plan.groups]), chunk_bytes=plan.chunk_bytes),
        make_optimizer=make,
        numerics=numerics,
    )
    under = partial(
        trace,
        model,
        batch,
        optimizer=session.optimizer,
        settings=settings,
        hardware=hardware,
        context=session,
        on_progress=say,
    )
    try:
        return under(allocator=AllocatorSettings(allowed_bytes=plan.budgets.device_bytes))
    except AllocatorFullError:
        # What the run would need is worth knowing all the more.
        say("the budget does not hold the step; tracing it without")
        return under()


def _plan_on(hardware: Hardware, recipe: Recipe, model: nn.Module, numerics: Numerics | None) -> Plan:
    """The plan that a session would have on some hardware."""
    match recipe.plan:
        case PlanRecipe():
            return plan_of(recipe.plan, model)
        case StaticPartition(device_memory=given):
            # One number seen in every place: shapes and types as the model's, without its memory. Not on meta, where torch
            # refuses fused optimizers.
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            stand_ins = [torch.zeros((), dtype=each.dtype).expand(each.shape).requires_grad_() for each in trained]
            return partition(
                lay_out(find_groups(model)),
                hardware.memory_bytes if given is None else parse_bytes(given),
                recipe.plan,
                state_bytes_per_parameter_byte=state_bytes_per_parameter_byte(
                    optimizer_over(recipe.optimizer, stand_ins), numerics
                ),
            )
        case _:
            raise UnpredictedError(AFTER_A_STEP)


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
