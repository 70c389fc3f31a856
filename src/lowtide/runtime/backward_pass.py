"""BackwardPass: opens groups when a backward reaches their modules, takes their gradients, and starts updates.

See `runtime.window` for when a group's backward starts and ends, `runtime.backward_task` for what one backward has open.
"""

from __future__ import annotations

import threading
from functools import partial

import torch

from lowtide import compat
from lowtide.memory.mover import Mover, Ticket
from lowtide.planning.plan import Schedule
from lowtide.runtime.alone import alone
from lowtide.runtime.backward_refusals import (
    graph_through_streamed,
    graph_through_used_up,
    refuse_old_weights,
    session_was_closed,
    why_step_is_lost,
)
from lowtide.runtime.backward_task import BackwardTask, is_away
from lowtide.runtime.finishing import Finisher
from lowtide.runtime.gradient_hooks import GradientHooks
from lowtide.runtime.gradient_watch import GradientWatch
from lowtide.runtime.gradients import GradientMover
from lowtide.runtime.loss_watch import LossWatch
from lowtide.runtime.observer import StepObserver
from lowtide.runtime.recording import Recorder
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Bound, Unit
from lowtide.runtime.window import Visit


class BackwardPass:
    """Told by visits and by hooks on parameters how far a backward is.

    Args:
        residency: Opens and closes the groups.
        gradients: Takes finished gradients to the host.
        loss: Asked at the start of each backward.
        gradient_watch: Asked there about the backward before.
        observer: Asked at each opening and closing of a window; None costs nothing.
        lock: Shared with the forward pass.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        gradients: GradientMover,
        recorder: Recorder,
        schedule: Schedule,
        *,
        loss: LossWatch,
        gradient_watch: GradientWatch,
        observer: StepObserver | None,
        lock: threading.RLock,
    ) -> None:
        self.finisher: Finisher | None = None
        """Set where there is an optimizer that steps through the session."""
        self.lost: str | None = None
        """Why the last step must be repeated; None where nothing broke."""
        self._units = residency.units
        self._residency = residency
        self._mover = mover
        self._gradients = gradients
        self._recorder = recorder
        self._schedule = schedule
        self._loss = loss
        self._gradient_watch = gradient_watch
        self._observer = observer
        self._lock = lock
        self._hooks = GradientHooks()
        self._tasks: dict[int, BackwardTask] = {}
        self._visit_started: dict[int, Ticket] = {}
        self._is_stopped = False

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun and not ended, well or not."""
        return bool(self._tasks)

    def watch_gradients(self) -> None:
        """Be told when a parameter's gradient is complete, where that is not simply left to autograd."""
        for unit in self._units.values():
            if unit.is_resident and self._schedule is Schedule.DEFERRED and not any(map(is_away, unit.bounds)):
                continue
            self._hooks.watch(unit, self._on_gradient, self._before_gradient)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self._is_stopped = True
        self._hooks.remove()

    # -- told by visits ------------------------------------------------------------------------------------------------

    @alone
    def reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at a module's output: open its groups."""
        window = visit.window
        if self._is_stopped:
            if all(unit.is_resident for unit in window.units):
                return
            raise session_was_closed(window)
        task = self._current_task(gradient)
        if torch.is_grad_enabled() and any(not unit.is_resident for unit in window.units):
            raise graph_through_streamed(window)
        if visit.backward == task.number and visit.is_open:
            return
        for unit, generation in zip(window.units, visit.generations, strict=True):
            refuse_old_weights(unit, generation)
        self._recorder.phase = "backward"
        for other in list(task.open_visits):
            # Whatever was made later has run by now, or never will: see Note [When a group's backward starts and ends].
            if other.first_node >= visit.next_node:
                self._end_visit(task, other)
        visit.backward = task.number
        self._residency.open_all(window.units)
        for unit in window.units:
            task.enter(unit)
        visit.is_open = True
        task.open_visits.append(visit)
        if self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.prefetch(window.units)
        self._visit_started[id(visit)] = self._mover.now()
        if self._observer is not None:
            self._observer.moment(window.name, "backward")

    @alone
    def left(self, visit: Visit) -> None:
        """The oldest node of a module's call has run: its backward is over."""
        task = self._tasks.get(visit.backward) if visit.backward is not None else None
        if task is not None and visit.is_open:
            self._end_visit(task, visit)

    def _end_visit(self, task: BackwardTask, visit: Visit) -> None:
        if self._observer is not None:
            self._observer.moment(visit.window.name, "backward")
        visit.is_open = False
        task.open_visits.remove(visit)
        try:
            for unit in visit.window.units:
                unit.visits.discard(visit)
                self._finish(unit, task, is_last=False)
        finally:
            started = self._visit_started.pop(id(visit))
            if visit.window.units:
                self._recorder.on_compute(visit.window.units[0].name, "backward", started, self._mover.now())
            for unit in visit.window.units:
                self._residency.close(unit)

    # -- told by parameters --------------------------------------------------------------------------------------------

    @alone
    def _before_gradient(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Of resident weights that the host updates: outside of their module's call too, what the host has is set aside."""
        del gradient
        if unit.num_tasks == 0 and compat.backward_number() is not None:
            refuse_old_weights(unit, unit.generation)
            self._current_task(None).enter(unit)

    @alone
    def _on_gradient(self, unit: Unit, bound: Bound, parameter: torch.Tensor) -> None:
        if unit.num_tasks == 0:
            if not unit.is_resident:
                return  # used outside its module's call, on the host: autograd has put the gradient where it belongs
            task = self._current_task(None if unit.is_consumed else parameter.grad)
            refuse_old_weights(unit, unit.generation)
            task.enter(unit)
        task = self._current_task(None)
        if torch.is_grad_enabled() and self._schedule is Schedule.IN_BACKWARD:
            raise graph_through_used_up(unit)
        if bound.chunk.spec.name in unit.consumed:
            refuse_old_weights(unit, unit.generation)
        if is_away(bound) and self._is_dropped(parameter):
            bound.stashed = parameter.grad = None
            unit.dropped.add(bound.spec.name)
        elif is_away(bound):
            self._gradients.take(bound)
        bound.has_fired = True
        self._finish(unit, task, is_last=False)

    # -- one backward --------------------------------------------------------------------------------------------------

    def _current_task(self, gradient: torch.Tensor | None) -> BackwardTask:
        number = compat.backward_number()
        assert number is not None
        task = self._tasks.get(number)
        if task is None:
            task = self._tasks[number] = BackwardTask(number)
            self._recorder.phases.backward_begins(number)
            if self.finisher is not None:
                self.finisher.updater.optimizer.refresh_groups()  # one may have been added since the last step
            compat.call_after_backward(partial(self._end_task, number))
            if self._loss.has_verdict and not self._has_gradients():
                # The user gave the step before up by clearing its gradients, not through the optimizer.
                self._loss.forget()
            # Last: where one of them refuses, the step is known to be lost. First what would explain a loss that is a NaN;
            # the loss is waited for in any case, and comes later.
            self._gradient_watch.check(waits=True)
            self._loss.judge(gradient)
        return task

    @alone
    def _end_task(self, number: int) -> None:
        task = self._tasks[number]
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        for unit in task.units.values():
            self._finish(unit, task, is_last=True)
        # Not before: what an update raises is the end of a backward that broke off.
        del self._tasks[number]
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        for unit in task.leave():
            self._show_host(unit)
            self._residency.guard(unit)
        self._gradient_watch.send()
        self._residency.store.prefetch()
        self._recorder.phases.backward_ends(number)

    @alone
    def check_broken(self) -> None:
        """After a backward that raised: put everything back where it belongs, and remember that the step is lost."""
        if compat.backward_number() is not None or not self._tasks:
            return
        moved = sorted(unit.label for unit in self._units.values() if unit.is_consumed)
        for task in list(self._tasks.values()):
            for visit in list(task.open_visits):
                visit.is_open = False
                task.open_visits.remove(visit)
                self._visit_started.pop(id(visit), None)
                for unit in visit.window.units:
                    self._residency.close(unit)
            for unit in task.leave():
                self._show_host(unit)
                if not unit.is_resident and not unit.group.num_open:
                    # An update that broke off may have left its traces in the copy; the host has the truth.
                    self._residency.store.drop(unit.name)
                self._residency.guard(unit)
        self._tasks.clear()
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        self._residency.store.order.forget_cycle()
        self.lost = why_step_is_lost(moved, len(self._units))

    def _finish(self, unit: Unit, task: BackwardTask, *, is_last: bool) -> None:
        if self._schedule is Schedule.IN_BACKWARD:
            assert self.finisher is not None
            self.finisher.finish(unit, task.number, is_last=is_last)

    def _is_dropped(self, parameter: torch.Tensor) -> bool:
        """In backward, of a parameter that the optimizer does not hold: no update would ever give its staging back."""
        if self._schedule is not Schedule.IN_BACKWARD or self.finisher is None:
            return False
        return not self.finisher.updater.optimizer.knows(parameter)

    def _show_host(self, unit: Unit) -> None:
        """No backward uses the unit any more: the user finds weights and gradients where they rest."""
        unit.look_at_host()
        for bound in unit.bounds:
            if is_away(bound) and self._schedule is Schedule.DEFERRED:
                self._gradients.expose(bound)
            elif bound.stashed is not None and not bound.is_whole and not unit.is_resident:
                # From a use outside of the module's call, and the call itself brought none: it is left for `step()`.
                bound.parameter.grad, bound.stashed = bound.stashed, None
            bound.has_fired = False

    def _has_gradients(self) -> bool:
        return any(bound.parameter.grad is not None for unit in self._units.values() for bound in unit.bounds)
