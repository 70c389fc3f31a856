"""BackwardTask: one running backward, and what it has opened."""

from __future__ import annotations

import torch

from lowtide import compat
from lowtide.runtime.unit import Bound, Unit
from lowtide.runtime.window import Visit


class BackwardTask:
    """Lives from the first gradient that reaches a managed module to the end of the backward."""

    def __init__(self, number: int, callers: set[int]) -> None:
        self.number = number
        self.callers = callers
        """Threads of which one has called `backward`."""
        self.units: dict[str, Unit] = {}
        self.open_visits: list[Visit] = []
        self.late: list[Unit] = []
        """Units whose visits have ended, and which stay open for hooks of the user's that are still to come."""

    def enter(self, unit: Unit) -> None:
        """The backward uses the unit: gradients on the host are set aside, so that autograd starts afresh."""
        if unit.name in self.units:
            return
        self.units[unit.name] = unit
        unit.num_tasks += 1
        if unit.num_tasks == 1:
            unit.awaits_hooks = False
            unit.awaited.clear()
            for bound in unit.bounds:
                bound.has_fired = False
                has_other_hooks = bound.hook is not None and compat.make_last_gradient_hook(bound.parameter, bound.hook)
                bound.is_hooked = has_other_hooks or (
                    not unit.is_resident and compat.has_gradient_hooks(bound.parameter)
                )
                bound.is_hook_awaited = bound.is_hooked
                unit.awaits_hooks = unit.awaits_hooks or bound.is_hooked
                bound.is_written_in_backward = False
                bound.version_in_backward = compat.version_of(bound.parameter)
                if is_away(bound):
                    bound.stashed, bound.parameter.grad = _on_host(bound, bound.parameter.grad), None
                    bound.is_whole = has_other_hooks and bound.stashed is not None
                    if bound.is_whole and bound.stashed is not None:
                        # Hooks of the user's find the sum at the parameter, as in plain torch.
                        bound.parameter.grad = bound.stashed.to(bound.parameter.device, copy=True)
                else:
                    _bring_gradient(bound.parameter)

    def leave(self) -> list[Unit]:
        """The backward is over; the units that no other backward uses."""
        left: list[Unit] = []
        for unit in self.units.values():
            unit.num_tasks -= 1
            if unit.num_tasks == 0:
                left.append(unit)
        self.units.clear()
        return left


def _bring_gradient(parameter: torch.Tensor) -> None:
    """Weights used outside of their module's call, on the host, have left a gradient there: autograd adds to it here."""
    gradient = parameter.grad
    if gradient is not None and gradient.device != parameter.device:
        parameter.grad = gradient.to(parameter.device)


def _on_host(bound: Bound, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What is there already; where the user set it beside resident weights on the device, a copy on the host."""
    if gradient is None or bound.twin is None or gradient.device == bound.twin.device:
        return gradient
    return gradient.detach().to(bound.twin.device)


def is_away(bound: Bound) -> bool:
    """Whether the gradient goes to the host."""
    return bound.twin is not None
