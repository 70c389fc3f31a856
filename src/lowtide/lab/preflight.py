"""What can be known of a recipe before it is run: mistakes, which end the command, what this machine lacks, and the peak that
the trace predicts.

A mistake would end the run anywhere, and is no result. What only this machine lacks, and what a budget does not hold, are
results, with records. A model's own factory runs in the process of its run alone, so that its mistakes show there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from lowtide.errors import ConfigError, HardwareError, LowtideError, PlanError
from lowtide.hardware import find_hardware, parse_cublas_workspace_config
from lowtide.lab.corpus.texts import find_files, read_stories
from lowtide.lab.corpus.tokens import load_corpus
from lowtide.lab.inputs import check_inputs, check_vocabulary
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import HubDataset, PlanRecipe, RandomInputs, Stories, TextFiles, plan_of, session_plan
from lowtide.lab.record import PredictedFigures
from lowtide.lab.training import compiled_modules, find_device, optimizer_over
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.models import ModelSource, resolve_model
from lowtide.optim.rules import require_rule
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.hand_plan import activations_by_group
from lowtide.planning.plan import Site
from lowtide.runtime.prediction.trace import trace
from lowtide.runtime.warm_up import device_size
from lowtide.tracing.settings import StepSettings
from lowtide.units import MiB

SMALL_TEXT_BYTES = 4 * MiB
"""Up to this a text is tokenized before the run: it may give fewer tokens than the recipe's vocabulary has."""

Check = tuple[str, Callable[[], object]]
"""The key that is to blame, and what raises where it is."""


def refuse_mistakes(name: str, recipe: Recipe) -> None:
    """Build the model on meta and try what the run will ask of it. No device is touched, and no long text is read.

    Args:
        name: The recipe's, for the message.
        recipe: What is to be run.

    Raises:
        ConfigError: The recipe cannot run anywhere; the message names the recipe and the key.
    """
    keys = {field.name for field in dataclasses.fields(Recipe)}
    for key, check in _checks(recipe):
        try:
            check()
        except Exception as error:  # torch and transformers have errors of their own for settings that do not fit
            said = str(error) if isinstance(error, LowtideError) else f"{type(error).__name__}: {error}"
            own = error.key if isinstance(error, ConfigError) else None
            # Another key than the recipe's is of a part that does not know where it stands.
            blamed = own if own is not None and own.partition(".")[0] in keys else key
            named = said if said.startswith((blamed, repr(blamed))) else f"{blamed}: {said}"
            raise ConfigError(f"the recipe {name!r} cannot run: {named}", key=blamed) from error


def _checks(recipe: Recipe) -> Iterator[Check]:
    if isinstance(recipe.data, TextFiles):
        yield "data.path", partial(find_files, recipe.data.path)
    yield "optimizer.settings", lambda: _optimizer(recipe)
    if recipe.precision is not None:
        yield "precision", lambda: _check_kernels(recipe)
    is_factory = ":" in recipe.model and not recipe.model.startswith("hf:")
    if not is_factory:
        yield "model", lambda: resolve_model(recipe.model)
    if recipe.model_settings:
        yield "model_settings", lambda: resolve_model(recipe.model, settings=recipe.model_settings)
    if is_factory:
        yield from _stories_check(recipe)
        return
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    yield "model_settings" if recipe.model_settings else "model", lambda: source.build(recipe.torch_dtype)
    yield from _model_checks(recipe, source, source.build(recipe.torch_dtype))


def _model_checks(recipe: Recipe, source: ModelSource, model: nn.Module) -> Iterator[Check]:
    yield "data.vocab_size", lambda: check_vocabulary(recipe, source)
    yield "batch", lambda: check_inputs(recipe, source)
    if isinstance(recipe.data, TextFiles):
        yield "data", partial(_check_small_text, recipe.data)
    yield from _stories_check(recipe)
    if isinstance(recipe.plan, PlanRecipe):
        yield "plan", partial(_check_plan, recipe.plan, model)
    elif recipe.plan is not None:
        made_later = recipe.plan
        yield "plan.activations", lambda: activations_by_group(lay_out(find_groups(model)), made_later.activations)
        device = find_device(recipe.device)
        if device.type != "cuda":
            yield "plan.device_memory", lambda: device_size(made_later.device_memory, device)
    if recipe.compile is not None:
        yield "compile.scope", partial(compiled_modules, model, recipe.compile.scope)


def _stories_check(recipe: Recipe) -> Iterator[Check]:
    if isinstance(recipe.data, Stories):
        yield "data", partial(read_stories, recipe.data)


def _check_small_text(data: TextFiles) -> None:
    # A larger text has any usual vocabulary, and takes long to read. What is made here is cached, and the run finds it.
    if sum(file.stat().st_size for file in find_files(data.path)) <= SMALL_TEXT_BYTES:
        load_corpus(data)


