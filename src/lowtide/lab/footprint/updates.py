"""Gradients and updates of a managed step in a trace: what they hold on the device, and when they let it go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.lab.footprint.mover import FootprintMover, Point
from lowtide.memory.chunk import Chunk
from lowtide.memory.store import ChunkStore
from lowtide.runtime.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.unit import Bound, Unit


class FootprintGradients:
    """What `runtime.gradients.GradientMover` is in a session: gradients leave for the host."""

    def __init__(self, mover: FootprintMover) -> None:
        self._mover = mover

    def take(self, bound: Bound) -> None:
        """Complete: it waits for its copy, and is nobody's beside that."""
        gradient, bound.parameter.grad = bound.parameter.grad, None
        assert gradient is not None
        self._mover.to_host(gradient, gradient)
        bound.has_fired = True

    def expose(self, bound: Bound) -> None:
        """What is on the host costs the device nothing."""


class FootprintUpdater:
    """What `runtime.updater.Updater` is in a session."""

    def __init__(self, optimizer: ChunkOptimizer, store: ChunkStore) -> None:
        self.optimizer = optimizer
        self._store = store

    def judge_in_backward(self, bounds: Sequence[Bound]) -> torch.Tensor | None:
        """A few numbers on the device, for a moment."""
        del bounds
        return None

    def update_here(self, bounds: Sequence[Bound], loose: Sequence[torch.Tensor], settings: Settings) -> None:
        """One step on parameters whose gradients are on the device."""
        parameters = [bound.parameter for bound in bounds] + list(loose)
        updates = [Update(parameter, parameter) for parameter in parameters if parameter.grad is not None]
        if updates:
            self.optimizer.run(updates, settings)

    def update_on_host(self, unit: Unit, chunk: Chunk, bounds: Sequence[Bound], settings: Settings) -> None:
        """One step on the host: afterwards what the device has of the weights is old."""
        del bounds, settings
        self._store.take_over(chunk)
        self._store.host_changes(chunk, Point(), unit.place)
