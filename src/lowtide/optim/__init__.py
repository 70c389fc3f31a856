"""Everything about updates that is not where they run: rules, formats, kernels, and the scaling of losses for fp16."""

from __future__ import annotations

from lowtide.optim.loss_scale import DynamicScale, Replenish, StaticScale
from lowtide.optim.loss_scaler import LossScaler
from lowtide.optim.optimizers import Adafactor, Lion

__all__ = ["Adafactor", "DynamicScale", "Lion", "LossScaler", "Replenish", "StaticScale"]
