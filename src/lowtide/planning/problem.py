"""Problem: a training step to be traced, as one value that a technique can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.hardware import Hardware
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.prediction.trace import trace
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, OptimizerFactory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What `lowtide.trace` takes. Never changed in place: techniques make another with `dataclasses.replace`."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    loss: Loss | None = None
    settings: StepSettings = field(default_factory=StepSettings)
    hardware: str | Hardware = "h200"
    torch_version: str | None = None
    allocator: AllocatorSettings | None = None
    name: str | None = None

    def trace(self, on_progress: Callable[[str], None] | None = None) -> StepTrace:
        """Predict the step; seconds for a large model."""
        return trace(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            loss=self.loss,
            settings=self.settings,
            hardware=self.hardware,
            torch_version=self.torch_version,
            allocator=self.allocator,
            name=self.name,
            on_progress=on_progress,
        )
