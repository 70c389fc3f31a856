"""LiteralDevices: code that names the CUDA device in so many words lands on the ghost card.

Models say `device="cuda"`, `x.cuda()` or `torch.cuda.is_available()` themselves. In the tracing subprocess there is no CUDA, by
intention, and torch refuses such calls before any dispatch mode sees them: they are translated one level above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class LiteralDevices(TorchFunctionMode):
    """While active, `cuda` in an argument of torch's functions means `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return self._to_card(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0]  # there is no card to pin it for
        if func is Tensor.to:
            args = tuple(self._translated(arg) for arg in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._translated(kwargs["device"])}
        return func(*args, **kwargs)

    def _translated(self, value: Any) -> Any:
        is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
            isinstance(value, str) and value.partition(":")[0] == "cuda"
        )
        return self._device if is_cuda else value

    def _to_card(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        return tensor.to(self._device, non_blocking=non_blocking, **options)
