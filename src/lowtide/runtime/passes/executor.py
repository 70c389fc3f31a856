"""Executor: carries out a plan. It makes a forward and a backward pass over the same groups, and answers between steps.

Everything here runs in the thread of the training loop, or in autograd's while the loop waits for it; only host updates
run beside it. See `passes.forward` and `passes.backward` for what opens and closes groups, `parameters.group` for where
parameters point. A model that needs no windows has a `CallWatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.memory.mover import GradientCarrier
from lowtide.memory.pools import AllocationCache
from lowtide.memory.store import Books
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientMover, HostGradient
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.parameters.pending import ReadingSave, SaveGuard
from lowtide.runtime.parameters.residency import ManagedResidency
from lowtide.runtime.passes.backward import BackwardPass
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.passes.exchange import GradientAverage
from lowtide.runtime.passes.forward import ForwardPass, Gate, Window, make_windows
from lowtide.runtime.passes.lock import LostStep, Process, SessionLock, locked
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import PhaseClock, Recorder
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.updates.norms import GradientWatch, LossWatch
from lowtide.runtime.updates.updater import Finisher, Updater
from lowtide.runtime.updates.worker import HostWorker


class Executor:
    """The two passes of one session under one plan, with what they share.

    Args:
        groups: Bound to the model's parameters.
        runner: Steps the optimizer by chunks; None if there is no optimizer, or torch's own step runs.
        books: Where device bytes of streamed chunks are counted.
        staging: Buffers for gradients on their way to the host.
        worker: Runs host updates.
        takes_totals: Whether the norms of gradients that are added up on the host are computed there.
        clock_origin_s: `perf_counter` at the mover's start, so that the host's spans share its clock.
        average: Averages gradients over several ranks; None where there is one.
        observer: Asked at each opening and closing of a window.
        switch: Between the devices of a replicated model; None where there is one.
    """

    def __init__(
        self,
        groups: Iterable[ManagedGroup],
        runner: ChunkOptimizer | None,
        mover: GradientCarrier,
        books: Books,
        staging: AllocationCache,
        worker: HostWorker,
        recorder: Recorder,
        schedule: Schedule,
        *,
        window_bytes: int,
        prefetch_depth: int,
        takes_totals: bool,
        clock_origin_s: float,
        average: GradientAverage | None,
        observer: StepObserver | None,
        switch: DeviceSwitch | None = None,
    ) -> None:
        self.average = average
        self.mover = mover
        self.recorder = recorder
        self.schedule = schedule
        self.worker = worker
        self.lost_step = LostStep()
        # A rank that refuses its own loss would leave the others waiting. All of them see what it does to the gradients.
        self.loss = LossWatch(is_immediate=schedule is Schedule.IN_BACKWARD, is_left_to_gradients=average is not None)
        self.gradient_watch = GradientWatch(mover)
        self.saves = SaveGuard()
        """Asked before weights or optimizer state change."""
        self._lock = SessionLock()
        self._gradients = GradientMover(mover, worker, staging, schedule, recorder, takes_totals=takes_totals)
        self.residency = ManagedResidency(
            groups,
            mover,
            books,
            recorder,
            self.saves,
            settler=self,
            window_bytes=window_bytes,
            prefetch_depth=prefetch_depth,
            observer=observer,
        )
        self.groups = self.residency.groups
        self.updater: Updater | None = None
        self.finisher: Finisher | None = None
        if runner is not None:
            self.updater = Updater(
                runner,
                self.residency.store,
                worker,
                staging,
                recorder,
                self.gradient_watch,
                self._gradients,
                self.saves,
                clock_origin_s=clock_origin_s,
            )
            self.finisher = Finisher(self.updater, self.residency, mover, recorder)
        self.backward = BackwardPass(
            self.residency,
            mover,
            self._gradients,
            recorder,
            schedule,
            finisher=self.finisher,
            loss=self.loss,
            gradient_watch=self.gradient_watch,
            lost_step=self.lost_step,
            average=average,
            observer=observer,
            lock=self._lock,
            switch=switch,
        )
        self.forward = ForwardPass(
            self.residency,
            mover,
            worker,
            recorder,
            backward=self.backward,
            loss=self.loss,
            gradient_watch=self.gradient_watch,
            observer=observer,
            lock=self._lock,
        )

    # -- a session begins and ends -------------------------------------------------------------------------------------

    def windows(self, model: nn.Module) -> list[Window]:
        """The windows around the model's calls, which call the passes; not installed yet."""
        return make_windows(model, self.groups.values(), self.schedule, self.forward, self.backward)

    def start(self) -> None:
        """Watch the parameters' gradients, until `stop`."""
        self.backward.watch_gradients()

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self.backward.stop()

    # -- a step that broke off -----------------------------------------------------------------------------------------

    def check_broken(self) -> None:
        """If a backward raised, put everything back where it belongs, and remember that the step is lost."""
        self.backward.check_broken()

    def mend(self) -> None:
        """`check_broken`, unless a forward or a backward of this thread is under way."""
        if compat.backward_number() is None and not self.forward.is_under_way:
            self.backward.check_broken()

    def put_in_order(self) -> None:
        """After an exception in `step()`, or at the end: start afresh from the true copies."""
        if compat.backward_number() is None:
            self.forward.forget_calls()
            self.backward.put_in_order()

    def lose_step(self, moved: Iterable[ManagedGroup]) -> None:
        """A `step()` broke off after these groups moved, and could not be completed."""
        self.backward.lose_step(moved, "step()")

    def forget_step(self) -> None:
        """The user gives the step up or begins the next: forget what was wrong with the last one."""
        self.lost_step.tell()
        self.lost_step.forget()
        self.loss.forget()
        if self.average is not None:
            self.average.forget_local_sums()
        self.recorder.forget_backward()

    def has_raised(self) -> bool:
        """Whether the last call of the model, backward or step raised, and none has succeeded since."""
        return self.forward.has_raised or self.backward.has_broken_off()

    def tell_why_mixed(self) -> str | None:
        """Says which weights a backward that broke off has moved; None if all weights are those of one step. Says it once."""
        self.check_broken()
        self.lost_step.be_told()
        return self.backward.why_mixed()

    # -- between steps -------------------------------------------------------------------------------------------------

    def part_of_step(self) -> str | None:
        """The part of a step in which this thread is: forward, backward or update; None if its work is not the session's."""
        phases = self.recorder.phases
        # The recorded phase is not asked for backward and update: one that raised may be recorded until the next call.
        if phases.is_in_backward():
            return "backward"
        if phases.phase == "forward":
            return "forward"
        return "update" if self._lock.is_in_call() else None

    def is_idle(self) -> bool:
        """Whether no graph is alive and no window open."""
        return not self.is_in_step() and not any(group.visits for group in self.groups.values())

    def is_in_step(self) -> bool:
        """Whether a forward or a backward is under way, or a window stands open."""
        if self.forward.is_under_way or self.backward.is_under_way or compat.backward_number() is not None:
            return True
        return any(group.stored.num_open for group in self.groups.values())

    def is_quiet(self) -> bool:
        """Whether it is idle and no work on the host's memory is under way."""
        if not self.is_idle():
            return False
        for group in self.groups.values():
            if any(chunk.host_work is not None for chunk in group.stored.chunks):
                return False
            if group.points_to_device and not group.is_resident:
                return False
            if not all(gradient.is_settled() for gradient in host_gradients(group)):
                return False
        self.mover.drain()
        return True

    def settle(self) -> None:
        """Wait until every update is made and every copy is done."""
        for group in self.groups.values():
            self.settle_group(group)
            for gradient in host_gradients(group):
                gradient.settle()
        self.worker.check()
        self.gradient_watch.check(waits=True)
        self.mover.drain()

    @locked
    def begin_save(self, reading: ReadingSave) -> None:
        """The save reads from now on: whoever changes something waits for that, and writes to parameters are noticed."""
        self.saves.begin(reading)
        for group in self.groups.values():
            self.residency.guard(group)

    def before_change(self, group: ManagedGroup) -> None:
        """Somebody may be about to write to the group's weights: a save under way reads them first."""
        if self.saves.reading is not None:
            self.saves.reading.wait_for(group.parameters)

    def before_any_change(self) -> None:
        """Somebody may be about to write to anything."""
        if self.saves.reading is not None:
            self.saves.reading.wait_for_all()

    def settle_group(self, group: ManagedGroup) -> None:
        """User code reads one of the group's parameters: wait until their values are final."""
        # Before the lock is taken: the thread that holds it may be waiting for this one.
        self.worker.refuse_in_its_thread(f"a parameter of group {group.label}")
        self._settle_group(group)

    @locked
    def _settle_group(self, group: ManagedGroup) -> None:
        self.mend()
        if not group.stored.num_open:
            self.residency.settle(group)

    def calling(self, what: str) -> AbstractContextManager[None]:
        """A context whose body is one call of this thread: calls of other threads are refused meanwhile."""
        self.backward.refuse_beside(what)
        return self._lock.call(what)

    @property
    def process(self) -> Process:
        """The process that the session is in."""
        return self._lock.process

    def make_gradient_pending(self, managed: ManagedParameter) -> None:
        """An update on the host reads the user's gradient: reading it waits."""
        if managed.host_gradient is not None:
            self._gradients.make_pending(managed.host_gradient)


