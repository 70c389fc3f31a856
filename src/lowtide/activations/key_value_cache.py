"""Key-value caches of Hugging Face models, which recomputed blocks would fill twice."""

from __future__ import annotations

from typing import Any

from torch import nn


def caching_configs(model: nn.Module) -> list[Any]:
    """Configurations of Hugging Face models that keep keys and values of past tokens.

    A recomputed block would put its own into the cache a second time; transformers' switch for recomputation turns the
    cache off as well.
    """
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if getattr(config, "use_cache", False) is True]
