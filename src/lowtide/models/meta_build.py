"""Building a model on the meta device: in no time and no memory, whatever its constructor does.

Most constructors run there as they are. Some turn a short `linspace` into Python numbers (stochastic depth rates in
Swin, ConvNeXt and their like), which a meta tensor has no values for; that one call is answered by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.errors import ValueReadError

Made = TypeVar("Made")


class _HostLinspace(TorchFunctionMode):
    """Answers `torch.linspace` on the host when the caller names no device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # whatever torch's function returns
        kwargs = dict(kwargs or {})
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
        with torch.device("meta"), _HostLinspace():
            return make()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise ValueReadError(
            f"{name} reads the values of tensors while it is built on the meta device ({error}); compute those numbers "
            "with plain Python, or make that tensor with device='cpu'"
        ) from error


def finish(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model in training mode and in `dtype`, its leftover host buffers on the meta device with the rest."""
    if next((p.device.type for p in model.parameters()), None) == "meta":
        for module in model.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, buffer.to("meta"))
    if dtype is not None:
        model.to(dtype)
    return model.train()
