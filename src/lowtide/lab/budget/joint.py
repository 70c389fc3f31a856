"""The joint forward and backward graph of a recipe's model, traced once and without memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import ConfigError, TraceError
from lowtide.lab.recipe import Recipe
from lowtide.lab.training import Batch, make_batches
from lowtide.models import resolve_model
from lowtide.tracing.attention.kernels import Attention, TargetAttention
from lowtide.tracing.attention.use import AttentionChoices

HOPPER = (9, 0)
"""Compute capability that is taken where no card is there to ask."""


def trace_recipe(recipe: Recipe) -> tuple[compat.JointGraph, tuple[str, ...]]:
    """The joint graph of the recipe's model with its loss, as `torch.compile` of the whole model cuts it, and remarks on it.

    Raises:
        ConfigError: The batch does not fit the model, or the recipe compiles its blocks one by one.
        TraceError: The model cannot be traced as one graph.
    """
    if recipe.compile is not None and recipe.compile.scope == "blocks":
        raise ConfigError(
            "a sweep cuts the graph of the whole model, and compile.scope is 'blocks': set it to 'model'",
            key="compile.scope",
        )
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    batch = make_batches(recipe, source)(0)
    model = source.build(recipe.torch_dtype)
    if recipe.device == "cpu":
        return trace_model(model, batch, name=recipe.model), ("attention as on the host",)
    major, minor = torch.__version__.split(".")[:2]
    choices = AttentionChoices(_capability(), (int(major), int(minor)))
    with TargetAttention(Attention(choices, lambda: "")):
        joint = trace_model(model, batch, name=recipe.model)
    return joint, tuple(choices.notes())


def trace_model(model: nn.Module, batch: Batch, *, name: str) -> compat.JointGraph:
    """The joint graph of `model(**batch)` and the backward of all that it returns.

    Args:
        model: On any device, the meta device too: only forms of tensors are looked at.
        batch: On any device.
        name: What the user calls the model, for the error.

    Raises:
        TraceError: It cannot be traced as one graph, or nothing in it is trained.
    """
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip((*weights, *batch), tensors, strict=True))
        inputs = {key: named[key] for key in batch}
        result = torch.func.functional_call(model, {key: named[key] for key in weights}, kwargs=inputs)
        return tuple(_tensors(result))

    try:
        return compat.trace_joint_graph(forward, list(weights.values()), list(batch.values()))
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        raise TraceError(
            f"{name} cannot be traced as one graph of forward and backward ({type(error).__name__}: {error}); a sweep needs "
            "a model that torch.compile takes whole (fullgraph=True)"
        ) from error


def _tensors(result: Any) -> Iterable[Tensor]:
    """All tensors of what a model returns, in order."""
    if isinstance(result, Tensor):
        yield result
    elif is_dataclass(result) and not isinstance(result, dict):
        for field in fields(result):
            yield from _tensors(getattr(result, field.name))
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from _tensors(value)


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
