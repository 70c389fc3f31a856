"""A model with real first weights, on the host: as its own code makes them, or what its initialisation draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.models import ModelSource


def first_model(source: ModelSource, dtype: torch.dtype) -> nn.Module:
    """The model on the host with its first weights: as its own code makes it where there is such, else as below.

    A factory may draw its weights otherwise than its modules would by themselves, or load them: nothing but the factory
    knows. One that puts its model on the meta device itself leaves them to `materialise`.

    Raises:
        ConfigError: As for `materialise`.
    """
    if source.build_on_host is None:
        return materialise(source.build(dtype), name=source.name, dtype=dtype)
    model = source.build_on_host(dtype)
    if any(tensor.device.type == "meta" for tensor in itertools.chain(model.parameters(), model.buffers())):
        return materialise(model, name=source.name, dtype=dtype)
    return model.cpu()


def materialise(model: nn.Module, *, name: str, dtype: torch.dtype) -> nn.Module:
    """The model on the host, its weights drawn from torch's generator: the same seed gives the same weights.

    A model with a `reset_parameters` of its own is asked to draw all its weights and buffers; a Hugging Face model is
    built again from its config; of any other model each module that holds parameters or buffers is asked. The weights are
    drawn in `dtype`, as a constructor under that default dtype would.

    Args:
        model: On the meta device; the one to use afterwards is returned.
        name: What the user calls it, for the error.
        dtype: Of the weights that a config builds.

    Raises:
        ConfigError: A module holds tensors and has no `reset_parameters`, so that nobody knows its first values.
    """
    if all(tensor.device.type != "meta" for tensor in itertools.chain(model.parameters(), model.buffers())):
        return model
    if _is_hugging_face(model):
        return _build_again(model, dtype)
    ties = list(_ties(model))
    model.to_empty(device="cpu")
    for first, other in ties:
        # `to_empty` makes two tensors of a tied one.
        _put(model, other, model.get_parameter(first))
    for path, module in _owners(model):
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"{name} cannot be given first weights: {type(module).__name__} at {path or 'its root'} holds tensors and "
                "has no reset_parameters(); add one there or to the whole model",
                key="model",
            )
        with torch.no_grad():
            reset()
    return model


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that must draw values: the model alone if it can, else each that holds tensors directly."""
    if hasattr(model, "reset_parameters"):
        yield "", model
        return
    for path, module in model.named_modules():
        tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if next(tensors, None) is not None:
            yield path, module


def _ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(first name, other name) of each parameter that has several."""
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(parameter, name) != name:
            yield first_names[parameter], name


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, parameter)


def _is_hugging_face(model: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def _build_again(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Not `to_empty`: rotary frequencies and their like are buffers that only a constructor fills.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu"):
            again: nn.Module = type(model)(model.config)
    finally:
        torch.set_default_dtype(before)
    return again.train(model.training)
