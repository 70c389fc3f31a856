"""A device of our own in the slot that torch leaves for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def register_python_backend(name: str, module: object) -> None:
    """Give torch's spare backend slot (PrivateUse1) a name, a Python device module and do-nothing device guards."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def allow_foreach_on(kind: type[torch.Tensor]) -> None:
    """Let the optimizers take their foreach form for parameters of this type, as they do for plain CUDA parameters."""
    from torch.optim.optimizer import _foreach_supported_types

    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def treat_cuda_as(name: str, on_autocast_exit: Callable[[], None]) -> None:
    """Make `torch.autocast("cuda")` mean the backend `name` in this process, and tell of the outermost context's end."""
    original_init = torch.autocast.__init__
    original_clear = torch.clear_autocast_cache

    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, name if device_type == "cuda" else device_type, *args, **kwargs)

    def clear() -> None:
        on_autocast_exit()
        original_clear()

    torch.autocast.__init__ = init  # type: ignore[method-assign]  # in the tracing subprocess alone
    torch.clear_autocast_cache = clear