def host_gradients(group: ManagedGroup) -> list[HostGradient]:
    """The gradients of the group's parameters that the host updates."""
    return [managed.host_gradient for managed in group.members if managed.host_gradient is not None]


class CallWatch:
    """Watches the calls of a model that needs no windows, from `install` to `remove`. Changes nothing about them.

    If the user compiles the model while it is managed, calls no longer come through here: their time then counts as the
    rest of the step, and nothing else changes.
    """

    def __init__(self, model: nn.Module, phases: PhaseClock, call_over: Callable[[bool], None]) -> None:
        self._model = model
        self._phases = phases
        self._call_over = call_over
        self._inner: Callable[..., Any] | None = None
        self._gate: Gate | None = None

    def go_through(self, gate: Gate | None) -> None:
        """The gate decides how calls go on, until it is None."""
        self._gate = gate

    def install(self) -> None:
        """Take the model's calls."""
        self._inner = compat.call_of(self._model)
        compat.replace_call(self._model, self._call)

    def remove(self) -> None:
        """Give them back, unless the user has put something else there. May be repeated."""
        if compat.call_of(self._model) == self._call:
            compat.replace_call(self._model, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner or compat.plain_call(self._model)
        if compat.is_compiled_around() or compat.backward_number() is not None:
            return inner(*args, **kwargs)
        self._phases.enter("forward")
        went_well = False
        try:
            output = inner(*args, **kwargs) if self._gate is None else self._gate(inner, args, kwargs)
            went_well = True
        finally:
            self._phases.leave("forward")
            self._call_over(went_well)
        if torch.is_grad_enabled():
            self._phases.watch_backward(output)
        return output
