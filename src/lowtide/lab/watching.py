"""The memory of one step through time: the peak between any two calls of the model's groups, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.lab.meter import TakePeak
from lowtide.memory.groups import find_groups


class Watch:
    """Points of a timeline; the running phase is told by whoever runs the step."""

    def __init__(self, take_peak: TakePeak) -> None:
        self._take_peak = take_peak
        self.phase = "forward"
        self.points: list[tuple[str, int]] = []

    def mark(self, phase: str | None = None) -> None:
        """Here something ends: a point with the most that was held since the last one."""
        self.points.append((phase or self.phase, self._take_peak()))


def watched_modules(model: nn.Module) -> list[nn.Module]:
    """Those whose calls are marked: of the groups of a plain model. In a session parameters may be veiled."""
    paths = dict.fromkeys(window for group in find_groups(model) for window in group.modules)
    return [model.get_submodule(path) for path in paths if path]


@contextmanager
def watched(modules: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Mark the ends of the calls of modules, and the beginnings of their backwards. Changes no tensor and no graph."""
    handles = [module.register_forward_hook(_ends(watch)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ends(watch: Watch) -> Callable[[nn.Module, Any, Any], None]:
    def on_gradient(gradient: Tensor) -> None:
        del gradient
        watch.mark("backward")

    def on_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        watch.mark()
        for tensor in compat.flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(on_gradient)
                break

    return on_forward
