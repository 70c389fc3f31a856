"""Switching recomputation on in a model that offers it under Hugging Face's name."""

from __future__ import annotations

from torch import nn

from lowtide.errors import ConfigError


def enable_recompute(model: nn.Module, *, name: str) -> None:
    """Call the model's `gradient_checkpointing_enable`.

    Args:
        model: The model.
        name: What the user calls it, for the error.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"{name} cannot recompute its layers: {type(model).__name__} has no gradient_checkpointing_enable(); add "
            "that method, or wrap its layers in torch.utils.checkpoint"
        )
    enable()