def _optimizer(recipe: Recipe) -> torch.optim.Optimizer:
    # On the host, not on meta: torch refuses fused optimizers there. A matrix and a vector, for either param group.
    return optimizer_over(recipe.optimizer, [torch.zeros(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)])


def _check_kernels(recipe: Recipe) -> None:
    optimizer = _optimizer(recipe)
    for group in optimizer.param_groups:
        require_rule(optimizer, group)


def _check_plan(plan: PlanRecipe, model: nn.Module) -> None:
    try:
        plan_of(plan, model)
    except PlanError as error:
        if error.needed_bytes is None:
            raise


COMPILERS = {"CC": ("C", ("gcc", "clang", "cc")), "CXX": ("C++", ("g++", "clang++", "c++"))}
"""What each variable names: a compiler of which language, and the usual names of such."""


def unmet_requirements(recipe: Recipe) -> tuple[str, ...]:
    """One sentence for each; empty where the recipe can run here.

    Raises:
        ConfigError: The recipe's device is none that a run can have anywhere.
    """
    return tuple(_lacking(recipe))


def _lacking(recipe: Recipe) -> Iterator[str]:
    device = None
    try:
        device = find_device(recipe.device)
    except HardwareError:
        yield (
            f"it needs the device {recipe.device!r}, and torch sees {torch.cuda.device_count()} CUDA devices; run it where "
            "there is one, or set device=cpu, where a device is emulated"
        )
    if isinstance(recipe.data, HubDataset) and not _has_package("datasets"):
        yield f"it reads {recipe.data.name!r} through the package 'datasets'; run: pip install datasets"
    if not isinstance(recipe.data, RandomInputs) and not _has_package("tokenizers"):
        yield "it trains a tokenizer with the package 'tokenizers'; run: pip install tokenizers"
    if recipe.model.startswith("hf:") and not _has_package("transformers"):
        yield f"it builds {recipe.model!r} with the package 'transformers'; run: pip install \"lowtide[transformers]\""
    # Other backends than inductor run torch's own operators, and build nothing.
    if device is not None and recipe.compile is not None and recipe.compile.backend == "inductor":
        on_cuda = device.type == "cuda"
        if on_cuda and not _has_package("triton"):
            yield "it compiles for CUDA with the package 'triton'; run: pip install triton"
        # Triton builds a small C library for each kernel's launch; on the host inductor writes C++.
        variable = "CC" if on_cuda else "CXX"
        language, usual = COMPILERS[variable]
        named = os.environ.get(variable, "").split()[:1]
        if not any(shutil.which(name) for name in named or usual):
            yield (
                f"torch.compile needs a {language} compiler: none of {', '.join(usual)} is on the path, and {variable} "
                "names none; install one, or set compile=null"
            )


def _has_package(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class UnpredictedError(LowtideError):
    """The trace does not know this kind of run; the message says what it lacks."""


def predict(recipe: Recipe, *, hardware: str, say: Callable[[str], None]) -> PredictedFigures:
    """The peak of a step of the recipe on some hardware, on a batch of the shape that all of its batches have.

    Args:
        recipe: What would be run.
        hardware: The name of the hardware.
        say: Is told what is being done.

    Raises:
        UnpredictedError: The recipe compiles, its optimizer state visits the device, or its plan is made from a step of the run.
        ConfigError: The recipe does not fit its model.
    """
    if recipe.compile is not None:
        raise UnpredictedError("compiled code is not predicted")
    if isinstance(recipe.plan, WarmUp):
        raise UnpredictedError("a warm-up's plan is made from the first step of the run, and is not known before")
    if isinstance(recipe.plan, PlanRecipe) and Site.PAGED in recipe.plan.sites:
        raise UnpredictedError("optimizer state that visits the device is not predicted")
    target = find_hardware(hardware)
    if recipe.cublas_workspace is not None:
        workspace_bytes = parse_cublas_workspace_config(recipe.cublas_workspace)
        target = dataclasses.replace(target, configured_workspace_bytes=workspace_bytes)
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = check_inputs(recipe, source)
    model = source.build(recipe.torch_dtype)
    result = trace(
        model,
        batch,
        optimizer=partial(optimizer_over, recipe.optimizer),
        settings=StepSettings(accumulate=recipe.accumulation, max_grad_norm=recipe.max_grad_norm),
        plan=None if recipe.plan is None else session_plan(recipe.plan, model),
        precision=None if recipe.plan is None else recipe.precision,
        moments=recipe.moments,
        hardware=target,
        on_progress=say,
    )
    return PredictedFigures(
        peak_bytes=result.peak_bytes,
        peak_phase=str(result.peak_phase),
        at_peak={str(category): num_bytes for category, num_bytes in result.at_peak.items()},
        reserved_bytes=result.peak_reserved_bytes,
    )
