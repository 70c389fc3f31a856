"""LiteralDevices: code that names the CUDA device in so many words lands on the ghost card.

Models say `device="cuda"`, `x.cuda()` or `torch.cuda.is_available()` themselves. In the tracing subprocess there is no CUDA, by
intention, and torch refuses such calls before any dispatch mode sees them: they are translated one level above.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class LiteralDevices(TorchFunctionMode):
    """While active, `cuda` in an argument of torch's functions means `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return self._to_card(*args, **kwargs)
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


@contextlib.contextmanager
def cuda_functions(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Let the questions that models ask of `torch.cuda` have the answers of a machine with one such card."""
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: compute_capability >= (8, 0) or including_emulation,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: compute_capability,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        # There is no randomness to replay.
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda new_state, device="cuda": None,
        # A model that logs its memory must not fail; what it logs is nobody's business here.
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
    }
    originals = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)
