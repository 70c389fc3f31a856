"""ModelSource: how to build a model and a batch for it, without having built either, in no time and no memory.

Models are built on the meta device. Most constructors run there as they are. Some turn a short `linspace` into Python
numbers (stochastic depth rates in Swin, ConvNeXt and their like), which a meta tensor has no values for; that one call is
answered by the host. Initial values are not drawn at all: on the meta device torch's way of doing so begins with a second of
imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide.errors import ConfigError, ValueReadError
from lowtide.models.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """Weights of a model that were trained before."""

    folder: Path
    build_empty: Callable[[torch.dtype | None], nn.Module]
    """The model for a session to fill from the folder's safetensors: its parameters on meta, its buffers on the host."""
    load: Callable[[torch.dtype | None], nn.Module]
    """The model with its weights, from files of any form and age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model by name. It holds no tensors, so that it can be pickled to another process and built there.

    Example:
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> source.make_batch("2x64")["input_ids"].shape
        torch.Size([2, 64])
        >>> batch = {name: tensor.to("meta") for name, tensor in source.make_batch("2").items()}
        >>> source.build(torch.bfloat16)(**batch).loss.shape
        torch.Size([])
    """

    name: str
    """What the user typed."""
    family: str
    """`gpt`, `llama`, `deep-one`, `resnet`; `hf:` and the model type for a Hugging Face config; `factory`."""
    default_batch: str
    """The text of a usual batch, which `make_batch` accepts."""
    build: Callable[[torch.dtype | None], nn.Module]
    """The model on the meta device, in training mode; None leaves the dtype to the model."""
    make_batch: Callable[[str], Batch]
    """Tensors on the host from a text such as `8x2048`; BatchMismatchError says what the model accepts."""
    build_on_host: Callable[[torch.dtype | None], nn.Module] | None = None
    """Builds the model with the weights that its own code draws or loads; None where `build` is all there is."""
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """The loss of a model and a batch; None where `model(**batch).loss` is."""
    pretrained: Pretrained | None = None
    """Weights that were trained before; None where there are none. `build` and `build_on_host` know nothing of them."""


Made = TypeVar("Made")


_DRAWING = frozenset(
    {torch.Tensor.normal_, torch.Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}
)
"""What torch's initialisers come down to, and those of them that a mode sees whole."""


class _WithoutValues(TorchFunctionMode):
    """Answers `torch.linspace` on the host when the caller names no device, and draws nothing for meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWING:
            drawn = args[0] if args else kwargs["tensor"]
            if drawn.device.type == "meta":
                return drawn
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def build_on_meta(make: Callable[[], Made], *, name: str) -> Made:
    """What `make` returns, with every tensor it makes on the meta device unless it names another.

    Args:
        make: Builds the model.
        name: What the user calls the model, for the error.
    """
    try:
        with torch.device("meta"), _WithoutValues():
            return make()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise ValueReadError(
            f"{name} reads the values of tensors while it is built on the meta device ({error}); compute those numbers "
            "with plain Python, or make that tensor with device='cpu'"
        ) from error


def finish(model: nn.Module, dtype: torch.dtype | None, *, name: str, recompute: bool = False) -> nn.Module:
    """The model in training mode and in `dtype`, its leftover host buffers on the meta device with the rest.

    Args:
        model: As it was built.
        dtype: None leaves the types as they are.
        recompute: Call the model's `gradient_checkpointing_enable`.
        name: What the user calls the model, for the error.
    """
    if next((p.device.type for p in model.parameters()), None) == "meta":
        for module in model.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, buffer.to("meta"))
    if dtype is not None:
        model.to(dtype)
    if recompute:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                f"{name} cannot recompute its layers: {type(model).__name__} has no gradient_checkpointing_enable(); add "
                "that method, or wrap its layers in torch.utils.checkpoint"
            )
        enable()
    return model.train()
