"""Any Python callable as a model: `package.module:factory`, returning an `nn.Module`, it and its batch, or these and a loss.

A factory with an argument named `batch` gets the text of `--batch`, None where nothing was given.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.errors import BatchMismatchError, ConfigError, UnknownNameError
from lowtide.models.batches import Batch, BatchForm, ImageBatch, TokenBatch, parse_sizes, random_floats
from lowtide.models.source import ModelSource, build_on_meta, finish

_Made = tuple[nn.Module, Mapping[str, Tensor] | None, Callable[[nn.Module, Any], Tensor] | None]
DEFAULT_BATCH = 8
DEFAULT_LENGTH = 512
DEFAULT_IMAGE_SIZE = 224


def resolve_factory(spec: str, *, recompute: bool) -> ModelSource:
    """The source for `package.module:factory`. The factory is called on the meta device; for `build_on_host`, where its weights
    count, as it is.

    When it returns (model, batch) or (model, batch, loss), the batch is a mapping from argument names to tensors. Those that
    came out on the meta device are given values afterwards: ones for integers and booleans (a valid token, a valid class, a
    mask that hides nothing), random ones for floats. When it returns a model only, the batch is made from text as for the
    built-in models, if the forward takes `input_ids` or `pixel_values`, and `labels`.
    """
    model, batch, loss = _call(spec)
    form: BatchForm = _infer_form(spec, model) if batch is None else _OwnBatch(spec=spec, default=_text_of(spec, batch))
    return ModelSource(
        name=spec,
        family="factory",
        default_batch=form.default,
        build=partial(_build, spec, recompute),
        make_batch=form,
        build_on_host=partial(_build_on_host, spec, recompute),
        loss=loss,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnBatch:
    """The batch that the factory itself returns; text goes to a factory that takes it, and else can only agree with it."""

    spec: str
    default: str

    def __call__(self, text: str) -> Batch:
        is_default = parse_sizes(text, accepted=self.default) == parse_sizes(self.default, accepted=self.default)
        if not is_default and not _takes_batch(_find(self.spec)):
            raise BatchMismatchError(
                f"{self.spec} returns a batch of its own, {self.default}, so {text!r} has no effect; give the factory an "
                "argument named batch, which gets this text, or leave the batch out"
            )
        _, batch, _ = _call(self.spec, None if is_default else text)
        assert batch is not None, f"{self.spec} returned a batch once and none the next time"
        return {name: _with_values(tensor) for name, tensor in batch.items()}


def _build(spec: str, recompute: bool, dtype: torch.dtype | None) -> nn.Module:
    return finish(_call(spec)[0], dtype, recompute=recompute, name=spec)


def _build_on_host(spec: str, recompute: bool, dtype: torch.dtype | None) -> nn.Module:
    return finish(_checked(spec, _maker(spec, None)())[0], dtype, recompute=recompute, name=spec)


def _call(spec: str, text: str | None = None) -> _Made:
    return _checked(spec, build_on_meta(_maker(spec, text), name=spec))


def _maker(spec: str, text: str | None) -> Callable[[], object]:
    found = _find(spec)
    return partial(found, batch=text) if _takes_batch(found) else found


def _takes_batch(found: Callable[..., object]) -> bool:
    try:
        return "batch" in inspect.signature(found).parameters
    except ValueError:  # a builtin without a signature
        return False


def _checked(spec: str, made: object) -> _Made:
    parts = made if isinstance(made, tuple) and len(made) in (2, 3) else (made,)
    model, batch, loss = (*parts, None, None)[:3]
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{spec} returned {type(model).__name__}; a factory returns an nn.Module, (nn.Module, batch) or "
            "(nn.Module, batch, loss)"
        )
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"the loss that {spec} returned is {type(loss).__name__}, which cannot be called; return a function of the model "
            "and the batch, such as lambda model, batch: model(**batch).mean()"
        )
    if batch is None:
        if loss is not None:
            raise ConfigError(
                f"{spec} returned a loss and no batch; return the batch that the loss is computed from too"
            )
        return model, None, None
    if not isinstance(batch, Mapping) or not batch or not all(isinstance(tensor, Tensor) for tensor in batch.values()):
        raise BatchMismatchError(
            f"the batch that {spec} returned is not a mapping from the forward's argument names to tensors; "
            "return it as {'input_ids': ..., 'labels': ...}"
        )
    return model, batch, loss


def _find(spec: str) -> Callable[..., object]:
    module_name, _, path = spec.partition(":")
    found: object = _import(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise UnknownNameError(f"factory in {module_name}", path, [n for n in dir(found) if not n.startswith("_")])
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{spec} is {type(found).__name__}, which cannot be called; name a function that returns the model"
        )
    try:
        inspect.signature(found).bind(**({"batch": None} if _takes_batch(found) else {}))
    except TypeError as error:
        raise ConfigError(
            f"{spec} cannot be called without arguments ({error}); name a function that needs none, or batch alone"
        ) from error
    except ValueError:
        pass  # a builtin without a signature: the call itself will tell
    return cast("Callable[..., object]", found)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        if str(Path.cwd()) in sys.path:
            raise UnknownNameError("module (installed, or in the current folder)", name) from error
    # A console script, unlike `python -m`, does not look where the user stands.
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    return _import(name)


def _text_of(spec: str, batch: Mapping[str, Tensor]) -> str:
    name, first = next(iter(batch.items()))
    if first.dim() == 0:
        raise BatchMismatchError(
            f"{name!r}, the first tensor of the batch that {spec} returned, has no dimensions; batch it"
        )
    return "x".join(map(str, first.shape))


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.device.type != "meta":
        return tensor
    if tensor.is_floating_point():
        return random_floats(tuple(tensor.shape)).to(tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _infer_form(spec: str, model: nn.Module) -> BatchForm:
    arguments = tuple(inspect.signature(model.forward).parameters)
    if {"input_ids", "labels"} <= set(arguments):
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        if embeddings:
            # The token table is by far the largest; positions and token types have tables too.
            vocab_size = max(table.num_embeddings for table in embeddings)
            return TokenBatch(vocab_size=vocab_size, default_batch=DEFAULT_BATCH, default_length=DEFAULT_LENGTH)
    if {"pixel_values", "labels"} <= set(arguments):
        heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        if heads and convolutions:
            return ImageBatch(
                num_classes=heads[-1].out_features,
                default_batch=DEFAULT_BATCH,
                num_channels=convolutions[0].in_channels,
                height=DEFAULT_IMAGE_SIZE,
                width=DEFAULT_IMAGE_SIZE,
            )
    raise BatchMismatchError(
        f"the forward of {spec} takes ({', '.join(arguments)}), and batches are known for (input_ids, labels) of a "
        "model with an embedding and (pixel_values, labels) of one with convolutions; let the factory return "
        "(model, batch), or (model, batch, loss) where the loss is not the model's own"
    )
