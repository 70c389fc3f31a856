"""Everything about updates that is not where they run: for now, the scaling of losses for fp16."""

from __future__ import annotations

from lowtide.optim.loss_scale import DynamicScale, Replenish, StaticScale
from lowtide.optim.loss_scaling import LossScaler

__all__ = ["DynamicScale", "LossScaler", "Replenish", "StaticScale"]
