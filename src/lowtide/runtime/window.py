"""Windows: what happens around the call of a module whose groups are managed, forward and backward.

Note [When a group's backward starts and ends]
It starts when the first gradient arrives at one of the module's outputs: a hook on each of them opens the groups. It
ends when the first gradient leaves through one of the module's inputs. Each input that needs a gradient enters the
module as a view of its own, made right before the call. Autograd runs what is ready in the order of creation, latest
first; the views are older than every node of the module, so when one of them is reached, all nodes of the module have
run. A module whose inputs need no gradient (an embedding) has ended when all its parameters have their gradients, and
in any case at the end of the backward.

Note [Recomputation]
A checkpoint around the module calls it again in the middle of its backward, and may break the call off by an exception
when it has what it needs. The groups are open then already, and stay open until the first call's inputs are reached:
the second call's graph is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.runtime.tensors import map_tensors, tensors_in
from lowtide.runtime.unit import Unit


class Visit:
    """One forward call with a graph. Only hooks in that graph hold it, so it dies with the graph."""

    def __init__(self, window: Window, listener: WindowListener) -> None:
        self.window = window
        self.generations = tuple(unit.generation for unit in window.units)
        self.backward: int | None = None
        """The backward that opened it last; it may be run again by another, where the graph was retained."""
        self.is_open = False
        self.num_inputs = 0
        self.waiting_for: set[int] = set()
        """Parameters whose gradients end the visit where no input does."""
        self._listener = listener

    def watch_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view for this call alone, whose gradient tells that the module's backward is over."""
        if not tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor
        view = tensor.view_as(tensor)
        self.num_inputs += 1
        view.register_hook(self._on_input_gradient)
        return view

    def watch_output(self, tensor: torch.Tensor) -> None:
        """The first gradient of an output opens the groups."""
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        self._listener.backward_reached(self, gradient)

    def _on_input_gradient(self, gradient: torch.Tensor) -> None:
        del gradient
        self._listener.backward_left(self)


class WindowListener(Protocol):
    """Opens and closes the groups."""

    def forward_begins(self, window: Window) -> None:
        """The module is about to be called."""

    def forward_ends(self, window: Window) -> None:
        """The module has returned or raised."""

    def model_returned(self, window: Window, output: object) -> None:
        """The whole model has returned."""

    def backward_reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at an output of the visit."""

    def backward_left(self, visit: Visit) -> None:
        """A gradient left through an input of the visit."""


class Window:
    """Stands around one module: `module(...)` goes through it, hooks and compiled code inside.

    Args:
        path: Of the module, "" for the whole model.
        units: The groups that the module needs.
    """

    def __init__(self, module: nn.Module, path: str, units: tuple[Unit, ...], listener: WindowListener) -> None:
        self.module = module
        self.path = path
        self.units = units
        self._listener = listener
        self._inner: Callable[..., Any] | None = None
        self._is_installed = False

    def install(self) -> None:
        """Take the module's calls."""
        self._inner = compat.replace_call(self.module, self._call)
        self._is_installed = True

    def remove(self) -> None:
        """Give the module's calls back."""
        if self._is_installed:
            compat.replace_call(self.module, self._inner)
            self._is_installed = False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner or compat.plain_call(self.module)
        self._listener.forward_begins(self)
        try:
            makes_graph = torch.is_grad_enabled() and bool(self.units)
            output = self._visit(inner, args, kwargs) if makes_graph else inner(*args, **kwargs)
        finally:
            self._listener.forward_ends(self)
        if self.path == "":
            self._listener.model_returned(self, output)
        return output

    def _visit(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = Visit(self, self._listener)
        args = tuple(map_tensors(value, visit.watch_input) for value in args)
        kwargs = {key: map_tensors(value, visit.watch_input) for key, value in kwargs.items()}
        entered = {id(tensor) for tensor in tensors_in((args, kwargs))}
        output = inner(*args, **kwargs)
        for tensor in tensors_in(output):
            # What passes through unchanged has no node of the module; its gradient comes after the module's.
            if id(tensor) not in entered:
                visit.watch_output(tensor)
        for unit in self.units:
            unit.visits.add(visit)
        return output
