"""Key-value caches of Hugging Face models, which recomputed blocks would fill twice.

A recomputed block would put its keys and values into the cache a second time; transformers' switch for recomputation turns
the cache off as well.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

_LOCK = threading.Lock()
_OFF: dict[int, tuple[Any, int]] = {}
"""Configurations whose cache is off, and for how many: it comes back with the last of them. By identity: two may be equal."""


class CachesOff:
    """From when it is made until `end`, no configuration in the model keeps keys and values of past tokens."""

    def __init__(self, model: nn.Module) -> None:
        found = {
            id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
        }
        with _LOCK:
            self._configs = [
                config for key, config in found.items() if key in _OFF or getattr(config, "use_cache", False) is True
            ]
            for config in self._configs:
                _, num_holders = _OFF.get(id(config), (config, 0))
                _OFF[id(config)] = (config, num_holders + 1)
                config.use_cache = False

    def end(self) -> None:
        """Turn those on again that nobody else wants off. May be repeated."""
        with _LOCK:
            for config in self._configs:
                _, num_holders = _OFF.pop(id(config))
                if num_holders > 1:
                    _OFF[id(config)] = (config, num_holders - 1)
                else:
                    config.use_cache = True
            self._configs = []
