"""Gradients and updates of a managed step in a trace: what they hold on the device, and when they let it go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowtide.lab.footprint.mover import FootprintMover, Point
from lowtide.memory.chunk import Chunk
from lowtide.memory.store import ChunkStore
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import norm_of
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.updates.finite import GradientWatch, Verdict
from lowtide.runtime.updates.updater import judge_here, judge_sent


class FootprintGradients:
    """What `GradientMover` is in a session: gradients leave for the host."""

    def __init__(self, mover: FootprintMover) -> None:
        self._mover = mover

    def take(self, managed: ManagedParameter) -> None:
        """Complete: it waits for its copy, and is nobody's beside that."""
        gradient, managed.parameter.grad = managed.parameter.grad, None
        assert gradient is not None
        managed.norm = (0, norm_of(gradient))
        self._mover.to_host(gradient, gradient)
        managed.has_fired = True

    def expose(self, managed: ManagedParameter) -> None:
        """What is on the host costs the device nothing."""

    def abandon(self, members: Iterable[ManagedParameter]) -> None:
        """A trace that broke off is over."""


class FootprintWatch(GradientWatch):
    """Norms take memory and have no values: nobody is told of anything."""

    def _send(self, verdicts: Sequence[Verdict]) -> None:
        arrived = _LatePoint(torch.stack([norm for verdict in verdicts for norm in verdict.norms]))
        for verdict in verdicts:
            verdict.be_sent(torch.empty(0), arrived)


class _LatePoint(Point):
    """Of a copy that is over when somebody waits for it, at the beginning of the next backward, and holds its source."""

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def is_done(self) -> bool:
        """Not before."""
        return False


class FootprintUpdater:
    """What `Updater` is in a session."""

    def __init__(self, optimizer: ChunkOptimizer, store: ChunkStore, watch: FootprintWatch, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self._store = store
        self._watch = watch
        self._schedule = schedule

    is_torn = False
    """A trace that broke off is over, and nobody asks what has moved."""

    def has_updated(self, chunk: str) -> bool:
        """See `is_torn`."""
        return False

    def begin_step(self) -> None:
        """See `is_torn`."""

    def judge_in_backward(self, members: Sequence[ManagedParameter]) -> torch.Tensor | None:
        """Norms on the device, until the end of the backward."""
        return judge_here(members, self.optimizer, self._watch)

    def update_here(
        self, members: Sequence[ManagedParameter], loose: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """One step on parameters whose gradients are on the device."""
        parameters = [managed.parameter for managed in members] + list(loose)
        updates = [Update(parameter, parameter) for parameter in parameters if parameter.grad is not None]
        if updates:
            self.optimizer.run(updates, settings)

    def update_on_host(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on the host: afterwards what the device has of the weights is old."""
        del settings
        self._store.take_over(chunk)
        if self._schedule is Schedule.IN_BACKWARD:
            judge_sent(members, self._watch)
        for managed in members:
            managed.norm = None
        self._store.host_changes(chunk, Point(), group.place)
