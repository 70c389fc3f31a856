"""Finisher: updates chunks whose gradients are complete, in a backward or on the device in `step()`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lowtide.memory.chunk import Chunk
from lowtide.memory.mover import Mover
from lowtide.planning.plan import Site
from lowtide.runtime.chunk_optimizer import Settings
from lowtide.runtime.recording import Recorder
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Bound, Unit
from lowtide.runtime.updater import Updater


class Finisher:
    """See the module's docstring."""

    def __init__(self, updater: Updater, residency: Residency, mover: Mover, recorder: Recorder) -> None:
        self.updater = updater
        self._residency = residency
        self._mover = mover
        self._recorder = recorder
        self._taken: tuple[int, Settings] | None = None
        """The settings of a backward, by its number."""

    def finish(self, unit: Unit, backward: int, *, is_last: bool) -> None:
        """Update the unit's chunks whose gradients this backward has completed.

        Where `is_last`, the backward is over: parameters without a gradient will get none.
        """
        if not is_last and any(visit.backward != backward for visit in unit.visits):
            return  # another use of the same weights is still to come
        for chunk in unit.group.chunks:
            bounds = [bound for bound in unit.bounds if bound.chunk is chunk and bound.parameter.requires_grad]
            fired = [bound for bound in bounds if bound.has_fired]
            if not fired or (len(fired) < len(bounds) and not is_last):
                continue
            if any(self.updater.optimizer.knows(bound.parameter) for bound in fired):
                self._use_up(unit, chunk, fired, self._settings_in(backward))

    def prefetch(self, units: Iterable[Unit]) -> None:
        """The backward has reached these: optimizer state that visits the device comes beside it."""
        self.updater.optimizer.prefetch(
            [bound.parameter for unit in units for bound in unit.bounds if bound.site is Site.PAGED]
        )

    def update_streamed_on_device(self, unit: Unit, chunk: Chunk, bounds: Sequence[Bound], settings: Settings) -> None:
        """Bring streamed weights to the device for their step there, and write them back."""
        self._recorder.phase = "update"
        try:
            self._update_open(unit, chunk, bounds, settings)
        except BaseException:
            # The copy may be half updated; the host has the weights from before.
            if not unit.group.num_open:
                self._residency.store.drop(unit.name)
            raise
        finally:
            unit.look_at_host()
            self._residency.guard(unit)

    def _settings_in(self, backward: int) -> Settings:
        """Of its first update: a rate that lies on the device is waited for once, not at every chunk."""
        if self._taken is None or self._taken[0] != backward:
            self._taken = (backward, self.updater.optimizer.settings())
        return self._taken[1]

    def _use_up(self, unit: Unit, chunk: Chunk, fired: list[Bound], settings: Settings) -> None:
        trained = [bound for bound in fired if self.updater.optimizer.knows(bound.parameter)]
        for bound in fired:
            bound.has_fired = False
        if trained[0].site is Site.HOST:
            self.updater.update_on_host(unit, chunk, trained, settings)
            self._residency.forget_old_copy(unit)
        else:
            gate = self.updater.judge_in_backward(trained)
            self._update_open(unit, chunk, trained, settings if gate is None else replace(settings, gate=gate))
            for bound in trained:
                bound.parameter.grad = None
        unit.generation += 1
        unit.consumed.add(chunk.spec.name)

    def _update_open(self, unit: Unit, chunk: Chunk, bounds: Sequence[Bound], settings: Settings) -> None:
        """One step on the device, in a window of its own; streamed weights are written back."""
        self._residency.open(unit)
        try:
            started = self._mover.now()
            self.updater.update_here(bounds, (), settings)
            if not unit.is_resident:
                self._residency.store.write_back(chunk)
            self._recorder.on_compute(unit.name, "update", started, self._mover.now())
        finally:
            self._residency.close(unit)
