"""Finisher: updates chunks whose gradients are complete, in a backward or on the device in `step()`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lowtide import compat
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
        for chunk in unit.group.chunks:
            fired = _complete(unit, chunk, is_last=is_last)
            if not fired:
                continue
            if not is_last and any(visit.backward != backward for visit in unit.visits):
                return  # another use of the same weights is still to come
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
        unit.generation += 1
        try:
            # Before it is: a group that has moved is named, wherever this breaks off.
            unit.consumed.add(chunk.spec.name)
            self._update(unit, chunk, trained, settings)
        except BaseException:
            if not self.updater.is_torn and not self.updater.has_updated(chunk.spec.name):
                unit.consumed.discard(chunk.spec.name)
            raise

    def _update(self, unit: Unit, chunk: Chunk, trained: Sequence[Bound], settings: Settings) -> None:
        if trained[0].site is Site.HOST:
            self.updater.update_on_host(unit, chunk, trained, settings)
            self._residency.forget_old_copy(unit)
            # Its last gradients come after its window has closed: whoever looks from now on waits for the update.
            self._residency.guard(unit)
            return
        gate = self.updater.judge_in_backward(trained)
        self._update_open(unit, chunk, trained, settings if gate is None else replace(settings, gate=gate))
        with compat.without_torch_function():
            for bound in trained:
                bound.parameter.grad = None

    def _update_open(self, unit: Unit, chunk: Chunk, bounds: Sequence[Bound], settings: Settings) -> None:
        """One step on the device, in a window of its own; streamed weights are written back."""
        self._residency.open(unit)
        try:
            started = self._mover.now()
            if not unit.is_resident:
                # Before they are changed: where the update breaks off, its state goes with what the device has.
                self._residency.store.device_changes(chunk)
            self.updater.update_here(bounds, (), settings)
            if not unit.is_resident:
                self._residency.write_back(unit, chunk)
            self._recorder.on_compute(unit.name, "update", started, self._mover.now())
        finally:
            self._residency.close(unit)


def _complete(unit: Unit, chunk: Chunk, *, is_last: bool) -> list[Bound]:
    """The chunk's parameters with a gradient, once all of them that are trained have one, or will get none."""
    if not is_last:
        # This is asked at every gradient: as long as the same one is missing, the chunk is not complete.
        awaited = unit.awaited.get(chunk.spec.name)
        if awaited is not None and not awaited.has_fired:
            return []
    fired: list[Bound] = []
    with compat.without_torch_function():  # parameters may be guarded; nobody reads a value here
        for bound in unit.bounds:
            if bound.chunk is not chunk:
                continue
            if bound.has_fired:
                if bound.parameter.requires_grad:
                    fired.append(bound)
            elif not is_last and bound.parameter.requires_grad:
                unit.awaited[chunk.spec.name] = bound
                return []
    return fired
