"""Updater: runs the optimizer on chunks whose gradients are complete, on the device at once and on the host in the worker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from lowtide import compat
from lowtide.memory.chunk import Chunk
from lowtide.memory.mover import Mover, Ticket
from lowtide.memory.pools import AllocationCache
from lowtide.memory.store import ChunkStore
from lowtide.planning.plan import Site
from lowtide.runtime.parameters.gradients import GradientSink, HostGradient
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.parameters.pending import SaveGuard, beside
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.updates.norms import GradientWatch, Verdict, norms_to_judge
from lowtide.runtime.updates.worker import Awaited, HostWorker, Job

LOOSE = "(unmanaged)"
"""Stands for parameters that no chunk has."""


class ChunkUpdates(Protocol):
    """Updates of chunks where the plan wants them: a session's are made, a prediction's take what they would take."""

    @property
    def optimizer(self) -> ChunkOptimizer:
        """Steps the user's optimizer by chunks."""

    @property
    def is_torn(self) -> bool:
        """Whether an update on the device broke off in the middle, in this step."""

    def begin_step(self) -> None:
        """What is updated from now on belongs to another step."""

    def has_updated(self, chunk: str) -> bool:
        """Whether the chunk's update was made in this step, or the worker will make it."""

    def judge_in_backward(self, members: Sequence[ManagedParameter]) -> torch.Tensor | None:
        """Gradients on the device, which an update there is about to take; its gate, where it can have one."""

    def update_here(
        self, members: Sequence[ManagedParameter], loose: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """One step on parameters that look at the device, and on unmanaged ones."""

    def update_on_host(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on the host for a chunk whose gradients are there or on their way."""


class Updater:
    """Makes the updates of chunks, and knows which were made in this step.

    Args:
        clock_origin_s: `perf_counter` at the mover's start, so that the host's spans share its clock.
    """

    def __init__(
        self,
        optimizer: ChunkOptimizer,
        store: ChunkStore,
        worker: HostWorker,
        cache: AllocationCache,
        recorder: Recorder,
        gradient_watch: GradientWatch,
        gradients: GradientSink,
        saves: SaveGuard,
        *,
        clock_origin_s: float,
    ) -> None:
        self.optimizer = optimizer
        self._saves = saves
        self._gradients = gradients
        self._store = store
        self._worker = worker
        self._cache = cache
        self._recorder = recorder
        self._gradient_watch = gradient_watch
        self._clock_origin_s = clock_origin_s
        self._brought: tuple[Settings, Settings] | None = None
        self._jobs: dict[str, Job] = {}
        self._marks: dict[str, int] = {}
        self._num_made = 0
        self.is_torn = False
        """Whether an update on the device broke off in the middle, in this step: weights and state may be of two steps."""

    def begin_step(self) -> None:
        """What is updated from now on belongs to another step."""
        self._jobs.clear()
        self._marks.clear()
        self.is_torn = False

    def has_updated(self, chunk: str) -> bool:
        """Whether the chunk's update was made in this step, or the worker will make it; right also after an exception."""
        if chunk in self._jobs:
            return self._jobs[chunk].is_given
        return chunk in self._marks and self._num_made > self._marks[chunk]

    def has_begun(self, chunk: str) -> bool:
        """Whether its update was made, or may be half made."""
        return self.has_updated(chunk) or (self.is_torn and self._marks.get(chunk) == self._num_made)

    def update_here(
        self, members: Sequence[ManagedParameter], loose: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """One step on parameters that look at the device, gradients beside them, and on unmanaged ones."""
        for managed in members if self.optimizer.checks_gradients else ():
            self.optimizer.check_gradient(managed.parameter, managed.gradient, managed.spec.name)
        parameters = [managed.parameter for managed in members] + list(loose)
        updates = [
            Update(managed.parameter, managed.leaf, managed.first_element)
            for managed in members
            if managed.leaf.grad is not None
        ]
        updates += [Update(parameter, parameter) for parameter in loose if parameter.grad is not None]
        if not updates:
            return
        if (reading := self._saves.reading) is not None:
            reading.wait_for(parameters)
        take_step = self.optimizer.prepare(updates, settings)
        self._marks.update(dict.fromkeys(_names(members), self._num_made))
        try:
            # In one line: there is no place between the two at which an exception could leave one without the other.
            self._num_made += take_step()
        except BaseException:
            self.is_torn = True
            raise

    def update_on_host(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on the host for a chunk whose gradients are there or on their way. Returns at once."""
        settings = self._on_host(settings)
        self._gradients.send()
        arrived = [_gradient_of(managed) for managed in members]
        updates: list[Update] = []
        gradients: list[torch.Tensor | None] = []
        if group.is_held(chunk):
            group.await_change()
            chunk.mark_touched()
        awaited: list[Awaited] = [waiting for gradient in arrived for waiting in gradient.pending]
        if (reading := self._saves.reading) is not None:
            parameters = [managed.parameter for managed in members]
            if group.is_resident:
                reading.wait_for(parameters)  # what comes next may write to the host's copy of the weights
            awaited.append(reading.reads_of(parameters))
        self._store.refresh_host(chunk)
        is_staged = chunk.staging is not None
        for managed, gradient in zip(members, arrived, strict=True):
            if not is_staged and gradient.is_held_beside():
                group.await_change()
            gradients.append(gradient.for_update(is_staged=is_staged))
            updates.append(Update(managed.parameter, _target_on_host(managed), managed.first_element))
        # A fetch may still be reading the bytes that the update is about to change, or a write-back be filling them.
        copies = [copied.ended for copied in (chunk.fetched, chunk.written) if copied is not None]
        if self.optimizer.needs_values(updates):
            for ended in copies:
                ended.wait()
        self.optimizer.claim_state(updates, settings)
        # Registered before it is submitted: after an exception it is known whether the update will be made.
        job = self._jobs[chunk.spec.name] = self._worker.new_job()
        staging = chunk.take_staging()
        # Under the deferred schedule `step()` has judged them all.
        verdict = judge_sent(members, self._gradient_watch) if staging is not None else None
        for gradient in arrived:
            gradient.forget_norm()
        step = self._recorder.step

        def update() -> None:
            started_s = time.perf_counter()
            if verdict is not None and not verdict.is_finite():
                return  # the loop is told by the watch
            try:
                # Only now: the update before this one clears the gradients of the same host targets when it ends.
                for item, values in zip(updates, gradients, strict=True):
                    item.target.grad = values
                with compat.outside_compilation():
                    self.optimizer.run(updates, settings)
            finally:
                for item in updates:
                    item.target.grad = None
            self._recorder.on_host_update(
                chunk.spec.name,
                step,
                started_s - self._clock_origin_s,
                time.perf_counter() - self._clock_origin_s,
                chunk.moved_bytes,
            )

        if verdict is not None:
            awaited.append(verdict.arrived)

        def give_back() -> None:
            if staging is not None:
                self._cache.give_back(staging)

        self._worker.submit(update, after=[*awaited, *copies], lastly=give_back, place=group.place, job=job)
        self._store.host_changes(chunk, job, group.place)
        for managed, item in zip(members, updates, strict=True):
            if managed.foreign is not None and item.target is not managed.foreign:
                job.wait()
                with torch.no_grad():
                    managed.foreign.copy_(item.target)
        for gradient in arrived:
            if staging is None:
                gradient.await_(job)
            else:
                gradient.use_up()

    def judge_in_backward(self, members: Sequence[ManagedParameter]) -> torch.Tensor | None:
        """Gradients on the device, which an update there is about to take; its gate, where it can have one."""
        return judge_here(members, self.optimizer, self._gradient_watch)

    def _on_host(self, settings: Settings) -> Settings:
        """Once for all chunks of a step: what lies on the device is waited for."""
        if self._brought is None or self._brought[0] is not settings:
            self._brought = (settings, settings.on_host())
        return self._brought[1]

    def place_state(self, groups: Sequence[ManagedGroup], device: torch.device) -> None:
        """Move optimizer state to where each chunk is updated."""
        for group in groups:
            for managed in group.members:
                self.place_state_of(managed, device)

    def place_state_of(self, managed: ManagedParameter, device: torch.device) -> None:
        """Move one parameter's state to where it is updated."""
        if self.optimizer.knows(managed.parameter):
            site = torch.device("cpu") if managed.site is Site.HOST else device
            self.optimizer.place_state(managed.parameter, site)


def _names(members: Sequence[ManagedParameter]) -> set[str]:
    return {managed.chunk.spec.name for managed in members} or {LOOSE}


def judge_here(
    members: Sequence[ManagedParameter], optimizer: ChunkOptimizer, watch: GradientWatch
) -> torch.Tensor | None:
    """See `Updater.judge_in_backward`."""
    with compat.without_torch_function():
        gradients = [(managed, managed.leaf.grad) for managed in members]
    held = [(managed, gradient) for managed, gradient in gradients if gradient is not None]
    if not held:
        return None
    names, norms = [managed.spec.name for managed, _ in held], norms_to_judge([gradient for _, gradient in held])
    undo = optimizer.undo_of([managed.parameter for managed, _ in held])
    if undo is None:
        watch.judge(names, norms, is_left_out=False)
        return None
    return watch.judge(names, norms, is_left_out=True, undo=undo).gate()


def judge_sent(members: Sequence[ManagedParameter], watch: GradientWatch) -> Verdict | None:
    """Gradients on their way to the host, whose norms were taken before they left."""
    sent = [(managed.spec.name, norm) for managed in members if (norm := _gradient_of(managed).sent_norm) is not None]
    if not sent:
        return None
    names, norms = zip(*sent, strict=True)
    return watch.judge_sent(names, norms)


def _target_on_host(managed: ManagedParameter) -> torch.Tensor:
    """The host target; where the user gave the parameter other memory, that, or a copy of it that the update can change."""
    assert managed.host_target is not None
    foreign = managed.foreign
    if foreign is None:
        return managed.host_target
    if foreign.device == managed.host_target.device and foreign.stride() == managed.host_target.stride():
        return foreign
    return beside(managed.host_target).copy_(foreign)


def _gradient_of(managed: ManagedParameter) -> HostGradient:
    assert managed.host_gradient is not None
    return managed.host_gradient


class Finisher:
    """Decides when a chunk is updated in backward, and opens its group where the device updates it; `Updater` makes the update."""

    def __init__(self, updater: ChunkUpdates, residency: Residency, mover: Mover, recorder: Recorder) -> None:
        self.updater = updater
        self._residency = residency
        self._mover = mover
        self._recorder = recorder
        self._settings_of_backward: tuple[int, Settings] | None = None
        """The settings of a backward, by its number."""

    def finish(self, group: ManagedGroup, backward: int, *, is_last: bool) -> None:
        """Update the group's chunks whose gradients this backward has completed.

        Where `is_last`, the backward is over: parameters without a gradient will get none.
        """
        for chunk in group.stored.chunks:
            fired = group.members_to_update(chunk, is_last=is_last)
            if not fired:
                continue
            if not is_last and group.is_used_beside(backward):
                return  # another use of the same weights is still to come
            trained = [managed for managed in fired if self.updater.optimizer.knows(managed.parameter)]
            if trained and group.is_spread:
                self._update_parts(group, chunk, fired, trained, self._settings_in(backward))
            elif trained:
                self._update_chunk(group, chunk, fired, trained, self._settings_in(backward))

    def prefetch(self, groups: Iterable[ManagedGroup]) -> None:
        """The backward has reached these: optimizer state that visits the device comes beside it."""
        self.updater.optimizer.prefetch(
            [managed.parameter for group in groups for managed in group.members if managed.site is Site.PAGED]
        )

    def update_streamed_on_device(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """Bring streamed weights to the device for their step there, and write them back."""
        self._recorder.phase = "update"
        try:
            self._update_open(group, chunk, members, settings)
        finally:
            group.point_to_host()
            self._residency.guard(group)

    def _settings_in(self, backward: int) -> Settings:
        """The settings of the backward's first update: a rate on the device is waited for once, not at every chunk."""
        if self._settings_of_backward is None or self._settings_of_backward[0] != backward:
            self._settings_of_backward = (backward, self.updater.optimizer.settings())
        return self._settings_of_backward[1]

    def _update_chunk(
        self,
        group: ManagedGroup,
        chunk: Chunk,
        fired: Sequence[ManagedParameter],
        trained: Sequence[ManagedParameter],
        settings: Settings,
    ) -> None:
        for managed in fired:
            managed.forget_gradient()
        group.count_update()
        try:
            # Before it is: a group that has moved is named, wherever this breaks off.
            group.mark_consumed(chunk.spec.name)
            self._update(group, chunk, trained, settings)
        except BaseException:
            if not self.updater.is_torn and not self.updater.has_updated(chunk.spec.name):
                group.unmark_consumed(chunk.spec.name)
            raise

    def _update_parts(
        self,
        group: ManagedGroup,
        chunk: Chunk,
        fired: Sequence[ManagedParameter],
        trained: Sequence[ManagedParameter],
        settings: Settings,
    ) -> None:
        """Update this rank's part of a chunk in backward; the other ranks update theirs."""
        for managed in fired:
            managed.forget_gradient()
        group.count_update()
        group.mark_consumed(chunk.spec.name)
        gate = None
        mine = [managed for managed in trained if managed.has_piece]
        if mine and mine[0].site is not Site.HOST:
            gate = self.updater.judge_in_backward(mine)
        self.update_part(group, chunk, mine, settings if gate is None else replace(settings, gate=gate))
        for managed in trained:
            managed.forget_piece()

    def update_part(
        self, group: ManagedGroup, chunk: Chunk, mine: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on this rank's pieces in a chunk, of which it may have none; all ranks bring the chunk together anew."""
        is_on_host = next(managed for managed in group.members if managed.chunk is chunk).site is Site.HOST
        if mine and is_on_host:
            self.updater.update_on_host(group, chunk, mine, settings)
        elif mine:
            if chunk.written is not None:
                self._mover.compute_after(chunk.written.ended)  # what a forward wrote may be on its way to the part
            started = self._mover.now()
            self.updater.update_here(mine, (), settings)
            self._recorder.on_compute(group.name, "update", started, self._mover.now())
        self._residency.store.parts_change(chunk, on_host=is_on_host)

    def _update(
        self, group: ManagedGroup, chunk: Chunk, trained: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        if trained[0].site is Site.HOST:
            self.updater.update_on_host(group, chunk, trained, settings)
            self._residency.forget_old_copy(group)
            # Its last gradients come after its window has closed: whoever looks from now on waits for the update.
            self._residency.guard(group)
            return
        gate = self.updater.judge_in_backward(trained)
        self._update_open(group, chunk, trained, settings if gate is None else replace(settings, gate=gate))
        with compat.without_torch_function():
            for managed in trained:
                managed.parameter.grad = None

    def _update_open(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on the device, in a window of its own; streamed weights are written back."""
        self._residency.open(group)
        ended: Ticket | None = None
        try:
            started = self._mover.now()
            if not group.is_resident:
                # Before they are changed: where the update breaks off, its state goes with what the device has.
                self._residency.store.device_changes(chunk)
            self.updater.update_here(members, (), settings)
            # One ticket for all that comes after the update: an event costs as much as a small kernel.
            ended = self._mover.now()
            if not group.is_resident:
                self._residency.write_back(group, chunk, ended)
            self._recorder.on_compute(group.name, "update", started, ended)
        finally:
            self._residency.close(group, ended)
