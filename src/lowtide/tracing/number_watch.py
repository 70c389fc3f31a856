"""Who reads a block's own number (`layer_idx`) while the block runs.

The methods of the block's classes have been read beforehand and found harmless. Other code that is handed the block may look
at the number as well and decide by it: then the blocks are not alike, whatever else they have in common.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from lowtide.tracing.block_signature import codes_of


class NumberWatch:
    """A context in which reads of some attributes of some classes are seen, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_blind = False
        """Whether something cannot be watched."""
        self.strangers: set[types.CodeType] = set()
        """Code outside the classes that has read one of the attributes."""
        self._watched: set[tuple[type, str]] = set()

    def add(self, numbers: set[tuple[type, str]]) -> None:
        """Watch these attributes, by class and name."""
        for kind, name in numbers:
            if hasattr(kind, name):  # a default that belongs to the class; the watch would hide it
                self.is_blind = True
            else:
                self._watched.add((kind, name))

    def __enter__(self) -> None:
        for kind, name in self._watched:
            setattr(kind, name, self._attribute(kind, name))

    def __exit__(self, *_: object) -> None:
        for kind, name in self._watched:
            delattr(kind, name)

    def _attribute(self, kind: type, name: str) -> property:
        known = codes_of(kind)

        def get(module: nn.Module) -> Any:
            reader = sys._getframe(1).f_code
            if self.is_on and reader not in known:
                self.strangers.add(reader)
            try:
                return vars(module)[name]
            except KeyError:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}") from None

        def put(module: nn.Module, value: Any) -> None:
            vars(module)[name] = value

        return property(get, put)
