"""The ghost device: torch's spare backend slot, registered as a card that has no memory and runs nothing.

A spare backend, not `meta` or `cpu`, because C++ code asks tensors for their kind of device: dropout takes its fused form,
the optimizers their foreach form, autograd its device thread only for what looks like an accelerator. Registration is
global and final for the process, so only the tracing subprocess does it.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import compat

NAME = "ghost"


class GhostModule:
    """What torch expects to find as `torch.ghost`: one card, no random state worth keeping."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # recompute asks for it; there is no randomness to replay

    def set_rng_state(self, state: object, device: object = None) -> None:
        pass

    def device(self, device: Any) -> Any:
        return torch.device(NAME, 0)


def register() -> torch.device:
    """Make the ghost device known to torch, once, and return it."""
    module = getattr(torch, NAME, None)
    if module is None:
        compat.register_python_backend(NAME, GhostModule())
    return torch.device(NAME, 0)
