"""CompileCheck: refuses `torch.compile` around a model with activation policies.

The compiler would go through the blocks' forwards by itself, past the policies, and nothing would be saved or said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide import compat
from lowtide.errors import ActivationError


class CompileCheck:
    """Takes the calls of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner: Callable[..., Any] | None = None
        self._is_active = False

    def install(self) -> None:
        """Take the model's calls."""
        self._inner = compat.replace_call(self._model, self._call)
        self._is_active = True

    def remove(self) -> None:
        """Give them back. Where others have taken them since, calls pass through here."""
        if self._is_active:
            self._is_active = False
            if compat.call_of(self._model) == self._call:
                compat.replace_call(self._model, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_active and compat.is_compiled_around():
            raise ActivationError(
                f"torch.compile around {type(self._model).__name__} would go past the activation policies of its blocks; "
                "compile the blocks before you apply policies: for block in model.layers: block.compile()"
            )
        return (self._inner or compat.plain_call(self._model))(*args, **kwargs)
