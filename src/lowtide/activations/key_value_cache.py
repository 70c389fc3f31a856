"""Key-value caches of Hugging Face models, which recomputed blocks would fill twice.

A recomputed block would put its keys and values into the cache a second time; transformers' switch for recomputation turns
the cache off as well. Some models compute the last bits otherwise without a cache, so that a run is to the bit that of plain
torch with `use_cache=False`, and not with the default.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
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
            self.names = tuple(
                dict.fromkeys(
                    type(module).__name__
                    for module in _outermost_with_config(model)
                    if getattr(module.config, "use_cache", False) is True and _takes_cache(module)
                )
            )
            """Classes of the models whose caches it turned off, though they would have used them."""
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


def _outermost_with_config(module: nn.Module) -> Iterator[nn.Module]:
    """A model that a user calls; those inside of it have their configurations from it."""
    if getattr(module, "config", None) is not None:
        yield module
        return
    for child in module.children():
        yield from _outermost_with_config(child)


def _takes_cache(module: nn.Module) -> bool:
    """Configurations of encoders say that there is a cache, too, though their models have none."""
    return "past_key_values" in inspect.signature(type(module).forward).parameters
