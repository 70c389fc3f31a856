"""GradientHooks: tells when the gradient of a parameter is complete, without keeping anybody alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from lowtide.runtime.backward_task import is_away
from lowtide.runtime.unit import Bound, Unit


class GradientHooks:
    """The session's hooks on parameters, until `remove`."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(
        self,
        unit: Unit,
        on_gradient: Callable[[Unit, Bound, torch.Tensor], None],
        before_gradient: Callable[[Unit, torch.Tensor], None],
    ) -> None:
        """Hook the unit's parameters.

        Args:
            unit: Whose parameters that are trained are hooked.
            on_gradient: A method; called when a parameter's gradient is complete.
            before_gradient: A method; called before that for resident weights whose gradients go to the host.
        """
        for bound in unit.bounds:
            if bound.parameter.requires_grad:
                hook = _weakly(on_gradient, unit, bound)
                bound.hook = bound.parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(bound.hook)
                if unit.is_resident and is_away(bound):
                    self._handles.append(bound.parameter.register_hook(_weakly(before_gradient, unit)))

    def remove(self) -> None:
        """Parameters are without them. May be repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _weakly(method: Callable[..., None], *arguments: object) -> Callable[[torch.Tensor], None]:
    """The method as a hook on a parameter. It holds nothing: Python's collector does not see what such hooks hold, and a
    session that is forgotten with its model would live for ever.
    """
    weak_method = weakref.WeakMethod(method)
    weak_arguments = [weakref.ref(argument) for argument in arguments]

    def hook(tensor: torch.Tensor) -> None:
        call = weak_method()
        if call is not None:
            call(*[reference() for reference in weak_arguments], tensor)

    return hook
