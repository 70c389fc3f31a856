"""Roles: which tensors are weights, optimizer state and gradients, and under which module's name.

Shared by the prediction, whose tensors are ghosts, and by the observation of a real step: both must call the same bytes
by the same name, or no comparison of the two would mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lowtide import compat
from lowtide.tracing.step_trace import Category


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is for."""

    category: Category
    module: str
    op: str
    """Stands where an operator's name would: `parameter weight`, `state exp_avg`."""


def weight_roles(model: nn.Module, root: str) -> Iterator[tuple[Tensor, Role]]:
    """Every parameter and buffer; a tied one once for each name, so that the last name stands.

    Args:
        model: The model.
        root: Stands for the outermost module, whose own path is empty.
    """
    for path, module in model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensor, Role(Category.WEIGHTS, path or root, f"{kind} {name}")


def state_roles(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Tensor, Role]]:
    """Every tensor that the optimizer keeps for a parameter, under the name of the parameter's module."""
    if optimizer is None:
        return
    paths = {id(parameter): name.rpartition(".")[0] or name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        module = paths.get(id(parameter), type(optimizer).__name__)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield value, Role(Category.OPTIMIZER, module, f"state {name}")


class GradientWatch:
    """A context in which `on_gradient` is told of each parameter's gradient as soon as it is complete.

    Before the user's own hooks, which may free it. The hooks go when the context ends; they hold nothing of the model.
    """

    def __init__(self, model: nn.Module, on_gradient: Callable[[Tensor], None]) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._on_gradient = on_gradient
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        on_gradient = self._on_gradient

        def tell(parameter: Tensor) -> None:
            if parameter.grad is not None:
                on_gradient(parameter.grad)

        self._handles = [compat.register_first_gradient_hook(parameter, tell) for parameter in self._parameters]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters.clear()


class ModuleListener(Protocol):
    """Is told which module's forward runs, in the thread that runs it."""

    def enter_module(self, path: str) -> None:
        """A forward begins."""
        ...

    def leave_module(self, *, has_weights: bool) -> None:
        """The innermost one ends."""
        ...


class ModulePaths:
    """A context that tells a listener of every module's forward, recomputations included. Holds no module."""

    def __init__(self, model: nn.Module, listener: ModuleListener) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._weighty = {id(module) for module in model.modules() if next(module.parameters(), None) is not None}
        self._listener = listener
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._listener.enter_module(self._paths.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._listener.leave_module(has_weights=id(module) in self._weighty)
