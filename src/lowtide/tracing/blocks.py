"""Recomputation of a model's repeated blocks in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.memory.blocks import repeated_blocks


def caching_configs(model: nn.Module) -> list[Any]:
    """Configurations of Hugging Face models that keep keys and values of past tokens.

    A recomputed block would put its own into the cache a second time; transformers' switch for recomputation turns the
    cache off as well.
    """
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if getattr(config, "use_cache", False) is True]


def recompute_blocks(model: nn.Module) -> int:
    """Checkpoint each repeated block in place (non-reentrant), key-value caches off; returns how many blocks there are."""
    blocks = repeated_blocks(model)
    for config in caching_configs(model):
        config.use_cache = False
    for _, block in blocks:
        forward = block.forward

        def run(*args: object, forward: object = forward, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)  # type: ignore[operator]
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]

        block.forward = run
    return len(blocks)
