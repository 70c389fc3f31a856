"""CallWatch: tells the clock of the phases when a model is called that needs no windows, everything being resident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.runtime.phase_clock import PhaseClock


class CallWatch:
    """Stands around the calls of one model, from `install` to `remove`. Changes nothing about them.

    Where the user compiles the model while it is managed, calls no longer come through here; nothing else follows from
    that than that their time counts as the rest of the step.
    """

    def __init__(self, model: nn.Module, phases: PhaseClock, call_over: Callable[[bool], None]) -> None:
        self._model = model
        self._phases = phases
        self._call_over = call_over
        self._inner: Callable[..., Any] | None = None

    def install(self) -> None:
        """Take the model's calls."""
        self._inner = compat.replace_call(self._model, self._call)

    def remove(self) -> None:
        """Give them back, unless the user has put something else there. May be repeated."""
        if compat.call_of(self._model) == self._call:
            compat.replace_call(self._model, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner or compat.plain_call(self._model)
        if compat.is_compiled_around() or compat.backward_number() is not None:
            return inner(*args, **kwargs)
        self._phases.enter("forward")
        went_well = False
        try:
            output = inner(*args, **kwargs)
            went_well = True
        finally:
            self._phases.leave("forward")
            self._call_over(went_well)
        if torch.is_grad_enabled():
            self._phases.watch_backward(output)
        return output
