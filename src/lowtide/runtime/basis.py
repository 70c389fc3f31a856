"""Basis: what a session is about, whatever its plan: model and optimizer, the device, and how updates are made."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.memory.layout import Layout
from lowtide.memory.mover import Mover
from lowtide.optim.update_types import Numerics
from lowtide.runtime.tracked_memory import TrackedMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Stays the same when the session goes on under another plan."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None where the model is run and not trained."""
    layout: Layout
    """Of the model."""
    mover: Mover
    """Of the device; an emulated one comes with `tracked`."""
    tracked: TrackedMemory | None
    """The emulated device's books; None on a real one."""
    max_grad_norm: float | None
    """Clip the gradients to this norm before each step; None leaves them."""
    numerics: Numerics | None
    """Of updates through our own kernels; None for the optimizer's own."""
    poison: bool
    """Fill memory that holds nothing with NaN."""

    @property
    def is_on_cuda(self) -> bool:
        """Whether the device is a real one."""
        return self.mover.device.type == "cuda"

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """What is made in it is the host's: an emulated device would count it as its own."""
        return contextlib.nullcontext() if self.tracked is None else self.tracked.on_host()

    def mark_host_memory(self, memory: torch.Tensor) -> None:
        """The memory is the host's, whoever made it."""
        if self.tracked is not None:
            self.tracked.exclude(memory)

    def mark_device_buffer(self, buffer: torch.Tensor) -> None:
        """The memory is the device's, and on the books already."""
        if self.tracked is not None:
            self.tracked.exclude_charged(buffer)
